"""Products and sums whose results for a row depend on that row alone, on a GPU. For `amoeba.ops.exact`.

    product(a_EMK, b_EKN), row_sum(x), softmax(x), top_k(x, k)

A tensor core adds up the elements of a step of the reduction at once, and step after step. So what fixes a result are
the steps and the instruction, and these are the same for one row and for thousands: a tile that is not full is
computed as if it were.

E matrices · M rows, K summed, N columns of each
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.gemm_tiles import accumulate, accumulate_part
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.router import ordered
from amoeba.kernels.tile_sizes import Product, for_any_rows
from amoeba.kernels.tiles import grouped_order

WARPS = 4
# In fp32 a product is summed in chunks of the depth, which are added up in order: by one program, or, where tiles are
# fewer than this, by one each. A multiple of every step.
CHUNK, PROGRAMS = 256, 132
SUM_BLOCK = 1024  # columns of a row at a time


def product(
    a_EMK: Tensor, b_EKN: Tensor, *, bias_N: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """a @ b + bias, summed in fp32 and rounded to `dtype` once; a and b have one dtype, or b is in fp32."""
    (count, rows, depth), columns = a_EMK.shape, b_EKN.shape[2]
    if depth == 1 and bias_N is None:  # exact, and no tile to compile for each number of columns
        return (a_EMK.float() * b_EKN.float()).to(dtype)
    out = torch.empty((count, rows, columns), dtype=dtype, device=a_EMK.device)
    if out.numel() == 0:
        return out
    if depth == 0:
        return out.zero_() if bias_N is None else out.copy_(bias_N)
    a, b = a_EMK.detach(), b_EKN.detach()
    a = a if a.stride(2) == 1 else a.contiguous()
    strides = depth if rows == 1 else a.stride(1), b.stride(1), b.stride(2)
    grid, chunks, constants, options = _launch(out.device, b.dtype, count, rows, depth, columns, strides)
    apart = grid[2] > 1
    target = torch.empty((chunks, *out.shape), dtype=torch.float32, device=out.device) if apart else out
    _product[grid](
        a, b, None if apart else bias_N, target, rows, a.stride(0), b.stride(0), PRODUCT=constants, **options
    )
    if apart:
        _add_chunks[(cdiv(out.numel(), SUM_BLOCK),)](
            target, bias_N, out, out.numel(), chunks, COLUMNS=columns, BLOCK=SUM_BLOCK, num_warps=WARPS
        )
    return out


@lru_cache(maxsize=1 << 12)
def _launch(
    device: torch.device,
    dtype: torch.dtype,
    count: int,
    rows: int,
    depth: int,
    columns: int,
    strides: tuple[int, int, int],
) -> tuple[tuple[int, int, int], int, Group, dict[str, int]]:
    """Its grid, the chunks of the depth, constants and options. strides: of rows, and those of a matrix."""
    chosen = for_any_rows(device, "product", Product(rows, 1, depth, columns, dtype))
    tiles = cdiv(rows, chosen.block_m) * cdiv(columns, chosen.block_n)
    chunks = cdiv(depth, CHUNK) if dtype == torch.float32 else 1
    apart = chunks > 1 and tiles * count < PROGRAMS
    constants = Group(
        STRIDE_ROW=strides[0],
        STRIDE_ROW_IN=1,
        STRIDE_IN=strides[1],
        STRIDE_OUT=strides[2],
        REDUCTION=depth,
        COLUMNS=columns,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        GROUP_M=chosen.group_m,
        CHUNK=CHUNK if chunks > 1 else depth,
        APART=apart,
    )
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return (tiles, count, chunks if apart else 1), chunks, constants, options


@quick
@triton.jit(do_not_specialize=["rows"])
def _product(a, b, bias_N, out, rows, a_batch, b_batch, PRODUCT: tl.constexpr):
    P: tl.constexpr = PRODUCT
    batch, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    column_tiles = tl.cdiv(P.COLUMNS, P.BLOCK_N)
    row_tile, column_tile = grouped_order(tl.program_id(0), tl.cdiv(rows, P.BLOCK_M), column_tiles, P.GROUP_M)
    row_M = row_tile * P.BLOCK_M + tl.arange(0, P.BLOCK_M)
    source_M = tl.minimum(row_M, rows - 1)
    column_N = column_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    inside_N = column_N < P.COLUMNS
    EVEN: tl.constexpr = P.COLUMNS % P.BLOCK_N == 0
    a += batch * a_batch
    b += batch * b_batch
    if P.APART:
        result = accumulate_part(a, b, source_M, column_N, inside_N, chunk * P.CHUNK, EVEN, P.CHUNK, PRODUCT)
        batch += chunk.to(tl.int64) * tl.num_programs(1)
    elif P.CHUNK < P.REDUCTION:
        result = tl.zeros((P.BLOCK_M, P.BLOCK_N), tl.float32)
        for first in range(0, P.REDUCTION, P.CHUNK):
            result += accumulate_part(a, b, source_M, column_N, inside_N, first, EVEN, P.CHUNK, PRODUCT)
    else:
        inside_M = row_M < rows if P.BLOCK_M <= 64 else None
        result = accumulate(a, b, source_M, column_N, inside_N, EVEN, PRODUCT, inside_M)
    if bias_N is not None:
        result += tl.load(bias_N + column_N, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    out += (batch * rows + row_tile * P.BLOCK_M) * P.COLUMNS
    place = (tl.arange(0, P.BLOCK_M) * P.COLUMNS)[:, None] + column_N[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(row_M < rows)[:, None] & inside_N[None, :])


@quick
@triton.jit(do_not_specialize=["count", "chunks"])
def _add_chunks(parts, bias_N, out, count, chunks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(chunks):
        total += tl.load(parts + place, mask=inside, other=0.0)
        parts += count
    if bias_N is not None:
        total += tl.load(bias_N + place % COLUMNS, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# --- sums


def row_sum(x: Tensor) -> Tensor:
    """Over the last dimension, in fp32."""
    columns = x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not x.numel():
        return out.zero_()
    if out.numel():
        _row_sum[(out.numel(),)](x.detach().contiguous(), out, columns, BLOCK=SUM_BLOCK, num_warps=WARPS)
    return out


@quick
@triton.jit(do_not_specialize=["columns"])
def _row_sum(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


def softmax(x: Tensor, *, log: bool = False) -> Tensor:
    """Over the last dimension, in fp32."""
    columns = x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        rows, block = out.numel() // columns, SUM_BLOCK if columns > SUM_BLOCK else max(16, next_power_of_2(columns))
        _softmax[(rows,)](x.detach().contiguous(), out, columns, LOG=log, BLOCK=block, num_warps=WARPS)
    return out


@quick
@triton.jit(do_not_specialize=["columns"])
def _softmax(x, out, columns, LOG: tl.constexpr, BLOCK: tl.constexpr):
    x += tl.program_id(0).to(tl.int64) * columns
    out += tl.program_id(0).to(tl.int64) * columns
    inner = tl.arange(0, BLOCK)
    most_N = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        value = tl.load(x + first + inner, mask=first + inner < columns, other=float("-inf")).to(tl.float32)
        most_N = tl.maximum(most_N, value, propagate_nan=tl.PropagateNan.ALL)
    most = tl.max(most_N, 0)
    total_N = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        value = tl.load(x + first + inner, mask=first + inner < columns, other=float("-inf")).to(tl.float32)
        total_N += tl.exp(value - most)
    total = tl.sum(total_N, 0)
    for first in range(0, columns, BLOCK):
        inside = first + inner < columns
        value = tl.load(x + first + inner, mask=inside, other=float("-inf")).to(tl.float32) - most
        if LOG:
            found = value - tl.log(total)
        else:
            found = tl.exp(value) / total
        tl.store(out + first + inner, found, mask=inside)


MOST_COLUMNS, MOST_TOP_K = 1024, 16  # of a row of which the largest are taken one after the other


def why_not_top_k(x: Tensor, k: int, dim: int) -> str | None:
    if dim not in (-1, x.dim() - 1) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "takes numbers of the last dimension, 32 bits at most"
    if x.shape[-1] > MOST_COLUMNS or k > MOST_TOP_K:
        return f"takes {MOST_TOP_K} of {MOST_COLUMNS} at most"
    return None


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and where they are; of equal numbers the first ones. NaN is the largest."""
    values = torch.empty((*x.shape[:-1], k), dtype=x.dtype, device=x.device)
    places = torch.empty(values.shape, dtype=torch.int64, device=x.device)
    if values.numel():
        columns = x.shape[-1]
        _top_k[(values.numel() // k,)](
            x.detach().contiguous(), values, places, columns, K=k, BLOCK=max(16, next_power_of_2(columns)), num_warps=1
        )
    return values, places


@quick
@triton.jit(do_not_specialize=["columns"])
def _top_k(x, values, places, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    given = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
    key = tl.where(column < columns, ordered(given.to(tl.float32)), -2147483648)
    for step in range(K):
        place = tl.min(tl.where(key == tl.max(key, 0), column, BLOCK), 0)
        tl.store(places + row * K + step, place.to(tl.int64))
        tl.store(values + row * K + step, tl.load(x + row * columns + place))
        key = tl.where(column == place, -2147483648, key)
