"""Products of sorted rows with their experts' matrices; rows gathered on load, activation in the epilogue.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

Expert e owns the sorted rows offs_E[e-1] : offs_E[e]. Where `order_N` is given, sorted row n is read from row
order_N[n] // top_k. Rows past offs_E[-1] are neither read nor written. Any strides; fp32 accumulation.

    h_NJ, a_NI = x_TH.new_empty(N, J), x_TH.new_empty(N, I)
    multiply_rows_activated(x_TH, gate_up_EJH, offs_E, activation, h_NJ, a_NI, order_N=order_N, top_k=K)
    multiply_rows(a_NI, down_EHI.transpose(1, 2), offs_E, y_NH)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels.activation import gated, group, plain
from amoeba.kernels.constants import Group
from amoeba.kernels.gemm_tiles import (
    accumulate,
    add_low_rank,
    added,
    halves,
    multiply_tile,
    of_matrix,
    of_result,
    of_rows,
    tile_of,
)
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.tile_sizes import Configuration, Product, configuration_on, with_addend
from amoeba.kernels.tiles import find_tile, rows_of_tile, slots


def multiply_rows(
    rows_NI: Tensor,
    matrix_EIO: Tensor,
    offs_E: Tensor,
    out_NO: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
    scale: float = 1.0,
    addend: Addend | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """out[n] = scale · rows[n] @ matrix[e] (+ bias[e], + addend); rows[order[n] // top_k] where there is an order."""
    rows, columns = out_NO.shape
    experts, reduction, _ = matrix_EIO.shape
    fit = matrix_EIO.shape[2] == columns and rows_NI.shape[1] == reduction and offs_E.shape[0] == experts
    fit = fit and rows_NI.dtype == matrix_EIO.dtype and have_lines(out_NO)
    check_arguments(fit, "(N, I), (E, I, O) and (N, O)", rows_NI=rows_NI, matrix_EIO=matrix_EIO, out_NO=out_NO)
    if rows == 0:
        return out_NO
    product = Product(rows, experts, reduction, columns, rows_NI.dtype)
    chosen = configuration or configuration_on(out_NO.device, "product", product)
    chosen = chosen if addend is None else with_addend(chosen)
    _multiply[(slots(rows, experts, chosen.block_m) * cdiv(columns, chosen.block_n),)](
        rows_NI,
        matrix_EIO,
        offs_E,
        out_NO,
        order_N,
        bias_EO,
        *added(addend),
        scale,
        PRODUCT=Group(
            **of_rows(rows_NI, top_k),
            **of_matrix(matrix_EIO),
            **of_result(out_NO, bias_EO, addend),
            SCALED=scale != 1.0,
            **tile_of(chosen, rows, experts, columns),
        ),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out_NO


def multiply_rows_activated(
    x_TH: Tensor,
    gate_up_EJH: Tensor,
    offs_E: Tensor,
    activation: Activation,
    h_NJ: Tensor | None,
    a_NI: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EJ: Tensor | None = None,
    addend: Addend | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """h[n] = x[order[n] // top_k] @ gate_up[e]ᵀ (+ bias[e], + addend) where it is asked for, and a[n] = act(h[n])."""
    rows, intermediate = a_NI.shape
    experts, width, hidden = gate_up_EJH.shape
    fit = width == activation.width(intermediate) and x_TH.shape[1] == hidden and offs_E.shape[0] == experts
    fit = fit and x_TH.dtype == gate_up_EJH.dtype and have_lines(a_NI, h_NJ)
    fit = fit and (h_NJ is None or h_NJ.shape == (rows, width))
    check_arguments(fit, "(T, H), (E, J, H) and (N, I)", x_TH=x_TH, gate_up_EJH=gate_up_EJH, a_NI=a_NI, h_NJ=h_NJ)
    if rows == 0:
        return a_NI
    product = Product(rows, experts, hidden, width, x_TH.dtype)
    chosen = configuration or configuration_on(a_NI.device, "up", product)
    chosen = chosen if addend is None else with_addend(chosen)
    _multiply_activated[(slots(rows, experts, chosen.block_m) * cdiv(width, chosen.block_n),)](
        x_TH,
        gate_up_EJH,
        offs_E,
        h_NJ,
        a_NI,
        order_N,
        bias_EJ,
        *added(addend),
        PRODUCT=Group(
            **of_rows(x_TH, top_k),
            **of_matrix(gate_up_EJH.transpose(1, 2)),
            **of_result(h_NJ, bias_EJ, addend),
            STRIDE_A_ROW=a_NI.stride(0),
            INTERMEDIATE=intermediate,
            **tile_of(chosen, rows, experts, width),
        ),
        ACTIVATION=group(activation),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return a_NI


@quick
@triton.jit
def _multiply(rows_NI, matrix_EIO, offs_E, out_NO, order_N, bias_EO, low_NR, factor_EOR, scale, PRODUCT: tl.constexpr):
    expert, row, row_end, column_tile = find_tile(offs_E, PRODUCT)
    if row >= row_end:
        return
    multiply_tile(
        expert, row, row_end, column_tile, rows_NI, matrix_EIO, out_NO, order_N, bias_EO, low_NR, factor_EOR, scale,
        PRODUCT,
    )  # fmt: skip


@quick
@triton.jit
def _multiply_activated(
    x_TH,
    gate_up_EJH,
    offs_E,
    h_NJ,
    a_NI,
    order_N,
    bias_EJ,
    low_NR,
    factor_EJR,
    PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    P: tl.constexpr = PRODUCT
    GATED: tl.constexpr = ACTIVATION.GATED
    INTERLEAVED: tl.constexpr = ACTIVATION.INTERLEAVED
    INTERMEDIATE: tl.constexpr = P.INTERMEDIATE
    BLOCK_M: tl.constexpr = P.BLOCK_M
    BLOCK_N: tl.constexpr = P.BLOCK_N
    expert, row, row_end, column_tile = find_tile(offs_E, PRODUCT)
    if row >= row_end:
        return
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, P.TOP_K, BLOCK_M)
    # One accumulator holds the gates and the ups of the same columns of a: the rows are read once for both, in one
    # product. Its columns run as h stores them, so that loads along them stay contiguous.
    ACTIVATED: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    index_N = tl.arange(0, BLOCK_N)
    if GATED and not INTERLEAVED:
        within_N = column_tile * ACTIVATED + index_N % ACTIVATED
        column_N = (index_N // ACTIVATED) * INTERMEDIATE + within_N
        inside_N = within_N < INTERMEDIATE
    else:
        column_N = column_tile * BLOCK_N + index_N
        inside_N = column_N < INTERMEDIATE * (BLOCK_N // ACTIVATED)
    EVEN_COLUMNS: tl.constexpr = INTERMEDIATE % ACTIVATED == 0
    matrix = gate_up_EJH + expert.to(tl.int64) * P.STRIDE_EXPERT
    h = accumulate(x_TH, matrix, source_M, column_N, inside_N, EVEN_COLUMNS, PRODUCT)
    if low_NR is not None:
        h = add_low_rank(h, low_NR, factor_EJR, expert, row_M, row_end, column_N, inside_N, EVEN_COLUMNS, PRODUCT)
    if bias_EJ is not None:
        bias = bias_EJ + expert.to(tl.int64) * P.STRIDE_BIAS_EXPERT
        h += tl.load(bias + column_N * P.STRIDE_BIAS, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    # Wide arithmetic on the scalar, narrow offsets on the tile: pointers to whole tiles would fill the registers.
    first_row = row.to(tl.int64)
    local_M = tl.arange(0, BLOCK_M)
    valid = (row_M < row_end)[:, None]
    if h_NJ is not None:
        h_pointers = h_NJ + first_row * P.STRIDE_OUT_ROW + (local_M * P.STRIDE_OUT_ROW)[:, None] + column_N[None, :]
        h_mask = valid
        if not EVEN_COLUMNS:
            h_mask = valid & inside_N[None, :]
        tl.store(h_pointers, h.to(h_NJ.dtype.element_ty), mask=h_mask)
    if GATED:
        gate, up = halves(h, INTERLEAVED)
        a = gated(gate, up, ACTIVATION)
    else:
        a = plain(h, ACTIVATION)
    activated = column_tile * ACTIVATED + tl.arange(0, ACTIVATED)
    a_pointers = a_NI + first_row * P.STRIDE_A_ROW + (local_M * P.STRIDE_A_ROW)[:, None] + activated[None, :]
    a_mask = valid
    if not EVEN_COLUMNS:
        a_mask = valid & (activated < INTERMEDIATE)[None, :]
    tl.store(a_pointers, a.to(a_NI.dtype.element_ty), mask=a_mask)
