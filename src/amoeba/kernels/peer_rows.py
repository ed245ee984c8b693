"""Sends rows from one rank's memory directly into another's, with counters that show what has arrived.

T tokens of this rank · R rows here, those of all ranks by (rank, token) · K experts per token · H columns · W ranks

    push_slots(peers, plan, expert_TK, tables, weight_TK, goes_WT)    # for each rank which of its experts a token wants
    expert_RK, weight_RK, owned = take_slots(peers, plan, weight_TK, comes_R)
    push_rows(peers, plan.there, ROWS, x_TH, goes_WT)                 # a token once to each rank that it goes to
    own_rows(peers, plan, x_TH, x_RH, comes_R)                        # while the others' are under way
    take_rows(peers, plan, x_RH, comes_R)
    push_rows(peers, plan.back, SUMS, y_RH, comes_R)                  # what the experts here made of it
    y_TH = add_rows(peers, plan, SUMS, y_RH, goes_WT)                 # by rank, in fp32

Every rank has a heap, which the others reach by its address: counters, then for each channel W cells, cell r for what
comes from rank r. A row lies in its cell at its token's number, so the number of rows need not be known, and
neither the host nor another rank is asked.

Counters only grow, and are never cleared. `epochs` counts the exchanges of a channel, on the device, so that a CUDA
graph that is replayed counts on. Of rank r's heap

    arrived[channel, s]   programs of rank s that have written all their rows into cell s: PUSHERS for each epoch
    taken[channel, d]     programs of rank d that have read all that r put into d's heap: TAKERS for each epoch

An exchange is three launches: `push` waits until what it sent before was taken, writes, and adds to `arrived`; one
program waits until all have arrived (alone, so that the other SMs stay free for what the others wait for); then all
are read, and `taken` is added to. All of a rank's sends come before its first wait: no circle of ranks can wait.

A wait ends after `limit`. Then (channel, rank waited for, epoch, seen, expected, which counter) is written to `record`
on the host, sums become NaN, and nothing waits any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.core.phase_timer import mark
from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.peer_context import (
    ARRIVED,
    CROWDED,
    NAMES,
    ROWS,
    SLOTS,
    TAKEN,
    PeerContext,
    Plan,
    add_one,
    add_parts,
    counter_of,
    tell,
    wait_for,
    wait_for_arrivals,
)

_BYTES_OF_TILE = 131072  # of fp32, by 16 warps: 128 bytes of bf16 of each thread are under way at once
_MOST_LINES = 512  # of a tile, so that all programs have some of narrow rows
_WARPS = 16


class Push(NamedTuple):
    """How a program pushes: twice the bytes of a tile, its warps, and whether it reads the next tile before writing
    this one, of rows that are one tile wide. Few programs push, and nothing else runs where they do, so tiles are
    large: about half of a multiprocessor's registers, in any dtype."""

    size: int = 262144
    warps: int = _WARPS
    ahead: bool = False


PUSH = Push()


def push_slots(
    peers: PeerContext, plan: Plan, expert_TK: Tensor, tables: tuple[Tensor, Tensor], weight_TK: Tensor, goes_WT: Tensor
) -> None:
    """tables: int64 (E + 1,), the owner of each expert and the id that it has there, and behind them those of no expert
    (see `Owners.tables`). Writes goes_WT, uint8."""
    tokens, top_k = weight_TK.shape
    _push_slots[(peers.pushers,)](
        expert_TK, *tables, weight_TK, goes_WT, *peers.waiting, peers.cell_at[SLOTS], peers.cell_size[SLOTS],
        peers.tokens, tokens, plan.tokens, tables[0].shape[0] - 1, peers.rank, peers.limit, K=top_k,
        TAKERS=peers.takers, **_slot_tile(top_k), **peers.constants(SLOTS), num_warps=8,
    )  # fmt: skip


def take_slots(
    peers: PeerContext,
    plan: Plan,
    weight_TK: Tensor,
    comes_R: Tensor,
    most_rows: int | None = None,
    *,
    guessed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """expert_RK (int32), weight_RK, and how many slots have an expert here: int32, to be added up. Writes comes_R,
    uint8: whether a row has one.

    most_rows: where more slots have one, none has: nothing is written behind the end of a buffer, and the host is told.
    guessed: the host counts them itself, and may `put_back` the ids.
    """
    top_k = weight_TK.shape[1]
    wait_for_all(peers, SLOTS)
    expert_RK = torch.empty((plan.rows, top_k), dtype=torch.int32, device=weight_TK.device)
    weight_RK = torch.empty((plan.rows, top_k), dtype=weight_TK.dtype, device=weight_TK.device)
    owned = torch.empty(peers.takers, dtype=torch.int32, device=weight_TK.device)
    _take_slots[(peers.takers,)](
        expert_RK, weight_RK, comes_R, owned, plan.back, peers.addresses, peers.cell_at[SLOTS], peers.cell_size[SLOTS],
        peers.tokens, peers.rank, K=top_k, TELLS=peers.reaches, **_slot_tile(top_k), **peers.constants(SLOTS),
        num_warps=8,
    )  # fmt: skip
    if most_rows is not None and most_rows < expert_RK.numel():
        slots = expert_RK.numel()
        _refuse_too_many[(1,)](
            expert_RK, owned, peers.epochs, peers.trouble, peers.record, slots, most_rows, PARTS=peers.takers,
            BLOCK=16384, GUESSED=guessed, CHANNEL=SLOTS, ON_GPU=expert_RK.is_cuda, num_warps=16,
        )  # fmt: skip
    return expert_RK, weight_RK, owned


def put_back(expert_RK: Tensor) -> None:
    """The ids of slots of which `take_slots` said that none has an expert, since there were more than was guessed."""
    torch.where(expert_RK < -1, -2 - expert_RK, expert_RK, out=expert_RK)


def push_rows(
    peers: PeerContext,
    places: Tensor,
    channel: int,
    rows: Tensor,
    wanted: Tensor,
    programs: int | None = None,
    how: Push = PUSH,
) -> None:
    """places: of a `Plan`. wanted: goes_WT or comes_R. programs: a divisor of `peers.pushers`; None: that number."""
    width, programs = rows.shape[1], programs or peers.pushers
    if peers.pushers % programs:
        raise bad_value("programs", f"a divisor of {peers.pushers}", programs, "leave it out")
    size = how.size * 2 // rows.element_size()
    _push_rows[(programs,)](
        rows, wanted, places, *peers.waiting, peers.cell_at[channel], peers.cell_size[channel], peers.rank, peers.limit,
        peers.pushers // programs, TAKERS=peers.takers, AHEAD=how.ahead, **_tile(rows, width, size),
        **peers.constants(channel), num_warps=how.warps,
    )  # fmt: skip


def room_for_rows(plan: Plan, rows_TH: Tensor) -> Tensor:
    """For the rows of all ranks' tokens; who does not come holds anything."""
    return torch.empty((plan.rows, rows_TH.shape[1]), dtype=rows_TH.dtype, device=rows_TH.device)


def own_rows(peers: PeerContext, plan: Plan, rows_TH: Tensor, out_RH: Tensor, comes_R: Tensor) -> None:
    _copy_rows(peers, plan, rows_TH, out_RH, comes_R, OWN=True)


def take_rows(peers: PeerContext, plan: Plan, out_RH: Tensor, comes_R: Tensor) -> None:
    """The rows of the other ranks' tokens."""
    wait_for_all(peers, ROWS)
    _copy_rows(peers, plan, out_RH, out_RH, comes_R, OWN=False)


def _copy_rows(peers: PeerContext, plan: Plan, rows: Tensor, out_RH: Tensor, comes_R: Tensor, **which: bool) -> None:
    _take_rows[(peers.takers,)](
        rows, comes_R, out_RH, plan.back, peers.addresses, peers.cell_at[ROWS], peers.cell_size[ROWS], peers.rank,
        **which, **_tile(rows, rows.shape[1]), **peers.constants(ROWS), num_warps=_WARPS,
    )  # fmt: skip


def add_rows(peers: PeerContext, plan: Plan, channel: int, rows_RH: Tensor, goes_WT: Tensor) -> Tensor:
    """For each token of this rank the sum over the ranks that it went to, in their order; 0 if it went nowhere."""
    tokens, width = goes_WT.shape[1], rows_RH.shape[1]
    wait_for_all(peers, channel)
    out_TH = torch.empty((tokens, width), dtype=rows_RH.dtype, device=rows_RH.device)
    _add_rows[(peers.takers,)](
        rows_RH, goes_WT, out_TH, plan.back, peers.addresses, peers.trouble, peers.cell_at[channel],
        peers.cell_size[channel], tokens, peers.rank, WIDE=rows_RH.dtype == torch.float64,
        TELLS=peers.reaches, **_tile(rows_RH, width), **peers.constants(channel), num_warps=_WARPS,
    )  # fmt: skip
    return out_TH


def wait_for_all(peers: PeerContext, channel: int) -> None:
    wait_for_arrivals[(1,)](
        *peers.waiting, peers.rank, peers.limit, PUSHERS=peers.pushers, **peers.constants(channel), num_warps=1
    )
    mark(f"{NAMES[channel]}: waited for")


def _slot_tile(top_k: int) -> dict[str, int]:
    return {"BLOCK_T": 256, "BLOCK_K": next_power_of_2(top_k)}  # of 16384 tokens each program has one or two


def _tile(rows: Tensor, width: int, size: int = _BYTES_OF_TILE) -> dict[str, Any]:
    columns = min(next_power_of_2(width), 2048)
    lines = max(min(size // 4 // columns, _MOST_LINES), 1)
    return {"H": width, "BLOCK_T": lines, "BLOCK_H": columns, "ALIGNED": is_aligned(rows, width)}


def is_aligned(rows: Tensor, width: int) -> bool:
    """Whether 16 bytes at a time may be read and written."""
    return rows.data_ptr() % 16 == 0 and width * rows.element_size() % 16 == 0


@quick
@triton.jit(do_not_specialize=["slots", "most_rows"])
def _refuse_too_many(
    expert_RK, owned_P, epochs, trouble, record, slots, most_rows,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, GUESSED: tl.constexpr, CHANNEL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """GUESSED: an id e becomes -2 - e, which is no expert either."""
    owned = tl.sum(tl.load(owned_P + tl.arange(0, PARTS)), axis=0)
    if owned > most_rows:
        if not GUESSED:
            epoch = tl.load(epochs + CHANNEL)
            tell(trouble, record, owned * 0, epoch, owned, most_rows, CROWDED, CHANNEL, ON_GPU)
        for first in range(0, slots, BLOCK):
            at = first + tl.arange(0, BLOCK)
            none = tl.full((BLOCK,), -1, tl.int32)
            if GUESSED:
                expert = tl.load(expert_RK + at, mask=at < slots, other=-1)
                none = tl.where(expert < 0, expert, -2 - expert)
            tl.store(expert_RK + at, none, mask=at < slots)


@quick
@triton.jit(do_not_specialize=["tokens", "count", "experts", "rank", "limit"])
def _push_slots(
    expert_TK, rank_E1, local_E1, weight_TK, goes_WT, addresses, epochs, trouble, record, cell_at, cell_size,
    most_tokens, tokens, count, experts, rank, limit,
    K: tl.constexpr, TAKERS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """count: rows that the others expect; those behind the tokens have no expert."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + CHANNEL)
    k = tl.arange(0, BLOCK_K)[None, :]
    for step in range(0, RANKS):
        dest = (rank + step) % RANKS
        if step > 0:
            taken = counter_of(addresses, rank, dest, TAKEN, CHANNEL, RANKS)
            wait_for(taken, epoch * TAKERS, epoch, dest, trouble, record, limit, TAKEN, CHANNEL, ON_GPU)
        cell = tl.load(addresses + dest) + cell_at + rank.to(tl.int64) * cell_size
        weights = cell.to(tl.pointer_type(weight_TK.dtype.element_ty))
        ids = (cell + most_tokens.to(tl.int64) * (K * 8)).to(tl.pointer_type(tl.int32))
        for first in range(program * BLOCK_T, count, programs * BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            at = t.to(tl.int64)[:, None] * K + k
            inside = (t < tokens)[:, None] & (k < K)
            asked = tl.load(expert_TK + at, mask=inside, other=-1)
            place = tl.where((asked >= 0) & (asked < experts), asked, experts)
            mine = inside & (tl.load(rank_E1 + place) == dest)
            expert = tl.where(mine, tl.load(local_E1 + place), -1).to(tl.int32)
            weight = tl.load(weight_TK + at, mask=inside, other=0)
            expected = (t < count)[:, None] & (k < K)
            tl.store(ids + at, expert, mask=expected)
            tl.store(weights + at, weight, mask=expected)
            goes = tl.max(mine.to(tl.int32), axis=1).to(tl.uint8)
            tl.store(goes_WT + dest.to(tl.int64) * tokens + t, goes, mask=t < tokens)
        if step > 0:
            add_one(counter_of(addresses, dest, rank, ARRIVED, CHANNEL, RANKS))


@quick
@triton.jit(do_not_specialize=["rank"])
def _take_slots(
    expert_RK, weight_RK, comes_R, owned_P, places, addresses, cell_at, cell_size, most_tokens, rank,
    K: tl.constexpr, TELLS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)[None, :]
    counts = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for source in range(0, RANKS):
        cell = tl.load(addresses + rank) + cell_at + source * cell_size.to(tl.int64)
        weights = cell.to(tl.pointer_type(weight_RK.dtype.element_ty))
        ids = (cell + most_tokens.to(tl.int64) * (K * 8)).to(tl.pointer_type(tl.int32))
        first_row, count = tl.load(places + source), tl.load(places + 2 * RANKS + source)
        for first in range(program * BLOCK_T, count.to(tl.int32), programs * BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            at = t.to(tl.int64)[:, None] * K + k
            inside = (t < count)[:, None] & (k < K)
            expert = tl.load(ids + at, mask=inside, other=-1)
            counts += (expert >= 0).to(tl.int32)
            tl.store(expert_RK + first_row * K + at, expert, mask=inside)
            tl.store(weight_RK + first_row * K + at, tl.load(weights + at, mask=inside, other=0), mask=inside)
            comes = (tl.max(expert, axis=1) >= 0).to(tl.uint8)
            tl.store(comes_R + first_row + t, comes, mask=t < count)
    tl.store(owned_P + program, tl.sum(tl.sum(counts, axis=1), axis=0))
    for step in range(1, RANKS if TELLS else 1):
        add_one(counter_of(addresses, (rank + step) % RANKS, rank, TAKEN, CHANNEL, RANKS))


@triton.jit
def rows_at(address, like, ALIGNED: tl.constexpr):
    """ALIGNED: 16 bytes at a time may be read and written."""
    rows = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return rows


@quick
@triton.jit(do_not_specialize=["rank", "limit", "parts"])
def _push_rows(
    rows, wanted, places, addresses, epochs, trouble, record, cell_at, cell_size, rank, limit, parts,
    TAKERS: tl.constexpr, AHEAD: tl.constexpr, H: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, ALIGNED: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + CHANNEL)
    for step in range(1, RANKS):  # each rank begins with another one
        dest = (rank + step) % RANKS
        taken = counter_of(addresses, rank, dest, TAKEN, CHANNEL, RANKS)
        wait_for(taken, epoch * TAKERS, epoch, dest, trouble, record, limit, TAKEN, CHANNEL, ON_GPU)
        cell = rows_at(tl.load(addresses + dest) + cell_at + rank.to(tl.int64) * cell_size, rows, ALIGNED)
        source = rows + tl.load(places + dest) * H
        wanted_T = wanted + tl.load(places + RANKS + dest)
        count = tl.load(places + 2 * RANKS + dest)
        t = program * BLOCK_T + tl.arange(0, BLOCK_T)
        goes = tl.load(wanted_T + t, mask=t < count, other=0)
        if AHEAD and H <= BLOCK_H:
            c = tl.arange(0, BLOCK_H)
            at = t.to(tl.int64)[:, None] * H + c[None, :]
            mask = (goes != 0)[:, None] & (c < H)[None, :]
            tile = tl.load(source + at, mask=mask)
            t += programs * BLOCK_T
            goes = tl.load(wanted_T + t, mask=t < count, other=0)
        for first in range(program * BLOCK_T, count.to(tl.int32), programs * BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            later = t + (2 if AHEAD and H <= BLOCK_H else 1) * programs * BLOCK_T
            goes_later = tl.load(wanted_T + later, mask=later < count, other=0)  # so that no row waits for it
            if AHEAD and H <= BLOCK_H:
                at_next = at + programs.to(tl.int64) * (BLOCK_T * H)
                mask_next = (goes != 0)[:, None] & (c < H)[None, :]
                tile_next = tl.load(source + at_next, mask=mask_next)
                tl.store(cell + at, tile, mask=mask)
                tile, at, mask = tile_next, at_next, mask_next
            for column in range(0, 0 if AHEAD and H <= BLOCK_H else H, BLOCK_H):
                c = column + tl.arange(0, BLOCK_H)
                at = t.to(tl.int64)[:, None] * H + c[None, :]
                mask = (goes != 0)[:, None] & (c < H)[None, :]
                tl.store(cell + at, tl.load(source + at, mask=mask), mask=mask)
            goes = goes_later
        add_parts(counter_of(addresses, dest, rank, ARRIVED, CHANNEL, RANKS), parts)


@quick
@triton.jit(do_not_specialize=["rank"])
def _take_rows(
    rows_TH, comes_R, out_RH, places, addresses, cell_at, cell_size, rank,
    OWN: tl.constexpr, H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, ALIGNED: tl.constexpr,
    CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0 if OWN else 1, 1 if OWN else RANKS):
        source = (rank + step) % RANKS
        if OWN:
            rows = rows_TH
        else:
            cell = tl.load(addresses + rank) + cell_at + source.to(tl.int64) * cell_size
            rows = rows_at(cell, rows_TH, ALIGNED)
        first_row, count = tl.load(places + source), tl.load(places + 2 * RANKS + source)
        for first in range(program * BLOCK_T, count.to(tl.int32), programs * BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            comes = tl.load(comes_R + first_row + t, mask=t < count, other=0) != 0
            for column in range(0, H, BLOCK_H):
                c = column + tl.arange(0, BLOCK_H)
                at = t.to(tl.int64)[:, None] * H + c[None, :]
                mask = comes[:, None] & (c < H)[None, :]
                tl.store(out_RH + first_row * H + at, tl.load(rows + at, mask=mask), mask=mask)
    for step in range(1, 1 if OWN else RANKS):
        add_one(counter_of(addresses, (rank + step) % RANKS, rank, TAKEN, CHANNEL, RANKS))


@quick
@triton.jit(do_not_specialize=["tokens", "rank"])
def _add_rows(
    rows_RH, goes_WT, out_TH, places, addresses, trouble, cell_at, cell_size, tokens, rank,
    WIDE: tl.constexpr, TELLS: tl.constexpr, H: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, ALIGNED: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    lost = tl.load(trouble) != 0
    own = rows_RH.to(tl.int64) + tl.load(places + rank) * (H * (rows_RH.dtype.element_ty.primitive_bitwidth // 8))
    for first in range(program * BLOCK_T, tokens, programs * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        for column in range(0, H, BLOCK_H):
            c = column + tl.arange(0, BLOCK_H)
            at = t.to(tl.int64)[:, None] * H + c[None, :]
            inside = (t < tokens)[:, None] & (c < H)[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_H), tl.float64 if WIDE else tl.float32)
            for source in range(0, RANKS):
                cell = tl.load(addresses + rank) + cell_at + source * cell_size.to(tl.int64)
                rows = rows_at(tl.where(source == rank, own, cell), rows_RH, ALIGNED)
                goes = tl.load(goes_WT + source * tokens.to(tl.int64) + t, mask=t < tokens, other=0) != 0
                total += tl.load(rows + at, mask=goes[:, None] & inside, other=0).to(total.dtype)
            total = tl.where(lost, float("nan"), total)
            tl.store(out_TH + at, total.to(out_TH.dtype.element_ty), mask=inside)
    for step in range(1, RANKS if TELLS else 1):
        add_one(counter_of(addresses, (rank + step) % RANKS, rank, TAKEN, CHANNEL, RANKS))
