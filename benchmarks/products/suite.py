"""Runs the benchmark of single kernels: check, then time, all of a shape in turns.

    report = run_products(SHAPES["qwen3_30b"], roles_of(SHAPES["qwen3_30b"], device), device, repeats=10)
    report.measurements[0].median_ms

A kernel that raises or whose result is out of tolerance gets no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.bench.shapes import Shape
from amoeba.bench.timing import REST_MS, Step, time_in_turns
from amoeba.bench.workload import relative_error

if TYPE_CHECKING:
    from benchmarks.products.roles import Role  # imports Triton


@dataclass(frozen=True)
class ProductMeasurement:
    """Without a time, `reason` says why. Rates where they mean something."""

    role: str
    reason: str | None = None
    error: float | None = None
    rounds: int = 0
    median_ms: float | None = None
    min_ms: float | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None


@dataclass(frozen=True)
class ProductsReport:
    shape: Shape
    rest_ms: float  # before each run
    measurements: list[ProductMeasurement] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Of ours; torch may lack a product."""
        return [each.role for each in self.measurements if each.reason is not None and "torch" not in each.role]


def run_products(shape: Shape, roles: Sequence[Role], device: torch.device, repeats: int) -> ProductsReport:
    reasons: dict[str, str] = {}
    errors: dict[str, float] = {}
    for role in roles:
        try:
            found = role.run()
        except Exception as error:  # whatever a product raises is its answer to this shape
            reasons[role.name] = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
            continue
        found = found if role.result is None else role.result()
        if role.expected is not None and isinstance(found, Tensor):
            errors[role.name] = relative_error(found, role.expected)
            if not errors[role.name] <= role.tolerance:
                reasons[role.name] = f"off by {errors[role.name]:.1e} > {role.tolerance:.0e}"
    right = {role.name: role for role in roles if role.name not in reasons}
    timings = time_in_turns({name: _step(role.run) for name, role in right.items()}, device, repeats)
    measurements = []
    for role in roles:
        found_error = errors.get(role.name)
        if role.name in reasons:
            measurements.append(ProductMeasurement(role.name, reasons[role.name], found_error))
            continue
        timing = timings[role.name]
        seconds = timing.median_ms / 1e3
        measurements.append(
            ProductMeasurement(
                role.name,
                None,
                found_error,
                timing.rounds,
                timing.median_ms,
                timing.min_ms,
                role.flops / seconds if role.flops else None,
                role.bytes / seconds if role.bytes else None,
            )
        )
    return ProductsReport(shape, REST_MS if device.type == "cuda" else 0.0, measurements)


def _step(run: Callable[[], object]) -> Step:
    def step(mark: Callable[[], None]) -> None:
        mark()
        run()
        mark()

    return step
