"""A tile of the products of sorted rows with their experts' matrices, for kernels of several files.

E experts · R LoRA rank · in values of a kernel: M rows and N columns of a tile

    PRODUCT = Group(**of_rows(rows_NI, top_k), **of_matrix(matrix_EIO), **tile_of(chosen, rows, E, columns), ...)

`accumulate` is the product, `add_low_rank` LoRA's part of it, `finish_tile` adds that and a bias, and stores. What they
are told of a product, PRODUCT, is a group of constants (`amoeba.kernels.constants`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.tile_sizes import Configuration
from amoeba.kernels.tiles import rows_of_tile, tile_constants


def of_rows(rows_NI: Tensor, top_k: int) -> dict[str, int]:
    return {"STRIDE_ROW": rows_NI.stride(0), "STRIDE_ROW_IN": rows_NI.stride(1), "TOP_K": top_k}


def of_matrix(matrix_EIO: Tensor) -> dict[str, int]:
    stride_expert, stride_in, stride_out = matrix_EIO.stride()
    return {
        "STRIDE_EXPERT": stride_expert,
        "STRIDE_IN": stride_in,
        "STRIDE_OUT": stride_out,
        "REDUCTION": matrix_EIO.shape[1],
        "COLUMNS": matrix_EIO.shape[2],
        "QUANTISED": False,
    }


def of_result(out_NO: Tensor | None, bias_EO: Tensor | None = None, addend: Addend | None = None) -> dict[str, int]:
    """Of what a product is written to, and of what is added to it."""
    of_expert, of_column = (0, 0) if bias_EO is None else bias_EO.stride()
    factor = (0, 0, 0) if addend is None else addend.factor_EOR.stride()
    return {
        "STRIDE_OUT_ROW": 0 if out_NO is None else out_NO.stride(0),
        "STRIDE_BIAS_EXPERT": of_expert,
        "STRIDE_BIAS": of_column,
        "STRIDE_FACTOR_EXPERT": factor[0],
        "STRIDE_FACTOR_OUT": factor[1],
        "STRIDE_FACTOR_RANK": factor[2],
        "RANK": 0 if addend is None else addend.low_NR.shape[1],
    }


def tile_of(chosen: Configuration, rows: int, experts: int, columns: int) -> dict[str, object]:
    tiles = tile_constants(rows, experts, chosen, cdiv(columns, chosen.block_n))
    return {"BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k, **tiles}


def added(addend: Addend | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if addend is None else addend[:2]


@triton.jit
def accumulate(
    rows, matrix, source_M, column_N, inside_N, EVEN_COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, inside_M=None
):
    """The product of the rows `source_M` with the columns `column_N` of one expert's matrix, in fp32. inside_M: which
    rows are read; where most of a tile are not, all programs would ask the same lines of the cache for them."""
    P: tl.constexpr = PRODUCT
    return _add_product(
        tl.zeros((P.BLOCK_M, P.BLOCK_N), dtype=tl.float32), rows, matrix, source_M, column_N, inside_N, P.STRIDE_ROW,
        P.STRIDE_ROW_IN, P.STRIDE_IN, P.STRIDE_OUT, P.REDUCTION, EVEN_COLUMNS, P.BLOCK_K, inside_M,
    )  # fmt: skip


@triton.jit
def accumulate_part(
    rows, matrix, source_M, column_N, inside_N, first, EVEN_COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """The same over LENGTH steps of the reduction, a multiple of BLOCK_K, from `first` on."""
    P: tl.constexpr = PRODUCT
    inner_K = first + tl.arange(0, P.BLOCK_K)
    row_pointers = rows + (source_M.to(tl.int64) * P.STRIDE_ROW)[:, None] + (inner_K * P.STRIDE_ROW_IN)[None, :]
    matrix_pointers = matrix + (inner_K * P.STRIDE_IN)[:, None] + (column_N.to(tl.int64) * P.STRIDE_OUT)[None, :]
    result = tl.zeros((P.BLOCK_M, P.BLOCK_N), dtype=tl.float32)
    for done in range(0, LENGTH, P.BLOCK_K):
        left_K = inner_K < P.REDUCTION - done
        row_tile = tl.load(row_pointers, mask=left_K[None, :], other=0.0)
        matrix_tile = tl.load(matrix_pointers, mask=left_K[:, None] & inside_N[None, :], other=0.0)
        result = tl.dot(row_tile.to(matrix_tile.dtype), matrix_tile, result, input_precision="ieee")
        row_pointers += P.BLOCK_K * P.STRIDE_ROW_IN
        matrix_pointers += P.BLOCK_K * P.STRIDE_IN
    return result


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
    inside_M=None,
):
    inner_K = tl.arange(0, BLOCK_K)
    row_pointers = rows + (source_M.to(tl.int64) * STRIDE_ROW)[:, None] + (inner_K * STRIDE_ROW_IN)[None, :]
    matrix_pointers = matrix + (inner_K * STRIDE_IN)[:, None] + (column_N.to(tl.int64) * STRIDE_OUT)[None, :]
    for done in range(0, REDUCTION, BLOCK_K):
        if REDUCTION % BLOCK_K == 0:
            if inside_M is None:
                row_tile = tl.load(row_pointers)
            else:
                row_tile = tl.load(row_pointers, mask=inside_M[:, None], other=0.0)
            if EVEN_COLUMNS:
                matrix_tile = tl.load(matrix_pointers)
            else:
                matrix_tile = tl.load(matrix_pointers, mask=inside_N[None, :], other=0.0)
        else:
            left_K = inner_K < REDUCTION - done
            mask = left_K[None, :] if inside_M is None else left_K[None, :] & inside_M[:, None]
            row_tile = tl.load(row_pointers, mask=mask, other=0.0)
            matrix_tile = tl.load(matrix_pointers, mask=left_K[:, None] & inside_N[None, :], other=0.0)
        result = tl.dot(row_tile.to(matrix_tile.dtype), matrix_tile, result, input_precision="ieee")
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
    EVEN_COLUMNS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    P: tl.constexpr = PRODUCT
    RANK: tl.constexpr = P.RANK
    return _add_product(
        result, low_NR, factor_EOR + expert.to(tl.int64) * P.STRIDE_FACTOR_EXPERT, tl.minimum(row_M, row_end - 1),
        column_N, inside_N, RANK, 1, P.STRIDE_FACTOR_RANK, P.STRIDE_FACTOR_OUT, RANK, EVEN_COLUMNS,
        RANK if RANK < 64 else 64,
    )  # fmt: skip


@triton.jit
def halves(tile, ALTERNATE: tl.constexpr):
    """A tile's even and odd columns, or its left and right half. On an accumulator nothing moves between threads."""
    if ALTERNATE:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
    else:
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
    PRODUCT: tl.constexpr,
):
    """One tile of a product; `row` is before `row_end`."""
    P: tl.constexpr = PRODUCT
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, P.TOP_K, P.BLOCK_M)
    column_N = column_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    inside_N = column_N < P.COLUMNS
    matrix = matrix_EIO + expert.to(tl.int64) * P.STRIDE_EXPERT
    inside_M = row_M < row_end if P.SLOT_PER_ROW else None
    result = accumulate(rows_NI, matrix, source_M, column_N, inside_N, P.COLUMNS % P.BLOCK_N == 0, PRODUCT, inside_M)
    if P.SCALED:
        result *= scale
    finish_tile(
        result, expert, row, row_M, row_end, column_N, inside_N, out_NO, bias_EO, low_NR, factor_EOR, PRODUCT
    )  # fmt: skip


@triton.jit
def finish_tile(
    result,
    expert,
    row,
    row_M,
    row_end,
    column_N,
    inside_N,
    out_NO,
    bias_EO,
    low_NR,
    factor_EOR,
    PRODUCT: tl.constexpr,
):
    """Adds LoRA's part and the bias, and stores what comes out."""
    P: tl.constexpr = PRODUCT
    EVEN_COLUMNS: tl.constexpr = P.COLUMNS % P.BLOCK_N == 0
    if low_NR is not None:
        result = add_low_rank(
            result, low_NR, factor_EOR, expert, row_M, row_end, column_N, inside_N, EVEN_COLUMNS, PRODUCT
        )  # fmt: skip
    if bias_EO is not None:
        bias = bias_EO + expert.to(tl.int64) * P.STRIDE_BIAS_EXPERT
        result += tl.load(bias + column_N * P.STRIDE_BIAS, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    out = out_NO + row.to(tl.int64) * P.STRIDE_OUT_ROW
    out += (tl.arange(0, P.BLOCK_M) * P.STRIDE_OUT_ROW)[:, None] + column_N[None, :]
    mask = (row_M < row_end)[:, None]
    if P.QUANTISED or not EVEN_COLUMNS:
        mask = mask & inside_N[None, :]
    tl.store(out, result.to(out_NO.dtype.element_ty), mask=mask)
