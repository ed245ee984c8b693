"""Gradients of the biases: sums over each expert's rows, and the products of the output's gradient with a bias.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W any width (H or J)

    sum_per_expert(dh_NJ, offs_E, out_EJ)                                                      # Σ dh
    sum_per_expert(dy_TH, offs_E, out_EH, order_N=order_N, weight_TK=weight_TK, by_token=True)  # Σ weight · dy[token]
    dot_TK = bias_dot(dy_TH, down_bias_EH, expert_TK)                          # <dy[t], bias[expert[t, k]]>

No atomics: an expert's rows are summed in chunks, counted from its own first row, and its partial sums are added in
their order. So an expert's sum depends on nothing but its own rows: it has the same bits whichever other experts there
are, as when they are divided over ranks. Chunk c of expert e, whose rows begin at b, has place b // CHUNK + e + c in a
buffer of N // CHUNK + E rows: no two chunks have the same place, whatever the routing.

Which number is added to which is written out, and left neither to the compiler's layout nor to its fused products: so
`amoeba.tasks` has the same bits from other tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.gemm_tiles import halves
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.tiles import column_block

WARPS = 4
SUM_BLOCK, SUM_ROWS = 512, 8  # 64 bytes of bf16 per thread on their way. Not measured yet. Rows: sums are the same
CHUNK = 128  # rows; a fixed number, so that sums do not depend on how many rows there are in all. Not measured yet.
ADD_BLOCK, ADD_ROWS = 256, 8
DOT_SLOTS = 16
DOT_COLUMNS = 128  # columns as far apart are added up first, one after the other


@triton.jit
def sum_of_rows(
    begin, end, column, rows, order, weight, W: tl.constexpr, ROW_STRIDE: tl.constexpr, K: tl.constexpr,
    BY_TOKEN: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of these columns, in fp32 and in the order of rows. ROWS: loads that are on their way together."""
    total = column.to(tl.float32) * 0.0
    for first in range(begin, end, ROWS):
        for step in tl.static_range(ROWS):
            row = first + step
            inside = row < end
            source = row
            if BY_TOKEN or HAS_WEIGHT:
                slot = tl.load(order + row, mask=inside, other=0)
                if BY_TOKEN:
                    source = slot // K
            width = tl.where(inside, W, 0)
            values = tl.load(rows + source.to(tl.int64) * ROW_STRIDE + column, mask=column < width, other=0.0)
            if HAS_WEIGHT:
                scale = tl.load(weight + slot, mask=inside, other=0.0).to(tl.float32)
                total = tl.fma(values.to(tl.float32), scale, total)
            else:
                total += values.to(tl.float32)
    return total


@triton.jit
def sum_of_chunks(
    begin, end, column, rows, order, weight, W: tl.constexpr, ROW_STRIDE: tl.constexpr, K: tl.constexpr,
    BY_TOKEN: tl.constexpr, HAS_WEIGHT: tl.constexpr, CHUNK_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What `sum_per_expert` has of these columns of an expert, whose rows these are."""
    total = column.to(tl.float32) * 0.0
    for first in range(begin, end, CHUNK_ROWS):
        total += sum_of_rows(
            first, tl.minimum(first + CHUNK_ROWS, end), column, rows, order, weight, W, ROW_STRIDE, K, BY_TOKEN,
            HAS_WEIGHT, ROWS,
        )  # fmt: skip
    return total


@quick
@triton.jit
def _sum_chunks(
    rows,
    offs,
    order,
    weight,
    partial,
    W: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    K: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One place of the partial sums, one block of columns: the chunk of an expert that has this place, if any."""
    place = tl.program_id(1)
    each = tl.arange(0, EXPERTS_PADDED)
    begins = tl.load(offs + each - 1, mask=(each > 0) & (each < NUM_EXPERTS), other=0)
    before = (each < NUM_EXPERTS) & (begins // CHUNK_ROWS + each <= place)
    expert = tl.sum(before.to(tl.int32), axis=0) - 1  # first places grow with the expert
    expert_begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    begin = expert_begin + (place - expert_begin // CHUNK_ROWS - expert) * CHUNK_ROWS
    end = tl.minimum(tl.load(offs + expert), begin + CHUNK_ROWS)
    if begin < end:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = sum_of_rows(begin, end, column, rows, order, weight, W, ROW_STRIDE, K, BY_TOKEN, HAS_WEIGHT, ROWS)
        tl.store(partial + place.to(tl.int64) * W + column, total, mask=column < W)


@quick
@triton.jit
def _add_chunks(
    partial,
    offs,
    out,
    W: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial sums of one expert, one block of columns; zeros for an expert without rows."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    chunks = (tl.load(offs + expert) - begin + CHUNK_ROWS - 1) // CHUNK_ROWS
    first_place = begin // CHUNK_ROWS + expert
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, chunks, ROWS):
        for step in tl.static_range(ROWS):  # unrolled: the loads do not wait for one another
            width = tl.where(first + step < chunks, W, 0)
            address = partial + (first_place + first + step).to(tl.int64) * W + column
            total += tl.load(address, mask=column < width, other=0.0)
    place = out + expert.to(tl.int64) * OUT_STRIDE + column
    tl.store(place, total.to(out.dtype.element_ty), mask=column < W)


def sum_per_expert(
    rows_NW: Tensor,
    offs_E: Tensor,
    out_EW: Tensor,
    *,
    order_N: Tensor | None = None,
    weight_TK: Tensor | None = None,
    by_token: bool = False,
) -> Tensor:
    """out[e] = Σ over the sorted rows of e of rows[n], accumulated in fp32; 0 for an expert without rows.

    With `weight_TK` each row is multiplied by weight.flatten()[order[n]]. With `by_token` the rows are those of tokens,
    (T, W), and sorted row n is rows[order[n] // K]. Both need `order_N`, and by_token needs weight_TK for its K.
    """
    experts, width = out_EW.shape
    fit = order_N is not None or (weight_TK is None and not by_token)
    fit = fit and (weight_TK is not None or not by_token) and have_lines(rows_NW, out_EW)
    fit = fit and rows_NW.shape[1] == width and offs_E.shape[0] == experts
    check_arguments(fit, "rows contiguous inside, and what goes with them", rows_NW=rows_NW, out_EW=out_EW)
    rows = rows_NW.shape[0] if order_N is None else order_N.shape[0]
    block = column_block(width, SUM_BLOCK)
    blocks = cdiv(width, block)
    places = rows // CHUNK + experts
    partial = torch.empty((places, width), dtype=torch.float32, device=rows_NW.device)
    if rows:
        _sum_chunks[(blocks, places)](
            rows_NW,
            offs_E,
            order_N,
            None if weight_TK is None else weight_TK.contiguous(),
            partial,
            W=width,
            ROW_STRIDE=rows_NW.stride(0),
            K=1 if weight_TK is None else weight_TK.shape[1],
            BY_TOKEN=by_token,
            HAS_WEIGHT=weight_TK is not None,
            NUM_EXPERTS=experts,
            EXPERTS_PADDED=next_power_of_2(experts),
            CHUNK_ROWS=CHUNK,
            ROWS=SUM_ROWS,
            BLOCK=block,
            num_warps=WARPS,
        )
    block = column_block(width, ADD_BLOCK)
    _add_chunks[(cdiv(width, block), experts)](
        partial,
        offs_E,
        out_EW,
        W=width,
        OUT_STRIDE=out_EW.stride(0),
        CHUNK_ROWS=CHUNK,
        ROWS=ADD_ROWS,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out_EW


@triton.jit
def dot_by_lanes(row, rows_M, valid_M, column, total, H: tl.constexpr):
    """Products of one row with M others, by their addresses, summed up to 32 numbers each; what is left to do is the
    sum of `sum_of_lanes`. column: 0 to COLUMNS; total: zeros, (M, COLUMNS)."""
    for first in range(0, H, column.shape[0]):
        at = first + column
        inside = valid_M[:, None] & (at < H)[None, :]
        one = tl.load(row + at, mask=at < H, other=0.0).to(tl.float32)
        many = tl.load(rows_M[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(many, tl.where(inside, one[None, :], 0.0), total)
    left, right = halves(total, True)
    left, right = halves(left + right, True)
    return left + right


@triton.jit
def sum_of_lanes(tile):
    """Of each row: the left half and the right half are added until one number is left."""
    if tile.shape[1] == 1:
        return tl.reshape(tile, (tile.shape[0],))
    else:
        left, right = halves(tile, False)
        return sum_of_lanes(left + right)


@quick
@triton.jit
def _bias_dot(
    dy,
    bias,
    expert_of_slot,
    out,
    K: tl.constexpr,
    H: tl.constexpr,
    DY_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    SLOT_BLOCKS: tl.constexpr = (K + SLOTS - 1) // SLOTS
    program = tl.program_id(0)
    token = (program // SLOT_BLOCKS).to(tl.int64)
    slot = (program % SLOT_BLOCKS) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(expert_of_slot + token * K + slot, mask=slot < K, other=-1).to(tl.int64)
    owned = (expert >= 0) & (expert < NUM_EXPERTS)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    total = dot_by_lanes(dy + token * DY_STRIDE, bias + expert * BIAS_STRIDE, owned, column, total, H)
    dot = tl.where(owned, sum_of_lanes(total), 0.0)  # an infinite dy times the 0 of a sentinel is NaN
    tl.store(out + token * K + slot, dot, mask=slot < K)


def bias_dot(dy_TH: Tensor, down_bias_EH: Tensor, expert_TK: Tensor) -> Tensor:
    """<dy[t], bias[expert[t, k]]> as (T, K) in fp32; 0 for sentinels.

    The biases of all experts stay in the L2 cache; what bounds this is reading K of them from there per row of dy.
    """
    (tokens, hidden), top_k = dy_TH.shape, expert_TK.shape[1]
    fit = have_lines(dy_TH, down_bias_EH) and down_bias_EH.shape[1] == hidden and expert_TK.shape[0] == tokens
    check_arguments(fit, "rows that are contiguous inside", dy_TH=dy_TH, down_bias_EH=down_bias_EH)
    out_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=dy_TH.device)
    if tokens == 0:
        return out_TK
    slots = min(DOT_SLOTS, next_power_of_2(top_k))
    _bias_dot[(tokens * cdiv(top_k, slots),)](
        dy_TH,
        down_bias_EH,
        expert_TK.contiguous(),
        out_TK,
        K=top_k,
        H=hidden,
        DY_STRIDE=dy_TH.stride(0),
        BIAS_STRIDE=down_bias_EH.stride(0),
        NUM_EXPERTS=down_bias_EH.shape[0],
        SLOTS=slots,
        COLUMNS=DOT_COLUMNS,
        num_warps=WARPS,
    )
    return out_TK
