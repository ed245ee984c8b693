"""What one step does to many parameters at once, in torch's operations, for parameters that are not on a GPU.

Bit for bit what kernels/adamw.py computes there. So no operation that may or may not round in between, such as lerp and
addcdiv, is used, and no square root that is not the nearest number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.optim.rounding import join, random_bits, round_stochastically, split, step_key


class Coefficients(NamedTuple):
    """With g the gradient, m and v its averages, w the master:

    m += (g - m) · first_rate
    v = v · second_decay + g² · second_rate
    w = w · decay - step_size · m / (√v · correction + epsilon)
    """

    first_rate: float
    second_decay: float
    second_rate: float
    correction: float
    epsilon: float
    decay: float
    step_size: float
    key: int  # of the chance by which averages are rounded to bf16


def coefficients(group: dict[str, Any], step: int) -> Coefficients:
    """As torch.optim.AdamW has them at its `step`-th step."""
    beta1, beta2, rate = (float(value) for value in (*group["betas"], group["lr"]))
    return Coefficients(
        first_rate=1 - beta1,
        second_decay=beta2,
        second_rate=1 - beta2,
        correction=1 / math.sqrt(1 - beta2**step),
        epsilon=float(group["eps"]),
        decay=1 - rate * group["weight_decay"],
        step_size=rate / (1 - beta1**step),
        key=step_key(group["seed"], step),
    )


class BatchKind(NamedTuple):
    device: torch.device
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    states_dtype: torch.dtype


@dataclass
class Batch:
    """Parameters of one kind that take the same step. All tensors of a parameter lie in memory alike."""

    kind: BatchKind
    group: int  # of the optimizer
    coefficients: Coefficients
    parameters: list[Tensor] = field(default_factory=list)
    remainders: list[Tensor] = field(default_factory=list)  # as many, or none where parameters are fp32
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # in the optimizer


# 4 MB of fp32. Smaller chunks cost more in calls than they save: with 1 << 17 a step of 8M parameters took about twice
# as long on a Neoverse-N1 (2026-11-15).
CHUNK = 1 << 20
# On x86 torch leaves square roots to MKL, whose fp32 ones may be off by one in the last bit (issue 31250 of PyTorch).
_ROOTS_BY_MKL = torch.backends.mkl.is_available()


def update(batch: Batch, scale: Tensor | None) -> None:
    """scale: of the gradients, one fp32 number on the same device."""
    for at, parameter in enumerate(batch.parameters):
        tensors = [parameter, batch.exp_avgs[at], batch.exp_avg_sqs[at], batch.gradients[at]]
        if batch.remainders:
            tensors.append(batch.remainders[at])
        # in the order of memory, with the tensor's own version counter: what was computed from it is seen to be old
        tensors = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        for first in range(0, parameter.numel(), CHUNK):
            chunks = [tensor[first : first + CHUNK] for tensor in tensors]
            _update_chunk(*chunks, scale=scale, by=batch.coefficients, position=batch.positions[at], first=first)


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """In fp32, whatever they are stored in."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()


def nearest_root(numbers: Tensor) -> Tensor:
    """Of fp32, rounded once: by way of fp64, whose last bits do not matter. No root of an fp32 number is so near to the
    middle between two others."""
    by_mkl = _ROOTS_BY_MKL and numbers.device.type == "cpu"
    return numbers.double().sqrt_().float() if by_mkl else numbers.sqrt()


def _update_chunk(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    remainder: Tensor | None = None,
    *,
    scale: Tensor | None,
    by: Coefficients,
    position: int,
    first: int,
) -> None:
    gradient = gradient.float() if scale is None else gradient.float() * scale
    average, square = exp_avg.float(), exp_avg_sq.float()  # themselves where they are fp32
    average += (gradient - average).mul_(by.first_rate)
    square.mul_(by.second_decay).add_((gradient * gradient).mul_(by.second_rate))
    change = nearest_root(square).mul_(by.correction).add_(by.epsilon)
    torch.div(average, change, out=change).mul_(by.step_size)
    if remainder is None:
        parameter.mul_(by.decay).sub_(change)
    else:
        rounded, missing = split(join(parameter, remainder).mul_(by.decay).sub_(change))
        parameter.copy_(rounded)
        remainder.copy_(missing)
    if exp_avg.dtype == torch.bfloat16:
        bits = random_bits(by.key, position, first, len(parameter), parameter.device)
        exp_avg.copy_(round_stochastically(average, bits & 0xFFFF))
        exp_avg_sq.copy_(round_stochastically(square, (bits >> 16).bitwise_and_(0xFFFF)))
