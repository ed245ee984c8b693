"""`python -m benchmarks products`: each kernel of a layer on a GPU by itself, a table per shape, the document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amoeba.bench.ceilings import Ceilings, measure_ceilings
from amoeba.bench.shapes import Shape, parse_shape
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from benchmarks.products.suite import ProductMeasurement, ProductsReport, run_products

if TYPE_CHECKING:
    from benchmarks.products.roles import Role  # imports Triton

_DEFAULT = ("qwen3_30b",)


def choose_shapes(shapes: Sequence[str], device: torch.device) -> list[Shape]:
    if device.type != "cuda":
        raise bad_value("--device", "a CUDA device", device.type, "leave it out: the layer runs anywhere")
    found = [parse_shape(text) for text in shapes or _DEFAULT]
    for shape in found:
        if shape.rank or shape.forward_only:
            raise bad_value("--shape", "a layer that is trained", shape.name, "give T,H,I,E,K")
    return found


def command_line(shapes: Sequence[Shape], repeats: int, ours: Sequence[str]) -> str:
    """The command that measures the same again."""
    named = [word for shape in shapes for word in ("--shape", shape.name)]
    named += [word for part in ours for word in ("--ours", part)]
    return shlex.join(["python", "-m", "benchmarks", "products", *named, "--repeats", str(repeats)])


def chosen(roles: Sequence[Role], ours: Sequence[str]) -> list[Role]:
    """Those that have one of these in their names; all of them, unless something is named."""
    found = [role for role in roles if not ours or any(part in role.name for part in ours)]
    if not found:
        names = "; ".join(role.name for role in roles)
        raise bad_value("--ours", f"a part of one of these names: {names}", ", ".join(ours), "leave it out for all")
    return found


def _measure(shape: Shape, device: torch.device, repeats: int, ours: Sequence[str]) -> ProductsReport:
    from benchmarks.products.roles import roles_of  # imports Triton

    return run_products(shape, chosen(roles_of(shape, device), ours), device, repeats)


def run(
    shapes: Sequence[Shape],
    device: torch.device,
    repeats: int,
    path: Path | None,
    output: Output,
    ours: Sequence[str] = (),
    measure: Callable[[Shape, torch.device, int, Sequence[str]], ProductsReport] = _measure,
    ceilings: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] = measure_ceilings,
) -> tuple[dict[str, Any], bool]:
    """Prints a table per shape; returns the document, and False if a kernel of ours raised or was wrong.

    ours: parts of the names of those that are measured; all are without any."""
    measured, reports = BenchRun(command_line(shapes, repeats, ours), "products", path, output), list[ProductsReport]()
    limits = measured.measure_ceilings(device, [torch.bfloat16], ceilings)
    for shape in shapes:
        measured.progress(f"{shape.name}: checking and timing its kernels")
        reports.append(measure(shape, device, repeats, ours))
        _print(reports[-1], limits, output)
        measured.keep(reports[-1])
    return measured.finish(), not any(report.wrong for report in reports)


def _print(report: ProductsReport, limits: Ceilings, output: Output) -> None:
    shape = report.shape
    sizes = f"T={shape.tokens} H={shape.hidden} I={shape.intermediate} E={shape.experts} K={shape.top_k}"
    rows = [_row(each, limits) for each in report.measurements if each.median_ms is not None]
    cells = [list(row.values()) for row in rows]
    output.table(f"{shape.name} ({sizes}), kernel by kernel", list(rows[0]) if rows else [""], cells)
    output.line(f"  rests of {report.rest_ms:g} ms before each run, and caches flushed")
    output.line("  of: the rate of a dense product in bf16, or of a copy")
    for each in report.measurements:
        if each.reason is not None:
            output.line(f"  {each.role}: {each.reason}", style="bold red" if each.role in report.wrong else None)


def _row(found: ProductMeasurement, limits: Ceilings) -> dict[str, str]:
    assert found.median_ms is not None and found.min_ms is not None
    flops, rate = found.flops_per_second, found.bytes_per_second
    of = "-"
    if flops is not None:
        of = f"{flops / limits.matmul_flops_per_second(torch.bfloat16):.0%}"
    elif rate is not None:
        of = f"{rate / limits.copy_bytes_per_second:.0%}"
    return {
        "": found.role,
        "ms": three_digits(found.median_ms),
        "min": three_digits(found.min_ms),
        "TFLOP/s": "-" if flops is None else three_digits(flops / 1e12),
        "GB/s": "-" if rate is None else three_digits(rate / 1e9),
        "of": of,
        "error": "-" if found.error is None else f"{found.error:.1e}",
    }
