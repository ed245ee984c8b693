"""The cases that every backend is tested on, as tensors, with the results of the reference.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    made = example(cases()[0], torch.bfloat16)
    made.inputs["x"], made.truth["gate_up"]        # fp64, the inputs rounded to bf16 before the reference saw them

`amoeba.proof.conformance` compares backends with them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from amoeba.core.config import Activation, ActivationKind
from amoeba.core.weights import LORA_NAMES, ExpertWeights, LoraFactors
from amoeba.precision.recipes import W8A8, Fp8Experts
from amoeba.proof.reference import experts as reference
from amoeba.proof.reference import recipes

Pattern = Literal["random", "empty_experts", "all_on_one", "sentinels", "sentinels_alone", "zero_weights"]
Storage = Literal["plain", "transposed"]
Lora = Literal["none", "all", "gate_up", "down", "up"]

# The projections that have factors. Experts without a gate have none of the gate's.
ADAPTED: dict[Lora, tuple[str, ...]] = {
    "none": (),
    "all": ("gate", "up", "down"),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "up": ("up",),
}
FREEZABLE = ("gate_up", "down", "gate_up_bias", "down_bias")
# A power of two, so that what `_inputs` makes exact stays exact, and not 1, which would hide one that is left out.
SCALING = 2.0

SILU = Activation("silu")
PLAIN_RELU2 = Activation("relu2", gated=False)
# gpt-oss, with a limit that the h of `_inputs` crosses often
CLAMPED_SWIGLU = Activation("silu", alpha=1.702, limit=0.75, up_shift=1.0, interleaved=True)
ACTIVATIONS = (SILU, PLAIN_RELU2, CLAMPED_SWIGLU)


@dataclass(frozen=True)
class Case:
    """One layer with its routing; all of it follows from these fields."""

    num_tokens: int
    top_k: int
    activation: Activation = SILU
    bias: bool = False
    pattern: Pattern = "random"
    hidden: int = 32
    intermediate: int = 48
    num_experts: int = 8
    recompute: bool = False
    storage: Storage = "plain"
    narrow: bool = False  # int32 expert ids, and routing weights in the dtype of x instead of fp32
    lora: Lora = "none"
    rank: int = 8
    frozen: bool = False  # weights and biases get no gradient
    seed: int = 0

    @property
    def has_kink(self) -> bool:
        """Whether the slope of the activation jumps somewhere."""
        return math.isfinite(self.activation.limit) or self.activation.kind == "relu"

    @property
    def name(self) -> str:
        words = [
            str(self.activation),
            "bias" if self.bias else "",
            f"T={self.num_tokens} K={self.top_k} E={self.num_experts} H={self.hidden} I={self.intermediate}",
            self.pattern,
            "recompute" if self.recompute else "",
            self.storage if self.storage != "plain" else "",
            "narrow" if self.narrow else "",
            f"lora={self.lora} R={self.rank}" if self.lora != "none" else "",
            "frozen" if self.frozen else "",
        ]
        return " ".join(word for word in words if word)


# Every gradient there is, and the widths that the fastest GPU kernels take; both small.
_FIRST = (
    Case(63, 8, SILU, True, "sentinels", lora="all", rank=5),
    Case(333, 1, SILU, pattern="all_on_one", hidden=128, intermediate=384),
)


# A single row has no others to average over: with 48 columns one large relu² decides its error (1.2e-2 in bf16).
def _widths(tokens: int) -> tuple[int, int]:
    return (64, 240) if tokens == 1 else (32, 48)


def cases(thorough: bool = False) -> list[Case]:
    """A selection that takes seconds, or the whole cross product."""
    if thorough:
        return list(dict.fromkeys((*_cross_product(), *_variants(), *_lora_cross_product(), *_lora_variants())))
    shapes: list[tuple[int, int, Pattern]] = [
        (0, 2, "random"),
        (1, 2, "random"),
        (63, 1, "all_on_one"),
        (63, 8, "sentinels"),
        (199, 2, "empty_experts"),
    ]
    chosen = [
        Case(tokens, top_k, activation, bias, pattern, *_widths(tokens))
        for activation, bias, (tokens, top_k, pattern) in itertools.product(ACTIVATIONS, (False, True), shapes)
    ]
    return list(dict.fromkeys((*chosen, *_variants(), *_lora_variants())))


def most_telling_first(found: Sequence[Case]) -> list[Case]:
    """In such an order that little time shows much: after `_FIRST` always the case with the most pairs of properties
    that no case before it has had, for the time that it takes."""
    ordered = [case for case in _FIRST if case in found]
    seen = {pair for case in ordered for pair in _pairs(case)}
    others = [case for case in found if case not in ordered]
    # What a case still adds only shrinks, so the first one with a fresh figure is ahead of all stale ones.
    waiting = [(-math.inf, place, _pairs(case)) for place, case in enumerate(others)]
    while waiting:
        told, place, pairs = waiting[0]
        worth = -len(pairs - seen) / _cost(others[place])
        if worth == told:
            heapq.heappop(waiting)
            seen |= pairs
            ordered.append(others[place])
        else:
            heapq.heapreplace(waiting, (worth, place, pairs))
    return ordered


def _cost(case: Case) -> float:
    """In products of the reference in fp64, over all backends and dtypes: any case takes as long as 6 million, and a
    weight, which is drawn, rounded to every format and compared, as 32 (Neoverse-N1, 2026-11-16)."""
    matrix = case.hidden * case.intermediate
    weights = case.num_experts * (case.activation.width(1) + 1) * matrix
    return 6e6 + case.num_tokens * case.top_k * matrix + 32 * weights


def _pairs(case: Case) -> set[tuple]:
    return set(itertools.combinations(((entry.name, getattr(case, entry.name)) for entry in fields(case)), 2))


def _cross_product() -> Iterator[Case]:
    for activation, bias, top_k in itertools.product(ACTIVATIONS, (False, True), (1, 2, 8)):
        yield Case(0, top_k, activation, bias)
        for tokens, pattern in itertools.product((1, 63, 199), get_args(Pattern)):
            if top_k == 2 or pattern not in ("sentinels_alone", "zero_weights"):
                yield Case(tokens, top_k, activation, bias, pattern, *_widths(tokens))


def _lora_cross_product() -> Iterator[Case]:
    # From a single row and rank 1 a factor's gradient is one dot product times a vector, and that product may be next
    # to 0 by accident (1.8e-2 in bf16); so one token meets all experts.
    shapes: list[tuple[int, int, Pattern]] = [
        (0, 2, "random"),
        (1, 8, "random"),
        (63, 1, "all_on_one"),
        (63, 8, "sentinels"),
        (199, 2, "empty_experts"),
    ]
    adapted: tuple[tuple[Lora, bool], ...] = (("all", False), ("all", True), ("gate_up", True), ("down", True))
    for activation, (lora, frozen), bias in itertools.product(ACTIVATIONS, adapted, (False, True)):
        for rank, (tokens, top_k, pattern) in itertools.product((1, 8, 5), shapes):
            widths = _widths(tokens)
            yield Case(tokens, top_k, activation, bias, pattern, *widths, lora=lora, rank=rank, frozen=frozen)


def _lora_variants() -> Iterator[Case]:
    """LoRA where it meets what is special about a case: few rows, no rows, other layouts, whole tiles."""
    for activation in ACTIVATIONS:
        yield Case(0, 2, activation, True, lora="all")
        yield Case(1, 8, activation, True, "random", *_widths(1), lora="all", rank=5, frozen=True)
        yield Case(63, 8, activation, True, "sentinels", lora="all", rank=5)
        yield Case(63, 8, activation, False, "sentinels", lora="all", frozen=True)
        yield Case(63, 1, activation, True, "all_on_one", lora="down", rank=1, frozen=True)
        yield Case(199, 2, activation, False, "empty_experts", lora="gate_up", rank=5)
        yield Case(63, 2, activation, True, "empty_experts", storage="transposed", lora="all", rank=5)
        yield Case(63, 2, activation, True, "sentinels", recompute=True, narrow=True, lora="all", frozen=True)
    yield Case(63, 2, lora="up", frozen=True)
    yield Case(63, 2, pattern="sentinels_alone", lora="all", frozen=True)
    yield Case(63, 2, bias=True, hidden=31, intermediate=23, lora="all", rank=5)
    yield Case(7, 4, SILU, True, "sentinels", hidden=512, intermediate=256, lora="all", rank=16, frozen=True)
    for activation in ACTIVATIONS:  # widths of whole blocks of 64, as the fastest GPU kernels want them
        yield Case(399, 4, activation, True, "sentinels", 320, 192, lora="all", rank=16)
        yield Case(
            399, 2, activation, False, "empty_experts", 320, 192, recompute=True, lora="all", rank=64, frozen=True
        )


def _variants() -> Iterator[Case]:
    """What does not take part in the cross product."""
    for kind, gated in itertools.product(get_args(ActivationKind), (True, False)):
        yield Case(63, 2, Activation(kind, gated=gated), bias=True, pattern="sentinels")
    yield Case(63, 2, Activation("gelu", gated=False, limit=0.75), bias=True)
    yield Case(63, 2, Activation("gelu_tanh", limit=0.75))
    yield Case(63, 2, Activation("silu", alpha=1.702, up_shift=-0.5))
    for activation, tokens in itertools.product(ACTIVATIONS, (0, 1, 63)):
        widths = _widths(tokens)
        yield Case(tokens, 2, activation, True, "sentinels", *widths, recompute=True)
        yield Case(tokens, 2, activation, True, "empty_experts", *widths, storage="transposed")
        yield Case(tokens, 2, activation, True, "sentinels", *widths, narrow=True)
    yield Case(63, 2, recompute=True, storage="transposed", narrow=True)
    # rows of no whole 16 bytes, which torch's grouped product does not take
    yield Case(63, 2, hidden=31, intermediate=23, bias=True, pattern="sentinels")
    yield Case(63, 2, PLAIN_RELU2, hidden=31, intermediate=23, storage="transposed")
    # J holds whole 16 bytes (in fp32, in bf16) and I does not, which shows in no stride of transposed weights
    yield Case(63, 2, intermediate=46, storage="transposed")
    yield Case(63, 2, intermediate=44, storage="transposed")
    # several tiles of any kernel, with a rest in every dimension
    yield Case(760, 4, CLAMPED_SWIGLU, bias=True, pattern="sentinels", hidden=144, intermediate=208, num_experts=16)
    yield Case(760, 4, SILU, pattern="empty_experts", hidden=208, intermediate=144, num_experts=16)
    # widths of whole blocks of 64, as the fastest GPU kernels want them, but not of their whole tiles
    for activation, bias in itertools.product(ACTIVATIONS, (False, True)):
        yield Case(399, 4, activation, bias, "sentinels", hidden=320, intermediate=192)
    yield Case(333, 1, SILU, pattern="all_on_one", hidden=128, intermediate=384)
    yield Case(399, 8, SILU, pattern="empty_experts", hidden=320, intermediate=192, recompute=True)
    yield Case(
        399, 2, CLAMPED_SWIGLU, True, "sentinels", hidden=320, intermediate=192, storage="transposed", narrow=True
    )
    yield Case(399, 2, SILU, pattern="sentinels_alone", hidden=128, intermediate=64)
    yield Case(199, 1, SILU, bias=True, num_experts=1)
    # decoding: few tokens, rows of many whole vectors
    yield Case(1, 4, SILU, hidden=256, intermediate=128, num_experts=32)
    yield Case(7, 4, SILU, bias=True, pattern="sentinels", hidden=512, intermediate=256, num_experts=8)


@dataclass(frozen=True, eq=False)
class Example:
    """A case in numbers: fp64 on the CPU, rounded to the dtype it was made for, with the truth about it."""

    expert_TK: Tensor
    dy_TH: Tensor
    inputs: dict[str, Tensor]  # x, weight, gate_up, down, and the biases and LoRA factors where there are any
    truth: dict[str, Tensor]  # output, the same without gradients (inference), and the gradient of each input


Represent = Callable[[ExpertWeights], ExpertWeights]


def without_truth(case: Case, dtype: torch.dtype) -> Example:
    """For who wants to know what serves it, or what is launched: the inputs, and no dy."""
    expert_TK, inputs, _ = _drawn(case, dtype)
    return Example(expert_TK, torch.zeros_like(inputs["x"]), inputs, {})


def example(case: Case, dtype: torch.dtype, represent: Represent | None = None) -> Example:
    """represent: what becomes of the weights where they are placed, see `Placement`; the truth is about that."""
    return _example(case, dtype, represent)


@functools.lru_cache(maxsize=16)  # placements of a case follow each other
def _drawn(case: Case, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Ids, inputs, and the state of the generator that draws what comes next."""
    generator = torch.Generator().manual_seed(case.seed)
    expert_TK, inputs = _expert_ids(case, generator), _inputs(case, dtype, generator)
    return expert_TK, inputs, generator.get_state()


@functools.lru_cache(maxsize=128)  # its arguments by position: a default that is left out would make a second entry
def _example(case: Case, dtype: torch.dtype, represent: Represent | None) -> Example:
    expert_TK, inputs, state = _drawn(case, dtype)
    generator = torch.Generator()
    generator.set_state(state)
    weights, lora = weights_of(inputs, case.activation), lora_of(inputs)
    if represent is not None:
        weights = represent(weights.to(torch.float32)).to(torch.float64)
    forward, backward = _reference(weights, lora, dtype)
    # The gradient of a routing weight is <dy, y of the expert>. A single one of them, with dy drawn at random, may be
    # next to 0 by accident, and its relative error without bound; so dy leans towards the outputs.
    y_TH = forward(inputs["x"], expert_TK, torch.ones_like(inputs["weight"]))
    lean_TH = torch.nn.functional.normalize(y_TH, dim=1) * case.hidden**0.5
    dy_TH = (
        (torch.randn(y_TH.shape, generator=generator, dtype=torch.float64, device=generator.device) + lean_TH)
        .to(dtype)
        .double()
    )
    problem = (inputs["x"], expert_TK, inputs["weight"])
    truth = {"output": forward(*problem)} | backward(dy_TH, *problem)
    truth["inference"] = truth["output"]
    if isinstance(weights, Fp8Experts) and weights.recipe == W8A8 and lora is None:
        truth["inference"] = recipes.experts_forward(*problem, weights, dtype)
    return Example(expert_TK, dy_TH, inputs, truth)


def _reference(
    weights: ExpertWeights, lora: LoraFactors | None, dtype: torch.dtype
) -> tuple[Callable[..., Tensor], Callable[..., dict[str, Tensor]]]:
    """Forward and backward for these weights."""
    found: Any = (reference.experts_forward, reference.experts_backward)
    more: dict[str, Any] = {"weights": weights, "lora": lora}
    if isinstance(weights, Fp8Experts) and weights.recipe != W8A8:
        found, more = (recipes.experts_forward, recipes.experts_backward), {"weights": weights, "dtype": dtype}
    forward, backward = (functools.partial(function, **more) for function in found)
    return forward, backward


def weights_of(tensors: dict[str, Tensor], activation: Activation) -> ExpertWeights:
    return ExpertWeights(
        tensors["gate_up"], tensors["down"], tensors.get("gate_up_bias"), tensors.get("down_bias"), activation
    )


def lora_of(tensors: dict[str, Tensor]) -> LoraFactors | None:
    factors = {name: tensor for name, tensor in tensors.items() if name in LORA_NAMES}
    return LoraFactors(**factors, scaling=SCALING) if factors else None


def _inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    tokens, hidden, inner, num_experts = case.num_tokens, case.hidden, case.intermediate, case.num_experts
    width = case.activation.width(inner)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return (drawn * scale).to(dtype).double()

    def whole(*shape: int, largest: int, scale: float) -> Tensor:
        """Multiples of scale, up to largest of them."""
        bounds, device = (-largest, largest + 1), generator.device
        return torch.randint(*bounds, shape, generator=generator, dtype=torch.int64, device=device).double() * scale

    device = generator.device
    weight_TK = torch.rand(tokens, case.top_k, generator=generator, dtype=torch.float64, device=device) + 0.1
    if case.pattern == "zero_weights":
        weight_TK[::2, 0] = 0
    inputs = {"weight": weight_TK.to(weight_dtype(case, dtype)).double()}
    unit = 2.0 ** -math.ceil(math.log2(hidden) / 2)
    if case.has_kink:
        # At a limit, and at relu's zero, the gradient jumps. An h that was rounded to the other side is no error of the
        # backend and would drown all others. So here x and W1 hold a number, its negative and 0 alone, which int8 has
        # without error too, and h is a whole multiple of 2·unit, few enough for 8 bits to hold every one of them
        # exactly, in any order of summation. Some lie on the limit itself; with a bias, an odd multiple of unit, none
        # does, nor on 0: int8's scales are not exact in fp32, and what remains of a sum that should be 0 has a sign.
        inputs["x"] = whole(tokens, hidden, largest=1, scale=1.0)
        inputs["gate_up"] = whole(num_experts, width, hidden, largest=1, scale=2 * unit)
        bias_EJ = whole(num_experts, width, largest=2, scale=2 * unit) + unit
    else:
        inputs["x"] = normal(tokens, hidden)
        inputs["gate_up"] = normal(num_experts, width, hidden, scale=hidden**-0.5)
        bias_EJ = normal(num_experts, width, scale=0.5)
    inputs["down"] = normal(num_experts, hidden, inner, scale=inner**-0.5)
    if case.bias:
        inputs |= {"gate_up_bias": bias_EJ, "down_bias": normal(num_experts, hidden, scale=0.5)}
    for name in ADAPTED[case.lora]:
        if name == "gate" and not case.activation.gated:
            continue
        fan_in, fan_out = (inner, hidden) if name == "down" else (hidden, inner)
        if case.has_kink and name != "down":
            # four of x's numbers each, so that c·x·Aᵀ is a small whole number and h one of its multiples, as above
            a_ERI = torch.zeros(num_experts, case.rank, fan_in, dtype=torch.float64, device=device)
            drawn = torch.rand(a_ERI.shape, generator=generator, dtype=torch.float32, device=device)
            place = drawn.argsort(-1)[..., :4]
            side = torch.randint(2, place.shape, generator=generator, dtype=torch.int64, device=device)
            sign = side.double() * 2 - 1
            inputs[f"{name}_lora_a"] = a_ERI.scatter_(-1, place, sign / SCALING)
            inputs[f"{name}_lora_b"] = whole(num_experts, fan_out, case.rank, largest=1, scale=2 * unit)
        else:
            a_ERI = normal(num_experts, case.rank, fan_in, scale=fan_in**-0.5)
            # relu² gives few large numbers, none negative: of both signs, A would cancel them by accident (1.3e-2)
            inputs[f"{name}_lora_a"] = a_ERI.abs() if name == "down" else a_ERI
            inputs[f"{name}_lora_b"] = normal(num_experts, fan_out, case.rank, scale=0.5 / SCALING * case.rank**-0.5)
    return inputs


def weight_dtype(case: Case, dtype: torch.dtype) -> torch.dtype:
    return dtype if case.narrow else torch.promote_types(dtype, torch.float32)


def _expert_ids(case: Case, generator: torch.Generator) -> Tensor:
    tokens, top_k, num_experts = case.num_tokens, case.top_k, case.num_experts
    dtype, device = torch.int32 if case.narrow else torch.int64, generator.device

    def choice(count: int) -> Tensor:
        return torch.randint(count, (tokens, top_k), generator=generator, dtype=torch.int64, device=device)

    def uniform(width: int) -> Tensor:
        return torch.rand(tokens, width, generator=generator, dtype=torch.float32, device=device)

    if case.pattern == "all_on_one":
        return torch.full((tokens, top_k), num_experts // 2, dtype=dtype, device=device)
    if case.pattern == "empty_experts":
        # the first, the last and every other expert get nothing; a token may meet the same expert twice
        busy = torch.arange(1, max(num_experts - 1, 2), 2, dtype=torch.int64, device=device) % num_experts
        return busy[choice(len(busy))].to(dtype)
    expert_TK = uniform(num_experts).argsort(dim=1)[:, :top_k].to(dtype)
    if case.pattern in ("sentinels", "sentinels_alone"):
        # the last one turns into an expert's id where somebody cuts it down to 32 bits
        outside = [num_experts, num_experts + 3, -1] + ([] if case.narrow else [2**32 + 1])
        drawn_TK = torch.tensor(outside, dtype=dtype, device=device)[choice(len(outside))]
        if case.pattern == "sentinels_alone":
            return drawn_TK
        return torch.where(uniform(top_k) < 0.4, drawn_TK, expert_TK)
    return expert_TK
