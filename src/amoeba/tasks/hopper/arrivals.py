"""Rows of other ranks in the kernel for Hopper: what goes out and what is waited for.

See `amoeba.tasks.triton.arrivals`.

    peers = write_peer_context(arrival, own_table)
    backward_kernel(..., peers, PLAN=Plan(..., RANKS=2))

A block of 128 rows is sent by two warpgroups, each its half, and each half has a flag of its own. The producer waits,
as at all gates: until what was sent before is taken, and until the rows of a product have come. Sums of dx of another
rank's tokens are stored in that rank's memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.launch import quick
from amoeba.kernels.peer_counters import TAKEN, counter_of, wait_for
from amoeba.kernels.peer_post import ROWS as _ROWS
from amoeba.kernels.peer_post import SUMS as _SUMS
from amoeba.tasks.hopper.queue import BLOCK_M, ONE
from amoeba.tasks.triton.arrivals import Arrival, flag_of, wait_for_rows
from amoeba.tasks.triton.local_first import LocalTable

ROWS, SUMS = tl.constexpr(_ROWS), tl.constexpr(_SUMS)
HALF = gl.constexpr(64)  # rows of a flag
# What the kernel is told of the other ranks: numbers in memory, of which the producer has one address in its registers.
GOES, ADDRESSES, EPOCHS, TROUBLE, RECORD, CELL_AT, CELL_SIZE, FLAGS_AT, FLAGS_SIZE, SENT_TOKENS = map(
    gl.constexpr, range(10)
)
COMES, SUMS_AT, SUMS_SIZE, MOST_TOKENS, RANK, LIMIT, SENDS, FIRST_LOCAL, OWN_DY = map(gl.constexpr, range(10, 19))
_FIELDS = 19


def write_peer_context(arrival: Arrival, own: LocalTable) -> Tensor:
    peers = torch.empty(_FIELDS, dtype=torch.int64, device=arrival.dy_TH.device)
    dy_TH, *others = arrival.arguments()
    _write[(1,)](peers, *others, arrival.sends, own.first_local, dy_TH, num_warps=1)
    return peers


@quick
@triton.jit(
    do_not_specialize=[
        "cell_at", "cell_size", "flags_at", "flags_size", "sums_at", "sums_size", "sent_tokens", "most_tokens", "rank",
        "limit", "sends",
    ]
)  # fmt: skip
def _write(
    peers, goes_WT, addresses, epochs, trouble, record, cell_at, cell_size, flags_at, flags_size, comes_R, sums_at,
    sums_size, sent_tokens, most_tokens, rank, limit, sends, first_local, own_dy,
):  # fmt: skip
    tl.store(peers, goes_WT.to(tl.int64))
    tl.store(peers + 1, addresses.to(tl.int64))
    tl.store(peers + 2, epochs.to(tl.int64))
    tl.store(peers + 3, trouble.to(tl.int64))
    tl.store(peers + 4, record.to(tl.int64))
    tl.store(peers + 5, cell_at)
    tl.store(peers + 6, cell_size)
    tl.store(peers + 7, flags_at)
    tl.store(peers + 8, flags_size)
    tl.store(peers + 9, sent_tokens)
    tl.store(peers + 10, comes_R.to(tl.int64))
    tl.store(peers + 11, sums_at)
    tl.store(peers + 12, sums_size)
    tl.store(peers + 13, most_tokens)
    tl.store(peers + 14, rank)
    tl.store(peers + 15, limit)
    tl.store(peers + 16, sends)
    tl.store(peers + 17, first_local.to(tl.int64))
    tl.store(peers + 18, own_dy.to(tl.int64))


@triton.jit
def number(peers, FIELD: tl.constexpr):
    return tl.load(peers + FIELD).to(tl.int32)


@triton.jit
def numbers_at(peers, FIELD: tl.constexpr, dtype: tl.constexpr):
    """An address that the peers holds."""
    return tl.load(peers + FIELD).to(tl.pointer_type(dtype))


@triton.jit
def wait_until_taken(peers, dest, CHANNEL: tl.constexpr, RANKS: tl.constexpr, TAKERS: tl.constexpr):
    """What was sent to a rank by this channel before."""
    epoch = tl.load(numbers_at(peers, EPOCHS, tl.int64) + CHANNEL)
    addresses = numbers_at(peers, ADDRESSES, tl.int64)
    taken = counter_of(addresses, number(peers, RANK), dest, TAKEN, CHANNEL, RANKS)
    wait_for(
        taken, epoch * TAKERS, epoch, dest, numbers_at(peers, TROUBLE, tl.int64),
        numbers_at(peers, RECORD, tl.int64), tl.load(peers + LIMIT), TAKEN, CHANNEL, True,
    )  # fmt: skip


@triton.jit
def wait_for_dy(peers, row_M, wanted_M, SENT: tl.constexpr):
    wait_for_rows(
        row_M, wanted_M, numbers_at(peers, ADDRESSES, tl.int64), numbers_at(peers, EPOCHS, tl.int64),
        numbers_at(peers, TROUBLE, tl.int64), numbers_at(peers, RECORD, tl.int64), tl.load(peers + FLAGS_AT),
        tl.load(peers + FLAGS_SIZE), number(peers, MOST_TOKENS), number(peers, RANK), tl.load(peers + LIMIT), SENT,
        True,
    )  # fmt: skip


@gluon.jit
def wait_for_tile(peers, order, row, end, PLAN: gl.constexpr):
    """Until dy of a row tile is there."""
    row_M = row + gl.arange(0, BLOCK_M, ONE)
    wanted_M = row_M < end
    wait_for_dy(peers, gl.load(order + row_M, mask=wanted_M, other=0) // PLAN.TOP_K, wanted_M, HALF)


@gluon.jit
def wait_for_received(peers, block, tokens, PLAN: gl.constexpr):
    """Until the rows of a block of tokens have come, also those that no expert here reads: their cell is used again."""
    token_M = block * PLAN.TOKENS + gl.arange(0, 128, ONE) % PLAN.TOKENS
    wait_for_dy(peers, token_M, token_M < tokens, HALF)
    source = block * PLAN.TOKENS // number(peers, MOST_TOKENS)
    if source != number(peers, RANK):  # where their sums go
        wait_until_taken(peers, source, SUMS, PLAN.RANKS, PLAN.TAKERS)


@triton.jit
def room_for_sums(peers, block, own, TOKENS: tl.constexpr, H: tl.constexpr):
    """Where the sums of a block of received rows go, as if those of row 0 on lay there: see `arrivals`."""
    source = block * TOKENS // number(peers, MOST_TOKENS)
    rank = tl.load(peers + RANK)
    cell = tl.load(numbers_at(peers, ADDRESSES, tl.int64) + source) + tl.load(peers + SUMS_AT)
    cell += rank * tl.load(peers + SUMS_SIZE)
    address = tl.where(source == rank, own.to(tl.int64), cell)
    address -= source.to(tl.int64) * tl.load(peers + MOST_TOKENS) * (H * 2)
    return address


@triton.jit
def _cell_of(peers, dest, like):
    address = tl.load(numbers_at(peers, ADDRESSES, tl.int64) + dest) + tl.load(peers + CELL_AT)
    address += tl.load(peers + RANK) * tl.load(peers + CELL_SIZE)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _aligned(peers, like):
    # not by `numbers_at`: what is said about the result of a call is lost where the call is inlined
    return tl.multiple_of(tl.load(peers + OWN_DY).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _raise_flag(peers, dest, block):
    flag = flag_of(
        numbers_at(peers, ADDRESSES, tl.int64), dest, number(peers, RANK), block, tl.load(peers + FLAGS_AT),
        tl.load(peers + FLAGS_SIZE),
    )  # fmt: skip
    epoch = tl.load(numbers_at(peers, EPOCHS, tl.int64) + ROWS)
    tl.debug_barrier()  # what all threads of the warpgroup have written comes before
    tl.atomic_xchg(flag, epoch + 1, sem="release", scope="sys")


@gluon.jit
def send_half(peers, dest, block, like, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """SEND: 64 rows of own dy. like: a pointer to such numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half = block * 2 + WARPGROUP
    tokens = number(peers, SENT_TOKENS)
    own = _aligned(peers, like)
    cell = _cell_of(peers, dest, like)
    goes = numbers_at(peers, GOES, gl.uint8) + dest.to(gl.int64) * tokens
    c = gl.arange(0, 256, gl.SliceLayout(0, layout))
    for first in range(half * HALF, gl.minimum((half + 1) * HALF, tokens), 16):
        t = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
        wanted = gl.load(goes + t, mask=t < tokens, other=0) != 0
        line = t.to(gl.int64) * PLAN.H
        for column in range(0, PLAN.H, 256):
            at = line[:, None] + (column + c)[None, :]
            mask = wanted[:, None] & (column + c < PLAN.H)[None, :]
            gl.store(cell + at, gl.load(own + at, mask=mask), mask=mask)
    _raise_flag(peers, dest, half)
