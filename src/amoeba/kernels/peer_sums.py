"""Sums of sorted rows straight into the memory of the rank whose token they are of: not summed here and then sent.

T tokens of this rank · R rows here, those of all ranks' tokens by (rank, token) · K experts per token · N routed rows ·
H columns · W ranks

    send_sums(post, plan, rows_NH, slot_row_RK, weight_RK, comes_R)             # Σ_k of the others' tokens
    y_TH = add_sums(post, plan, rows_NH, slot_row_RK, weight_RK, goes_WT)       # Σ_k of own ones, and what came

A rank's sum of a token is rounded to the dtype of the rows, and those of the ranks are added in their order in fp32:
the bits of `combine`, then `push_rows` and `add_rows`. What arrived and what was taken is counted as these count it, so
one rank may do one and another the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.combine import WARPS, combine_block, combine_tile, sum_of_slots
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.peer_copies import count_everywhere, wait_for_room
from amoeba.kernels.peer_counters import ARRIVED, TAKEN
from amoeba.kernels.peer_post import SUMS, Plan, Post
from amoeba.kernels.peer_rows import is_aligned, rows_at, wait_for_all


def send_sums(
    post: Post, plan: Plan, rows_NH: Tensor, slot_row_RK: Tensor, weight_RK: Tensor | None, comes_R: Tensor
) -> None:
    """comes_R: of tokens that have no expert here nothing is written."""
    hidden, top_k = rows_NH.shape[1], slot_row_RK.shape[1]
    at_once, block = combine_block(hidden, top_k)
    tokens = max((place.stop - place.start for place in plan.places), default=0)
    wait_for_room(post, SUMS)
    if tokens and post.count > 1:
        _send_sums[(tokens * cdiv(hidden, block), post.count - 1)](
            rows_NH, slot_row_RK, weight_RK, comes_R, plan.back, post.addresses, post.cell_at[SUMS],
            post.cell_size[SUMS], slot_row_RK.numel(), post.rank, K=top_k, H=hidden, ROW_STRIDE=rows_NH.stride(0),
            HAS_WEIGHT=weight_RK is not None, AT_ONCE=at_once, BLOCK=block, ALIGNED=is_aligned(rows_NH, hidden),
            RANKS=post.count, num_warps=WARPS,
        )  # fmt: skip
    count_everywhere(post, SUMS, ARRIVED.value)


def add_sums(
    post: Post, plan: Plan, rows_NH: Tensor, slot_row_RK: Tensor, weight_RK: Tensor | None, goes_WT: Tensor
) -> Tensor:
    """For each token of this rank the sum over the ranks, in their order; NaN after a wait in vain."""
    tokens, hidden, top_k = goes_WT.shape[1], rows_NH.shape[1], slot_row_RK.shape[1]
    at_once, block = combine_block(hidden, top_k)
    wait_for_all(post, SUMS)
    out_TH = torch.empty((tokens, hidden), dtype=rows_NH.dtype, device=rows_NH.device)
    if tokens:
        _add_sums[(tokens * cdiv(hidden, block),)](
            rows_NH, slot_row_RK, weight_RK, goes_WT, out_TH, plan.back, post.addresses, post.trouble,
            post.cell_at[SUMS], post.cell_size[SUMS], slot_row_RK.numel(), tokens, post.rank, K=top_k, H=hidden,
            ROW_STRIDE=rows_NH.stride(0), HAS_WEIGHT=weight_RK is not None, AT_ONCE=at_once, BLOCK=block,
            ALIGNED=is_aligned(rows_NH, hidden), RANKS=post.count, num_warps=WARPS,
        )  # fmt: skip
    count_everywhere(post, SUMS, TAKEN.value)
    return out_TH


@quick
@triton.jit(do_not_specialize=["num_rows", "rank"])
def _send_sums(
    rows, slot_row, weight, comes_R, places, addresses, cell_at, cell_size, num_rows, rank,
    K: tl.constexpr, H: tl.constexpr, ROW_STRIDE: tl.constexpr, HAS_WEIGHT: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    dest = (rank + 1 + tl.program_id(1)) % RANKS
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    first, count = tl.load(places + dest), tl.load(places + 2 * RANKS + dest)
    if token < count:  # noqa: SIM102 - of two conditions in one both would be loaded
        if tl.load(comes_R + first + token) != 0:
            cell = tl.load(addresses + dest) + cell_at + rank.to(tl.int64) * cell_size
            out = rows_at(cell - first * (H * (rows.dtype.element_ty.primitive_bitwidth // 8)), rows, ALIGNED)
            combine_tile(
                first + token, program % COLUMN_BLOCKS, rows, slot_row, weight, out, num_rows, K, H, ROW_STRIDE, H,
                HAS_WEIGHT, AT_ONCE, BLOCK,
            )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["num_rows", "tokens", "rank"])
def _add_sums(
    rows, slot_row, weight, goes_WT, out_TH, places, addresses, trouble, cell_at, cell_size, num_rows, tokens, rank,
    K: tl.constexpr, H: tl.constexpr, ROW_STRIDE: tl.constexpr, HAS_WEIGHT: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    column = (program % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    heap = tl.load(addresses + rank) + cell_at
    own = sum_of_slots(
        tl.load(places + rank) + token, column, rows, slot_row, weight, num_rows, K, H, ROW_STRIDE, HAS_WEIGHT,
        AT_ONCE, BLOCK,
    )  # fmt: skip
    own = own.to(rows.dtype.element_ty).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(RANKS):
        cell = rows_at(heap + source * cell_size.to(tl.int64), rows, ALIGNED)
        goes = tl.load(goes_WT + source * tokens.to(tl.int64) + token)
        width = tl.where(rank == source, 0, tl.where(goes != 0, H, 0))  # what does not come has no columns
        came = tl.load(cell + token * H + column, mask=column < width, other=0.0).to(tl.float32)
        total += tl.where(rank == source, own, came)
    total = tl.where(tl.load(trouble) != 0, float("nan"), total)
    tl.store(out_TH + token * H + column, total.to(out_TH.dtype.element_ty), mask=column < H)
