"""Tiles of products and gradients whose sums leave all at once, by one code for all kinds.

See `amoeba.tasks.hopper_kernel`. A warpgroup's sums are 32 KB, its two buffers 16: so the second half of them waits
for the copy engine to read the first, and nothing is multiplied meanwhile. Here that half goes where the warpgroup's
own rows of the tile's last two stages were, which nobody else reads; these are given back when the next tile's first
product is under way and the engine has read them: `held`. The other two stages of the ring have that tile's beginning.

Kinds differ in where a block of 64 x 64 sums goes, in its descriptor and in whether it is turned; not in the code.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from amoeba.kernels.hopper.descriptor import barrier, bulk_store
from amoeba.kernels.hopper.product_store import column_parts
from amoeba.kernels.tiles import grouped_order
from amoeba.tasks.clock import note_task, now
from amoeba.tasks.decoder import ACTIVATE, COMBINE, DOWN, DOWN_WEIGHTS, UP, UP_WEIGHTS
from amoeba.tasks.hopper_queue import BLOCK_K, BLOCK_M, BLOCK_N, STAGES, STOP, is_there, take, tell
from amoeba.tasks.hopper_row_passes import activate, combine
from amoeba.tasks.hopper_tiles import TELL_AT, TELL_LATER, pass_over


@gluon.jit
def settle(held, empty, count):
    """The engine has read all sums; stages where they lay are given back. count: of stages before this tile."""
    tma.store_wait(0)
    barrier()
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=held)
    mbarrier.arrive(empty.index((count + STAGES - 2) % STAGES), count=1, pred=held)


@gluon.jit
def _end_of_sums(acc, next_task, last, queue, taken):
    """While the last stage is multiplied the next task is taken, if it is there."""
    ahead = last & is_there(queue, taken)
    if ahead:
        next_task = take(queue, taken)
    return warpgroup_mma_wait(0, deps=(acc,)), ahead, next_task


@gluon.jit
def consume_held(
    descriptors, results, sources, counters, queue, ring, staging, trace, tokens, rows, intermediate, bundle,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each task, on one rank."""
    da, dh, ds, d_x, d_weight, d_down, d_gate_up = results
    tiled = (da, da + rows.to(gl.int64) * PLAN.DX_AT, d_down, d_gate_up)
    weight, order, slot_row = sources
    _, _, _, da_bufs, h_bufs, token_bufs, full, empty = ring
    _, all_scales = staging
    scales = all_scales.index(WARPGROUP)
    count = 0
    taken = 0
    untold = -1
    held = False
    next_task = take(queue, taken)
    ahead = True  # the next task is taken already
    working = True
    while working:
        if trace is not None:
            came = now(trace, False)
        if not ahead:
            if not is_there(queue, taken):
                tell(untold, counters, PLAN)
                untold = -1
            next_task = take(queue, taken)
        kind, item, part, expert, row, end, ticket = next_task
        ahead = False
        taken += 1
        if trace is not None:
            started = now(trace, False)
        if kind == ACTIVATE:
            settle(held, empty, count)
            held = False
            count = activate(
                da, dh, ds, weight, order, counters, untold, da_bufs, h_bufs, scales, full, empty, count, row,
                end, intermediate, WARPGROUP, PLAN,
            )  # fmt: skip
            untold = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + expert
        elif kind == COMBINE:
            settle(held, empty, count)
            held = False
            count = combine(
                item, ds, slot_row, d_x, d_weight, None, counters, untold, token_bufs, full, empty, count,
                tokens, rows, WARPGROUP, PLAN,
            )  # fmt: skip
            untold = -1
        elif kind != STOP:
            of_rows = (kind == DOWN) | (kind == UP)
            idle = kind == STOP
            if PLAN.HALVES * WARPGROUP == 1:
                idle = of_rows & (row + 64 >= end)
            if idle:
                settle(held, empty, count)
                held = False
                tell(untold, counters, PLAN)
                count = pass_over(full, empty, count, gl.where(kind == DOWN, PLAN.H, PLAN.J))
            else:
                count, ahead, next_task, held = compute_tiles(
                    next_task, tiled, descriptors, counters, queue, ring, count, taken, untold, held, bundle,
                    WARPGROUP, PLAN,
                )  # fmt: skip
            untold = -1
            if of_rows:
                untold = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + PLAN.EXPERTS
            if PLAN.IN_PLACE:  # noqa: SIM102 - known when it is compiled, unlike the next
                if kind == DOWN_WEIGHTS:
                    untold = (1 + PLAN.EXPERTS + item) * (PLAN.EXPERTS + 1) + PLAN.EXPERTS
        working = kind != STOP
        if trace is not None and WARPGROUP == 0:  # noqa: SIM102 - known when it is compiled, unlike the next
            if working:
                note_task(trace, ticket, kind, item, part, came, started, False)
    tell(untold, counters, PLAN)
    tma.store_wait(0)


@gluon.jit
def compute_tiles(
    task, results, descriptors, counters, queue, ring, count, taken, untold, held, bundle, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """A task's tiles, this warpgroup's half. Returns also whether the next task was taken, that, and `held`."""
    kind, _, part, _, _, _, _ = task
    first = part
    stop = part + 1
    if PLAN.BUNDLED:  # noqa: SIM102 - known when it is compiled, unlike the next
        if (kind == DOWN_WEIGHTS) | (kind == UP_WEIGHTS):
            first = part * bundle
            stop = gl.minimum(first + bundle, gl.where(kind == DOWN_WEIGHTS, PLAN.DOWN_TILES, PLAN.UP_TILES))
    next_task = task
    ahead = stop < 0
    for tile in range(first, stop):
        count, ahead, next_task = _compute_tile(
            task, next_task, tile, tile + 1 == stop, results, descriptors, counters, queue, ring, count, taken, untold,
            held, WARPGROUP, PLAN,
        )  # fmt: skip
        held = _stages_of(task, PLAN) > 1
        untold = -1
    return count, ahead, next_task, held


@gluon.jit
def _stages_of(task, PLAN: gl.constexpr):
    kind, _, _, _, row, end, _ = task
    of_rows = (kind == DOWN) | (kind == UP)
    depth = gl.where(kind == DOWN, PLAN.H, PLAN.J)
    return gl.cdiv(gl.where(of_rows, depth, end - row), BLOCK_K)


@gluon.jit
def _compute_stage(
    acc, left_bufs, matrix_bufs, full, empty, count, i, stages, TURNED: gl.constexpr, WARPGROUP: gl.constexpr
):
    """The i-th of a tile, begun: `multiply_stage`, or, turned, `sum_stage`; but the last two are not given back."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    fence_async_shared()  # threads may have written the rows, the matrix unit reads them as another party
    left = left_bufs.index(stage * 2 + WARPGROUP)
    if TURNED:
        acc = warpgroup_mma(left.permute((1, 0)), matrix_bufs.index(stage), acc, is_async=True)
    else:
        acc = warpgroup_mma(left, matrix_bufs.index(stage), acc, use_acc=i > 0, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    give_back = (i > 0) & (i + 1 < stages)
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=give_back)
    return acc


@gluon.jit
def _compute_tile(
    task, next_task, tile, last, results, descriptors, counters, queue, ring, count, taken, untold, held,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    kind, _, _, _, _, _, _ = task
    _, matrix_bufs, left_bufs, _, _, _, full, empty = ring
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = gl.zeros((64, 256), gl.float32, mma)  # what an expert without rows gets
    stages = _stages_of(task, PLAN)
    tell_at = gl.minimum(TELL_AT + TELL_LATER * WARPGROUP, stages - 1)
    of_rows = (kind == DOWN) | (kind == UP)
    if of_rows:
        for i in range(stages):
            acc = _compute_stage(acc, left_bufs, matrix_bufs, full, empty, count, i, stages, False, WARPGROUP)
            if i == 0:
                settle(held, empty, count)
            count += 1
            if i == tell_at:
                tell(untold, counters, PLAN)
        acc, ahead, next_task = _end_of_sums(acc, next_task, last, queue, taken)
    else:
        for i in range(stages):
            acc = _compute_stage(acc, left_bufs, matrix_bufs, full, empty, count, i, stages, True, WARPGROUP)
            if i == 0:
                settle(held, empty, count)
            count += 1
            if i == tell_at:
                tell(untold, counters, PLAN)
        acc, ahead, next_task = _end_of_sums(acc, next_task, last, queue, taken)
        if stages == 0:
            settle(held, empty, count)
            tell(untold, counters, PLAN)
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=stages == 1)
    place = _place(task, tile, results, WARPGROUP, PLAN)
    _store_sums(acc, kind, place, descriptors, left_bufs, count, stages > 1, WARPGROUP, PLAN)
    return count, ahead, next_task


@gluon.jit
def _place(task, tile, results, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """Where sums go: tensor, its stride, first row, end of the rows, first column, end of the columns."""
    kind, _, part, expert, row, end, _ = task
    da, dx, d_down, d_gate_up = results
    out = da
    stride = 0 * row + PLAN.DA_STRIDE
    first_row = row + WARPGROUP * 64
    column = part * BLOCK_N
    width = 0 * row + PLAN.I
    if kind == UP:
        out = dx
        stride = 0 * row + PLAN.DX_STRIDE
        width = 0 * row + PLAN.H
    elif kind == DOWN_WEIGHTS:
        h, w = grouped_order(tile, PLAN.H_TILES, PLAN.I_TILES, PLAN.GROUP)
        out = d_down
        stride = 0 * row + PLAN.I
        first_row = expert * PLAN.H + h * BLOCK_M + WARPGROUP * 64
        end = (expert + 1) * PLAN.H
        column = w * BLOCK_N
    elif kind == UP_WEIGHTS:
        h, w = grouped_order(tile, PLAN.H_TILES, PLAN.J_TILES, PLAN.GROUP)
        out = d_gate_up
        stride = 0 * row + PLAN.H
        first_row = expert * PLAN.J + w * BLOCK_N
        end = (expert + 1) * PLAN.J
        column = h * BLOCK_M + WARPGROUP * 64
        width = 0 * row + PLAN.H
    return out, stride, first_row, end, column, width


@gluon.jit
def _store_sums(acc, kind, place, descriptors, bufs, count, deep, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """In quarters: the first two through the warpgroup's own buffers, the others through its rows of the last two
    stages if there are two (deep), else through the same buffers when they have been read."""
    out, stride, row, end, column, width = place
    dtype: gl.constexpr = out.dtype.element_ty
    turned = kind == UP_WEIGHTS
    down_rows = gl.where(turned, 64, 0)  # from one quarter to the next
    OWN: gl.constexpr = 2 * STAGES + 2 * WARPGROUP
    quarters = column_parts(acc, 4)
    for half in gl.static_range(2):
        if half == 1:
            if not deep:
                tma.store_wait(0)
                barrier()
            left = gl.where(deep, (count + STAGES - 1) % STAGES * 2 + WARPGROUP, OWN)
            right = gl.where(deep, (count + STAGES - 2) % STAGES * 2 + WARPGROUP, OWN + 1)
        else:
            left = OWN
            right = OWN + 1
        left_buf = bufs.index(left)
        right_buf = bufs.index(right)
        if turned:
            left_buf.permute((1, 0)).store(quarters[2 * half].to(dtype))
            right_buf.permute((1, 0)).store(quarters[2 * half + 1].to(dtype))
        else:
            left_buf.store(quarters[2 * half].to(dtype))
            right_buf.store(quarters[2 * half + 1].to(dtype))
        left_row = row + 2 * half * down_rows
        left_column = column + 2 * half * (64 - down_rows)
        right_row = left_row + down_rows
        right_column = left_column + 64 - down_rows
        if (right_row + 64 <= end) & (right_column + 64 <= width):
            fence_async_shared()
            da_desc, dx_desc, d_down_desc, d_gate_up_desc = descriptors
            if kind == DOWN:
                bulk_store(da_desc, [left_row, left_column], left_buf)
                bulk_store(da_desc, [right_row, right_column], right_buf)
            elif kind == UP:
                bulk_store(dx_desc, [left_row, left_column], left_buf)
                bulk_store(dx_desc, [right_row, right_column], right_buf)
            elif kind == DOWN_WEIGHTS:
                bulk_store(d_down_desc, [left_row, left_column], left_buf)
                bulk_store(d_down_desc, [right_row, right_column], right_buf)
            else:
                bulk_store(d_gate_up_desc, [left_row, left_column], left_buf)
                bulk_store(d_gate_up_desc, [right_row, right_column], right_buf)
        else:
            _store_within(out, stride, left_buf, left_row, end, left_column, width)
            _store_within(out, stride, right_buf, right_row, end, right_column, width)


@gluon.jit
def _store_within(out, stride, buffer, row, end, column, width):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = column + gl.arange(0, 64, gl.SliceLayout(0, layout))
    pointers = out + m.to(gl.int64)[:, None] * stride + n[None, :]
    gl.store(pointers, buffer.load(layout), mask=(m < end)[:, None] & (n < width)[None, :])
