"""A tile of the products of sorted rows with their experts' matrices, for kernels of several files.

E experts · R LoRA rank · in values of a kernel: M rows and N columns of a tile

`accumulate` is the product, `add_low_rank` LoRA's part of it, `multiply_tile` both with a bias, stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.tiles import rows_of_tile


@triton.jit
def accumulate(
    rows,
    matrix,
    source_M,
    column_N,
    inside_N,
    STRIDE_ROW: tl.constexpr,
    STRIDE_ROW_IN: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    REDUCTION: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The product of the rows `source_M` with the columns `column_N` of one expert's matrix, in fp32."""
    nothing = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    return _add_product(
        nothing,
        rows,
        matrix,
        source_M,
        column_N,
        inside_N,
        STRIDE_ROW,
        STRIDE_ROW_IN,
        STRIDE_IN,
        STRIDE_OUT,
        REDUCTION,
        EVEN_COLUMNS,
        BLOCK_K,
    )


@triton.jit
def _add_product(
    result,
    rows,
    matrix,
    source_M,
    column_N,
    inside_N,
    STRIDE_ROW: tl.constexpr,
    STRIDE_ROW_IN: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    REDUCTION: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    inner_K = tl.arange(0, BLOCK_K)
    row_pointers = rows + (source_M.to(tl.int64) * STRIDE_ROW)[:, None] + (inner_K * STRIDE_ROW_IN)[None, :]
    matrix_pointers = matrix + (inner_K * STRIDE_IN)[:, None] + (column_N.to(tl.int64) * STRIDE_OUT)[None, :]
    for done in range(0, REDUCTION, BLOCK_K):
        if REDUCTION % BLOCK_K == 0:
            row_tile = tl.load(row_pointers)
            if EVEN_COLUMNS:
                matrix_tile = tl.load(matrix_pointers)
            else:
                matrix_tile = tl.load(matrix_pointers, mask=inside_N[None, :], other=0.0)
        else:
            left_K = inner_K < REDUCTION - done
            row_tile = tl.load(row_pointers, mask=left_K[None, :], other=0.0)
            matrix_tile = tl.load(matrix_pointers, mask=left_K[:, None] & inside_N[None, :], other=0.0)
        result = tl.dot(row_tile, matrix_tile, result, input_precision="ieee")
        row_pointers += BLOCK_K * STRIDE_ROW_IN
        matrix_pointers += BLOCK_K * STRIDE_IN
    return result


@triton.jit
def add_low_rank(
    result,
    low_NR,
    factor_EOR,
    expert,
    row_M,
    row_end,
    column_N,
    inside_N,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_RANK: tl.constexpr,
    RANK: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
):
    return _add_product(
        result,
        low_NR,
        factor_EOR + expert.to(tl.int64) * STRIDE_EXPERT,
        tl.minimum(row_M, row_end - 1),
        column_N,
        inside_N,
        RANK,
        1,
        STRIDE_RANK,
        STRIDE_OUT,
        RANK,
        EVEN_COLUMNS,
        RANK if RANK < 64 else 64,
    )


@triton.jit
def halves(tile, ALTERNATE: tl.constexpr):
    """A tile's even and odd columns, or its left and right half. On an accumulator nothing moves between threads."""
    if ALTERNATE:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def multiply_tile(
    expert,
    row,
    row_end,
    column_tile,
    rows_NI,
    matrix_EIO,
    out_NO,
    order_N,
    bias_EO,
    low_NR,
    factor_EOR,
    scale,
    STRIDE_ROW: tl.constexpr,
    STRIDE_ROW_IN: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_IN: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_OUT_ROW: tl.constexpr,
    STRIDE_BIAS_EXPERT: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    STRIDE_FACTOR_EXPERT: tl.constexpr,
    STRIDE_FACTOR_OUT: tl.constexpr,
    STRIDE_FACTOR_RANK: tl.constexpr,
    REDUCTION: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SCALED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of a product; `row` is before `row_end`."""
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, TOP_K, BLOCK_M)
    column_N = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column_N < COLUMNS
    result = accumulate(
        rows_NI,
        matrix_EIO + expert.to(tl.int64) * STRIDE_EXPERT,
        source_M,
        column_N,
        inside_N,
        STRIDE_ROW,
        STRIDE_ROW_IN,
        STRIDE_IN,
        STRIDE_OUT,
        REDUCTION,
        COLUMNS % BLOCK_N == 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if SCALED:
        result *= scale
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
    mask = (row_M < row_end)[:, None]
    if COLUMNS % BLOCK_N != 0:
        mask = mask & inside_N[None, :]
    tl.store(out, result.to(out_NO.dtype.element_ty), mask=mask)
