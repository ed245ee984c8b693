"""What the parts of the kernel for Hopper tell each other, and what programs do: tasks, gates, signals.

See `amoeba.tasks.hopper.kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from amoeba.kernels.hopper.tma import barrier

# Of a task that is passed on: kind, item, part, expert, first row, end of the rows, ticket.
# They are written at once, with room for one more.
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
def look(counter, at_least):
    """`wait`, by each thread for itself."""
    acquire: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    seen = gl.inline_asm_elementwise(acquire, "=r,l", [counter], gl.int32, False, 1)
    while seen < at_least:
        seen = gl.inline_asm_elementwise(acquire, "=r,l", [counter], gl.int32, False, 1)
    _fence()


@gluon.jit
def tell(untold, counters, PLAN: gl.constexpr):
    """That this half of a task is done: a counter, mostly the row tile's, and after a row pass also the expert's; both
    in one number. -1: of none."""
    if untold >= 0:
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        _fence()
        barrier()
        gl.atomic_add(counters + untold // (PLAN.EXPERTS + 1), 1, sem="release")
        expert = untold % (PLAN.EXPERTS + 1)
        if expert < PLAN.EXPERTS:
            gl.atomic_add(counters + 1 + expert, 1, sem="release")


@gluon.jit
def draw(counters, tokens):
    """The next ticket, on its way to the first thread: nobody waits for it before `drawn_ticket`.

    The compiler must not see that all threads name one address: it would draw once for a whole warp, and wait for that.
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
    """Whether the next task was passed on, after so many: for all threads of a warpgroup the same answer."""
    _, pushed, _, _ = queue
    return gl.min(pushed.load(ONE), 0) > taken


@gluon.jit
def take(queue, taken):
    """The next task, as soon as it is there: kind, item, part, expert, first row, end of the rows, ticket."""
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
