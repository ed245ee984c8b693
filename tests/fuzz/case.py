"""One seed, one case: the shape of a call of `experts`, in plain words and numbers.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank

    case = draw(seed=1234, device="cpu")
    describe(case)            # "seed=1234 tokens=63 dtype=bfloat16 ..."

A field's default is its simplest value; shrink.py goes back to them one by one.
"""

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from amoeba import Activation
from amoeba.core.config import ActivationKind

FACTORS = tuple(f"{name}_lora_{side}" for name in ("gate", "up", "down") for side in "ab")
FORMATS = ("fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights")  # of frozen experts
RECIPES = ("fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4")  # for experts that train
LAYOUTS = ("plain", "transposed", "permuted", "sliced", "strided", "expanded", "offset")
# A case holds at most so many numbers in one stack of weights, and so many steps of the loop that finds the truth.
MOST_NUMBERS = 2_000_000
MOST_STEPS = 256


@dataclass(frozen=True)
class Case:
    seed: int
    device: str = "cpu"
    backend: str = "auto"
    placement: str = "resident"  # or cpu-bf16, cpu-int8, one of FORMATS or RECIPES
    nodes: int = 1  # of packed experts
    threads: int = 1
    dtype: str = "float32"
    tokens: int = 1
    hidden: int = 8
    intermediate: int = 8
    experts: int = 1
    top_k: int = 1
    kind: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: int = 0  # in steps of the grid on which h lies then, see tensors.py; 0: none
    up_shift: float = 0.0
    interleaved: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False
    layouts: dict[str, str] = field(default_factory=dict)  # by name of a tensor; plain where it is not named
    ids: str = "distinct"
    id_dtype: str = "int64"
    scales: str = "plain"  # the routing weights
    scale_dtype: str = "float32"
    trusted: bool = False
    wanted: tuple[str, ...] = ("x", "weight")  # what requires a gradient, where it is there
    ranks: dict[str, int] = field(default_factory=dict)  # by projection
    factor_dtype: str = "same"
    scaling: float = 1.0
    shared_a: bool = False  # gate and up have one A
    recompute: bool = False
    mode: str = "grad"
    repeats: bool = False  # once more, forward and backward: the same bits
    default_dtype: str = "float32"
    default_device: str = "none"
    nan: str = "none"  # the tensor that holds one number that is not finite
    bad: str = "nan"  # that number: nan, inf or -inf

    @property
    def packed(self) -> bool:
        """Whether the experts are packed for the CPU core."""
        return self.placement.startswith("cpu-")

    @property
    def quantised(self) -> bool:
        """Whether the experts are frozen in one of FORMATS."""
        return self.placement in FORMATS

    @property
    def frozen(self) -> bool:
        return self.packed or self.quantised

    @property
    def has_kink(self) -> bool:
        """Whether the slope of the activation jumps somewhere."""
        return self.limit > 0 or self.kind == "relu"

    @property
    def unit(self) -> float:
        """Half a step of the grid for h."""
        return 2.0 ** -math.ceil(math.log2(self.hidden) / 2)

    @property
    def activation(self) -> Activation:
        limit = 2 * self.unit * self.limit if self.limit else math.inf
        return Activation(self.kind, self.gated, self.alpha, limit, self.up_shift, self.interleaved)

    @property
    def computes_in(self) -> torch.dtype:
        """What x and the weights are rounded to before anything is computed."""
        return torch.bfloat16 if self.packed or self.mode == "autocast" else getattr(torch, self.dtype)

    @property
    def row(self) -> str:
        """The line of the final count to which the case belongs."""
        place = self.placement if not self.packed else f"{self.placement} x{self.nodes}"
        return f"{self.device} {self.backend} {place} {self.dtype}"


def describe(case: Any) -> str:
    """All that is not as simple as it can be."""
    parts = []
    for each in dataclasses.fields(case):
        value = getattr(case, each.name)
        if value != simplest(each):
            parts.append(f"{each.name}={value}")
    return " ".join(parts)


def simplest(part: dataclasses.Field) -> Any:
    return part.default_factory() if part.default_factory is not dataclasses.MISSING else part.default


def draw(seed: int, device: str = "cpu") -> Case:
    """The case of this seed; the same on every machine."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {"seed": seed, "device": device}
    fields |= _where(rng, device)
    backend = fields.get("backend", "auto")
    fields |= _sizes(rng, small=backend == "triton" and device == "cpu", whole=backend == "grouped")
    fields |= _expert(rng, fields)
    fields |= _routing(rng, fields)
    fields |= _lora(rng, fields)
    fields |= _surroundings(rng, fields)
    names = ("x", "weight", "expert", "dy", "gate_up", "down", "gate_up_bias", "down_bias", *FACTORS)
    awkward = rng.choice((0.0, 0.2, 0.7))
    drawn = {name: rng.choice(LAYOUTS) if rng.random() < awkward else "plain" for name in names}
    fields["layouts"] = {name: layout for name, layout in drawn.items() if layout != "plain"}
    everything = tuple(name for name in names if name not in ("expert", "dy"))
    few = tuple(name for name in everything if rng.random() < 0.4)
    fields["wanted"] = rng.choice((everything, everything, few, (rng.choice(everything),)))
    return Case(**fields)


def _where(rng: random.Random, device: str) -> dict[str, Any]:
    placement = rng.choices(
        ("resident", "cpu-bf16", "cpu-int8", *FORMATS, *RECIPES), (55, 13, 8, *[4] * 4, *[2] * len(RECIPES))
    )[0]
    if placement in FORMATS or placement in RECIPES:
        dtypes = ("float32", "bfloat16", "float16") if placement in FORMATS else ("float32", "bfloat16")
        return {"placement": placement, "dtype": rng.choice(dtypes), "threads": rng.choice((1, 1, 2))}
    if placement != "resident":
        nodes = rng.choices((1, 2, 3), (6, 2, 1))[0]
        return {
            "placement": placement,
            "nodes": nodes,
            "threads": rng.choice((nodes, nodes, nodes + 1)),
            "backend": rng.choice(("auto", "cpu")),
            "dtype": rng.choices(("bfloat16", "float32"), (4, 1))[0],  # of the weights before they are packed
        }
    if device == "cpu":
        backend = rng.choices(("auto", "cpu", "eager", "grouped", "triton"), (40, 30, 15, 12, 3))[0]
        dtype = rng.choices(("float32", "bfloat16", "float16", "float64"), (50, 30, 10, 10))[0]
        if backend in ("cpu", "grouped") and dtype in ("float16", "float64"):
            dtype = "float32"
        if backend == "grouped" and rng.random() < 0.7:
            dtype = "float32"
        if backend == "triton":
            dtype = rng.choice(("float32", "float16"))
    else:
        backend = rng.choices(("auto", "triton", "eager", "grouped"), (35, 35, 15, 15))[0]
        dtype = rng.choices(("bfloat16", "float32", "float16", "float64"), (50, 25, 20, 5))[0]
        if backend == "grouped":
            dtype = "bfloat16"
        if backend == "triton" and dtype == "float64":
            dtype = "bfloat16"
    return {"placement": placement, "backend": backend, "dtype": dtype, "threads": rng.choice((1, 1, 1, 2, 3))}


def _sizes(rng: random.Random, small: bool, whole: bool) -> dict[str, Any]:
    """small: for Triton's interpreter, which is slow. whole: mostly widths that torch's grouped product takes."""

    def width() -> int:
        kind = rng.random()
        if kind < 0.15:
            return rng.choice((1, 2, 3, 5, 7))
        if kind < 0.4:
            return rng.randint(8, 100)
        return rng.choice((8, 16, 24, 32, 48, 64, 64, 96, 128, 192, 256))

    tokens = rng.choice((0, 1, 1, 2, 3, 4, 7, 8, 16, 31, 63, 64, 65, 127, 199, rng.randint(1, 300)))
    if rng.random() < 0.03:
        tokens = rng.choice((760, 1500, 4096))
    hidden, intermediate = width(), width()
    if whole and rng.random() < 0.8:
        hidden, intermediate = (-(-size // 8) * 8 for size in (hidden, intermediate))
    experts = rng.choice((1, 2, 3, 4, 5, 8, 8, 8, 16, 32))
    if rng.random() < 0.03:
        experts = rng.choice((64, 129, 700))
    if small:
        tokens, hidden, intermediate, experts = min(tokens, 16), min(hidden, 48), min(intermediate, 48), min(experts, 4)
    while experts * hidden * intermediate > MOST_NUMBERS:
        experts = max(experts // 2, 1)
    top_k = min(experts, rng.choice((1, 1, 2, 2, 3, 4, 8, experts)))
    if rng.random() < 0.02:
        top_k = rng.choice((0, experts + 2))
    if top_k * experts > MOST_STEPS:
        tokens = min(tokens, max(MOST_STEPS // top_k, 1))
    return {"tokens": tokens, "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}


def _expert(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    kind, gated = rng.choice(get_args(ActivationKind)), rng.random() < 0.7
    limit = rng.choice((0, 0, 0, rng.randint(1, 4)))
    bias = rng.random() < 0.4
    if fields["placement"] in ("fp8-weights", "nvfp4-weights"):
        # their scales are not powers of two, so h would not lie on the grid that a kink needs
        kind, limit = rng.choice(("silu", "gelu", "gelu_tanh", "relu2")), 0
    drawn = {
        "kind": kind,
        "gated": gated,
        "alpha": rng.choice((1.0, 1.0, 1.702, 0.5)) if kind == "silu" else 1.0,
        "limit": limit,
        "up_shift": rng.choice((0.0, 0.0, 1.0, -0.5)) if gated else 0.0,
        "interleaved": gated and rng.random() < 0.3,
        "gate_up_bias": bias != (rng.random() < 0.05),
        "down_bias": bias,
    }
    # int8's scales are not exact, and an h without a bias may lie on the kink itself
    if fields["placement"] == "cpu-int8" and (limit or kind == "relu"):
        drawn["gate_up_bias"] = True
    return drawn


def _routing(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    if fields["top_k"] > fields["experts"]:
        ids = rng.choice(("any", "duplicates"))
    else:
        ids = rng.choice(("distinct", "distinct", "any", "one", "sentinels", "sentinels", "nobody", "duplicates"))
    scales = rng.choices(("plain", "zeros", "negative", "huge", "tiny"), (75, 10, 5, 5, 5))[0]
    if fields["dtype"] == "float16" and scales in ("huge", "tiny"):
        scales = "plain"
    dtype = rng.choices(("float32", "same", "float64"), (60, 35, 5))[0]
    return {
        "ids": ids,
        "id_dtype": rng.choice(("int64", "int64", "int32")),
        "scales": scales,
        "scale_dtype": fields["dtype"] if dtype == "same" else dtype,
        "trusted": rng.random() < (0.8 if scales == "negative" else 0.2),
    }


def _lora(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.55:
        return {}
    rank = rng.choice((1, 2, 4, 5, 8, 8, 16, 16, 32, 64))
    among = ("gate", "up", "down") if fields["gated"] else ("up", "down")
    chosen = among if rng.random() < 0.6 else tuple(name for name in among if rng.random() < 0.6)
    same = rng.random() < 0.7
    ranks = {name: rank if same else rng.choice((1, 3, 8, 16)) for name in chosen}
    return {
        "ranks": ranks,
        "factor_dtype": rng.choice(("same", "same", "float32")),
        "scaling": rng.choice((1.0, 2.0, 0.5)),
        "shared_a": ranks.get("gate", 0) == ranks.get("up", -1) and rng.random() < 0.2,
    }


def _surroundings(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    modes = {"grad": 70, "no_grad": 12, "inference_mode": 6, "checkpoint": 5}
    if fields["dtype"] == "float32" and fields.get("backend") != "triton":
        modes["autocast"] = 7
    if fields["device"] == "cuda":
        modes["side_stream"] = 8
        if fields["placement"] == "resident" and fields.get("backend") in ("triton", "grouped"):
            modes["cuda_graph"] = 2
    mode = rng.choices(list(modes), list(modes.values()))[0]
    devices = ("none", "meta", "cpu") if fields["device"] == "cpu" else ("none", "meta", "cpu", "cuda")
    nan = rng.choice(("x", "weight", "gate_up", "down", "dy", "gate_up_bias", *FACTORS))
    return {
        "mode": mode,
        "recompute": rng.random() < 0.25,
        "repeats": rng.random() < 0.3,
        "default_dtype": rng.choices(("float32", "bfloat16", "float64", "float16"), (70, 14, 12, 4))[0],
        "default_device": rng.choice(devices) if rng.random() < 0.2 else "none",
        "nan": nan if rng.random() < 0.1 else "none",
        "bad": rng.choice(("nan", "nan", "inf", "-inf")),
        "trusted": fields["trusted"] or nan == "weight",
    }
