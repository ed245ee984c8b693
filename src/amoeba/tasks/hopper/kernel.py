"""The scheduled backward on Hopper, in Gluon: one persistent kernel on one ring of stages.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

See `amoeba.tasks.hopper.backward`, which launches it. Three warpgroups: the producer draws tickets, waits at gates,
passes tasks on to the other two and fills the stages; those compute and signal. A stage holds 48 KB for every task:

    DOWN, UP                   128 rows of 64 of the depth, and 64 lines of 256 columns of the matrix
    DOWN_WEIGHTS, UP_WEIGHTS   64 gathered rows, 128 wide in two halves, and the same sorted rows, 256 wide
    ACTIVATE                   dA', gate and up: whole lines of BLOCK columns, 16 KB of each
    COMBINE                    rows of dx, 256 columns of them, of as many tokens as have 64 of them

The tiles of products and weight gradients call the functions of the separate kernels, and the row passes sum in the
same order as theirs, so the results are bitwise identical.

**Waiting.** The producer and the two other warpgroups process tasks in the order of tickets. Only the producer waits at
gates, before it passes a task on. A warpgroup that has finished a task does not signal immediately: it would have to
wait for its stores and for the release while the tensor cores are idle. It signals while its next product runs, before
it waits for a task that has not been passed on yet, and at the end. So no signal is held back during a wait.

**Visibility of writes.** Threads and the copy engine access memory through different proxies, and neither sees the
other's pending writes. `signal` waits until the engine's writes have arrived (not only been read from shared memory),
orders the two proxies with a fence, synchronises the threads of the warpgroup, then releases. `wait` acquires, then
fences again before the engine is told to load. This covers dA' (stored by the engine or, at an expert's end, by
threads; loaded by the engine), dh and s·a (stored by threads, loaded by the engine or by threads) and dx (stored by
either, copied to shared memory by threads).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from amoeba.kernels.hopper.tma import reinterpret
from amoeba.kernels.launch import quick
from amoeba.tasks.hopper.producer import produce
from amoeba.tasks.hopper.products import multiply, pass_over, sum_tile
from amoeba.tasks.hopper.queue import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    ONE,
    ROOM,
    STAGES,
    STOP,
    TASKS,
    is_there,
    receive,
    send_half,
    signal,
)
from amoeba.tasks.hopper.row_passes import activate, combine
from amoeba.tasks.triton.tickets import (
    ACTIVATE,
    COMBINE,
    DOWN,
    DOWN_WEIGHTS,
    SEND,
    UP,
    UP_WEIGHTS,
    note_task,
    now,
)


@gluon.jit
def _consume(
    descriptors, results, sources, counters, queue, ring, staging, peers, trace, tokens, rows, intermediate,
    bundle, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each task."""
    da_desc, dx_desc, d_down_desc, d_gate_up_desc = descriptors
    da, dh, ds, d_x, d_weight, d_down, d_gate_up = results
    dx = da + rows.to(gl.int64) * PLAN.I
    weight, order, slot_row = sources
    _, _, _, da_bufs, h_bufs, token_bufs, full, empty = ring
    buffers, all_scales = staging
    scales = all_scales.index(WARPGROUP)
    count = 0
    taken = 0
    pending = -1
    next_task = receive(queue, taken)
    ahead = True  # the next task is taken already
    working = True
    while working:
        if trace is not None:
            came = now(trace, False)
        if not ahead:
            if not is_there(queue, taken):
                signal(pending, counters, PLAN)
                pending = -1
            next_task = receive(queue, taken)
        kind, item, part, expert, row, end, ticket = next_task
        ahead = False
        taken += 1
        if trace is not None:
            started = now(trace, False)
        if (kind == DOWN) | (kind == UP):
            depth = gl.where(kind == DOWN, PLAN.H, PLAN.J)
            if PLAN.SMALL * WARPGROUP == 1:  # whose half of the row tile may be empty
                if row + 64 < end:
                    count, ahead, next_task = multiply(
                        next_task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending,
                        depth, WARPGROUP, PLAN,
                    )  # fmt: skip
                else:
                    signal(pending, counters, PLAN)
                    count = pass_over(full, empty, count, depth)
            else:
                count, ahead, next_task = multiply(
                    next_task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending, depth,
                    WARPGROUP, PLAN,
                )  # fmt: skip
            pending = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + PLAN.EXPERTS
        elif (kind == DOWN_WEIGHTS) | (kind == UP_WEIGHTS):
            gradients = (d_down, d_gate_up, d_down_desc, d_gate_up_desc)
            if PLAN.BUNDLED:
                tiles = gl.where(kind == DOWN_WEIGHTS, PLAN.DOWN_TILES, PLAN.UP_TILES)
                stop = gl.minimum((part + 1) * bundle, tiles)
                task = next_task
                for tile in range(part * bundle, stop):
                    count, ahead, next_task = sum_tile(
                        task, next_task, tile, tile + 1 == stop, gradients, buffers, counters, queue, ring, count,
                        taken, pending, WARPGROUP, PLAN,
                    )  # fmt: skip
                    pending = -1
            else:
                count, ahead, next_task = sum_tile(
                    next_task, next_task, part, True, gradients, buffers, counters, queue, ring, count, taken, pending,
                    WARPGROUP, PLAN,
                )  # fmt: skip
            pending = -1
        elif kind == ACTIVATE:
            count = activate(
                da, dh, ds, weight, order, counters, pending, da_bufs, h_bufs, scales, full, empty, count, row,
                end, intermediate, WARPGROUP, PLAN,
            )  # fmt: skip
            pending = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + expert
        elif kind == COMBINE:
            count = combine(
                item, ds, slot_row, d_x, d_weight, peers, counters, pending, token_bufs, full, empty, count,
                tokens, rows, WARPGROUP, PLAN,
            )  # fmt: skip
            pending = -1
        elif PLAN.RANKS > 1:  # noqa: SIM102 - known when it is compiled, unlike the next
            if kind == SEND:
                signal(pending, counters, PLAN)
                pending = -1
                send_half(peers, item, part, da, WARPGROUP, PLAN)
        working = kind != STOP
        if trace is not None and WARPGROUP == 0:  # noqa: SIM102 - known when it is compiled, unlike the next
            if working:
                note_task(trace, ticket, kind, item, part, came, started, False)
    signal(pending, counters, PLAN)
    tma.store_wait(0)


@quick
@gluon.jit(do_not_specialize=["tokens", "rows", "wave", "late", "behind", "bundle"])
def backward_kernel(
    down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc, da_desc, dx_desc,
    d_down_desc, d_gate_up_desc, dy, x, expert_TK, weight, da, dh, ds, d_x, d_weight, d_gate_up, d_down, order,
    slot_row, offs_E, heaviest_E, records, counters, peers, trace, tokens, rows, intermediate, wave, late, behind,
    bundle, PLAN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = da.dtype.element_ty
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rowwise: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], PLAN.ROW_LAYOUT)
    left_bufs = reinterpret(row_bufs, dtype, [STAGES * 2, 64, 64], PLAN.LEFT_LAYOUT)
    buffers = gl.allocate_shared_memory(dtype, [4, 64, 64], PLAN.OUT_LAYOUT)  # two of each warpgroup, which take turns
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], PLAN.MATRIX_LAYOUT)
    da_bufs = reinterpret(row_bufs, dtype, [STAGES, PLAN.LINES, PLAN.BLOCK], PLAN.LINES_LAYOUT)
    h_bufs = reinterpret(matrix_bufs, dtype, [STAGES * 2, PLAN.LINES, PLAN.BLOCK], PLAN.LINES_LAYOUT)
    token_bufs = reinterpret(matrix_bufs, dtype, [STAGES, BLOCK_K, BLOCK_N], rowwise)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    tasks = gl.allocate_shared_memory(gl.int32, [TASKS, ROOM], plain)
    scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], plain)
    pushed = gl.allocate_shared_memory(gl.int32, [128], plain)
    task_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], barriers)
    task_empty = gl.allocate_shared_memory(gl.int64, [TASKS, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # the copy engine, and 128 threads of the producer
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    for i in gl.static_range(TASKS):
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(task_empty.index(i), count=2)
    pushed.store(gl.full([128], 0, gl.int32, ONE))
    ring = (row_bufs, matrix_bufs, left_bufs, da_bufs, h_bufs, token_bufs, full, empty)
    queue = (tasks, pushed, task_full, task_empty)
    staging = (buffers, scales)
    stores = (da_desc, dx_desc, d_down_desc, d_gate_up_desc)
    loads = (down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc)
    results = (da, dh, ds, d_x, d_weight, d_down, d_gate_up)
    maps = (order, slot_row, offs_E, heaviest_E, records)
    gl.warp_specialize(
        [
            (_consume, (
                stores, results, (weight, order, slot_row), counters, queue, ring, staging, peers, trace, tokens, rows,
                intermediate, bundle, gl.constexpr(0), PLAN,
            )),
            (_consume, (
                stores, results, (weight, order, slot_row), counters, queue, ring, staging, peers, trace, tokens, rows,
                intermediate, bundle, gl.constexpr(1), PLAN,
            )),
            (produce, (
                loads, (dy, x, da, dh, expert_TK), maps, counters, queue, ring, peers, tokens, rows, intermediate,
                (wave, late, behind, bundle), PLAN,
            )),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip
