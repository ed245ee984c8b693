"""Linear layers over the same rows in one launch, or one with LoRA's part, with the bits of `kernels.exact.product`.

    q_MN, k_MN, v_MN = linears(x_MK, (q_weight_NK, k_weight_NK, v_weight_NK))
    y_MN = linear_with_factors(x_MK, weight_NK, low_MR, b_NR, scaling)      # x Wᵀ + (scaling low) Bᵀ, rounded once

For half precision: in fp32 a product is summed in chunks, each by a program of its own where rows are few.

M rows · K summed · N columns · R LoRA rank
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.gemm_tiles import accumulate
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.tile_sizes import Product, for_any_rows
from amoeba.kernels.tiles import grouped_order

MOST = 3  # layers at once
MOST_RANK = 64  # whose products are a loop over the ranks


def linears(x_MK: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return _launched(x_MK, weights, None, None, 1.0)


def linear_with_factors(x_MK: Tensor, weight_NK: Tensor, low_MR: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """low and b in fp32."""
    return _launched(x_MK, (weight_NK,), low_MR.contiguous(), b_NR.detach().contiguous(), scaling)[0]


def why_not(x: Tensor, weights: Sequence[Tensor], rank: int = 0) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16) or any(each.dtype != x.dtype for each in weights):
        return "takes rows and weights in half precision"
    if len(weights) > MOST or rank > MOST_RANK:
        return f"takes {MOST} layers and ranks of {MOST_RANK} at most"
    if any(not each.is_contiguous() or 0 in each.shape for each in weights):
        return "takes contiguous weights"
    return None


def _launched(
    x_MK: Tensor, weights: Sequence[Tensor], low_MR: Tensor | None, b_NR: Tensor | None, scaling: float
) -> list[Tensor]:
    rows, depth = x_MK.shape
    x = x_MK.detach()
    x = x if x.stride(1) == 1 else x.contiguous()
    widths = tuple(each.shape[0] for each in weights)
    found = [torch.empty((rows, width), dtype=x.dtype, device=x.device) for width in widths]
    if rows:
        of_factors = (0, 1.0) if low_MR is None else (low_MR.shape[1], scaling)
        stride = depth if rows == 1 else x.stride(0)
        grid, constants, options = _launch(x.device, x.dtype, rows, depth, widths, stride, of_factors)
        missing = [None] * (MOST - len(widths))
        matrices = [each.detach() for each in weights]
        _linears[grid](x, *matrices, *missing, *found, *missing, low_MR, b_NR, rows, LINEARS=constants, **options)
    return found


@lru_cache(maxsize=1 << 12)
def _launch(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    depth: int,
    widths: tuple[int, ...],
    stride: int,
    of_factors: tuple[int, float],
) -> tuple[tuple[int], Group, dict[str, int]]:
    chosen = for_any_rows(device, "product", Product(rows, 1, depth, sum(widths), dtype))
    tiles = [cdiv(width, chosen.block_n) for width in widths]
    constants = Group(
        STRIDE_ROW=stride,
        STRIDE_ROW_IN=1,
        STRIDE_IN=1,
        STRIDE_OUT=depth,
        REDUCTION=depth,
        FIRST=widths[0],
        SECOND=widths[1] if len(widths) > 1 else 0,
        THIRD=widths[2] if len(widths) > 2 else 0,
        FIRST_TILES=tiles[0],
        SECOND_TILES=tiles[1] if len(tiles) > 1 else 0,
        COLUMN_TILES=sum(tiles),
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        GROUP_M=chosen.group_m,
        EVEN=all(width % chosen.block_n == 0 for width in widths),
        COLUMNS_ARE=16 if all(width % 16 == 0 for width in widths) else 1,
        RANK=of_factors[0],
        SCALING=of_factors[1],
    )
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return (cdiv(rows, chosen.block_m) * sum(tiles),), constants, options


@quick
@triton.jit(do_not_specialize=["rows"])
def _linears(
    x, first, second, third, first_out, second_out, third_out, low, factor, rows, LINEARS: tl.constexpr
):  # fmt: skip
    P: tl.constexpr = LINEARS
    row_tile, column_tile = grouped_order(tl.program_id(0), tl.cdiv(rows, P.BLOCK_M), P.COLUMN_TILES, P.GROUP_M)
    matrix, out, columns = first, first_out, P.FIRST
    # One product for all: in branches of its own each would have its own buffers.
    if P.SECOND > 0:
        second_tile = column_tile - P.FIRST_TILES
        if second_tile >= 0:
            matrix, out, columns, column_tile = second, second_out, P.SECOND, second_tile
            if P.THIRD > 0:
                third_tile = second_tile - P.SECOND_TILES
                if third_tile >= 0:
                    matrix, out, columns, column_tile = third, third_out, P.THIRD, third_tile
        columns = tl.multiple_of(columns, P.COLUMNS_ARE)
    row_M = row_tile * P.BLOCK_M + tl.arange(0, P.BLOCK_M)
    source_M = tl.minimum(row_M, rows - 1)
    column_N = column_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    inside_N = column_N < columns
    inside_M = row_M < rows if P.BLOCK_M <= 64 else None
    result = accumulate(x, matrix, source_M, column_N, inside_N, P.EVEN, LINEARS, inside_M)
    if low is not None:
        for rank in tl.static_range(P.RANK):  # element by element: the same instructions for every tile
            low_M = tl.load(low + source_M * P.RANK + rank) * P.SCALING
            factor_N = tl.load(factor + column_N * P.RANK + rank, mask=inside_N, other=0.0)
            result = tl.fma(low_M[:, None], factor_N[None, :], result)
    out += (row_tile.to(tl.int64) * P.BLOCK_M) * columns
    place = (tl.arange(0, P.BLOCK_M) * columns)[:, None] + column_N[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(row_M < rows)[:, None] & inside_N[None, :])
