"""Rows and weights to e4m3, with a power of two as scale for each 1 x 128 of a row and each 128 x 128 of a weight.

T tokens · K experts per token · N = T·K routed rows · E experts · O out · I in · W columns · B blocks, at most

    quantised_TH = quantise_rows(x_TH)                          # as `quantise(x_TH, FP8_TRAINING_ROWS)`, to the bit
    quantise_weights(gate_up_EJH, matrix_EJH, turned_EHJ)       # into both orientations, from one read

One pass over memory each. Where it trains the scale is the least power of two that keeps all finite numbers of a block
within 448, found from the bits of the largest of them, so nothing is divided. NaN and infinities become NaN: a run that
diverges must show it.

Rows for gradients of weights are transposed: 128 rows of an expert are a block, stored (blocks, columns, 128).

    blocks = row_blocks(offs_E, table)                              # table: of `amoeba.kernels.hopper.gemm`
    dh = transpose_rows(dh_NJ, blocks)                                   # a scale for each 128 x 1
    x = transpose_tokens(x_TH, order_N, K, blocks)                       # a scale for each column, over all tokens

The matrix unit takes e4m3 along the summed dimension only, which is the rows here, so both operands are transposed.
Rows of tokens are encoded once each, in two passes (the largest number of a column, then codes), and only bytes are
gathered. A block begins with an expert's first row, or 128 rows on; behind the expert's last one it holds zeros. What
lies behind the last block is not written.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.tiles import column_block
from amoeba.precision.formats import FP8_TRAINING, FP8_TRAINING_ROWS, Format
from amoeba.precision.quantised import QuantisedMatrix, block_counts

BLOCK = 128
# Numbers of a tile of rows: 32 a thread, 64 bytes of bf16 on their way at once; 4.0 TB/s on an H200 (2026-11-16).
ROW_TILE, WIDEST_BLOCK, ROW_WARPS = 4096, 1024, 4
# With up to 128 registers a thread two blocks of weights are on their way in each multiprocessor: 4.0 TB/s on an H200
# (of 4.3 copied), where the two or twelve more that the compiler took for some shapes left it at 2.6 (2026-11-16).
WEIGHT_WARPS, MOST_REGISTERS = 8, 128
# GPUs have an instruction for it, from compute capability 8.9 on. Triton's interpreter rounds ties wrongly.
BY_BITS = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def infinities_to_nan(values):
    """The instruction that makes codes would saturate them. One multiply-add for each number: infinity times 0 is NaN,
    and a maximum passes NaN over, so the largest of the result is the largest finite number."""
    return values * 0.0 + values


@triton.jit
def power_of_two(largest):
    """The least power of two at or above largest / 448 (= 1.75 · 2^8), a normal number; 1 for 0, and for NaN, the
    largest of nothing but NaN. And its reciprocal."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(largest > 0, tl.maximum(exponent, 1), 127)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_scale(largest):
    """largest / 448, a normal number; 1 for 0, and for NaN, the largest of nothing but NaN."""
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    return tl.where(largest > 0, scale, 1.0)


@triton.jit
def encode(values):
    """e4m3 codes in uint8: nearest, ties to even, saturating, also infinities (see `infinities_to_nan`)."""
    if not BY_BITS:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = values.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(values), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes count 2^-9, which is the last bit of what begins with 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(values == values, code, 127)
    return (code | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode(code):
    """fp32 of e4m3 codes in uint8."""
    if not BY_BITS:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # fp16 with the same bits is the number divided by 256, subnormal numbers too
    size = (code & 127).to(tl.uint16)
    bits = ((size << 7) | ((code & 128).to(tl.uint16) << 8)).to(tl.uint16)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(size == 127, float("nan"), value)


@triton.jit
def encode_rows(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr = True):
    """Codes of a tile in fp32, and scales (ROWS, COLUMNS / 128)."""
    BLOCKS: tl.constexpr = COLUMNS // 128
    blocks = tl.reshape(infinities_to_nan(values), (ROWS, BLOCKS, 128))
    largest = tl.max(tl.abs(blocks), axis=2)
    if POWER_OF_TWO:
        scale, inverse = power_of_two(largest)
        blocks = blocks * inverse[:, :, None]
    else:
        scale = exact_scale(largest)
        blocks = tl.div_rn(blocks, scale[:, :, None])
    return tl.reshape(encode(blocks), (ROWS, COLUMNS)), scale


@triton.jit
def store_codes(
    values,
    codes,
    scales,
    row,
    row_in,
    first_column,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr = True,
):
    """A tile in fp32, quantised: TILE columns from first_column on, of COLUMNS in all; beyond them it holds zeros.

    codes, scales: contiguous, of rows with WIDTH columns, to which these begin at SHIFT, a multiple of 128.
    """
    BLOCKS: tl.constexpr = (COLUMNS + 127) // 128
    code, scale = encode_rows(values, ROWS, TILE, POWER_OF_TWO)
    column = first_column + tl.arange(0, TILE)
    block = first_column // 128 + tl.arange(0, TILE // 128)
    code_row = codes + row.to(tl.int64)[:, None] * WIDTH + SHIFT
    scale_row = scales + row.to(tl.int64)[:, None] * ((WIDTH + 127) // 128) + SHIFT // 128
    tl.store(code_row + column[None, :], code, mask=row_in[:, None] & (column < COLUMNS)[None, :])
    tl.store(scale_row + block[None, :], scale, mask=row_in[:, None] & (block < BLOCKS)[None, :])


@triton.jit
def load_codes(
    codes,
    scales,
    row,
    row_in,
    first_column,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """What `store_codes` wrote, or `quantise_rows`, in fp32. SHIFT may be a multiple of 64: blocks are those of the
    row."""
    PIECE: tl.constexpr = 128 if SHIFT % 128 == 0 else 64  # lies in one block
    column = first_column + tl.arange(0, TILE)
    piece = first_column + PIECE * tl.arange(0, TILE // PIECE)
    code_row = codes + row.to(tl.int64)[:, None] * WIDTH + SHIFT
    scale_row = scales + row.to(tl.int64)[:, None] * ((WIDTH + 127) // 128)
    code = tl.load(code_row + column[None, :], mask=row_in[:, None] & (column < COLUMNS)[None, :], other=0)
    block = (SHIFT + piece) // 128
    scale = tl.load(scale_row + block[None, :], mask=row_in[:, None] & (piece < COLUMNS)[None, :], other=0.0)
    pieces = tl.reshape(decode(code), (ROWS, TILE // PIECE, PIECE)) * scale[:, :, None]
    return tl.reshape(pieces, (ROWS, TILE))


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows(
    rows,
    codes,
    scales,
    num_rows,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // COLUMN_BLOCKS) * ROWS + tl.arange(0, ROWS)
    first_column = (program % COLUMN_BLOCKS) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    row_in = row < num_rows
    pointers = rows + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    values = tl.load(pointers, mask=row_in[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
    store_codes(values, codes, scales, row, row_in, first_column, WIDTH, WIDTH, 0, ROWS, COLUMNS, POWER_OF_TWO)


def empty_rows(rows: int, width: int, device: torch.device, format: Format = FP8_TRAINING_ROWS) -> QuantisedMatrix:
    """For codes and scales of rows that a kernel will write."""
    data = torch.empty((rows, width), dtype=torch.uint8, device=device)
    scales = torch.empty((rows, cdiv(width, BLOCK)), dtype=torch.float32, device=device)
    return QuantisedMatrix(data, scales, format, width)


def quantise_rows(
    rows_NW: Tensor, into: QuantisedMatrix | None = None, format: Format = FP8_TRAINING_ROWS
) -> QuantisedMatrix:
    """Rows that are contiguous inside, of any width. into: where there is room for them already, in its own format.
    format: with a scale in fp32 for each 1 x 128."""
    rows, width = rows_NW.shape
    fit = have_lines(rows_NW) and (into is None or into.shape == rows_NW.shape)
    check_arguments(fit, "rows that are contiguous inside, and room of their shape", rows_NW=rows_NW)
    found = empty_rows(rows, width, rows_NW.device, format) if into is None else into
    if rows_NW.numel() == 0:
        return found
    columns = max(BLOCK, column_block(width, WIDEST_BLOCK))
    tile_rows = ROW_TILE // columns
    _quantise_rows[(cdiv(rows, tile_rows) * cdiv(width, columns),)](
        rows_NW,
        found.data,
        found.scales,
        rows,
        STRIDE=rows_NW.stride(0),
        WIDTH=width,
        ROWS=tile_rows,
        COLUMNS=columns,
        POWER_OF_TWO=found.format.power_of_two,
        num_warps=ROW_WARPS,
    )
    return found


@quick
@triton.jit
def _quantise_weights(
    weight,
    codes,
    scales,
    turned_codes,
    turned_scales,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_COLUMN: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One block."""
    DOWN: tl.constexpr = (HEIGHT + 127) // 128
    ACROSS: tl.constexpr = (WIDTH + 127) // 128
    program = tl.program_id(0)
    expert = (program // (DOWN * ACROSS)).to(tl.int64)
    down = program // ACROSS % DOWN
    across = program % ACROSS
    row = down * 128 + tl.arange(0, 128)
    column = across * 128 + tl.arange(0, 128)
    inside = (row < HEIGHT)[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * STRIDE_ROW + column.to(tl.int64)[None, :] * STRIDE_COLUMN
    values = infinities_to_nan(tl.load(weight + expert * STRIDE_EXPERT + at, mask=inside, other=0.0).to(tl.float32))
    scale, inverse = power_of_two(tl.max(tl.max(tl.abs(values), axis=1), axis=0))
    code = encode(values * inverse)
    codes += expert * (HEIGHT * WIDTH)
    tl.store(codes + row.to(tl.int64)[:, None] * WIDTH + column[None, :], code, mask=inside)
    tl.store(scales + expert * (DOWN * ACROSS) + down * ACROSS + across, scale)
    if turned_codes is not None:
        turned_codes += expert * (HEIGHT * WIDTH)
        turned_at = turned_codes + column.to(tl.int64)[:, None] * HEIGHT + row[None, :]
        tl.store(turned_at, tl.trans(code), mask=tl.trans(inside))
        tl.store(turned_scales + expert * (DOWN * ACROSS) + across * DOWN + down, scale)


def empty_weights(experts: int, height: int, width: int, device: torch.device) -> QuantisedMatrix:
    data = torch.empty((experts, height, width), dtype=torch.uint8, device=device)
    scales = torch.empty((experts, *block_counts(height, width, FP8_TRAINING)), dtype=torch.float32, device=device)
    return QuantisedMatrix(data, scales, FP8_TRAINING, width)


def quantise_weights(weight_EOI: Tensor, into: QuantisedMatrix, transposed: QuantisedMatrix | None = None) -> None:
    """into: (E, O, I), as `quantise(weight, FP8_TRAINING)` gives it; transposed: the same as (E, I, O).

    The weight may have any strides.
    """
    experts, height, width = weight_EOI.shape
    fit = into.shape == weight_EOI.shape and (transposed is None or transposed.shape == (experts, width, height))
    fit = fit and into.data.is_contiguous() and into.scales.is_contiguous()
    fit = fit and (transposed is None or (transposed.data.is_contiguous() and transposed.scales.is_contiguous()))
    check_arguments(fit, "(E, O, I) and contiguous memory for its numbers", weight_EOI=weight_EOI, data=into.data)
    if weight_EOI.numel() == 0:
        return
    _quantise_weights[(into.scales.numel(),)](
        weight_EOI,
        into.data,
        into.scales,
        None if transposed is None else transposed.data,
        None if transposed is None else transposed.scales,
        STRIDE_EXPERT=weight_EOI.stride(0),
        STRIDE_ROW=weight_EOI.stride(1),
        STRIDE_COLUMN=weight_EOI.stride(2),
        HEIGHT=height,
        WIDTH=width,
        num_warps=WEIGHT_WARPS,
        **({"maxnreg": MOST_REGISTERS} if weight_EOI.device.type != "cpu" else {}),  # unknown to the interpreter
    )


# Scales that a tile of the product reads behind the last column of the last block, and does not use.
SPARE = BLOCK
# Columns of a tile and warps, the fastest of three each on an H200 (dev/log, 2026-11-17): 3.1 to 3.4 TB/s for
# blocks, 4.0 to 4.3 for gathered codes, 2.8 to 3.2 for both passes over x.
TURN_COLUMNS, TURN_WARPS = 64, 4
GATHER_COLUMNS, GATHER_WARPS = 128, 4
SIZE_ROWS, SIZE_COLUMNS, ENCODE_ROWS, ENCODE_COLUMNS, ENCODE_WARPS = 64, 128, 16, 256, 4


class RowBlocks(NamedTuple):
    """
    table: of tiles of 128 rows, see `amoeba.kernels.hopper.gemm.tile_table`.
    end_E: int32, the blocks of an expert and of all before it.
    """

    table: Tensor
    end_E: Tensor

    @property
    def most(self) -> int:
        return self.table.shape[0] // 4 - 1


class Transposed(NamedTuple):
    """
    codes_BWR: uint8 (B, W, 128).
    scales:    fp32; of each column of each block, one block after the other, and SPARE more; or of each column.
    """

    codes_BWR: Tensor
    scales: Tensor


@quick
@triton.jit(do_not_specialize=["experts"])
def _block_ends(offs_E, end_E, experts, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    end = tl.load(offs_E + e, mask=e < experts, other=0)
    start = tl.load(offs_E + e - 1, mask=(e > 0) & (e < experts), other=0)
    blocks = tl.where(e < experts, (end - start + 127) // 128, 0)
    tl.store(end_E + e, tl.cumsum(blocks, 0), mask=e < experts)


def row_blocks(offs_E: Tensor, table: Tensor) -> RowBlocks:
    end_E = torch.empty_like(offs_E)
    _block_ends[(1,)](offs_E, end_E, offs_E.shape[0], EXPERTS=next_power_of_2(offs_E.shape[0]))
    return RowBlocks(table, end_E)


@triton.jit
def _rows_of_block(table, block):
    """Sorted rows of a block, and which of them the expert has."""
    entry = table + 4 + block * 4
    row = tl.load(entry + 1) + tl.arange(0, 128)
    return row, row < tl.load(entry + 2)


@triton.jit
def _store_transposed(codes, code, block, column, inside, WIDTH: tl.constexpr):
    at = codes + (block.to(tl.int64) * WIDTH + column)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(at, tl.trans(code), mask=inside[:, None])


@quick
@triton.jit
def _transpose_rows(rows, table, codes, scales, STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // ACROSS
    if block < tl.load(table):
        row, owned = _rows_of_block(table, block)
        column = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        at = rows + row.to(tl.int64)[:, None] * STRIDE + column[None, :]
        values = infinities_to_nan(tl.load(at, mask=owned[:, None] & inside[None, :], other=0).to(tl.float32))
        scale, inverse = power_of_two(tl.max(tl.abs(values), axis=0))
        _store_transposed(codes, encode(values * inverse[None, :]), block, column, inside, WIDTH)
        tl.store(scales + block.to(tl.int64) * WIDTH + column, scale, mask=inside)


def transpose_rows(rows_NW: Tensor, blocks: RowBlocks) -> Transposed:
    """Sorted rows, contiguous inside."""
    width = rows_NW.shape[1]
    check_arguments(have_lines(rows_NW), "rows that are contiguous inside", rows_NW=rows_NW)
    codes_BWR = torch.empty((blocks.most, width, BLOCK), dtype=torch.uint8, device=rows_NW.device)
    scales = torch.empty(blocks.most * width + SPARE, dtype=torch.float32, device=rows_NW.device)
    _transpose_rows[(blocks.most * cdiv(width, TURN_COLUMNS),)](
        rows_NW,
        blocks.table,
        codes_BWR,
        scales,
        STRIDE=rows_NW.stride(0),
        WIDTH=width,
        COLUMNS=TURN_COLUMNS,
        num_warps=TURN_WARPS,
        **({"maxnreg": MOST_REGISTERS} if rows_NW.device.type != "cpu" else {}),  # unknown to the interpreter
    )
    return Transposed(codes_BWR, scales)


@triton.jit
def _load_tile(rows, num_rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's rows and columns, which of both there are, and their numbers in fp32, NaN for infinities."""
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(rows + row.to(tl.int64)[:, None] * STRIDE + column[None, :], mask=mask, other=0).to(tl.float32)
    return row, column, mask, infinities_to_nan(values)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _column_sizes(
    rows, largest, num_rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """largest: bits of fp32 as integers, which are ordered alike, so that it does not matter who comes first."""
    _, column, _, values = _load_tile(rows, num_rows, STRIDE, WIDTH, ROWS, COLUMNS)
    size = tl.max(tl.abs(values), axis=0)
    size = tl.where(size == size, size, 0.0)  # nothing but NaN: the bits of NaN are above those of every number
    tl.atomic_max(largest + column, size.to(tl.int32, bitcast=True), mask=column < WIDTH, sem="relaxed")


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _encode_columns(
    rows,
    largest,
    codes,
    scales,
    num_rows,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask, values = _load_tile(rows, num_rows, STRIDE, WIDTH, ROWS, COLUMNS)
    size = tl.load(largest + column, mask=column < WIDTH, other=0).to(tl.float32, bitcast=True)
    scale, inverse = power_of_two(size)
    tl.store(codes + row.to(tl.int64)[:, None] * WIDTH + column[None, :], encode(values * inverse[None, :]), mask=mask)
    if tl.program_id(0) * COLUMNS < WIDTH:
        tl.store(scales + column, scale, mask=column < WIDTH)


@quick
@triton.jit
def _transpose_codes(given, order, table, codes, WIDTH: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // ACROSS
    if block < tl.load(table):
        row, owned = _rows_of_block(table, block)
        token = tl.load(order + row, mask=owned, other=0) // TOP_K
        column = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        at = given + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        code = tl.load(at, mask=owned[:, None] & inside[None, :], other=0)
        _store_transposed(codes, code, block, column, inside, WIDTH)


def transpose_tokens(rows_TW: Tensor, order_N: Tensor, top_k: int, blocks: RowBlocks) -> Transposed:
    """Rows of tokens, contiguous inside, gathered by order // top_k."""
    tokens, width = rows_TW.shape
    check_arguments(have_lines(rows_TW), "rows that are contiguous inside", rows_TW=rows_TW)
    codes_TW = torch.empty((tokens, width), dtype=torch.uint8, device=rows_TW.device)
    scales = torch.empty(width, dtype=torch.float32, device=rows_TW.device)
    largest = torch.empty(width, dtype=torch.int32, device=rows_TW.device).zero_()
    stride = rows_TW.stride(0)
    _column_sizes[(cdiv(tokens, SIZE_ROWS) * cdiv(width, SIZE_COLUMNS),)](
        rows_TW, largest, tokens,
        STRIDE=stride, WIDTH=width, ROWS=SIZE_ROWS, COLUMNS=SIZE_COLUMNS, num_warps=ENCODE_WARPS,
    )  # fmt: skip
    _encode_columns[(cdiv(tokens, ENCODE_ROWS) * cdiv(width, ENCODE_COLUMNS),)](
        rows_TW, largest, codes_TW, scales, tokens,
        STRIDE=stride, WIDTH=width, ROWS=ENCODE_ROWS, COLUMNS=ENCODE_COLUMNS, num_warps=ENCODE_WARPS,
    )  # fmt: skip
    codes_BWR = torch.empty((blocks.most, width, BLOCK), dtype=torch.uint8, device=rows_TW.device)
    _transpose_codes[(blocks.most * cdiv(width, GATHER_COLUMNS),)](
        codes_TW, order_N, blocks.table, codes_BWR,
        WIDTH=width, TOP_K=top_k, COLUMNS=GATHER_COLUMNS, num_warps=GATHER_WARPS,
    )  # fmt: skip
    return Transposed(codes_BWR, scales)
