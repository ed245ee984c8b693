"""What one step does to many parameters at once: the numbers they share, and the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.optim.rounding import step_key


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
