"""Which configuration a kernel is launched with: what was measured on this GPU, else our tables.

    chosen = configuration_on(device, "product", rows=N, experts=E, reduction=H, columns=J, dtype=x_TH.dtype)

The answer to one question stays the same as long as the process lives, and costs a look-up. Nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import torch

from amoeba.kernels.candidates import bucket, candidates
from amoeba.kernels.configuration import Configuration, Role, configuration
from amoeba.system import tuned

# of the pass that is under way; None: as many as its weights have
_experts: ContextVar[int | None] = ContextVar("experts", default=None)


@contextmanager
def as_with(experts: int) -> Iterator[None]:
    """Configurations are chosen as if the weights had so many experts: some of them, in slots, are computed with the
    tiles, and so with the last bits, of all."""
    token = _experts.set(experts)
    try:
        yield
    finally:
        _experts.reset(token)


def as_many(experts: int) -> int:
    """By which a configuration is chosen for weights of so many experts."""
    return _experts.get() or experts


def configuration_on(device: torch.device, role: Role, *, experts: int, **problem: Any) -> Configuration:
    """For the GPU, or the interpreter, that `device` stands for. The arguments are those of `configuration`."""
    return _configuration_on(device, role, experts=as_many(experts), **problem)


@lru_cache(maxsize=1 << 16)
def _configuration_on(
    device: torch.device,
    role: Role,
    *,
    rows: int,
    experts: int,
    reduction: int,
    columns: int,
    dtype: torch.dtype,
) -> Configuration:
    capability = capability_of(device)
    problem: dict[str, Any] = {
        "rows": rows, "experts": experts, "reduction": reduction, "columns": columns, "dtype": dtype
    }  # fmt: skip
    measured = tuned.choose(
        device, tile_key(role, **problem), lambda: candidates(role, capability=capability, **problem)
    )
    return configuration(role, capability=capability, **problem) if measured is None else measured


def tile_key(role: Role, *, rows: int, experts: int, reduction: int, columns: int, dtype: torch.dtype) -> str:
    """What one measurement stands for: the number of experts makes no difference to a tile."""
    return tuned.key(role, dtype, rows=bucket(rows, experts), reduction=reduction, columns=columns)


@cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """None for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
