"""Dequantises experts' matrices, some experts at a time.

E experts · O rows of a matrix · I columns

    dequantise(matrix, 8, 16, out_EOI)                          # of the experts 8 to 15; out: bf16 (8, O, I)

One pass over memory. A number is its bits' one times its scale in fp32, rounded to the dtype of `out`: what
`QuantisedMatrix.dequantise` gives. Blocks (GGUF, NF4) are read by `amoeba.kernels.blocks`.

`unpack_e4m3`, `unpack_e2m1` and `load_scales` serve other kernels as well. Numbers are unpacked by their bits, through
fp16, which every GPU converts: bits put where fp16 has them are the number times a power of two, subnormal ones too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.blocks import NARROWEST, layout_of, load_blocks
from amoeba.kernels.constants import Group
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
    expected = f"({last - first}, {rows}, {columns}), contiguous, as are each expert's numbers and scales"
    check_arguments(fits, expected, data=matrix.data, scales=matrix.scales, out=out_EOI)
    if out_EOI.numel() == 0:
        return out_EOI
    least = NARROWEST if matrix.format.scale == "inside" else 2  # a byte has two codes of four bits
    block = min(_COLUMNS, max(least, next_power_of_2(columns)))
    _dequantise[(cdiv((last - first) * rows, _ROWS), cdiv(columns, block))](
        matrix.data[first:last],
        matrix.scales[first:last],
        None if matrix.matrix_scale is None else matrix.matrix_scale[first:last],
        out_EOI,
        (last - first) * rows,
        MATRIX=Group(
            ROWS=rows,
            COLUMNS=columns,
            STORED_COLUMNS=matrix.data.shape[2],
            SCALE_COLUMNS=matrix.scales.shape[2],
            STRIDE_EXPERT=matrix.data.stride(0),
            STRIDE_SCALE_EXPERT=matrix.scales.stride(0),
            STRIDE_MATRIX_SCALE=0 if matrix.matrix_scale is None else matrix.matrix_scale.stride(0),
            **block_constants(matrix),
        ),
        ROWS=_ROWS,
        COLUMNS=block,
        num_warps=_WARPS,
    )
    return out_EOI


def block_constants(matrix: QuantisedMatrix) -> dict[str, Any]:
    """What kernels that decode a stack of matrices are told of their codes and of where scales belong."""
    block_rows, block_columns = matrix.format.block
    of_part = matrix.shape[1] // matrix.parts
    inside = layout_of(matrix) if matrix.format.scale == "inside" else {}
    return inside | {
        "BITS": matrix.format.element.bits,
        "SCALE": matrix.format.scale,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "PART_ROWS": of_part,
        "PART_BLOCKS": cdiv(of_part, block_rows),
    }


@triton.jit
def unpack_e4m3(code):
    """fp32 of codes in uint8."""
    size = code & 127
    bits = ((size.to(tl.uint16) << 7) | ((code & 128).to(tl.uint16) << 8)).to(tl.uint16)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(size == 127, float("nan"), value)


@triton.jit
def unpack_e2m1(code):
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
def load_scales(pointers, mask, of_matrix, SCALE: tl.constexpr):
    if SCALE == "fp32":
        scale = tl.load(pointers, mask=mask, other=0.0)
    elif SCALE == "e8m0":
        scale = _e8m0(tl.load(pointers, mask=mask, other=0))
    else:
        scale = unpack_e4m3(tl.load(pointers, mask=mask, other=0)) * of_matrix
    return scale


@quick
@triton.jit(do_not_specialize=["rows"])
def _dequantise(data, scales, matrix_scale, out, rows, MATRIX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_R = row_R < rows
    expert_R = (row_R // MATRIX.ROWS).to(tl.int64)
    inner_R = row_R % MATRIX.ROWS
    bytes_R = data + expert_R * MATRIX.STRIDE_EXPERT + inner_R * MATRIX.STORED_COLUMNS
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    if MATRIX.SCALE == "inside":
        value = load_blocks(bytes_R[:, None], there_R[:, None], first, COLUMNS, MATRIX)
    else:
        if MATRIX.BITS == 8:
            mask = there_R[:, None] & (column_C < MATRIX.COLUMNS)[None, :]
            packed = tl.load(bytes_R[:, None] + column_C[None, :], mask=mask, other=0)
            value = decode(packed)
        else:
            byte_C = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            mask = there_R[:, None] & (byte_C < MATRIX.STORED_COLUMNS)[None, :]
            packed = tl.load(bytes_R[:, None] + byte_C[None, :], mask=mask, other=0)
            value = tl.reshape(tl.join(unpack_e2m1(packed), unpack_e2m1(packed >> 4)), (ROWS, COLUMNS))
        of_matrix = 1.0
        if matrix_scale is not None:
            of_matrix = tl.load(matrix_scale + expert_R * MATRIX.STRIDE_MATRIX_SCALE, mask=there_R, other=0.0)[:, None]
        SHARED: tl.constexpr = MATRIX.BLOCK_COLUMNS if MATRIX.BLOCK_COLUMNS < COLUMNS else COLUMNS
        GROUPS: tl.constexpr = COLUMNS // SHARED
        block_G = first // MATRIX.BLOCK_COLUMNS + tl.arange(0, GROUPS)
        line_R = scale_row(inner_R, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS) * MATRIX.SCALE_COLUMNS
        places = scales + (expert_R * MATRIX.STRIDE_SCALE_EXPERT + line_R)[:, None] + block_G[None, :]
        scale = load_scales(
            places, there_R[:, None] & (block_G < MATRIX.SCALE_COLUMNS)[None, :], of_matrix, MATRIX.SCALE
        )
        value = tl.reshape(tl.reshape(value, (ROWS, GROUPS, SHARED)) * scale[:, :, None], (ROWS, COLUMNS))
    mask = there_R[:, None] & (column_C < MATRIX.COLUMNS)[None, :]
    place_R = out + row_R.to(tl.int64) * MATRIX.COLUMNS
    tl.store(place_R[:, None] + column_C[None, :], value.to(out.dtype.element_ty), mask=mask)
