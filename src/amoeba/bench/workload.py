"""The numbers that every implementation gets, and the truth about them.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I · R LoRA rank

    workload = make_workload(SHAPES["small"], torch.device("cpu"), torch.float32)
    workload.errors({"output": y_TH})["output"]      # relative error in the L2 norm

The routing weights have the dtype of x, as transformers' routers give them; LoRA factors are in fp32, as PEFT keeps
them. The reference is fp64; on a GPU, where fp64 may run at a sixty-fourth of the speed, it is fp32 for all but small
problems. It is computed expert by expert, so that no second copy of all weights is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from amoeba.bench.shapes import Shape
from amoeba.core import cost
from amoeba.core.weights import LORA_NAMES, AnyExperts, ExpertWeights, LoraFactors
from amoeba.proof.reference import experts as reference

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
    lora: LoraFactors | None  # beside frozen weights
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
    parameters: tuple[Tensor, ...] = ()  # of its own, beside those of the workload; not counted as kept for backward


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
