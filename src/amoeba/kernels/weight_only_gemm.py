"""Products of sorted 16-bit rows with their experts' quantised matrices, dequantised tile by tile as they are loaded.

N routed rows · E experts · I in · O out

    multiply_rows(x_TH, gate_up, offs_E, h_NJ, order_N=order_N, top_k=K)           # x · Wᵀ
    multiply_rows(dh_NJ, gate_up, offs_E, dx_NH, transposed=True)                  # dh · W

Rows are those of `grouped_gemm`. A weight is its number times its scale in fp32, rounded to the dtype of the rows: what
`QuantisedMatrix.dequantise` gives.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.blocks import load_blocks
from amoeba.kernels.constants import Group
from amoeba.kernels.dequantise import block_constants, load_scales, scale_row, unpack_e2m1, unpack_e4m3
from amoeba.kernels.gemm_tiles import added, finish_tile, of_result, of_rows, tile_of
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.tile_sizes import Configuration, Product, configuration_on
from amoeba.kernels.tiles import find_tile, rows_of_tile, slots
from amoeba.precision.quantised import QuantisedMatrix

# Two numbers to a byte are half as many bytes, which are a tile too; and a tile of weights passes through registers, in
# fp32, before it is multiplied. Compiled for sm_80 to sm_90 within these none of the formats spills. On an H200 220 to
# 270 TFLOP/s, a third of bf16 (document `codes-prefill` of bce7076, 2026-11-17), where Hopper has other kernels now.
_NARROWEST, _WIDEST = 32, 128
_LONGEST_STEP = 64


def multiply_rows(
    rows_NI: Tensor,
    matrix: QuantisedMatrix,
    offs_E: Tensor,
    out_NO: Tensor,
    *,
    transposed: bool = False,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
    addend: Addend | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """out[n] = rows[n] @ matrix[e]ᵀ (+ bias[e], + addend), or @ matrix[e] where transposed; rows[order[n] // top_k]
    where there is an order.

    matrix: a stack of (O, I), or of (I, O) where transposed, each contiguous.
    """
    rows, columns = out_NO.shape
    experts, stored_rows, stored_columns = matrix.shape
    reduction = stored_rows if transposed else stored_columns
    fit = columns == (stored_columns if transposed else stored_rows) and rows_NI.shape[1] == reduction
    fit = fit and offs_E.shape[0] == experts and have_lines(out_NO)
    fit = fit and all(experts == 0 or tensor[0].is_contiguous() for tensor in (matrix.data, matrix.scales))
    check_arguments(
        fit,
        "(N, I), (E, O, I) with contiguous matrices, and (N, O)",
        rows_NI=rows_NI,
        data=matrix.data,
        scales=matrix.scales,
        out=out_NO,
    )
    if rows == 0:
        return out_NO
    product = Product(rows, experts, reduction, columns, rows_NI.dtype)
    chosen = configuration or configuration_on(out_NO.device, "product", product)
    if configuration is None:
        chosen = replace(
            chosen,
            block_n=min(max(chosen.block_n, _NARROWEST), _WIDEST),
            block_k=min(max(chosen.block_k, _NARROWEST), _LONGEST_STEP),
            num_warps=max(chosen.num_warps, 8 if chosen.block_m >= 64 else 4),
        )
    _multiply[(slots(rows, experts, chosen.block_m) * cdiv(columns, chosen.block_n),)](
        rows_NI,
        matrix.data,
        matrix.scales,
        matrix.matrix_scale,
        offs_E,
        out_NO,
        order_N,
        bias_EO,
        *added(addend),
        PRODUCT=Group(
            **of_rows(rows_NI, top_k),
            **of_result(out_NO, bias_EO, addend),
            **tile_of(chosen, rows, experts, columns),
            REDUCTION=reduction,
            COLUMNS=columns,
            QUANTISED=True,
        ),
        MATRIX=Group(
            **block_constants(matrix),
            STRIDE_EXPERT=matrix.data.stride(0),
            STRIDE_ROW=matrix.data.stride(1),
            STRIDE_SCALE_EXPERT=matrix.scales.stride(0),
            STRIDE_SCALE_ROW=matrix.scales.stride(1),
            STRIDE_MATRIX_SCALE=0 if matrix.matrix_scale is None else matrix.matrix_scale.stride(0),
            TRANSPOSED=transposed,
        ),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out_NO


@triton.jit
def _numbers_of_blocks(data, done, column_N, inside_N, PRODUCT: tl.constexpr, MATRIX: tl.constexpr):
    """As `_weights`."""
    if MATRIX.TRANSPOSED:
        inner_K = done + tl.arange(0, PRODUCT.BLOCK_K)
        rows = data + (inner_K.to(tl.int64) * MATRIX.STRIDE_ROW)[:, None]
        first = tl.multiple_of(tl.min(column_N, 0), PRODUCT.BLOCK_N)
        return load_blocks(rows, (inner_K < PRODUCT.REDUCTION)[:, None], first, PRODUCT.BLOCK_N, MATRIX)
    else:
        rows = data + (column_N.to(tl.int64) * MATRIX.STRIDE_ROW)[:, None]
        return tl.trans(load_blocks(rows, inside_N[:, None], done, PRODUCT.BLOCK_K, MATRIX))


@triton.jit
def _weights(data, scales, of_matrix, done, column_N, inside_N, PRODUCT: tl.constexpr, MATRIX: tl.constexpr):
    """The steps `done` and on of the reduction for these columns, (BLOCK_K, BLOCK_N) in fp32."""
    REDUCTION: tl.constexpr = PRODUCT.REDUCTION
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    BLOCK_COLUMNS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    inner_K = done + tl.arange(0, BLOCK_K)
    left_K = inner_K < REDUCTION
    mask = left_K[:, None] & inside_N[None, :]
    wide_N = column_N.to(tl.int64)
    if MATRIX.BITS == 8:
        if MATRIX.TRANSPOSED:
            pointers = data + (inner_K.to(tl.int64) * MATRIX.STRIDE_ROW)[:, None] + column_N[None, :]
        else:
            pointers = data + (wide_N * MATRIX.STRIDE_ROW)[None, :] + inner_K[:, None]
        value = unpack_e4m3(tl.load(pointers, mask=mask, other=0))
    elif MATRIX.TRANSPOSED:  # two columns in a byte
        byte_N = tl.multiple_of(tl.min(column_N, 0) // 2, BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        pointers = data + (inner_K.to(tl.int64) * MATRIX.STRIDE_ROW)[:, None] + byte_N[None, :]
        byte = tl.load(pointers, mask=left_K[:, None] & (byte_N < MATRIX.STRIDE_ROW)[None, :], other=0)
        value = tl.reshape(tl.join(unpack_e2m1(byte), unpack_e2m1(byte >> 4)), (BLOCK_K, BLOCK_N))
    else:  # two steps in a byte
        byte_K = done // 2 + tl.arange(0, BLOCK_K // 2)
        pointers = data + (wide_N * MATRIX.STRIDE_ROW)[None, :] + byte_K[:, None]
        byte = tl.load(pointers, mask=(byte_K < MATRIX.STRIDE_ROW)[:, None] & inside_N[None, :], other=0)
        pairs = tl.permute(tl.join(unpack_e2m1(byte), unpack_e2m1(byte >> 4)), (0, 2, 1))
        value = tl.reshape(pairs, (BLOCK_K, BLOCK_N))
    # One line of scales for as many steps as share it; for each step where blocks and steps do not fall together.
    WHOLE: tl.constexpr = MATRIX.PART_ROWS % MATRIX.BLOCK_ROWS == 0 or MATRIX.PART_ROWS == REDUCTION
    SHARED: tl.constexpr = BLOCK_COLUMNS if not MATRIX.TRANSPOSED else MATRIX.BLOCK_ROWS if WHOLE else 1
    LINES: tl.constexpr = BLOCK_K // SHARED if SHARED < BLOCK_K else 1
    first_S = done + tl.arange(0, LINES) * (BLOCK_K // LINES)
    # And one scale for as many columns.
    ACROSS: tl.constexpr = (
        BLOCK_N if not MATRIX.TRANSPOSED else BLOCK_N // BLOCK_COLUMNS if BLOCK_N > BLOCK_COLUMNS else 1
    )
    if MATRIX.TRANSPOSED:
        row_S = scale_row(first_S, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS)
        across = tl.min(column_N, 0) // BLOCK_COLUMNS + tl.arange(0, ACROSS)
        scale_pointers = scales + (row_S.to(tl.int64) * MATRIX.STRIDE_SCALE_ROW)[:, None] + across[None, :]
        there = (first_S < REDUCTION)[:, None] & (across < MATRIX.STRIDE_SCALE_ROW)[None, :]
    else:
        row_N = scale_row(column_N, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS).to(tl.int64)
        scale_pointers = scales + (row_N * MATRIX.STRIDE_SCALE_ROW)[None, :] + (first_S // BLOCK_COLUMNS)[:, None]
        there = (first_S < REDUCTION)[:, None] & inside_N[None, :]
    scale = load_scales(scale_pointers, there, of_matrix, MATRIX.SCALE)
    if LINES < BLOCK_K or ACROSS < BLOCK_N:
        wide = tl.reshape(scale, (LINES, 1, ACROSS, 1))
        spread = tl.broadcast_to(wide, (LINES, BLOCK_K // LINES, ACROSS, BLOCK_N // ACROSS))
        scale = tl.reshape(spread, (BLOCK_K, BLOCK_N))
    return value * scale


@quick
@triton.jit
def _multiply(
    rows_NI,
    data,
    scales,
    matrix_scale,
    offs_E,
    out_NO,
    order_N,
    bias_EO,
    low_NR,
    factor_EOR,
    PRODUCT: tl.constexpr,
    MATRIX: tl.constexpr,
):
    P: tl.constexpr = PRODUCT
    expert, row, row_end, column_tile = find_tile(offs_E, PRODUCT)
    if row >= row_end:
        return
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, P.TOP_K, P.BLOCK_M)
    column_N = column_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    inside_N = column_N < P.COLUMNS
    of_matrix = 1.0
    if matrix_scale is not None:
        of_matrix = tl.load(matrix_scale + expert.to(tl.int64) * MATRIX.STRIDE_MATRIX_SCALE)
    data += expert.to(tl.int64) * MATRIX.STRIDE_EXPERT
    scales += expert.to(tl.int64) * MATRIX.STRIDE_SCALE_EXPERT
    inner_K = tl.arange(0, P.BLOCK_K)
    row_pointers = rows_NI + (source_M.to(tl.int64) * P.STRIDE_ROW)[:, None] + (inner_K * P.STRIDE_ROW_IN)[None, :]
    result = tl.zeros((P.BLOCK_M, P.BLOCK_N), dtype=tl.float32)
    for done in range(0, P.REDUCTION, P.BLOCK_K):
        if P.REDUCTION % P.BLOCK_K == 0:
            row_tile = tl.load(row_pointers)
        else:
            row_tile = tl.load(row_pointers, mask=(inner_K < P.REDUCTION - done)[None, :], other=0.0)
        if MATRIX.SCALE == "inside":
            weight_tile = _numbers_of_blocks(data, done, column_N, inside_N, PRODUCT, MATRIX)
        else:
            weight_tile = _weights(data, scales, of_matrix, done, column_N, inside_N, PRODUCT, MATRIX)
        result = tl.dot(row_tile, weight_tile.to(row_tile.dtype), result, input_precision="ieee")
        row_pointers += P.BLOCK_K * P.STRIDE_ROW_IN
    finish_tile(
        result, expert, row, row_M, row_end, column_N, inside_N, out_NO, bias_EO, low_NR, factor_EOR, PRODUCT
    )  # fmt: skip
