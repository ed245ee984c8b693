"""The products of the kernel for Hopper: a task's tiles of dA', of dx and of weights' gradients, and their stages.

See `amoeba.tasks.hopper.kernel`. The tiles are the functions of the kernels that do nothing else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from amoeba.kernels.hopper.epilogue import column_parts, store_tile
from amoeba.kernels.hopper.gemm_kernel import multiply_stage
from amoeba.kernels.hopper.wgrad import fill_gradient, store_gradient, sum_stage
from amoeba.kernels.tiles import grouped_order
from amoeba.tasks.hopper.queue import BLOCK_K, STAGES, is_there, receive, signal
from amoeba.tasks.triton.tickets import DOWN, DOWN_WEIGHTS

# A warpgroup signals a finished task once this many stages of its next product have started: a release takes more than
# half a microsecond, in which the matrix unit has enough to do. The second one later, so that one of the two
# multiplies.
SIGNAL_AT, SIGNAL_LATER = gl.constexpr(2), gl.constexpr(2)


@gluon.jit
def fill_gradients(
    sources, ring, count, part, row, end, bundle, WIDTH: gl.constexpr, STRIDE: gl.constexpr,
    WIDTH_TILES: gl.constexpr, TILES: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The stages of a task's tiles of a weight's gradient. sources, ring: as for `fill_gradient`."""
    strides = (PLAN.H, STRIDE)
    if PLAN.BUNDLED:
        for tile in range(part * bundle, gl.minimum((part + 1) * bundle, TILES)):
            h, w = grouped_order(tile, PLAN.H_TILES, WIDTH_TILES, PLAN.GROUP)
            count = fill_gradient(sources, ring, count, (h, w, row, end), PLAN.H, WIDTH, strides, PLAN.TOP_K)
    else:
        h, w = grouped_order(part, PLAN.H_TILES, WIDTH_TILES, PLAN.GROUP)
        count = fill_gradient(sources, ring, count, (h, w, row, end), PLAN.H, WIDTH, strides, PLAN.TOP_K)
    return count


@gluon.jit
def multiply(
    task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending, depth,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of dA' or of dx, this warpgroup's rows. Returns also whether the next task was taken, and that."""
    kind, _, part, _, row, end, _ = task
    row_bufs, matrix_bufs, _, _, _, _, full, empty = ring
    stages = (row_bufs, matrix_bufs, full, empty)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = gl.zeros((64, 256), gl.float32, mma)
    signal_at = gl.minimum((SIGNAL_AT + SIGNAL_LATER * WARPGROUP) * BLOCK_K, depth - BLOCK_K)
    for k in range(0, depth, BLOCK_K):
        acc = multiply_stage(acc, stages, count, k > 0, BLOCK_K, WARPGROUP, PLAN)
        count += 1
        if k == signal_at:
            signal(pending, counters, PLAN)
    next_task = task
    ahead = is_there(queue, taken)
    if ahead:  # while the last stage is multiplied
        next_task = receive(queue, taken)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    quarters = column_parts(acc, 4)
    for quarter in gl.static_range(4):
        first_row = row + WARPGROUP * 64
        column = part * 256 + quarter * 64
        buffer = buffers.index(WARPGROUP * 2 + quarter % 2)
        if kind == DOWN:
            store_tile(quarters[quarter], da, da_desc, buffer, PLAN.I, first_row, end, column, PLAN.I, 0, 1)
        else:
            store_tile(quarters[quarter], dx, dx_desc, buffer, PLAN.H, first_row, end, column, PLAN.H, 0, 1)
    return count, ahead, next_task


@gluon.jit
def pass_over(full, empty, count, depth):
    """Stages of a tile in which this warpgroup has no rows: given back as they come."""
    for _ in range(0, depth, BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def sum_tile(
    task, next_task, tile, last, gradients, buffers, counters, queue, ring, count, taken, pending,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of a weight's gradient, this warpgroup's half. last: of its task. Returns as `multiply`."""
    kind, _, _, expert, row, end, _ = task
    d_down, d_gate_up, d_down_desc, d_gate_up_desc = gradients
    _, matrix_bufs, left_bufs, _, _, _, full, empty = ring
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = gl.zeros((64, 256), gl.float32, mma)  # what an expert without rows gets
    signal_at = gl.minimum(row + (SIGNAL_AT + SIGNAL_LATER * WARPGROUP) * BLOCK_K, end - 1)
    for first in range(row, end, BLOCK_K):
        acc = sum_stage(acc, (left_bufs, matrix_bufs, full, empty), count, first > row, WARPGROUP)
        count += 1
        if (first <= signal_at) & (signal_at < first + BLOCK_K):
            signal(pending, counters, PLAN)
    ahead = last & is_there(queue, taken)
    if ahead:
        next_task = receive(queue, taken)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=end > row)
    if end == row:
        signal(pending, counters, PLAN)
    if kind == DOWN_WEIGHTS:
        h, w = grouped_order(tile, PLAN.H_TILES, PLAN.I_TILES, PLAN.GROUP)
        store_gradient(acc, buffers, d_down, d_down_desc, expert, h, w, PLAN.H, PLAN.I, WARPGROUP, False, 2)
    else:
        h, w = grouped_order(tile, PLAN.H_TILES, PLAN.J_TILES, PLAN.GROUP)
        store_gradient(acc, buffers, d_gate_up, d_gate_up_desc, expert, h, w, PLAN.H, PLAN.J, WARPGROUP, True, 2)
    return count, ahead, next_task
