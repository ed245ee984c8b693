"""What is measured: named layers, the tensors that every implementation gets, and the reference's results for them.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank · J = 2I

    parse_shape("qwen3_30b")            # by name
    parse_shape("512,512,256,32,4")     # as T,H,I,E,K

    workload = make_workload(SHAPES["small"], torch.device("cpu"), torch.float32)
    workload.errors({"output": y_TH})["output"]      # relative error in the L2 norm

The routing weights have the dtype of x, as transformers' routers give them; LoRA factors are in fp32, as PEFT keeps
them. The reference is fp64; on a GPU, where fp64 may run at a sixty-fourth of the speed, it is fp32 for all but small
problems. It is computed expert by expert, so that no second copy of all weights is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from amoeba.core import cost
from amoeba.core.errors import bad_value
from amoeba.core.weights import LORA_NAMES, AnyExperts, ExpertWeights, LoraFactors
from amoeba.proof.reference import experts as reference
from amoeba.system.machine import available_memory


@dataclass(frozen=True)
class Shape:
    """One layer and the tokens that it gets.

    skew:         exponent of a Zipf law for the experts' popularity; 0 is an even draw.
    forward_only: a decoding step; training it would say nothing.
    rank:         LoRA factors of this rank on all three projections of frozen experts; 0: the experts are trained.
                  Such layers are measured in bf16, whichever dtype is asked for.
    """

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    skew: float = 0.0
    forward_only: bool = False
    rank: int = 0

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def least_bytes(self, device: torch.device, dtype: torch.dtype, training: bool) -> int:
        """What the inputs, the reference and one pass take together at the very least."""
        weights, wide = 3 * self.experts * self.hidden * self.intermediate, 8 if device.type == "cpu" else 4
        of_reference = (
            weights + weights * 2 // 3 if training and not self.rank else 0
        )  # the larger stack is joined last
        of_tokens = self.tokens * self.hidden * (2 * dtype.itemsize + 2 * wide) + self.tokens * self.experts * 16
        of_rows = self.rows * (self.hidden + 2 * self.intermediate) * dtype.itemsize
        return weights * dtype.itemsize + of_reference * wide + of_tokens + of_rows


#            name             T      H      I    E   K
_TABLE = (
    Shape("small", 512, 512, 256, 32, 4),
    Shape("decode", 1, 512, 256, 32, 4, forward_only=True),
    Shape("decode8", 8, 512, 256, 32, 4, forward_only=True),
    Shape("decode64", 64, 512, 256, 32, 4, forward_only=True),
    Shape("qwen3_30b", 32768, 2048, 768, 128, 8),
    Shape("qwen3_small", 8192, 2048, 768, 128, 8),
    Shape("qwen3_128", 128, 2048, 768, 128, 8),
    # the busiest expert gets about 15 times the mean
    Shape("qwen3_zipf", 32768, 2048, 768, 128, 8, skew=1.2),
    Shape("qwen3_decode1", 1, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode8", 8, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode", 64, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode_zipf", 64, 2048, 768, 128, 8, skew=1.2, forward_only=True),
    Shape("sonic_a", 24576, 1536, 256, 128, 8),
    Shape("sonic_a_1024", 1024, 1536, 256, 128, 8),
    Shape("sonic_b", 32768, 4096, 256, 256, 16),
    Shape("sonic_c", 32768, 4096, 1024, 128, 8),
    Shape("mixtral", 8192, 4096, 14336, 8, 2),
    Shape("olmoe", 32768, 2048, 1024, 64, 8),
    Shape("dsv3", 8192, 7168, 2048, 32, 8),
    Shape("lora_small", 512, 512, 256, 32, 4, rank=8),
    Shape("lora_decode", 1, 512, 256, 32, 4, forward_only=True, rank=8),
    Shape("lora_qwen3_512", 512, 2048, 768, 128, 8, rank=8),
    Shape("lora_qwen3_2048", 2048, 2048, 768, 128, 8, rank=8),
    Shape("lora_qwen3_8192", 8192, 2048, 768, 128, 8, rank=16),
    Shape("lora_gpt_oss_4096", 4096, 2880, 2880, 32, 4, rank=16),  # without its biases and clamps
    Shape("lora_dsv2lite_512", 512, 2048, 1408, 64, 6, rank=8),
    Shape("lora_dsv2lite_2048", 2048, 2048, 1408, 64, 6, rank=8),
    Shape("lora_dsv3_512", 512, 7168, 2048, 64, 8, rank=16),
    Shape("lora_qwen3_decode1", 1, 2048, 768, 128, 8, forward_only=True, rank=8),
    Shape("lora_qwen3_decode16", 16, 2048, 768, 128, 8, forward_only=True, rank=8),
)
SHAPES = {shape.name: shape for shape in _TABLE}

SUITES: dict[str, tuple[str, ...]] = {
    "small": ("small", "decode"),
    "cpu": (
        "small",
        "decode",
        "decode8",
        "decode64",
        "lora_small",
        "lora_decode",
        "lora_qwen3_512",
        "lora_qwen3_2048",
        "lora_dsv2lite_512",
        "lora_dsv2lite_2048",
        "lora_dsv3_512",
        "lora_qwen3_decode1",
        "lora_qwen3_decode16",
    ),
    "gpu": (
        "qwen3_30b",
        "qwen3_small",
        "qwen3_zipf",
        "sonic_a",
        "sonic_b",
        "sonic_c",
        "mixtral",
        "olmoe",
        "dsv3",
        "qwen3_decode1",
        "qwen3_decode8",
        "qwen3_decode",
    ),
}
# Suites that are in the repository's benchmarks/, by the names that --suite had for them.
_MOVED = {"model": "models", "models": "models", "stream": "stream", "ranks": "ranks", "products": "products"}


def check_memory(problems: Iterable[tuple[torch.dtype, Shape]], device: torch.device, training: bool) -> None:
    """Before anything is allocated: a shape that cannot fit would take minutes to fail, or the machine with it."""
    free = available_memory(device)
    for dtype, shape in problems:
        needed = shape.least_bytes(device, dtype, training and not shape.forward_only)
        if free is not None and needed > free:
            raise bad_value(
                "--shape",
                f"one that fits into the {free / 2**30:.1f} GiB that are free on {device.type}",
                f"{shape.name}, which takes {_gib(needed)} at least",
                "lower T, H, I or E" + (", or measure --pass forward alone" if training else ""),
            )


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e6 else f"{gib:.1e} GiB"


def default_suite(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else "small"


def parse_suite(name: str) -> list[Shape]:
    if name not in SUITES:
        remedy = "see the names in docs/reference/bench.md"
        if (moved := _MOVED.get(name)) is not None:
            remedy = f"in a checkout of the repository, run: python -m benchmarks {moved}"
        raise bad_value("--suite", f"one of {', '.join(SUITES)}", repr(name), remedy)
    return [SHAPES[shape] for shape in SUITES[name]]


def parse_shape(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    expected = f"a name ({', '.join(SHAPES)}) or five positive integers T,H,I,E,K"
    remedy = "write for example --shape small or --shape 512,512,256,32,4"
    try:
        tokens, hidden, intermediate, experts, top_k = (int(part) for part in text.split(","))
    except ValueError:
        raise bad_value("--shape", expected, repr(text), remedy) from None
    if min(tokens, hidden, intermediate, experts, top_k) < 1:
        raise bad_value("--shape", expected, repr(text), remedy)
    if top_k > experts:
        raise bad_value("--shape", f"K at most E ({experts})", f"K = {top_k} in {text!r}", "lower K or raise E")
    return Shape(text, tokens, hidden, intermediate, experts, top_k)


# On a GPU, problems with more operations than this in a forward are compared in fp32.
_FP64_FLOPS_ON_GPU = 1e10
# Experts drawn at random where there are many: on a CPU billions of random numbers take minutes. The others are these,
# rolled by one more row each time.
_DRAWN_EXPERTS = 8
# Elements compared at a time: bounds the memory of the comparison.
_COMPARED_AT_ONCE = 1 << 26
# What int8 weights and activations may be off by.
INT8_TOLERANCE = {"output": 3e-2, "gradient": 5e-2}


@dataclass(frozen=True, eq=False)
class Workload:
    shape: Shape
    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    gate_up_EJH: nn.Parameter
    down_EHI: nn.Parameter
    lora: LoraFactors | None  # on frozen weights
    dy_TH: Tensor
    truth: dict[str, Tensor]  # output and, for a workload made for training, the gradient of each leaf
    truth_dtype: torch.dtype
    placed: dict[str, AnyExperts] = field(default_factory=dict)  # the same experts in placements, by name, made once

    @property
    def device(self) -> torch.device:
        return self.x_TH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x_TH.dtype

    def leaves(self) -> dict[str, Tensor]:
        """What gets a gradient, by the names of the truth."""
        trained = {"gate_up": self.gate_up_EJH, "down": self.down_EHI} if self.lora is None else self.lora.tensors()
        return {"x": self.x_TH, "weight": self.weight_TK} | trained

    def clear_gradients(self) -> None:
        for leaf in self.leaves().values():
            leaf.grad = None

    def busiest(self) -> float:
        """Rows of the busiest expert over the mean."""
        count_E = torch.bincount(self.expert_TK.flatten(), minlength=self.shape.experts)
        return float(count_E.max()) * self.shape.experts / self.shape.rows

    def experts_touched(self) -> int:
        return int(self.expert_TK.unique().numel())

    def errors(self, found: dict[str, Tensor]) -> dict[str, float]:
        return {name: relative_error(tensor, self.truth[name]) for name, tensor in found.items()}


@dataclass(frozen=True)
class Implementation:
    """Who computes the experts, ours or a peer: a function () -> y_TH that autograd can see through."""

    name: str
    ours: bool
    run: Callable[[], Tensor]
    tolerance: dict[str, float] | None = None  # of "output" and "gradient"; None: that of the dtype
    itemsize: float | None = None  # of the weights as it reads them; None: that of the dtype
    gradients: Callable[[], dict[str, Tensor]] | None = None  # those that it does not hand to autograd, after backward
    parameters: tuple[
        Tensor, ...
    ] = ()  # of its own, in addition to those of the workload; not counted as kept for backward


def make_workload(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, training: bool = True, seed: int = 0
) -> Workload:
    """Draws the inputs and computes the reference; with training=False the output only."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.experts

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    def stack(rows: int, columns: int) -> nn.Parameter:
        drawn = experts if device.type == "cuda" else min(experts, _DRAWN_EXPERTS)
        first = normal(drawn, rows, columns, scale=columns**-0.5)
        if drawn == experts:
            return nn.Parameter(first, requires_grad=not shape.rank)
        whole = torch.empty(experts, rows, columns, dtype=dtype, device=device)
        for e in range(experts):
            whole[e] = first[e % drawn].roll(e // drawn, 0)
        return nn.Parameter(whole, requires_grad=not shape.rank)

    x_TH = normal(shape.tokens, hidden).requires_grad_()
    gate_up, down = stack(2 * inner, hidden), stack(hidden, inner)
    expert_TK, weight_TK = draw_routing(shape, generator)
    weight_TK = weight_TK.to(dtype).requires_grad_()
    lora = _draw_factors(shape, generator) if shape.rank else None

    flops = cost.forward_flops(rows=shape.rows, hidden=hidden, intermediate=inner)
    wide = torch.float32 if device.type == "cuda" and flops > _FP64_FLOPS_ON_GPU else torch.float64
    inputs = x_TH.detach().to(wide), expert_TK, weight_TK.detach().to(wide)
    with torch.no_grad():
        truth = {"output": torch.zeros(shape.tokens, hidden, dtype=wide, device=device)}
        for problem in _problems(inputs, gate_up, down, lora, wide):
            truth["output"] += reference.experts_forward(*problem)
        # The gradient of a routing weight is <dy, y>. Were dy drawn at random, a single one could be next to 0 by
        # accident and its relative error without bound; so dy leans towards the output.
        lean_TH = nn.functional.normalize(truth["output"], dim=1) * hidden**0.5
        dy_TH = (normal(shape.tokens, hidden) + lean_TH).to(dtype)
        workload = Workload(shape, x_TH, expert_TK, weight_TK, gate_up, down, lora, dy_TH, truth, wide)
        if training:
            of_experts: dict[str, list[Tensor]] = {name: [] for name in workload.leaves()}
            for problem in _problems(inputs, gate_up, down, lora, wide):
                for name, gradient in reference.experts_backward(dy_TH.to(wide), *problem).items():
                    if name in ("x", "weight"):
                        truth[name] = truth[name].add_(gradient) if name in truth else gradient
                    elif name in of_experts:
                        of_experts[name].append(gradient)
            truth |= {name: torch.cat(parts) for name, parts in of_experts.items() if parts}
    return workload


def _problems(
    inputs: tuple[Tensor, Tensor, Tensor], gate_up: Tensor, down: Tensor, lora: LoraFactors | None, wide: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, ExpertWeights, LoraFactors | None]]:
    """The arguments of the reference for each expert by itself: the others' ids are sentinels."""
    x_TH, expert_TK, weight_TK = inputs
    for e in range(gate_up.shape[0]):
        part = slice(e, e + 1)
        factors = None
        if lora is not None:
            of_expert = {name: factor[part].to(wide) for name, factor in lora.tensors().items()}
            factors = LoraFactors(**of_expert, scaling=lora.scaling)
        yield x_TH, expert_TK - e, weight_TK, ExpertWeights(gate_up[part].to(wide), down[part].to(wide)), factors


def _draw_factors(shape: Shape, generator: torch.Generator) -> LoraFactors:
    """As large as after some training: the update has about a tenth of the size of what it is added to."""
    experts, hidden, inner, rank = shape.experts, shape.hidden, shape.intermediate, shape.rank
    up = ((experts, rank, hidden), (experts, inner, rank))
    factors = []
    for size in (*up, *up, (experts, rank, inner), (experts, hidden, rank)):
        scale = size[2] ** -0.5 * (0.1 if size[2] == rank else 1.0)
        drawn = torch.randn(size, generator=generator, device=generator.device, dtype=torch.float32).mul_(scale)
        factors.append(drawn.requires_grad_())
    return LoraFactors(**dict(zip(LORA_NAMES, factors, strict=True)), scaling=2.0)


def draw_routing(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """K distinct experts per token, drawn by popularity (Gumbel top-k), with softmax weights."""
    device = generator.device
    place_E = torch.randperm(shape.experts, generator=generator, device=device, dtype=torch.int64)
    popularity_E = -shape.skew * (place_E + 1).double().log()
    noise_TE = torch.rand(shape.tokens, shape.experts, generator=generator, device=device, dtype=torch.float64)
    gumbel_TE = -(-noise_TE.clamp_(min=1e-300).log()).log()
    logits_TK, expert_TK = (popularity_E + gumbel_TE).topk(shape.top_k, dim=1)
    return expert_TK, logits_TK.softmax(dim=1)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖, a slice at a time; infinite where found is not finite or of another shape."""
    if found.shape != truth.shape:
        return float("inf")
    lines = max(1, _COMPARED_AT_ONCE // max(1, truth[0].numel() if truth.dim() and truth.shape[0] else 1))
    difference = size = torch.zeros((), dtype=torch.float64, device=truth.device)
    for part, expected in zip(found.detach().split(lines), truth.split(lines), strict=True):
        difference = difference + (part.to(truth.dtype) - expected).square().sum(dtype=torch.float64)
        size = size + expected.square().sum(dtype=torch.float64)
    error = float((difference / size).sqrt())
    return error if error == error else float("inf")
