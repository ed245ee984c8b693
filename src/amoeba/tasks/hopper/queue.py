"""The queue between the warpgroups of the Hopper kernel: tickets, waits at gates, tasks passed on, signals.

See `amoeba.tasks.hopper.kernel`.

Rows of other ranks: see `amoeba.tasks.triton.arrivals`. A block of 128 rows is sent by two warpgroups, each its half,
and each half has a flag of its own. The producer waits, as at all gates: until what was sent before is taken, and until
the rows of a product have come. Sums of dx of another rank's tokens are stored in that rank's memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from amoeba.kernels.hopper.tma import barrier
from amoeba.tasks.triton.arrivals import (
    GOES,
    OWN_DY,
    SENT_TOKENS,
    cell_of,
    number,
    numbers_at,
    raise_flag,
    wait_for_received,
    wait_for_rows,
)

# The fields of a task in the queue: kind, item, part, expert, first row, end of the rows, ticket.
# They are written in one store of ROOM numbers.
FIELDS, ROOM, TASKS = gl.constexpr(7), gl.constexpr(8), gl.constexpr(2)
STOP = gl.constexpr(-1)
BLOCK_M, BLOCK_N, BLOCK_K, STAGES = gl.constexpr(128), gl.constexpr(256), gl.constexpr(64), gl.constexpr(4)
STAGE_BYTES = gl.constexpr((128 + 256) * 64 * 2)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _fence():
    """What threads and the copy engine have done so far comes before what either of them does from here on."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait(counter, at_least):
    seen = gl.atomic_add(counter, 0, sem="acquire")
    while seen < at_least:
        seen = gl.atomic_add(counter, 0, sem="acquire")
    barrier()
    _fence()


@gluon.jit
def wait_per_thread(counter, at_least):
    """`wait`, but each thread waits on its own."""
    acquire: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    seen = gl.inline_asm_elementwise(acquire, "=r,l", [counter], gl.int32, False, 1)
    while seen < at_least:
        seen = gl.inline_asm_elementwise(acquire, "=r,l", [counter], gl.int32, False, 1)
    _fence()


@gluon.jit
def signal(pending, counters, PLAN: gl.constexpr):
    """Signals that this half of a task is done: counts up one counter, usually that of the row tile, and after a row
    pass also the expert's. pending: both in one number; -1 for none."""
    if pending >= 0:
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        _fence()
        barrier()
        gl.atomic_add(counters + pending // (PLAN.EXPERTS + 1), 1, sem="release")
        expert = pending % (PLAN.EXPERTS + 1)
        if expert < PLAN.EXPERTS:
            gl.atomic_add(counters + 1 + expert, 1, sem="release")


@gluon.jit
def draw(counters, tokens):
    """Starts drawing the next ticket, in the first thread; only `drawn_ticket` waits for it.

    The compiler must not see that all threads use the same address: it would draw once per warp and wait for that.
    """
    lane = gl.arange(0, 128, ONE)
    nothing = gl.minimum(tokens, 0)  # as only we know
    return gl.atomic_add(counters + nothing * lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def drawn_ticket(drawn):
    return gl.max(gl.where(gl.arange(0, 128, ONE) == 0, drawn, 0), 0)


@gluon.jit
def wait_for_tokens(
    block, expert_TK, slot_row, offs_E, place_E, first_tile, row_counters, tokens, rows, PLAN: gl.constexpr
):
    """Until all rows of a block of tokens have their dx and ds."""
    lane = gl.arange(0, PLAN.SLOTS, ONE)
    slot = block.to(gl.int64) * (PLAN.TOKENS * PLAN.TOP_K) + lane
    inside = (lane < PLAN.TOKENS * PLAN.TOP_K) & (slot < tokens * PLAN.TOP_K)
    row = gl.load(slot_row + slot, mask=inside, other=2147483647)
    owned = row < rows
    expert = gl.load(expert_TK + slot, mask=owned, other=0)
    start = gl.load(offs_E + expert - 1, mask=owned & (expert > 0), other=0)
    place = gl.load(place_E + expert, mask=owned, other=0)
    tile = gl.load(first_tile + place, mask=owned, other=0) + (row - start) // BLOCK_M
    counters = row_counters + tile
    least = _least(counters, owned, PLAN.COMPLETE)
    while least < PLAN.COMPLETE:
        least = _least(counters, owned, PLAN.COMPLETE)
    barrier()
    _fence()


@gluon.jit
def _least(counters, owned, complete):
    seen = gl.atomic_add(counters, owned.to(gl.int32) * 0, mask=owned, sem="acquire")
    return gl.min(gl.where(owned, seen, complete), 0)


@gluon.jit
def pass_on(queue, count, kind, item, part, expert, row, end, ticket):
    tasks, pushed, task_full, task_empty = queue
    slot = count % TASKS
    mbarrier.wait(task_empty.index(slot), ((count // TASKS) & 1) ^ 1)
    at = gl.arange(0, ROOM, ONE)
    first = gl.where(at == 0, kind, gl.where(at == 1, item, gl.where(at == 2, part, expert)))
    second = gl.where(at == 4, row, gl.where(at == 5, end, ticket))
    tasks.index(slot).store(gl.where(at < 4, first, second))
    barrier()
    mbarrier.arrive(task_full.index(slot), count=1)
    pushed.store(gl.full([128], count + 1, gl.int32, ONE))
    return count + 1


@gluon.jit
def is_there(queue, taken):
    """Whether the task after `taken` others was passed on; the same answer for all threads of a warpgroup."""
    _, pushed, _, _ = queue
    return gl.min(pushed.load(ONE), 0) > taken


@gluon.jit
def receive(queue, taken):
    """Waits for the next task: kind, item, part, expert, first row, end of the rows, ticket."""
    _, _, task_full, task_empty = queue
    slot = taken % TASKS
    mbarrier.wait(task_full.index(slot), (taken // TASKS) & 1)
    task = ()  # type: tuple
    for at in gl.static_range(FIELDS):
        task += (_field(queue, slot, at),)
    barrier()
    mbarrier.arrive(task_empty.index(slot), count=1)
    return task


@gluon.jit
def _field(queue, slot, FIELD: gl.constexpr):
    tasks, _, _, _ = queue
    return gl.max(tasks.index(slot).slice(FIELD, 1).load(ONE), 0)


HALF = gl.constexpr(64)  # rows of a flag


@gluon.jit
def wait_for_tile(peers, order, row, end, PLAN: gl.constexpr):
    """Until dy of a row tile is there."""
    row_M = row + gl.arange(0, BLOCK_M, ONE)
    wanted_M = row_M < end
    wait_for_rows(peers, gl.load(order + row_M, mask=wanted_M, other=0) // PLAN.TOP_K, wanted_M, HALF, True)


@gluon.jit
def wait_for_block(peers, block, tokens, PLAN: gl.constexpr):
    """Until the rows of a block of tokens have come, and there is room for their sums."""
    token_M = block * PLAN.TOKENS + gl.arange(0, 128, ONE) % PLAN.TOKENS
    wait_for_received(peers, block, token_M, tokens, HALF, PLAN.TOKENS, PLAN.RANKS, PLAN.TAKERS, True)


@triton.jit
def _aligned(peers, like):
    # not by `numbers_at`: what is said about the result of a call is lost where the call is inlined
    return tl.multiple_of(tl.load(peers + OWN_DY).to(tl.pointer_type(like.dtype.element_ty)), 16)


@gluon.jit
def send_half(peers, dest, block, like, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """SEND: 64 rows of own dy. like: a pointer to such numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half = block * 2 + WARPGROUP
    tokens = number(peers, SENT_TOKENS)
    own = _aligned(peers, like)
    cell = cell_of(peers, dest, like, True)
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
    raise_flag(peers, dest, half)
