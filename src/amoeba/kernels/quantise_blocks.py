"""Rows and weights to the operands of a training recipe: fp8-128, mxfp8 or nvfp4; rows also as they are activated.

N rows · E experts · O out · I in · J = 2I or I

    x = quantise_rows(x_TH, MXFP8_TRAINING_ROWS)                       # as `quantise` of amoeba.precision, to the bit
    a = activate_and_quantise(h_NJ, activation, NVFP4_TRAINING_ROWS, offs_E)      # Q(act(h)); a is rounded once
    quantise_weights(down_EHI, matrix, transposed)                     # both orientations

Plain Triton for every GPU that converts to e4m3 (from sm_89 on). Each orientation of a weight takes a read; nvfp4 takes
one more, for the largest number of a row or of an expert's matrix. What fp8-128 has kernels for already is left to
`amoeba.kernels.quantise`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels import quantise
from amoeba.kernels.activation import gated, group, plain
from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.quantise import decode, encode, exact_scale, infinities_to_nan, power_of_two
from amoeba.precision.formats import Format
from amoeba.precision.quantised import QuantisedMatrix, empty_quantised

# Numbers of a tile of rows and its warps, sides of a tile of weights. Compiled for sm_89, sm_100 and sm_120 without
# spills; not timed.
_ROW_TILE, _WIDEST, _ROW_WARPS = 2048, 1024, 4
_SIDE, _WEIGHT_WARPS = 64, 4


@triton.jit
def encode_e2m1(values):
    """Codes in uint8: nearest, ties to even, saturating. NaN is 0: its block's scale is NaN."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return (code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.uint8)


@triton.jit
def _pack(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
    return low | (high << 4)


@triton.jit
def matrix_scale_of(largest):
    """Of nvfp4: largest / (6 · 448), a normal number; 1 for 0."""
    scale = tl.maximum(tl.div_rn(largest, 2688.0), 1.1754943508222875e-38)
    return tl.where(largest > 0, scale, 1.0)


@triton.jit
def _scales(largest, not_finite, matrix_scale, FORMAT: tl.constexpr):
    """As they are stored, and what numbers are divided by (of powers of two: multiplied with)."""
    if FORMAT.SCALE == "e4m3":
        quotient = tl.div_rn(tl.div_rn(largest, 6.0), matrix_scale)
        code = encode(tl.where(largest > 0, quotient, 0.0))
        value = decode(code) * matrix_scale
        stored = tl.where(not_finite > 0, 127, code.to(tl.int32)).to(tl.uint8)
        return stored, tl.where(value == 0, float("inf"), value)
    elif FORMAT.POWER_OF_TWO:
        scale, inverse = power_of_two(largest)
        if FORMAT.SCALE == "e8m0":
            return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), inverse
        else:
            return scale, inverse
    else:
        scale = exact_scale(largest)
        return scale, scale


@triton.jit
def _codes(blocks, by, FORMAT: tl.constexpr):
    if FORMAT.POWER_OF_TWO:
        numbers = blocks * by
    else:
        numbers = tl.div_rn(blocks, by)
    if FORMAT.BITS == 8:
        return encode(numbers)
    else:
        return encode_e2m1(numbers)


@triton.jit
def _load(
    rows, row_R, there_R, first, WIDTH: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr
):
    """Columns of rows in fp32, activated where there is an activation; NaN for infinities, zeros behind the end."""
    column = first + tl.arange(0, COLUMNS)
    there = there_R[:, None] & (column < WIDTH)[None, :]
    at = rows + row_R.to(tl.int64)[:, None] * STRIDE
    if ACT is None:
        values = tl.load(at + column[None, :], mask=there, other=0.0).to(tl.float32)
    elif ACT.INTERLEAVED:
        gate = tl.load(at + 2 * column[None, :], mask=there, other=0.0).to(tl.float32)
        up = tl.load(at + 2 * column[None, :] + 1, mask=there, other=0.0).to(tl.float32)
        values = gated(gate, up, ACT)
    elif ACT.GATED:
        gate = tl.load(at + column[None, :], mask=there, other=0.0).to(tl.float32)
        up = tl.load(at + WIDTH + column[None, :], mask=there, other=0.0).to(tl.float32)
        values = gated(gate, up, ACT)
    else:
        values = plain(tl.load(at + column[None, :], mask=there, other=0.0).to(tl.float32), ACT)
    return infinities_to_nan(tl.where(there, values, 0.0))


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows_in_blocks(
    rows,
    codes,
    scales,
    row_scales,
    offs,
    num_rows,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has whole rows."""
    BLOCK: tl.constexpr = FORMAT.BLOCK
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    PER_BYTE: tl.constexpr = 8 // FORMAT.BITS
    STORED: tl.constexpr = BLOCKS * BLOCK // 2 if PER_BYTE == 2 else WIDTH
    GROUPS: tl.constexpr = COLUMNS // BLOCK
    first_row = tl.program_id(0) * ROWS
    if offs is not None:
        num_rows = tl.minimum(num_rows, tl.load(offs + EXPERTS - 1))
    if first_row >= num_rows:
        return
    row_R = first_row + tl.arange(0, ROWS)
    there_R = row_R < num_rows
    wide_R = row_R.to(tl.int64)
    of_row = tl.full((ROWS,), 1.0, tl.float32)
    if FORMAT.SCALE == "e4m3":
        largest_R = tl.zeros((ROWS,), tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            largest_R = tl.maximum(
                largest_R, tl.max(tl.abs(_load(rows, row_R, there_R, first, WIDTH, STRIDE, COLUMNS, ACT)), axis=1)
            )
        of_row = matrix_scale_of(largest_R)
        tl.store(row_scales + row_R, of_row, mask=there_R)
    for first in range(0, WIDTH, COLUMNS):
        values = _load(rows, row_R, there_R, first, WIDTH, STRIDE, COLUMNS, ACT)
        blocks = tl.reshape(values, (ROWS, GROUPS, BLOCK))
        not_finite = tl.max((blocks != blocks).to(tl.int32), axis=2)
        stored, by = _scales(tl.max(tl.abs(blocks), axis=2), not_finite, of_row[:, None], FORMAT)
        code = tl.reshape(_codes(blocks, by[:, :, None], FORMAT), (ROWS, COLUMNS))
        if PER_BYTE == 2:
            code = _pack(code, ROWS, COLUMNS)
        byte = first // PER_BYTE + tl.arange(0, COLUMNS // PER_BYTE)
        there = there_R[:, None] & (byte < STORED)[None, :]
        tl.store(codes + (wide_R * STORED)[:, None] + byte[None, :], code, mask=there)
        block = first // BLOCK + tl.arange(0, GROUPS)
        there = there_R[:, None] & (block < BLOCKS)[None, :]
        tl.store(scales + (wide_R * BLOCKS)[:, None] + block[None, :], stored, mask=there)


def _of_format(format: Format) -> Group:
    return Group(SCALE=format.scale, POWER_OF_TWO=format.power_of_two, BITS=format.element.bits, BLOCK=format.block[1])


def _write_rows(
    rows_NW: Tensor, into: QuantisedMatrix, activation: Activation | None, offs_E: Tensor | None
) -> QuantisedMatrix:
    rows, width = into.shape
    if rows_NW.numel() == 0:
        return into
    columns = min(_WIDEST, max(128, next_power_of_2(width)))
    _quantise_rows_in_blocks[(cdiv(rows, max(1, _ROW_TILE // columns)),)](
        rows_NW,
        into.data,
        into.scales,
        into.matrix_scale,
        offs_E,
        rows,
        FORMAT=_of_format(into.format),
        ACT=None if activation is None else group(activation),
        WIDTH=width,
        STRIDE=rows_NW.stride(0),
        EXPERTS=0 if offs_E is None else offs_E.shape[0],
        ROWS=max(1, _ROW_TILE // columns),
        COLUMNS=columns,
        num_warps=_ROW_WARPS,
    )
    return into


def quantise_rows(rows_NW: Tensor, format: Format) -> QuantisedMatrix:
    """Rows that are contiguous inside, of any width; a format with blocks of one row."""
    if format.scale == "fp32":
        return quantise.quantise_rows(rows_NW, format=format)
    check_arguments(have_lines(rows_NW), "rows that are contiguous inside", rows_NW=rows_NW)
    rows, width = rows_NW.shape
    return _write_rows(rows_NW, empty_quantised((rows, width), format, device=rows_NW.device), None, None)


def activate_and_quantise(h_NJ: Tensor, activation: Activation, into: QuantisedMatrix, offs_E: Tensor) -> None:
    """Q(act(h)) of the rows before offs_E[-1]. into: (N, I), in a format with blocks of one row."""
    fit = have_lines(h_NJ) and h_NJ.shape == (into.shape[0], activation.width(into.columns))
    check_arguments(fit, "rows of h, contiguous inside, and room for as many of a", h_NJ=h_NJ, data=into.data)
    _write_rows(h_NJ, into, activation, offs_E)


@triton.jit
def _tile_of_weight(weight, STRIDES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """This program's numbers in fp32, NaN for infinities, its expert, and its tile down and across."""
    DOWN: tl.constexpr = (HEIGHT + SIDE - 1) // SIDE
    ACROSS: tl.constexpr = (WIDTH + SIDE - 1) // SIDE
    program = tl.program_id(0)
    expert = (program // (DOWN * ACROSS)).to(tl.int64)
    down = program // ACROSS % DOWN
    across = program % ACROSS
    row = (down * SIDE + tl.arange(0, SIDE))[:, None]
    column = (across * SIDE + tl.arange(0, SIDE))[None, :]
    at = weight + expert * STRIDES.EXPERT + row.to(tl.int64) * STRIDES.ROW + column.to(tl.int64) * STRIDES.COLUMN
    values = tl.load(at, mask=(row < HEIGHT) & (column < WIDTH), other=0.0).to(tl.float32)
    return infinities_to_nan(values), expert, down, across


@quick
@triton.jit
def _largest_of_matrices(
    weight, largest, STRIDES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr
):
    """largest: bits of fp32 as integers, which are ordered alike, so that it does not matter who comes first."""
    values, expert, _, _ = _tile_of_weight(weight, STRIDES, HEIGHT, WIDTH, SIDE)
    size = tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    size = tl.where(size == size, size, 0.0)
    tl.atomic_max(largest + expert, size.to(tl.int32, bitcast=True), sem="relaxed")


@quick
@triton.jit
def _quantise_weights_in_blocks(
    weight,
    codes,
    scales,
    largest,
    matrix_scale,
    FORMAT: tl.constexpr,
    STRIDES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
):
    BLOCK: tl.constexpr = FORMAT.BLOCK
    GROUPS: tl.constexpr = SIDE // BLOCK
    PER_BYTE: tl.constexpr = 8 // FORMAT.BITS
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    BLOCKS_DOWN: tl.constexpr = (HEIGHT + BLOCK - 1) // BLOCK
    STORED: tl.constexpr = BLOCKS * BLOCK // 2 if PER_BYTE == 2 else WIDTH
    values, expert, down, across = _tile_of_weight(weight, STRIDES, HEIGHT, WIDTH, SIDE)
    of_matrix = 1.0
    if largest is not None:
        of_matrix = matrix_scale_of(tl.load(largest + expert).to(tl.float32, bitcast=True))
        if (down == 0) & (across == 0):
            tl.store(matrix_scale + expert, of_matrix)
    blocks = tl.reshape(values, (GROUPS, BLOCK, GROUPS, BLOCK))
    size = tl.max(tl.max(tl.abs(blocks), axis=3), axis=1)
    not_finite = tl.max(tl.max((blocks != blocks).to(tl.int32), axis=3), axis=1)
    stored, by = _scales(size, not_finite, of_matrix, FORMAT)
    code = tl.reshape(_codes(blocks, by[:, None, :, None], FORMAT), (SIDE, SIDE))
    if PER_BYTE == 2:
        code = _pack(code, SIDE, SIDE)
    row = (down * SIDE + tl.arange(0, SIDE))[:, None]
    byte = (across * (SIDE // PER_BYTE) + tl.arange(0, SIDE // PER_BYTE))[None, :]
    at = codes + expert * (HEIGHT * STORED) + row.to(tl.int64) * STORED + byte
    tl.store(at, code, mask=(row < HEIGHT) & (byte < STORED))
    line = (down * GROUPS + tl.arange(0, GROUPS))[:, None]
    block = (across * GROUPS + tl.arange(0, GROUPS))[None, :]
    at = scales + expert * (BLOCKS_DOWN * BLOCKS) + line * BLOCKS + block
    tl.store(at, stored, mask=(line < BLOCKS_DOWN) & (block < BLOCKS))


def quantise_weights(weight_EOI: Tensor, into: QuantisedMatrix, transposed: QuantisedMatrix | None = None) -> None:
    """into: (E, O, I), as `quantise` gives it, in a format with square blocks; transposed: the same as (E, I, O), whose
    scales of matrices are those of `into`. The weight may have any strides."""
    if into.format.scale == "fp32":
        quantise.quantise_weights(weight_EOI, into, transposed)
        return
    experts, height, width = weight_EOI.shape
    fit = into.shape == weight_EOI.shape and (transposed is None or transposed.shape == (experts, width, height))
    fit = fit and all(each.is_contiguous() for each in (into.data, into.scales))
    check_arguments(fit, "(E, O, I) and contiguous memory for its numbers", weight_EOI=weight_EOI, data=into.data)
    if weight_EOI.numel() == 0:
        return
    largest = None
    grid = (experts * cdiv(height, _SIDE) * cdiv(width, _SIDE),)
    if into.matrix_scale is not None:
        largest = torch.empty(experts, dtype=torch.int32, device=weight_EOI.device).zero_()
        _largest_of_matrices[grid](weight_EOI, largest, **_sizes(weight_EOI))
    # Square blocks of the transposed weight have the same scales and codes.
    for weight, matrix in ((weight_EOI, into), (weight_EOI.mT, transposed)):
        if matrix is not None:
            _quantise_weights_in_blocks[grid](
                weight,
                matrix.data,
                matrix.scales,
                largest,
                into.matrix_scale,
                FORMAT=_of_format(into.format),
                **_sizes(weight),
            )


def _sizes(weight_EOI: Tensor) -> dict[str, Any]:
    expert, row, column = weight_EOI.stride()
    strides = Group(EXPERT=expert, ROW=row, COLUMN=column)
    height, width = weight_EOI.shape[1:]
    return {"STRIDES": strides, "HEIGHT": height, "WIDTH": width, "SIDE": _SIDE, "num_warps": _WEIGHT_WARPS}
