"""The peer context of the kernels of `peers`: the heaps of a group, where rows are in them, the parts of a send; and
the counters by which they wait for each other. See `amoeba.kernels.peer_rows`.

W ranks

Heaps begin with the counters. One is added to with release and looked at with acquire, for the whole system: who sees
the number sees what was written before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.fences import fenced, microseconds
from amoeba.kernels.launch import quick

CHANNELS = tl.constexpr(4)
ARRIVED, TAKEN = tl.constexpr(0), tl.constexpr(1)
CROWDED = tl.constexpr(2)  # in place of a counter: more rows than fit
RECORD = 7  # set, channel, rank, epoch, seen, expected, counter


@triton.jit
def counter_of(addresses, rank, of_rank, WHICH: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr):
    """In the heap of `rank`, the counter to which `of_rank` adds."""
    first = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    return first + ((WHICH * CHANNELS + CHANNEL) * RANKS + of_rank)


@triton.jit
def look(counter):
    return tl.atomic_add(counter, 0, sem="acquire", scope="sys")


@triton.jit
def add_one(counter):
    add_parts(counter, 1)


@triton.jit
def add_parts(counter, parts):
    tl.debug_barrier()  # what all threads of the program have read and written comes before
    tl.atomic_add(counter, parts, sem="release", scope="sys")


@triton.jit
def wait_for(
    counter, at_least, epoch, whom, trouble, record, limit,
    WHICH: tl.constexpr, CHANNEL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    seen = look(counter)
    if seen < at_least:
        began = microseconds(epoch * 0, ON_GPU)
        now = began
        stop = look(trouble)
        while (seen < at_least) & (stop == 0) & (now - began < limit):
            seen = look(counter)
            now = microseconds(now, ON_GPU)
        if (seen < at_least) & (stop == 0):
            tell(trouble, record, whom, epoch, seen, at_least, WHICH, CHANNEL, ON_GPU)
    tl.debug_barrier()


@triton.jit
def tell(
    trouble, record, whom, epoch, seen, expected, WHICH: tl.constexpr, CHANNEL: tl.constexpr, ON_GPU: tl.constexpr
):
    if tl.atomic_xchg(trouble, 1, sem="relaxed", scope="gpu") == 0:  # the first one tells
        tl.store(record + 1, CHANNEL)
        tl.store(record + 2, whom)
        tl.store(record + 3, epoch)
        tl.store(record + 4, seen)
        tl.store(record + 5, expected)
        tl.store(record + 6, WHICH)
        tl.debug_barrier()
        tl.store(record, fenced(epoch.to(tl.int32) * 0 + 1, ON_GPU))


@quick
@triton.jit(do_not_specialize=["rank", "limit"])
def wait_until_taken(
    addresses, epochs, trouble, record, rank, limit,
    TAKERS: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Until what was sent to all other ranks before has been read."""
    epoch = tl.load(epochs + CHANNEL)
    for step in range(1, RANKS):
        dest = (rank + step) % RANKS
        counter = counter_of(addresses, rank, dest, TAKEN, CHANNEL, RANKS)
        wait_for(counter, epoch * TAKERS, epoch, dest, trouble, record, limit, TAKEN, CHANNEL, ON_GPU)


@quick
@triton.jit(do_not_specialize=["rank"])
def add_everywhere(
    addresses, rank, PARTS: tl.constexpr, WHICH: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """As PARTS programs would, each of which adds one to the counter of this rank in the heap of each other."""
    for step in range(1, RANKS):
        counter = counter_of(addresses, (rank + step) % RANKS, rank, WHICH, CHANNEL, RANKS)
        tl.atomic_add(counter, PARTS, sem="release", scope="sys")


@quick
@triton.jit(do_not_specialize=["rank", "limit"])
def wait_for_arrivals(
    addresses, epochs, trouble, record, rank, limit,
    PUSHERS: tl.constexpr, CHANNEL: tl.constexpr, RANKS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(epochs + CHANNEL) + 1
    tl.debug_barrier()
    tl.store(epochs + CHANNEL, epoch)
    for step in range(1, RANKS):
        source = (rank + step) % RANKS
        counter = counter_of(addresses, rank, source, ARRIVED, CHANNEL, RANKS)
        wait_for(counter, epoch * PUSHERS, epoch, source, trouble, record, limit, ARRIVED, CHANNEL, ON_GPU)


SLOTS, ROWS, SUMS, GRADIENTS = range(4)
NAMES = ("ids", "rows", "sums", "gradients of weights")
FLAGS = 4  # no channel: where the flags of `amoeba.tasks.triton.arrivals` lie, of each source one for 16 rows at most
# Parts of which what a rank sends is counted, and what it takes: the same on every rank. As many programs do it, unless
# a send is told otherwise. By 16 programs rows left at 347 to 387 GB/s on an H200, by 48 at 498 to 525, their launch by
# the host included (2026-11-16, dev/log). The interpreter runs one after another.
PUSHERS, TAKERS = 48, 64
PUSHERS_INTERPRETED = TAKERS_INTERPRETED = 2
# Without a GPU a kernel has no clock; this many polls take about a second.
LOOKS_PER_SECOND = 10_000


@dataclass(frozen=True, eq=False)
class PeerContext:
    """What the ranks have made once.

    addresses: int64 (W,), of every rank's heap as this process reaches it.
    epochs:    int64 (CHANNELS,), on the device, this rank's own.
    trouble:   int64 (1,), the same: not 0 after a wait in vain.
    record:    int64 (RECORD,), on the host, where the device writes it.
    cell_at:   of each channel, the first byte of its cells in a heap.
    cell_size: of each channel, in bytes.
    tokens:    of one rank at most.
    heaps:     the same heaps, uint8, for copies that no kernel makes.
    reaches:   whether the addresses are all there; else readers signal no one, and others' heaps are for `Courier`.
    """

    addresses: Tensor
    epochs: Tensor
    trouble: Tensor
    record: Tensor
    cell_at: tuple[int, ...]
    cell_size: tuple[int, ...]
    tokens: int
    rank: int
    count: int
    seconds: float
    heaps: tuple[Tensor, ...] = ()
    reaches: bool = True

    @property
    def limit(self) -> int:
        return int(self.seconds * (1e6 if self.addresses.is_cuda else LOOKS_PER_SECOND))

    @property
    def pushers(self) -> int:
        return PUSHERS if self.addresses.is_cuda else PUSHERS_INTERPRETED

    @property
    def takers(self) -> int:
        return TAKERS if self.addresses.is_cuda else TAKERS_INTERPRETED

    def constants(self, channel: int) -> dict[str, Any]:
        return {"CHANNEL": channel, "RANKS": self.count, "ON_GPU": self.addresses.is_cuda}

    @property
    def waiting(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.addresses, self.epochs, self.trouble, self.record


@dataclass(frozen=True, eq=False)
class Plan:
    """Where rows are: int64 (3, W), of each rank the first row, the first entry of what says which go, and how many.

    there: of this rank's tokens, in x_TH and goes_WT.
    back:  of each rank's tokens, in x_RH and comes_R.
    places: of each rank's tokens in x_RH, as the host knows them.
    """

    there: Tensor
    back: Tensor
    tokens: int
    rows: int
    places: tuple[slice, ...] = ()


def heap_layout(ranks: int, tokens: int, top_k: int, row_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """cell_at and cell_size of a `PeerContext`, and the bytes of a heap."""
    tokens = tokens_of_cells(tokens)
    slots = tokens * top_k
    sizes = (slots * (4 + 8), tokens * row_bytes, tokens * row_bytes, slots * 8, tokens // 16 * 8)
    at = [_whole(2 * CHANNELS.value * ranks * 8)]
    for size in sizes:
        at.append(_whole(at[-1] + ranks * size))
    return tuple(at[:-1]), sizes, at[-1]


def tokens_of_cells(tokens: int) -> int:
    """So that each cell begins at a multiple of 16 bytes."""
    return -(-max(tokens, 1) // 16) * 16


def _whole(size: int) -> int:
    return -(-size // 256) * 256
