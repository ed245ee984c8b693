"""The truth about a case: loops over slots and experts in fp64, gradients by autograd. It shares no code with amoeba.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    truth(case, made)                  # {"output": y_TH, "x": dx_TH, ...}, each gradient by the name of its tensor
    rounding_noise(case, made, names)  # how far each of them moves when all it is made of is off by a rounding error
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import RECIPES, Case
from .tensors import Made

# What one rounding may change, of a number of its own size.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
E4M3_ROUNDING = 2.0**-4
NOISE_DRAWS = 4

Noise = Callable[[Tensor], Tensor]


def truth(case: Case, made: Made) -> dict[str, Tensor]:
    return _loop(case, made, _none, _none, None)


def rounding_noise(case: Case, made: Made) -> dict[str, float]:
    """The largest L2 distance from the truth among loops whose inputs and intermediate results are a little off.

    A single dot product may come out next to 0 by accident; then its relative error has no bound, whoever computes it.
    """
    exact, moved = truth(case, made), dict[str, float]()
    for number in range(NOISE_DRAWS):
        found = _loop(case, made, *_noises(case, number))
        for name, tensor in found.items():
            moved[name] = max(moved.get(name, 0.0), float((tensor - exact[name]).nan_to_num(0.0).norm()))
    return moved


def _noises(case: Case, number: int) -> tuple[Noise, Noise, Noise]:
    """(of inputs, of what is between, by how much a slope of the activation is off)."""

    def uniform(tensor: Tensor) -> Tensor:
        """In [-1, 1], the same for equal numbers, as rounding is: the errors of equal rows do not cancel."""
        return torch.sin(torch.frexp(tensor).mantissa * 1e9 + number)

    def relative(size: float) -> Noise:
        return lambda tensor: tensor * (1 + size * uniform(tensor))

    def of_rows(tensor: Tensor) -> Tensor:
        """By up to half of int8's step, a 127th of the row's largest. Of the first draw, as int8 itself rounds: where a
        sum is next to 0, its error hangs on these very roundings, and a few others may all come out smaller."""
        largest = tensor.abs().amax(-1, keepdim=True) if tensor.shape[-1] else tensor
        if number == 0:
            step = (largest / 127).clamp(min=1e-30)
            return (tensor / step).round() * step
        return tensor + largest / 254 * uniform(tensor)

    wide = ROUNDING[torch.promote_types(case.computes_in, torch.float32)]

    def of_slope(h: Tensor) -> Tensor:
        """Far from 0, 1 + erf(h) and its like are what is left of two numbers next to each other."""
        return wide * uniform(h)

    if case.placement in RECIPES:
        coarse = relative(E4M3_ROUNDING)
        return (_none if case.has_kink else coarse), coarse, of_slope
    if case.placement == "cpu-int8":
        return (relative(ROUNDING[torch.bfloat16]) if case.has_kink else of_rows), of_rows, of_slope
    # sums are in fp32 at least, and a sum of n is off by some √n roundings
    summed = wide * math.sqrt(max(case.hidden, case.intermediate))
    between = relative(max(ROUNDING[case.computes_in], summed))
    return (_none if case.has_kink else relative(summed)), between, of_slope


def _none(tensor: Tensor) -> Tensor:
    return tensor


class _Disturbed(torch.autograd.Function):
    """A result that is rounded on the way forward, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Noise, backward: Noise) -> Tensor:
        ctx.noise = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return ctx.noise(gradient), None, None


def _loop(case: Case, made: Made, input_noise: Noise, noise: Noise, slope_noise: Noise | None) -> dict[str, Tensor]:
    wide: dict[str, Tensor] = {}
    for name, tensor in made.tensors.items():
        value = tensor.detach().cpu()
        value = value if name == "weight" else value.to(case.computes_in)
        value = value.double()
        if name not in ("weight", "x") or not case.has_kink:
            value = input_noise(value)
        wide[name] = value.requires_grad_()
    if case.shared_a and "gate_lora_a" in wide:
        wide["up_lora_a"] = wide["gate_lora_a"]

    def rounded(tensor: Tensor) -> Tensor:
        return _Disturbed.apply(tensor, noise, noise)

    def rounded_back(tensor: Tensor) -> Tensor:
        """h of an activation with a kink is exact, its gradient is not."""
        return _Disturbed.apply(tensor, _none if case.has_kink else noise, noise)

    def act(h: Tensor) -> Tensor:
        return _act(case, h) if slope_noise is None else _act(case, h) + slope_noise(h.detach()) * h

    by_expert = {name: tensor.unbind(0) for name, tensor in wide.items() if name not in ("x", "weight")}

    def low_rank(projection: str, e: int, rows: Tensor) -> Tensor | float:
        if f"{projection}_lora_a" not in by_expert:
            return 0.0
        a, b = by_expert[f"{projection}_lora_a"][e], by_expert[f"{projection}_lora_b"][e]
        low = rows @ a.T
        low = rounded(low) if projection == "down" else rounded_back(low)
        return case.scaling * (low @ b.T)

    def expert(e: int, rows: Tensor) -> Tensor:
        h = rows @ by_expert["gate_up"][e].T
        if "gate_up_bias" in by_expert:
            h = h + by_expert["gate_up_bias"][e]
        if not case.gated:
            a = act(_clamp_above(case, rounded_back(h + low_rank("up", e, rows))))
        else:
            if case.interleaved:
                gate, up = h[:, 0::2], h[:, 1::2]
            else:
                gate, up = h[:, : case.intermediate], h[:, case.intermediate :]
            gate = _clamp_above(case, rounded_back(gate + low_rank("gate", e, rows)))
            up = rounded_back(up + low_rank("up", e, rows))
            if case.limit:
                up = up.clamp(-case.activation.limit, case.activation.limit)
            a = act(gate) * (up + case.up_shift)
        a = rounded(a)
        y = a @ by_expert["down"][e].T + low_rank("down", e, a)
        return rounded(y + by_expert["down_bias"][e] if "down_bias" in by_expert else y)

    x_TH, weight_TK = wide["x"], wide["weight"]
    y_TH = torch.zeros_like(x_TH)
    for k in range(case.top_k):
        column = made.expert_TK[:, k].tolist()
        for e in sorted(set(column)):
            if 0 <= e < case.experts:
                tokens = torch.tensor([t for t, chosen in enumerate(column) if chosen == e])
                share = rounded(weight_TK[tokens, k, None] * expert(e, x_TH[tokens]))
                y_TH = y_TH.index_add(0, tokens, share)
    found = {"output": y_TH.detach()}
    wanted = _wanted(made)
    if wanted:
        leaves = [wide[name] for name in wanted]
        if y_TH.requires_grad and y_TH.grad_fn is not None:
            dy_TH = made.dy_TH.detach().cpu().double()
            gradients: Sequence[Tensor | None] = torch.autograd.grad(y_TH, leaves, dy_TH, allow_unused=True)
        else:
            gradients = [None] * len(leaves)
        for name, leaf, gradient in zip(wanted, leaves, gradients, strict=True):
            found[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: tensor.detach() for name, tensor in found.items()}


def _wanted(made: Made) -> list[str]:
    """Names of tensors with a gradient, a shared one once."""
    seen: list[Tensor] = []
    names = []
    for name, tensor in made.tensors.items():
        if tensor.requires_grad and not any(tensor is other for other in seen):
            seen.append(tensor)
            names.append(name)
    return names


def _clamp_above(case: Case, gate: Tensor) -> Tensor:
    return gate.clamp(max=case.activation.limit) if case.limit else gate


def _act(case: Case, h: Tensor) -> Tensor:
    if case.kind == "silu":
        return h * torch.sigmoid(case.alpha * h)
    if case.kind == "relu":
        return torch.relu(h)
    if case.kind == "relu2":
        return torch.relu(h) ** 2
    return F.gelu(h, approximate="tanh" if case.kind == "gelu_tanh" else "none")
