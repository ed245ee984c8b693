"""Experts' block-scaled matrices to the numbers that they stand for, some experts at a time.

E experts · O rows of a matrix · I columns

    dequantise(matrix, 8, 16, out_EOI)                          # of the experts 8 to 15; out: bf16 (8, O, I)

One pass over memory. A number is its code times its scale in fp32, rounded to the dtype of `out`: what
`QuantisedMatrix.dequantise` gives.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.block_scaled_product import block_constants, decode_e2m1, decode_scales, scale_row
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.quantise import decode
from amoeba.precision.quantised import QuantisedMatrix

# Of a tile: 32 numbers a thread.
_ROWS, _COLUMNS, _WARPS = 16, 256, 4


def dequantise(matrix: QuantisedMatrix, first: int, last: int, out_EOI: Tensor) -> Tensor:
    """Of the experts from `first` on, before `last`. Each is contiguous, whatever lies between them."""
    experts, rows, columns = matrix.shape
    fits = tuple(out_EOI.shape) == (last - first, rows, columns) and 0 <= first <= last <= experts
    fits = fits and out_EOI.is_contiguous()
    fits = fits and all(experts == 0 or tensor[0].is_contiguous() for tensor in (matrix.data, matrix.scales))
    expected = f"({last - first}, {rows}, {columns}), contiguous as each expert's codes and scales are"
    check_arguments(fits, expected, data=matrix.data, scales=matrix.scales, out=out_EOI)
    if out_EOI.numel() == 0:
        return out_EOI
    block = min(_COLUMNS, max(2, next_power_of_2(columns)))  # a byte has two codes of four bits
    _dequantise[(cdiv((last - first) * rows, _ROWS), cdiv(columns, block))](
        matrix.data[first:last],
        matrix.scales[first:last],
        None if matrix.matrix_scale is None else matrix.matrix_scale[first:last],
        out_EOI,
        (last - first) * rows,
        MATRIX_ROWS=rows,
        MATRIX_COLUMNS=columns,
        STORED_COLUMNS=matrix.data.shape[2],
        SCALE_COLUMNS=matrix.scales.shape[2],
        STRIDE_EXPERT=matrix.data.stride(0),
        STRIDE_SCALE_EXPERT=matrix.scales.stride(0),
        STRIDE_MATRIX_SCALE=0 if matrix.matrix_scale is None else matrix.matrix_scale.stride(0),
        **block_constants(matrix),
        ROWS=_ROWS,
        COLUMNS=block,
        num_warps=_WARPS,
    )
    return out_EOI


@quick
@triton.jit(do_not_specialize=["rows"])
def _dequantise(
    data,
    scales,
    matrix_scale,
    out,
    rows,
    MATRIX_ROWS: tl.constexpr,
    MATRIX_COLUMNS: tl.constexpr,
    STORED_COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    STRIDE_MATRIX_SCALE: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_R = row_R < rows
    expert_R = (row_R // MATRIX_ROWS).to(tl.int64)
    inner_R = row_R % MATRIX_ROWS
    codes_R = data + expert_R * STRIDE_EXPERT + inner_R * STORED_COLUMNS
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    if BITS == 8:
        mask = there_R[:, None] & (column_C < MATRIX_COLUMNS)[None, :]
        code = tl.load(codes_R[:, None] + column_C[None, :], mask=mask, other=0)
        value = decode(code)
    else:
        byte_C = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        mask = there_R[:, None] & (byte_C < STORED_COLUMNS)[None, :]
        code = tl.load(codes_R[:, None] + byte_C[None, :], mask=mask, other=0)
        value = tl.reshape(tl.join(decode_e2m1(code), decode_e2m1(code >> 4)), (ROWS, COLUMNS))
    of_matrix = 1.0
    if matrix_scale is not None:
        of_matrix = tl.load(matrix_scale + expert_R * STRIDE_MATRIX_SCALE, mask=there_R, other=0.0)[:, None]
    SHARED: tl.constexpr = BLOCK_COLUMNS if BLOCK_COLUMNS < COLUMNS else COLUMNS
    GROUPS: tl.constexpr = COLUMNS // SHARED
    block_G = first // BLOCK_COLUMNS + tl.arange(0, GROUPS)
    line_R = scale_row(inner_R, BLOCK_ROWS, PART_ROWS, PART_BLOCKS) * SCALE_COLUMNS
    places = scales + (expert_R * STRIDE_SCALE_EXPERT + line_R)[:, None] + block_G[None, :]
    scale = decode_scales(places, there_R[:, None] & (block_G < SCALE_COLUMNS)[None, :], of_matrix, SCALE)
    value = tl.reshape(tl.reshape(value, (ROWS, GROUPS, SHARED)) * scale[:, :, None], (ROWS, COLUMNS))
    mask = there_R[:, None] & (column_C < MATRIX_COLUMNS)[None, :]
    place_R = out + row_R.to(tl.int64) * MATRIX_COLUMNS
    tl.store(place_R[:, None] + column_C[None, :], value.to(out.dtype.element_ty), mask=mask)
