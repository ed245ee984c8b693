"""Counters in the memory of several ranks, by which kernels wait for each other, and what is told of a wait in vain.

See `amoeba.kernels.peer_rows`, whose heaps begin with them. A counter is added to with release and looked at with
acquire, for the whole system: who sees the number sees what was written before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
