"""What a layer's training step is made of on a GPU, kernel by kernel, with torch's grouped product where there is one.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

    for role in roles_of(SHAPES["qwen3_30b"], torch.device("cuda")):
        role.run()

In bf16 and, on Hopper, in fp8. Importing this imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends.fp8_codes import codes_of
from amoeba.backends.fp8_triton import WIDTH
from amoeba.backends.low_rank import ByToken
from amoeba.backends.triton_rows import HopperRows, TritonRows
from amoeba.bench.shapes import Shape
from amoeba.bench.workload import draw_routing
from amoeba.core.config import Activation
from amoeba.core.problem import Needs, Problem
from amoeba.core.torch_internals import grouped_product_in_fp8
from amoeba.core.weights import ExpertWeights
from amoeba.kernels.activate import activate, activate_backward, has_whole_blocks
from amoeba.kernels.combine import combine
from amoeba.kernels.quantise import empty_rows, quantise_rows
from amoeba.kernels.sort import sort_rows
from amoeba.precision.quantised import QuantisedMatrix

TOLERANCE, FP8_TOLERANCE = 1e-2, 1e-1


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
    turned_down, turned_gate_up, unit = of_down.turned(down), of_gate_up.turned(gate_up), 2.0 * N * H * I
    fused, scaled_a_NI = has_whole_blocks(activation, I), ours.new_rows(I)
    codes, kept = empty_rows(N, 2 * I, device), empty_rows(N, 2 * I, device)
    out_NJ = torch.empty_like(dh_NJ)

    def up(h: Tensor | QuantisedMatrix | None) -> None:
        fp8_gemm.up(x, order_N, K, of_gate_up.matrix, table, activation, a, h_NJ=h)

    def down_backward() -> None:
        fp8_gemm.multiply(dy, turned_down, table, da_NI, order_N=order_N, top_k=K)

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
        rowwise("dA', torch fp8 (rowwise, sorted rows)", dy, turned_down, unit, gathered=True),
        Role("activation back in fp8", back, bytes=(14.0 if fused else 12.0) * N * I),
        fp8(
            "dx in fp8",
            lambda: fp8_gemm.multiply(dh, turned_gate_up, table, dx_NH),
            2 * unit,
            "dx",
            lambda: dx_NH,
        ),
        rowwise("dx, torch fp8 (rowwise)", dh, turned_gate_up, 2 * unit, gathered=False),
    ]
