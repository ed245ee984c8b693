"""Weight gradients: for every expert the sum over its rows of leftᵀ · right, with the rows gathered on load.

T tokens · K experts per token · N = T·K routed rows · E experts · O, I the two sizes of an expert's matrix

Expert e owns the sorted rows offs_E[e-1] : offs_E[e]. Where an order is given for a side, its sorted row n is read from
row order[n] // top_k. Rows of other experts and rows past offs_E[-1] are never read. Experts without rows get zeros,
written by the same kernel: `out` needs no memset. Any strides, of the output too; fp32 accumulation, no atomics.

    weight_gradient(dy_TH, scaled_a_NI, offs_E, d_down_EHI, left_order_N=order_N, top_k=K)
    weight_gradient(dh_NJ, x_TH, offs_E, d_gate_up_EJH, right_order_N=order_N, top_k=K)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.tile_sizes import Configuration, Product, configuration_on
from amoeba.kernels.tiles import grouped_order


def weight_gradient(
    left_NO: Tensor,
    right_NI: Tensor,
    offs_E: Tensor,
    out_EOI: Tensor,
    *,
    more_EOI: Tensor | None = None,
    left_order_N: Tensor | None = None,
    right_order_N: Tensor | None = None,
    top_k: int = 1,
    heaviest_E: Tensor | None = None,
    configuration: Configuration | None = None,
) -> Tensor:
    """out[e] = Σ_n left[n]ᵀ right[n] over the rows n of e.

    more_EOI: gets what comes of the columns of left that out has no room for, so that one pass serves two tensors.
    heaviest_E: see `heaviest_first`; made here if not given.
    """
    out, turned = out_EOI, out_EOI.stride(1) == 1 and out_EOI.stride(2) != 1
    if more_EOI is None and turned:  # stored as (E, I, O): the transposed product is the same
        left_NO, right_NI = right_NI, left_NO
        left_order_N, right_order_N = right_order_N, left_order_N
        out_EOI = out_EOI.transpose(1, 2)
    experts, first_height, width = out_EOI.shape
    height = first_height + (0 if more_EOI is None else more_EOI.shape[1])
    fit = left_NO.shape[1] == height and right_NI.shape[1] == width and offs_E.shape[0] == experts
    fit = fit and left_NO.dtype == right_NI.dtype
    check_arguments(fit, "(N, O), (N, I) and (E, O, I)", left_NO=left_NO, right_NI=right_NI, out_EOI=out_EOI)
    order_N = left_order_N if left_order_N is not None else right_order_N
    rows = order_N.shape[0] if order_N is not None else left_NO.shape[0]
    product = Product(rows, experts, height, width, left_NO.dtype)
    chosen = configuration or configuration_on(out_EOI.device, "weight_gradient", product)
    _weight_gradient[(cdiv(height, chosen.block_m) * cdiv(width, chosen.block_n) * experts,)](
        left_NO,
        right_NI,
        offs_E,
        heaviest_E if heaviest_E is not None else heaviest_first(offs_E),
        out_EOI,
        more_EOI,
        left_order_N,
        right_order_N,
        PRODUCT=product_of(left_NO, right_NI, out_EOI, more_EOI, top_k, chosen),
        GROUP_M=chosen.group_m,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out


def product_of(
    left_NO: Tensor,
    right_NI: Tensor,
    out_EOI: Tensor,
    more_EOI: Tensor | None,
    top_k: int,
    chosen: Configuration,
) -> Group:
    """What a kernel is told of a product: strides of both sides and of the results, sizes and tiles."""
    return Group(
        LEFT=left_NO.stride(),
        RIGHT=right_NI.stride(),
        OUT=out_EOI.stride(),
        MORE=None if more_EOI is None else more_EOI.stride(),
        HEIGHT=left_NO.shape[1],
        FIRST_HEIGHT=out_EOI.shape[1],
        WIDTH=right_NI.shape[1],
        TOP_K=top_k,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
    )


def heaviest_first(offs_E: Tensor) -> Tensor:
    """The experts by falling number of rows, int32: begun first, the heaviest do not run on alone at the end."""
    experts = offs_E.shape[0]
    heaviest_E = torch.empty_like(offs_E, dtype=torch.int32)
    block = next_power_of_2(experts)
    part = min(block, 32)
    _heaviest_first[(block // part,)](offs_E, heaviest_E, EXPERTS=experts, BLOCK_E=block, BLOCK_PART=part)
    return heaviest_E


@quick
@triton.jit
def _heaviest_first(offs_E, heaviest_E, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_PART: tl.constexpr):
    expert_E = tl.arange(0, BLOCK_E)
    expert_P = tl.program_id(0) * BLOCK_PART + tl.arange(0, BLOCK_PART)
    rows_E, rows_P = rows_of(offs_E, expert_E, EXPERTS), rows_of(offs_E, expert_P, EXPERTS)
    more = rows_E[None, :] > rows_P[:, None]
    earlier = (rows_E[None, :] == rows_P[:, None]) & (expert_E[None, :] < expert_P[:, None])
    place_P = tl.sum((more | earlier).to(tl.int32), 1)
    tl.store(heaviest_E + place_P, expert_P, mask=expert_P < EXPERTS)


@triton.jit
def rows_of(offs_E, expert, EXPERTS: tl.constexpr):
    """Rows of these experts; -1 for what is no expert."""
    end = tl.load(offs_E + expert, mask=expert < EXPERTS, other=-1)
    return end - tl.load(offs_E + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)


@triton.jit
def _gathered(order_N, row_K, end, TOP_K: tl.constexpr):
    return tl.load(order_N + row_K, mask=row_K < end, other=0).to(tl.int32) // TOP_K


@triton.jit
def weight_gradient_tile(
    expert,
    height_tile,
    width_tile,
    left_NO,
    right_NI,
    offs_E,
    out_EOI,
    more_EOI,
    left_order_N,
    right_order_N,
    PRODUCT: tl.constexpr,
):
    """One tile of an expert's gradient, zeros where it has no rows."""
    P: tl.constexpr = PRODUCT
    TOP_K: tl.constexpr = P.TOP_K
    BLOCK_K: tl.constexpr = P.BLOCK_K
    start = tl.load(offs_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_E + expert)

    height_M = height_tile * P.BLOCK_M + tl.arange(0, P.BLOCK_M)
    width_N = width_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    left = left_NO + (height_M.to(tl.int64) * P.LEFT[1])[:, None]
    right = right_NI + (width_N.to(tl.int64) * P.RIGHT[1])[None, :]
    result = tl.zeros((P.BLOCK_M, P.BLOCK_N), dtype=tl.float32)
    # Gathered row numbers are read one step ahead and carried along: a load that waits for another one in the same
    # step would halve the depth of the software pipeline. (Carried over two steps they would end it.)
    row_K = start + tl.arange(0, BLOCK_K)
    if left_order_N is not None:
        left_K = _gathered(left_order_N, row_K, end, TOP_K)
    if right_order_N is not None:
        right_K = _gathered(right_order_N, row_K, end, TOP_K)
    for row in range(start, end, BLOCK_K):
        row_K = row + tl.arange(0, BLOCK_K)
        valid_K = row_K < end  # both sides are masked: 0 · NaN of another's row would be NaN
        if left_order_N is None:
            left_K = row_K
        if right_order_N is None:
            right_K = row_K
        left_mask = valid_K[None, :]
        if P.HEIGHT % P.BLOCK_M != 0:
            left_mask = left_mask & (height_M < P.HEIGHT)[:, None]
        right_mask = valid_K[:, None]
        if P.WIDTH % P.BLOCK_N != 0:
            right_mask = right_mask & (width_N < P.WIDTH)[None, :]
        left_tile = tl.load(left + (left_K.to(tl.int64) * P.LEFT[0])[None, :], mask=left_mask, other=0.0)
        right_tile = tl.load(right + (right_K.to(tl.int64) * P.RIGHT[0])[:, None], mask=right_mask, other=0.0)
        result = tl.dot(left_tile, right_tile, result, input_precision="ieee")
        if left_order_N is not None:
            left_K = _gathered(left_order_N, row_K + BLOCK_K, end, TOP_K)
        if right_order_N is not None:
            right_K = _gathered(right_order_N, row_K + BLOCK_K, end, TOP_K)

    inside = (height_M < P.FIRST_HEIGHT)[:, None] & (width_N < P.WIDTH)[None, :]
    _store(out_EOI, result, expert, height_M, width_N, inside, P.OUT)
    if more_EOI is not None:
        inside = ((height_M >= P.FIRST_HEIGHT) & (height_M < P.HEIGHT))[:, None] & (width_N < P.WIDTH)[None, :]
        _store(more_EOI, result, expert, height_M - P.FIRST_HEIGHT, width_N, inside, P.MORE)


@quick
@triton.jit
def _weight_gradient(
    left_NO,
    right_NI,
    offs_E,
    heaviest_E,
    out_EOI,
    more_EOI,
    left_order_N,
    right_order_N,
    PRODUCT: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    HEIGHT_TILES: tl.constexpr = (PRODUCT.HEIGHT + PRODUCT.BLOCK_M - 1) // PRODUCT.BLOCK_M
    WIDTH_TILES: tl.constexpr = (PRODUCT.WIDTH + PRODUCT.BLOCK_N - 1) // PRODUCT.BLOCK_N
    program = tl.program_id(0)
    expert = tl.load(heaviest_E + program // (HEIGHT_TILES * WIDTH_TILES))
    height_tile, width_tile = grouped_order(program % (HEIGHT_TILES * WIDTH_TILES), HEIGHT_TILES, WIDTH_TILES, GROUP_M)
    weight_gradient_tile(
        expert, height_tile, width_tile, left_NO, right_NI, offs_E, out_EOI, more_EOI, left_order_N, right_order_N,
        PRODUCT,
    )  # fmt: skip


@triton.jit
def _store(out_EOI, result, expert, height_M, width_N, inside, STRIDES: tl.constexpr):
    out = out_EOI + expert.to(tl.int64) * STRIDES[0]
    out += (height_M.to(tl.int64) * STRIDES[1])[:, None] + (width_N.to(tl.int64) * STRIDES[2])[None, :]
    tl.store(out, result.to(out_EOI.dtype.element_ty), mask=inside)
