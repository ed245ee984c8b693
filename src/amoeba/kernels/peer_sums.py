"""Writes sums of sorted rows directly into the memory of the rank that owns the token.

T tokens of this rank · R rows here, those of all ranks' tokens by (rank, token) · K experts per token · N routed rows ·
H columns · W ranks

    send_sums(peers, plan, rows_NH, slot_row_RK, weight_RK, comes_R)             # Σ_k of the others' tokens
    y_TH = add_sums(peers, plan, rows_NH, slot_row_RK, weight_RK, goes_WT)       # Σ_k of own ones, and what came

    own_sums(peers, plan, rows_NH, slot_row_RK, own_TH)                          # the same in two steps, unweighted
    dx_TH = add_kept(peers, own_TH, goes_WT)

A rank's sum of a token is rounded to the dtype of the rows, and those of the ranks are added in their order in fp32:
the bits of `combine`, then `push_rows` and `add_rows`. What arrived and what was taken is counted as these count it, so
one rank may do one and another the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.combine import WARPS, combine, combine_block, combine_tile, sum_of_slots, sums_of
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.peer_context import ARRIVED, SUMS, TAKEN, PeerContext, Plan
from amoeba.kernels.peer_copies import count_everywhere, wait_for_room
from amoeba.kernels.peer_rows import is_aligned, rows_at, wait_for_all


def send_sums(
    peers: PeerContext, plan: Plan, rows_NH: Tensor, slot_row_RK: Tensor, weight_RK: Tensor | None, comes_R: Tensor
) -> None:
    """comes_R: of tokens that have no expert here nothing is written."""
    hidden, top_k = rows_NH.shape[1], slot_row_RK.shape[1]
    tokens = max((place.stop - place.start for place in plan.places), default=0)
    wait_for_room(peers, SUMS)
    if tokens and peers.count > 1:
        _send_sums[(tokens * cdiv(hidden, combine_block(hidden, top_k)[1]), peers.count - 1)](
            rows_NH, slot_row_RK, weight_RK, comes_R, plan.back, peers.addresses, peers.trouble, peers.cell_at[SUMS],
            peers.cell_size[SUMS], slot_row_RK.numel(), peers.rank, ALIGNED=is_aligned(rows_NH, hidden),
            RANKS=peers.count, **sums_of(rows_NH, top_k),
        )  # fmt: skip
    count_everywhere(peers, SUMS, ARRIVED.value)


def add_sums(
    peers: PeerContext, plan: Plan, rows_NH: Tensor, slot_row_RK: Tensor, weight_RK: Tensor | None, goes_WT: Tensor
) -> Tensor:
    """For each token of this rank the sum over the ranks, in their order; NaN after a wait in vain."""
    tokens, hidden, top_k = goes_WT.shape[1], rows_NH.shape[1], slot_row_RK.shape[1]
    wait_for_all(peers, SUMS)
    out_TH = torch.empty((tokens, hidden), dtype=rows_NH.dtype, device=rows_NH.device)
    if tokens:
        _add_sums[(tokens * cdiv(hidden, combine_block(hidden, top_k)[1]),)](
            rows_NH, slot_row_RK, weight_RK, goes_WT, out_TH, plan.back, peers.addresses, peers.trouble,
            peers.cell_at[SUMS], peers.cell_size[SUMS], slot_row_RK.numel(), tokens, peers.rank,
            ALIGNED=is_aligned(rows_NH, hidden), RANKS=peers.count, **sums_of(rows_NH, top_k),
        )  # fmt: skip
    count_everywhere(peers, SUMS, TAKEN.value)
    return out_TH


def own_sums(peers: PeerContext, plan: Plan, rows_NH: Tensor, slot_row_RK: Tensor, own_TH: Tensor) -> None:
    """Σ_k of own tokens, rounded, to which `add_kept` adds what comes."""
    (tokens, hidden), top_k = own_TH.shape, slot_row_RK.shape[1]
    at_once, block = combine_block(hidden, top_k)
    if at_once < top_k:
        slots_TK = slot_row_RK[plan.places[peers.rank].start :][:tokens]
        combine(rows_NH, slots_TK, None, own_TH, sentinel=slot_row_RK.numel())
    elif tokens:
        _own_sums[(tokens * cdiv(hidden, block),)](
            rows_NH, slot_row_RK, own_TH, plan.back, peers.trouble, slot_row_RK.numel(), tokens, peers.rank,
            **sums_of(rows_NH, top_k),
        )  # fmt: skip


def add_kept(peers: PeerContext, own_TH: Tensor, goes_WT: Tensor) -> Tensor:
    """Sums of own tokens, and behind them maybe more rows, and what the other ranks sent, in their order. Of a token
    that has no expert here own_TH may hold anything."""
    tokens, hidden = goes_WT.shape[1], own_TH.shape[1]
    _, block = combine_block(hidden, 1)
    wait_for_all(peers, SUMS)
    out_TH = torch.empty((tokens, hidden), dtype=own_TH.dtype, device=own_TH.device)
    if tokens:
        _add_kept[(tokens * cdiv(hidden, block),)](
            own_TH, goes_WT, out_TH, peers.addresses, peers.trouble, peers.cell_at[SUMS], peers.cell_size[SUMS], tokens,
            peers.rank, H=hidden, BLOCK=block, ALIGNED=is_aligned(own_TH, hidden), RANKS=peers.count, num_warps=WARPS,
        )  # fmt: skip
    if peers.reaches:
        count_everywhere(peers, SUMS, TAKEN.value)
    return out_TH


@triton.jit
def _rows_of_slots(token, inside, column, rows, slot_row, weight, num_rows, SUMS: tl.constexpr):
    """Of one token, all asked for before anything waits for one of them: the values of its K rows, their weights, and
    how many there are. inside: whether there is such a token.

    Left to itself the compiler keeps few registers and asks for one after the other. A barrier is what it does not move
    loads across."""
    K: tl.constexpr = SUMS.K
    places = ()
    for k in tl.static_range(K):
        places += (tl.load(slot_row + token * K + k, mask=inside, other=num_rows),)  # type: ignore[assignment]
    tl.debug_barrier()
    values, weights, owned = (), (), 0
    for k in tl.static_range(K):
        has_row = places[k] < num_rows
        width = tl.where(has_row, SUMS.H, 0)  # the row of a sentinel has no columns
        row = places[k].to(tl.int64)  # type: ignore[var-annotated]
        values += (tl.load(rows + row * SUMS.ROW_STRIDE + column, mask=column < width, other=0.0),)
        if weight is not None:
            weights += (tl.load(weight + token * K + k, mask=has_row, other=0.0),)
        owned += has_row.to(tl.int32)
    return values, weights, owned


@triton.jit
def _summed(values, weights, trouble, WEIGHTED: tl.constexpr, SUMS: tl.constexpr):
    """As `sum_of_slots` has it: in fp32, in the order of k; NaN after a wait in vain. That is looked up behind the
    barrier and added to first, so that no sum comes before the last load."""
    tl.debug_barrier()
    total = tl.zeros((SUMS.BLOCK,), tl.float32) + tl.where(tl.load(trouble) != 0, float("nan"), 0.0)
    for k in tl.static_range(SUMS.K):
        value = values[k].to(tl.float32)
        if WEIGHTED:
            value *= weights[k].to(tl.float32)
        total += value
    return total


@quick
@triton.jit(do_not_specialize=["num_rows", "rank"])
def _send_sums(
    rows, slot_row, weight, comes_R, places, addresses, trouble, cell_at, cell_size, num_rows, rank,
    SUMS: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """AT_ONCE < K: there are too many rows for all of them to be under way."""
    H: tl.constexpr = SUMS.H
    BLOCK: tl.constexpr = SUMS.BLOCK
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    dest = (rank + 1 + tl.program_id(1)) % RANKS
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    first, count = tl.load(places + dest), tl.load(places + 2 * RANKS + dest)
    cell = tl.load(addresses + dest) + cell_at + rank.to(tl.int64) * cell_size
    out = rows_at(cell - first * (H * (rows.dtype.element_ty.primitive_bitwidth // 8)), rows, ALIGNED)
    if SUMS.AT_ONCE == SUMS.K:
        column = (program % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        values, weights, owned = _rows_of_slots(
            first + token, token < count, column, rows, slot_row, weight, num_rows, SUMS
        )
        total = _summed(values, weights, trouble, weight is not None, SUMS)
        width = tl.where(owned > 0, H, 0)
        tl.store(out + (first + token) * H + column, total.to(rows.dtype.element_ty), mask=column < width)
    elif token < count:  # noqa: SIM102 - of two conditions in one both would be loaded
        if tl.load(comes_R + first + token) != 0:
            combine_tile(first + token, program % COLUMN_BLOCKS, rows, slot_row, weight, out, None, num_rows, SUMS)


@quick
@triton.jit(do_not_specialize=["num_rows", "tokens", "rank"])
def _add_sums(
    rows, slot_row, weight, goes_WT, out_TH, places, addresses, trouble, cell_at, cell_size, num_rows, tokens, rank,
    SUMS: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = SUMS.H
    BLOCK: tl.constexpr = SUMS.BLOCK
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    column = (program % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    heap, own_token = tl.load(addresses + rank) + cell_at, tl.load(places + rank) + token
    came = _came(token, column, heap, rows, goes_WT, cell_size, tokens, rank, H, ALIGNED, RANKS)
    if SUMS.AT_ONCE == SUMS.K:
        values, weights, _ = _rows_of_slots(own_token, token < tokens, column, rows, slot_row, weight, num_rows, SUMS)
        own = _summed(values, weights, trouble, weight is not None, SUMS)
    else:
        own = sum_of_slots(own_token, column, rows, slot_row, weight, num_rows, SUMS)
        own += tl.where(tl.load(trouble) != 0, float("nan"), 0.0)
    own = own.to(rows.dtype.element_ty).to(tl.float32)
    total = _added(own, came, rank, RANKS, BLOCK)
    tl.store(out_TH + token * H + column, total.to(out_TH.dtype.element_ty), mask=column < H)


@triton.jit
def _came(
    token, column, heap, like, goes_WT, cell_size, tokens, rank,
    H: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """What each of the others has sent of a token, under way."""
    found = ()
    for source in tl.static_range(RANKS):
        cell = rows_at(heap + source * cell_size.to(tl.int64), like, ALIGNED)
        goes = tl.load(goes_WT + source * tokens.to(tl.int64) + token)
        width = tl.where(rank == source, 0, tl.where(goes != 0, H, 0))  # what does not come has no columns
        found += (tl.load(cell + token * H + column, mask=column < width, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def _added(own, came, rank, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """In the order of the ranks, in fp32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(RANKS):
        total += tl.where(rank == source, own, came[source].to(tl.float32))
    return total


@quick
@triton.jit(do_not_specialize=["num_rows", "tokens", "rank"])
def _own_sums(rows, slot_row, own_TH, places, trouble, num_rows, tokens, rank, SUMS: tl.constexpr):
    H: tl.constexpr = SUMS.H
    BLOCK: tl.constexpr = SUMS.BLOCK
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    column = (program % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    values, weights, _ = _rows_of_slots(
        tl.load(places + rank) + token, token < tokens, column, rows, slot_row, None, num_rows, SUMS
    )
    total = _summed(values, weights, trouble, False, SUMS)
    tl.store(own_TH + token * H + column, total.to(own_TH.dtype.element_ty), mask=column < H)


@quick
@triton.jit(do_not_specialize=["tokens", "rank"])
def _add_kept(
    own_TH, goes_WT, out_TH, addresses, trouble, cell_at, cell_size, tokens, rank,
    H: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    COLUMN_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    column = (program % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    width = tl.where(tl.load(goes_WT + rank * tokens.to(tl.int64) + token) != 0, H, 0)
    own = tl.load(own_TH + token * H + column, mask=column < width, other=0.0)
    heap = tl.load(addresses + rank) + cell_at
    came = _came(token, column, heap, own_TH, goes_WT, cell_size, tokens, rank, H, ALIGNED, RANKS)
    total = _added(own.to(tl.float32), came, rank, RANKS, BLOCK)
    total += tl.where(tl.load(trouble) != 0, float("nan"), 0.0)
    tl.store(out_TH + token * H + column, total.to(out_TH.dtype.element_ty), mask=column < H)
