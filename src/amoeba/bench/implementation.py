"""One who computes the experts, ours or a peer, as the benchmark sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# What int8 weights and activations may be off by.
INT8_TOLERANCE = {"output": 3e-2, "gradient": 5e-2}


@dataclass(frozen=True)
class Implementation:
    """A function of the workload, () -> y_TH, that autograd can see through."""

    name: str
    ours: bool
    run: Callable[[], Tensor]
    tolerance: dict[str, float] | None = None  # of "output" and "gradient"; None: that of the dtype
    itemsize: float | None = None  # of the weights as it reads them; None: that of the dtype
    gradients: Callable[[], dict[str, Tensor]] | None = None  # those that it does not hand to autograd, after backward
    parameters: tuple[Tensor, ...] = ()  # of its own, beside those of the workload; not counted as kept for backward
