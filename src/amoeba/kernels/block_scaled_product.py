"""Products of sorted rows with their experts' block-scaled matrices, dequantised tile by tile as they are loaded.

N routed rows · E experts · I in · O out

    multiply_rows(x_TH, gate_up, offs_E, h_NJ, order_N=order_N, top_k=K)           # x · Wᵀ
    multiply_rows(dh_NJ, gate_up, offs_E, dx_NH, transposed=True)                  # dh · W

Rows are those of `grouped_product`. A code is decoded by its bits, through fp16, which every GPU converts: its bits put
where fp16 has them are the number times a power of two, subnormal numbers too. Code times scale is a product in fp32,
rounded to the dtype of the rows: what `QuantisedMatrix.dequantise` gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.product_tiles import add_low_rank
from amoeba.kernels.tile_sizes import Configuration, configuration_on
from amoeba.kernels.tiles import expert_constants, find_tile, rows_of_tile, slots
from amoeba.precision.quantised import QuantisedMatrix

# Two codes to a byte are half as many bytes, which are a tile too; and a tile of weights passes through registers, in
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
    chosen = configuration or configuration_on(
        out_NO.device,
        "product",
        rows=rows,
        experts=experts,
        reduction=reduction,
        columns=columns,
        dtype=rows_NI.dtype,
    )
    if configuration is None:
        chosen = replace(
            chosen,
            block_n=min(max(chosen.block_n, _NARROWEST), _WIDEST),
            block_k=min(max(chosen.block_k, _NARROWEST), _LONGEST_STEP),
            num_warps=max(chosen.num_warps, 8 if chosen.block_m >= 64 else 4),
        )
    column_tiles = cdiv(columns, chosen.block_n)
    _multiply[(slots(rows, experts, chosen.block_m) * column_tiles,)](
        rows_NI,
        matrix.data,
        matrix.scales,
        matrix.matrix_scale,
        offs_E,
        out_NO,
        order_N,
        bias_EO,
        *((None, None) if addend is None else addend[:2]),
        *rows_NI.stride(),
        *matrix.data.stride()[:2],
        *matrix.scales.stride()[:2],
        0 if matrix.matrix_scale is None else matrix.matrix_scale.stride(0),
        out_NO.stride(0),
        *(bias_EO.stride() if bias_EO is not None else (0, 0)),
        *((0, 0, 0) if addend is None else addend.factor_EOR.stride()),
        REDUCTION=reduction,
        COLUMNS=columns,
        RANK=0 if addend is None else addend.low_NR.shape[1],
        TRANSPOSED=transposed,
        **block_constants(matrix),
        TOP_K=top_k,
        **expert_constants(rows, experts, chosen),
        COLUMN_TILES=column_tiles,
        **chosen.constants(),
    )
    return out_NO


def block_constants(matrix: QuantisedMatrix) -> dict[str, Any]:
    """What kernels that decode a stack of matrices are told of their codes and of where scales belong."""
    block_rows, block_columns = matrix.format.block
    of_part = matrix.shape[1] // matrix.parts
    return {
        "BITS": matrix.format.element.bits,
        "SCALE": matrix.format.scale,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "PART_ROWS": of_part,
        "PART_BLOCKS": cdiv(of_part, block_rows),
    }


@triton.jit
def decode_e4m3(code):
    """fp32 of codes in uint8."""
    size = code & 127
    bits = ((size.to(tl.uint16) << 7) | ((code & 128).to(tl.uint16) << 8)).to(tl.uint16)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(size == 127, float("nan"), value)


@triton.jit
def decode_e2m1(code):
    """fp32 of codes in the low four bits of a uint8."""
    bits = (((code & 7).to(tl.uint16) << 9) | ((code & 8).to(tl.uint16) << 12)).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _e8m0(code):
    bits = tl.where(code == 0, 1 << 22, code.to(tl.int32) << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_row(row, BLOCK_ROWS: tl.constexpr, PART_ROWS: tl.constexpr, PART_BLOCKS: tl.constexpr):
    """Which row of scales a row of the matrix has."""
    return (row // PART_ROWS) * PART_BLOCKS + (row % PART_ROWS) // BLOCK_ROWS


@triton.jit
def decode_scales(pointers, mask, of_matrix, SCALE: tl.constexpr):
    if SCALE == "fp32":
        scale = tl.load(pointers, mask=mask, other=0.0)
    elif SCALE == "e8m0":
        scale = _e8m0(tl.load(pointers, mask=mask, other=0))
    else:
        scale = decode_e4m3(tl.load(pointers, mask=mask, other=0)) * of_matrix
    return scale


@triton.jit
def _weights(
    data,
    scales,
    of_matrix,
    done,
    column_N,
    inside_N,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    REDUCTION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The steps `done` and on of the reduction for these columns, (BLOCK_K, BLOCK_N) in fp32."""
    inner_K = done + tl.arange(0, BLOCK_K)
    left_K = inner_K < REDUCTION
    mask = left_K[:, None] & inside_N[None, :]
    wide_N = column_N.to(tl.int64)
    if BITS == 8:
        if TRANSPOSED:
            pointers = data + (inner_K.to(tl.int64) * STRIDE_ROW)[:, None] + column_N[None, :]
        else:
            pointers = data + (wide_N * STRIDE_ROW)[None, :] + inner_K[:, None]
        value = decode_e4m3(tl.load(pointers, mask=mask, other=0))
    elif TRANSPOSED:  # two columns in a byte
        byte_N = tl.multiple_of(tl.min(column_N, 0) // 2, BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        pointers = data + (inner_K.to(tl.int64) * STRIDE_ROW)[:, None] + byte_N[None, :]
        byte = tl.load(pointers, mask=left_K[:, None] & (byte_N < STRIDE_ROW)[None, :], other=0)
        value = tl.reshape(tl.join(decode_e2m1(byte), decode_e2m1(byte >> 4)), (BLOCK_K, BLOCK_N))
    else:  # two steps in a byte
        byte_K = done // 2 + tl.arange(0, BLOCK_K // 2)
        pointers = data + (wide_N * STRIDE_ROW)[None, :] + byte_K[:, None]
        byte = tl.load(pointers, mask=(byte_K < STRIDE_ROW)[:, None] & inside_N[None, :], other=0)
        pairs = tl.permute(tl.join(decode_e2m1(byte), decode_e2m1(byte >> 4)), (0, 2, 1))
        value = tl.reshape(pairs, (BLOCK_K, BLOCK_N))
    # One line of scales for as many steps as share it; for each step where blocks and steps do not fall together.
    WHOLE: tl.constexpr = PART_ROWS % BLOCK_ROWS == 0 or PART_ROWS == REDUCTION
    SHARED: tl.constexpr = BLOCK_COLUMNS if not TRANSPOSED else BLOCK_ROWS if WHOLE else 1
    LINES: tl.constexpr = BLOCK_K // SHARED if SHARED < BLOCK_K else 1
    first_S = done + tl.arange(0, LINES) * (BLOCK_K // LINES)
    # And one scale for as many columns.
    ACROSS: tl.constexpr = BLOCK_N if not TRANSPOSED else BLOCK_N // BLOCK_COLUMNS if BLOCK_N > BLOCK_COLUMNS else 1
    if TRANSPOSED:
        row_S = scale_row(first_S, BLOCK_ROWS, PART_ROWS, PART_BLOCKS)
        across = tl.min(column_N, 0) // BLOCK_COLUMNS + tl.arange(0, ACROSS)
        scale_pointers = scales + (row_S.to(tl.int64) * STRIDE_SCALE_ROW)[:, None] + across[None, :]
        there = (first_S < REDUCTION)[:, None] & (across < STRIDE_SCALE_ROW)[None, :]
    else:
        row_N = scale_row(column_N, BLOCK_ROWS, PART_ROWS, PART_BLOCKS).to(tl.int64)
        scale_pointers = scales + (row_N * STRIDE_SCALE_ROW)[None, :] + (first_S // BLOCK_COLUMNS)[:, None]
        there = (first_S < REDUCTION)[:, None] & inside_N[None, :]
    scale = decode_scales(scale_pointers, there, of_matrix, SCALE)
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
    STRIDE_ROW: tl.constexpr,
    STRIDE_ROW_IN: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_DATA_ROW: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    STRIDE_MATRIX_SCALE: tl.constexpr,
    STRIDE_OUT_ROW: tl.constexpr,
    STRIDE_BIAS_EXPERT: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    STRIDE_FACTOR_EXPERT: tl.constexpr,
    STRIDE_FACTOR_OUT: tl.constexpr,
    STRIDE_FACTOR_RANK: tl.constexpr,
    REDUCTION: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOT_PER_ROW: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    expert, row, row_end, column_tile = find_tile(
        offs_E, EXPERTS, BLOCK_E, SLOT_PER_ROW, COLUMN_TILES, BLOCK_M, GROUP_M
    )
    if row >= row_end:
        return
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, TOP_K, BLOCK_M)
    column_N = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column_N < COLUMNS
    of_matrix = 1.0
    if matrix_scale is not None:
        of_matrix = tl.load(matrix_scale + expert.to(tl.int64) * STRIDE_MATRIX_SCALE)
    data += expert.to(tl.int64) * STRIDE_EXPERT
    scales += expert.to(tl.int64) * STRIDE_SCALE_EXPERT
    inner_K = tl.arange(0, BLOCK_K)
    row_pointers = rows_NI + (source_M.to(tl.int64) * STRIDE_ROW)[:, None] + (inner_K * STRIDE_ROW_IN)[None, :]
    result = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, REDUCTION, BLOCK_K):
        if REDUCTION % BLOCK_K == 0:
            row_tile = tl.load(row_pointers)
        else:
            row_tile = tl.load(row_pointers, mask=(inner_K < REDUCTION - done)[None, :], other=0.0)
        weight_tile = _weights(
            data,
            scales,
            of_matrix,
            done,
            column_N,
            inside_N,
            STRIDE_DATA_ROW,
            STRIDE_SCALE_ROW,
            REDUCTION,
            TRANSPOSED,
            BITS,
            SCALE,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            PART_ROWS,
            PART_BLOCKS,
            BLOCK_N,
            BLOCK_K,
        )
        result = tl.dot(row_tile, weight_tile.to(row_tile.dtype), result, input_precision="ieee")
        row_pointers += BLOCK_K * STRIDE_ROW_IN
    if low_NR is not None:
        result = add_low_rank(
            result,
            low_NR,
            factor_EOR,
            expert,
            row_M,
            row_end,
            column_N,
            inside_N,
            STRIDE_FACTOR_EXPERT,
            STRIDE_FACTOR_OUT,
            STRIDE_FACTOR_RANK,
            RANK,
            COLUMNS % BLOCK_N == 0,
        )
    if bias_EO is not None:
        bias = bias_EO + expert.to(tl.int64) * STRIDE_BIAS_EXPERT
        result += tl.load(bias + column_N * STRIDE_BIAS, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    out = out_NO + row.to(tl.int64) * STRIDE_OUT_ROW
    out += (tl.arange(0, BLOCK_M) * STRIDE_OUT_ROW)[:, None] + column_N[None, :]
    mask = (row_M < row_end)[:, None] & inside_N[None, :]
    tl.store(out, result.to(out_NO.dtype.element_ty), mask=mask)
