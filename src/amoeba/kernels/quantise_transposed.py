"""Rows to e4m3, transposed, for gradients of weights: 128 rows of an expert are a block, stored (blocks, columns, 128).

T tokens · K experts per token · N = T·K routed rows · E experts · W columns · B blocks, as many as there may be

    blocks = row_blocks(offs_E, table)                              # table: of `amoeba.kernels.hopper.gemm`
    dh = transpose_rows(dh_NJ, blocks)                                   # a scale for each 128 x 1
    x = transpose_tokens(x_TH, order_N, K, blocks)                       # a scale for each column, over all tokens

The matrix unit takes e4m3 along the summed dimension only, which is the rows here, so both operands are transposed.
Rows of tokens are encoded once each, in two passes (the largest number of a column, then codes), and only bytes are
gathered. A block begins with an expert's first row, or 128 rows on; behind the expert's last one it holds zeros. Scales
are powers of two, as in `amoeba.kernels.quantise`. What lies behind the last block is not written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.quantise import MOST_REGISTERS, encode, infinities_to_nan, power_of_two

BLOCK = 128
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
