"""`python -m benchmarks products`: what a layer's training step is made of on a GPU, kernel by kernel, with torch's
grouped product where there is one; in bf16 and, on Hopper, in fp8. A kernel that raises or is wrong gets no time.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

    report = run_products(shape, roles_of(shape, device), device, repeats=10)
    report.measurements[0].median_ms
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends.fp8_triton import WIDTH
from amoeba.backends.fp8_weights import codes_of
from amoeba.backends.low_rank import ByToken
from amoeba.backends.triton_rows import HopperRows, TritonRows
from amoeba.bench.timing import REST_MS, Ceilings, measure_ceilings, step_of, time_in_turns
from amoeba.bench.workload import Shape, draw_routing, parse_shape, relative_error
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.config import Activation
from amoeba.core.errors import bad_value, one_line
from amoeba.core.problem import Needs, Problem
from amoeba.core.torch_internals import grouped_product_in_fp8
from amoeba.core.weights import ExpertWeights
from amoeba.kernels.activate import activate, activate_backward, has_whole_blocks
from amoeba.kernels.combine import combine
from amoeba.kernels.quantise import empty_rows, quantise_rows
from amoeba.kernels.sort import sort_rows
from amoeba.precision.quantised import QuantisedMatrix
from benchmarks import command

TOLERANCE, FP8_TOLERANCE = 1e-2, 1e-1
_DEFAULT = ("qwen3_30b",)


@dataclass(frozen=True)
class Role:
    """
    flops:    operations of a product.
    bytes:    that a pass over memory reads and writes.
    expected: what `result` has to be after a run, or what the run returns.
    """

    name: str
    run: Callable[[], object]
    flops: float = 0.0
    bytes: float = 0.0
    expected: Tensor | None = None
    result: Callable[[], Tensor] | None = None
    tolerance: float = TOLERANCE


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


def roles_of(shape: Shape, device: torch.device) -> list[Role]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    T, H, I, E, K = shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k
    N, activation = shape.rows, Activation()
    expert_TK, weight_TK = draw_routing(shape, generator)
    gate_up, down = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    problem = Problem(normal(T, H), expert_TK, weight_TK.float(), ExpertWeights(gate_up, down))
    ours, dy_TH = TritonRows.dispatch(problem, None), normal(T, H)
    rows = plain = TritonRows(problem, ours.order_N, ours.slot_row_N, ours.offs_E)
    slot_row_TK, offs_E = rows.slot_row_N.view(T, K), rows.offs_E
    x_NH, dy_NH = (t.index_select(0, rows.order_N // K) for t in (problem.x_TH, dy_TH))

    h_NJ, a_NI = plain.up(True)
    assert h_NJ is not None
    da_NI = F.grouped_mm(dy_NH, down, offs=offs_E)
    dh_NJ, scaled_a_NI, out_TH = torch.empty_like(h_NJ), torch.empty_like(a_NI), torch.empty_like(dy_TH)
    y_NH = F.grouped_mm(a_NI, down.transpose(1, 2), offs=offs_E)
    unit = 2.0 * N * H * I

    def back() -> None:
        activate_backward(da_NI, h_NJ, problem.weight_TK, rows.order_N, activation, dh_NJ, scaled_a_NI, offs_E)

    back()
    dx_NH = F.grouped_mm(dh_NJ, gate_up, offs=offs_E)
    d_down = F.grouped_mm(dy_NH.t(), scaled_a_NI, offs=offs_E)
    d_gate_up = F.grouped_mm(dh_NJ.t(), x_NH, offs=offs_E)
    in_bf16 = [
        Role("sort", lambda: sort_rows(expert_TK, E)),
        Role("up, torch (sorted rows, not activated)", lambda: F.grouped_mm(x_NH, gate_up.mT, offs=offs_E), 2 * unit),
        Role("up", lambda: ours.up(True)[1], 2 * unit, expected=a_NI),
        Role("up, plain Triton", lambda: plain.up(True)[1], 2 * unit, expected=a_NI),
        Role("activation", lambda: activate(h_NJ, activation, scaled_a_NI, offs_E), bytes=6.0 * N * I),
        Role("down, torch", lambda: F.grouped_mm(a_NI, down.mT, offs=offs_E), unit),
        Role("down", lambda: ours.down(a_NI), unit, expected=y_NH),
        Role("down, plain Triton", lambda: plain.down(a_NI), unit, expected=y_NH),
        Role("combine", lambda: combine(y_NH, slot_row_TK, problem.weight_TK, out_TH), bytes=2.0 * (N + T) * H),
        Role("dA', torch (sorted rows)", lambda: F.grouped_mm(dy_NH, down, offs=offs_E), unit),
        Role("activation back", back, bytes=12.0 * N * I),
        Role("d down, torch (sorted rows)", lambda: F.grouped_mm(dy_NH.t(), scaled_a_NI, offs=offs_E), unit),
        Role("d down", lambda: ours.weight_gradient(ByToken(dy_TH), scaled_a_NI, down), unit, expected=d_down),
        Role("dx, torch", lambda: F.grouped_mm(dh_NJ, gate_up, offs=offs_E), 2 * unit),
        Role("dx", lambda: ours.up_backward(dh_NJ, Needs(x=True, weight=False))[0], 2 * unit, expected=dx_NH),
        Role("d gate_up, torch (sorted rows)", lambda: F.grouped_mm(dh_NJ.t(), x_NH, offs=offs_E), 2 * unit),
        Role("d gate_up", lambda: ours.weight_gradient(dh_NJ, ours.x, gate_up), 2 * unit, expected=d_gate_up),
    ]
    if not isinstance(ours, HopperRows) or H % WIDTH or I % WIDTH:
        return in_bf16
    return in_bf16 + _in_fp8(ours, dy_TH, dh_NJ, {"a": a_NI, "y": y_NH, "da": da_NI, "dx": dx_NH})


def _in_fp8(ours: HopperRows, dy_TH: Tensor, dh_NJ: Tensor, in_bf16: dict[str, Tensor]) -> list[Role]:
    """The same products in e4m3, which is 6 % away; `amoeba verify` proves their numbers."""
    from amoeba.kernels.hopper import fp8_gemm

    x_TH, weights, table, order_N, K = ours.problem.x_TH, ours.problem.weights, ours.table, ours.order_N, ours.top_k
    gate_up, down, activation = weights.gate_up_EJH, weights.down_EHI, weights.activation
    (_, H, I), N, device = down.shape, ours.problem.rows, x_TH.device
    of_gate_up, of_down = codes_of(gate_up), codes_of(down)

    def refresh() -> None:
        of_gate_up.write(gate_up, both=True)
        of_down.write(down, both=True)

    refresh()
    x, dy, dh = quantise_rows(x_TH), quantise_rows(dy_TH), quantise_rows(dh_NJ)
    a, h_NJ, y_NH, dx_NH = empty_rows(N, I, device), torch.empty_like(dh_NJ), ours.new_rows(H), ours.new_rows(H)
    da_NI = ours.new_rows(I)
    transposed_down, transposed_gate_up, unit = (
        of_down.transposed(down),
        of_gate_up.transposed(gate_up),
        2.0 * N * H * I,
    )
    fused, scaled_a_NI = has_whole_blocks(activation, I), ours.new_rows(I)
    codes, kept = empty_rows(N, 2 * I, device), empty_rows(N, 2 * I, device)
    out_NJ = torch.empty_like(dh_NJ)

    def up(h: Tensor | QuantisedMatrix | None) -> None:
        fp8_gemm.up(x, order_N, K, of_gate_up.matrix, table, activation, a, h_NJ=h)

    def down_backward() -> None:
        fp8_gemm.multiply(dy, transposed_down, table, da_NI, order_N=order_N, top_k=K)

    def back() -> None:
        weight_TK, offs_E, quantised = ours.problem.weight_TK, ours.offs_E, codes if fused else None
        activate_backward(
            da_NI, h_NJ, weight_TK, order_N, activation, out_NJ, scaled_a_NI, offs_E, quantised_dh=quantised
        )

    up(h_NJ)

    def fp8(name: str, run: Callable[[], object], flops: float, expected: str, result: Callable[[], Tensor]) -> Role:
        return Role(name, run, flops, expected=in_bf16[expected], result=result, tolerance=FP8_TOLERANCE)

    def rowwise(name: str, rows: QuantisedMatrix, matrix: QuantisedMatrix, flops: float, *, gathered: bool) -> Role:
        """torch's product with one scale for a row and one for a column, without the time to quantise."""
        rows_NW = rows.data.index_select(0, order_N // K) if gathered else rows.data
        given = rows_NW.view(fp8_gemm.E4M3), matrix.data.view(fp8_gemm.E4M3).mT
        ones = (torch.ones(size, dtype=torch.float32, device=device) for size in ((N,), matrix.shape[:2]))
        operands = (*given, *ones, ours.offs_E)
        return Role(name, lambda: grouped_product_in_fp8(*operands), flops)

    in_e4m3 = [fp8("up in fp8, h in e4m3", lambda: up(kept), 2 * unit, "a", a.dequantise)] if fused else []
    return [
        Role("quantise x", lambda: quantise_rows(x_TH), bytes=3.0 * x_TH.numel()),
        Role("codes of all weights", refresh, bytes=4.0 * (gate_up.numel() + down.numel())),
        fp8("up in fp8, h in bf16", lambda: up(h_NJ), 2 * unit, "a", a.dequantise),
        *in_e4m3,
        fp8("up in fp8, h not kept", lambda: up(None), 2 * unit, "a", a.dequantise),
        rowwise("up, torch fp8 (rowwise, sorted rows)", x, of_gate_up.matrix, 2 * unit, gathered=True),
        fp8("down in fp8", lambda: fp8_gemm.multiply(a, of_down.matrix, table, y_NH), unit, "y", lambda: y_NH),
        rowwise("down, torch fp8 (rowwise)", a, of_down.matrix, unit, gathered=False),
        fp8("dA' in fp8", down_backward, unit, "da", lambda: da_NI),
        rowwise("dA', torch fp8 (rowwise, sorted rows)", dy, transposed_down, unit, gathered=True),
        Role("activation back in fp8", back, bytes=(14.0 if fused else 12.0) * N * I),
        fp8(
            "dx in fp8",
            lambda: fp8_gemm.multiply(dh, transposed_gate_up, table, dx_NH),
            2 * unit,
            "dx",
            lambda: dx_NH,
        ),
        rowwise("dx, torch fp8 (rowwise)", dh, transposed_gate_up, 2 * unit, gathered=False),
    ]


def run_products(shape: Shape, roles: Sequence[Role], device: torch.device, repeats: int) -> ProductsReport:
    """Checks each, then times those that are right, in turns."""
    checked = {role.name: _checked(role) for role in roles}
    right = {role.name: step_of(role.run) for role in roles if checked[role.name].reason is None}
    timings = time_in_turns(right, device, repeats)
    measurements = []
    for role in roles:
        found, timing = checked[role.name], timings.get(role.name)
        if timing is not None:
            seconds = timing.median_ms / 1e3
            found = replace(
                found,
                rounds=timing.rounds,
                median_ms=timing.median_ms,
                min_ms=timing.min_ms,
                flops_per_second=role.flops / seconds if role.flops else None,
                bytes_per_second=role.bytes / seconds if role.bytes else None,
            )
        measurements.append(found)
    return ProductsReport(shape, REST_MS if device.type == "cuda" else 0.0, measurements)


def _checked(role: Role) -> ProductMeasurement:
    try:
        found = role.run()
    except Exception as raised:  # whatever a product raises is its answer to this shape
        return ProductMeasurement(role.name, f"{type(raised).__name__}: {one_line(raised)}")
    found = found if role.result is None else role.result()
    if role.expected is None or not isinstance(found, Tensor):
        return ProductMeasurement(role.name)
    error = relative_error(found, role.expected)
    reason = None if error <= role.tolerance else f"off by {error:.1e} > {role.tolerance:.0e}"
    return ProductMeasurement(role.name, reason, error)


def choose_shapes(shapes: Sequence[str], device: torch.device) -> list[Shape]:
    if device.type != "cuda":
        raise bad_value("--device", "a CUDA device", device.type, "leave it out: the layer runs anywhere")
    found = [parse_shape(text) for text in shapes or _DEFAULT]
    for shape in found:
        if shape.rank or shape.forward_only:
            raise bad_value("--shape", "a layer that is trained", shape.name, "give T,H,I,E,K")
    return found


def chosen(roles: Sequence[Role], ours: Sequence[str]) -> list[Role]:
    """Those that have one of these in their names; all of them, unless something is named."""
    found = [role for role in roles if not ours or any(part in role.name for part in ours)]
    if not found:
        names = "; ".join(role.name for role in roles)
        raise bad_value("--ours", f"a part of one of these names: {names}", ", ".join(ours), "leave it out for all")
    return found


def run(
    shapes: Sequence[Shape],
    device: torch.device,
    repeats: int,
    path: Path | None,
    output: Output,
    ours: Sequence[str] = (),
    roles: Callable[[Shape, torch.device], list[Role]] = roles_of,
    ceilings: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] = measure_ceilings,
) -> tuple[dict[str, Any], bool]:
    """Prints a table per shape; returns the document, and False if a kernel of ours raised or was wrong.

    ours: parts of the names of those that are measured; all are without any."""
    again = command("products", shape=[shape.name for shape in shapes], ours=list(ours), repeats=repeats)
    measured, reports = BenchRun(again, "products", path, output), list[ProductsReport]()
    limits = measured.measure_ceilings(device, [torch.bfloat16], ceilings)
    for shape in shapes:
        measured.progress(f"{shape.name}: checking and timing its kernels")
        reports.append(run_products(shape, chosen(roles(shape, device), ours), device, repeats))
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
