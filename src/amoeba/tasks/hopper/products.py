"""The products of the kernel for Hopper: a task's tiles of dA', of dx and of weights' gradients, and their stages.

See `amoeba.tasks.hopper.kernel`. The tiles are the functions of the kernels that do nothing else. The row passes, also
from the ring of stages, are the activation's backward and the sums over tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma_wait

from amoeba.kernels.activation import gated_backward
from amoeba.kernels.expert_sums import DOT_COLUMNS as _DOT_COLUMNS
from amoeba.kernels.expert_sums import dot_by_lanes, sum_of_chunks
from amoeba.kernels.hopper.epilogue import column_parts, row_scale, scaled_to_fp16, store_row_scale, store_tile
from amoeba.kernels.hopper.gemm_kernel import multiply_stage
from amoeba.kernels.hopper.tma import barrier, bulk_load, gather, reinterpret
from amoeba.kernels.hopper.wgrad import fill_gradient, store_gradient, sum_stage
from amoeba.kernels.tiles import grouped_order
from amoeba.tasks.hopper.queue import BLOCK_K, BLOCK_M, BLOCK_N, ONE, STAGE_BYTES, STAGES, is_there, receive, signal
from amoeba.tasks.triton.arrivals import COMES, numbers_at, room_for_sums
from amoeba.tasks.triton.bias_tasks import D_DOWN, D_GATE_UP
from amoeba.tasks.triton.bias_tasks import DOWN_BIAS as DOWN_BIAS_AT
from amoeba.tasks.triton.tickets import DOWN, DOWN_BIAS, DOWN_WEIGHTS

# A warpgroup signals a finished task once this many stages of its next product have started: a release takes more than
# half a microsecond, in which the matrix unit has enough to do. The second one later, so that one of the two
# multiplies.
SIGNAL_AT, SIGNAL_LATER = gl.constexpr(2), gl.constexpr(2)
# Rows whose products with a bias are summed up together, and rows of a bias's gradient that are on their way together.
DOT_ROWS, BIAS_ROWS = gl.constexpr(32), gl.constexpr(16)
DOT_COLUMNS = gl.constexpr(_DOT_COLUMNS)


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
    task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending, depth, rows,
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
    first_row = row + WARPGROUP * 64
    if kind == DOWN:
        for half in gl.static_range(2):  # of which a row has one scale
            left, right = quarters[2 * half], quarters[2 * half + 1]
            column = part * 256 + half * 128
            if PLAN.SCALED:
                scale, inverse = row_scale(gl.max(gl.maximum(gl.abs(left), gl.abs(right)), axis=1))
                store_row_scale(scales_behind(dx, rows, PLAN), inverse, PLAN.SCALES, first_row, end, column // 128)
                left, right = scaled_to_fp16(left, scale), scaled_to_fp16(right, scale)
            buffer = buffers.index(WARPGROUP * 2)
            store_tile(left, da, da_desc, buffer, PLAN.I, first_row, end, column, PLAN.I, 0, 1)
            buffer = buffers.index(WARPGROUP * 2 + 1)
            store_tile(right, da, da_desc, buffer, PLAN.I, first_row, end, column + 64, PLAN.I, 0, 1)
    else:
        for quarter in gl.static_range(4):
            column = part * 256 + quarter * 64
            buffer = buffers.index(WARPGROUP * 2 + quarter % 2)
            store_tile(quarters[quarter], dx, dx_desc, buffer, PLAN.H, first_row, end, column, PLAN.H, 0, 1)
    return count, ahead, next_task


@gluon.jit
def scales_behind(dx, rows, PLAN: gl.constexpr):
    """Of dA' in fp16: behind the rows of dx, so that there is no pointer more in registers."""
    return (dx + rows.to(gl.int64) * PLAN.H).to(gl.pointer_type(gl.float32))


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


@gluon.jit
def fill_lines(da_desc, h_desc, da_bufs, h_bufs, full, empty, count, row, end, intermediate, PLAN: gl.constexpr):
    """dA', gate and up of a row tile. Lines after the last row are another expert's and are not read.

    intermediate: PLAN.I, which would have the loop unrolled, and more in registers than there is room for.
    """
    for line in range(row, gl.minimum(end, row + BLOCK_M), PLAN.LINES):
        for column in range(0, intermediate, PLAN.BLOCK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, STAGE_BYTES)
            bulk_load(da_desc, [line, column], bar, da_bufs.index(stage))
            bulk_load(h_desc, [line, column], bar, h_bufs.index(stage * 2))
            bulk_load(h_desc, [line, column + PLAN.I], bar, h_bufs.index(stage * 2 + 1))
            async_copy.mbarrier_arrive(bar, increment_count=False)  # with the threads, though they copy nothing
            count += 1
    return count


@gluon.jit
def activate(
    da, dx, dh, ds, weight, order, counters, pending, da_bufs, h_bufs, scales, full, empty, count, row, end, rows,
    intermediate, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dh, s·a and ds of this warpgroup's lines, half of each stage. Sums as `_activate_backward` makes them."""
    # All rows' weights at once: one by one each would be waited for. They are on their way while the last task is told.
    own_row = row + gl.arange(0, BLOCK_M, ONE)
    slot = gl.load(order + own_row, mask=own_row < end, other=0)
    own_scale = gl.load(weight + slot, mask=own_row < end, other=0.0)
    signal(pending, counters, PLAN)
    scales.store(own_scale.to(gl.float32))
    scale_bufs = reinterpret(scales, gl.float32, [BLOCK_M // PLAN.OWN_LINES, PLAN.OWN_LINES], scales.layout)
    barrier()
    FIRST: gl.constexpr = WARPGROUP * PLAN.OWN_LINES
    for line in range(row, gl.minimum(end, row + BLOCK_M), PLAN.LINES):
        scale_buf = scale_bufs.index((line - row) // PLAN.OWN_LINES + WARPGROUP)
        count = _activate_lines(
            da, dx, dh, ds, da_bufs, h_bufs, scale_buf, full, empty, count, line + FIRST, end, rows, intermediate,
            FIRST, WARPGROUP, PLAN,
        )  # fmt: skip
    return count


@gluon.jit
def _activate_lines(
    da, dx, dh, ds, da_bufs, h_bufs, scale_buf, full, empty, count, row, end, rows, intermediate,
    FIRST: gl.constexpr, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Of the stages' lines those from FIRST on."""
    layout: gl.constexpr = PLAN.LINE_LAYOUT
    dtype: gl.constexpr = da.dtype.element_ty
    n = row + gl.arange(0, PLAN.OWN_LINES, gl.SliceLayout(1, layout))
    c = gl.arange(0, PLAN.BLOCK, gl.SliceLayout(0, layout))
    own = n < end
    scale = scale_buf.load(gl.SliceLayout(1, layout))[:, None]
    n_64 = n.to(gl.int64)[:, None]
    dot = gl.zeros((PLAN.OWN_LINES, PLAN.BLOCK), gl.float32, layout)
    if PLAN.SCALED:  # those of the next columns are on their way while these are computed
        scales_of_da = scales_behind(dx, rows, PLAN) + n.to(gl.int64) * PLAN.SCALES
        next_scale = gl.load(scales_of_da, mask=own, other=0.0)
    for first_column in range(0, intermediate, PLAN.BLOCK):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        d = da_bufs.index(stage).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        gate = h_bufs.index(stage * 2).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        up = h_bufs.index(stage * 2 + 1).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
        column = (first_column + c)[None, :]
        inside = own[:, None]
        if PLAN.I % PLAN.BLOCK != 0:  # what a line's sum must not have in it; other lines may hold anything
            inside = inside & (column < PLAN.I)
            zero = gl.zeros_like(d)
            d = gl.where(column < PLAN.I, d, zero)
            gate = gl.where(column < PLAN.I, gate, zero)
            up = gl.where(column < PLAN.I, up, zero)
        if PLAN.SCALED:
            d = d.to(gl.float16, bitcast=True).to(gl.float32) * next_scale[:, None]
            following = first_column + PLAN.BLOCK
            next_scale = gl.load(scales_of_da + following // 128, mask=own & (following < intermediate), other=0.0)
        else:
            d = d.to(gl.float32)
        gate = gate.to(gl.float32)
        up = up.to(gl.float32)
        a, dgate, dup = gated_backward(scale * d, gate, up, PLAN)
        dh_at = dh + n_64 * PLAN.J + column
        gl.store(dh_at, dgate.to(dtype), mask=inside)
        gl.store(dh_at + PLAN.I, dup.to(dtype), mask=inside)
        dot += d * a
        gl.store(da + n_64 * PLAN.I + column, (scale * a).to(dtype), mask=inside)
    gl.store(ds + n, gl.sum(dot, axis=1), mask=own)
    return count


@gluon.jit
def add_bias_dots(biases, dy, ds, order, expert, row, end, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """To ds of this warpgroup's lines, <dy, down_bias>. Sums as `bias_dot` makes them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, lanes)
    column = gl.arange(0, DOT_COLUMNS, gl.SliceLayout(0, layout))
    bias = numbers_at(biases, DOWN_BIAS_AT, dy.dtype.element_ty) + expert.to(gl.int64) * PLAN.H
    barrier()  # ds of all lines is there
    for first in range(0, BLOCK_M // 2, DOT_ROWS):
        n = _own_line(row, first + gl.arange(0, DOT_ROWS, gl.SliceLayout(1, layout)), WARPGROUP, PLAN)
        valid = n < end
        token = (gl.load(order + n, mask=valid, other=0) // PLAN.TOP_K).to(gl.int64)
        total = gl.zeros((DOT_ROWS, DOT_COLUMNS), gl.float32, layout)
        total = dot_by_lanes(bias, dy + token * PLAN.H, valid, column, total, PLAN.H)
        dot = gl.sum(gl.convert_layout(total, lanes), axis=1)  # lane 0 and 16, 1 and 17, ...: as `sum_of_lanes`
        n = _own_line(row, first + gl.arange(0, DOT_ROWS, of_row), WARPGROUP, PLAN)
        gl.store(ds + n, gl.load(ds + n, mask=n < end, other=0.0) + dot, mask=n < end)


@gluon.jit
def _own_line(row, index, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The row of a warpgroup's index-th line of a row tile."""
    stage = index // PLAN.OWN_LINES
    return row + stage * PLAN.LINES + WARPGROUP * PLAN.OWN_LINES + index % PLAN.OWN_LINES


@gluon.jit
def sum_bias(biases, kind, expert, part, row, end, dy, dh, order, weight, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """DOWN_BIAS or UP_BIAS, this warpgroup's half of the columns."""
    HALF: gl.constexpr = PLAN.BIAS_COLUMNS // 2
    layout: gl.constexpr = gl.BlockedLayout([HALF // 128], [32], [4], [0])
    column = part * PLAN.BIAS_COLUMNS + WARPGROUP * HALF + gl.arange(0, HALF, layout)
    dtype: gl.constexpr = dy.dtype.element_ty
    if kind == DOWN_BIAS:
        if PLAN.DOWN_BIAS:
            total = sum_of_chunks(
                row, end, column, dy, order, weight, PLAN.H, PLAN.H, PLAN.TOP_K, True, True, PLAN.BIAS_CHUNK, BIAS_ROWS
            )
            out = numbers_at(biases, D_DOWN, dtype) + expert.to(gl.int64) * PLAN.H + column
            gl.store(out, total.to(dtype), mask=column < PLAN.H)
    elif PLAN.UP_BIAS:
        total = sum_of_chunks(
            row, end, column, dh, order, weight, PLAN.J, PLAN.J, PLAN.TOP_K, False, False, PLAN.BIAS_CHUNK, BIAS_ROWS
        )
        out = numbers_at(biases, D_GATE_UP, dtype) + expert.to(gl.int64) * PLAN.J + column
        gl.store(out, total.to(dtype), mask=column < PLAN.J)


@gluon.jit
def fill_tokens(block, dx, slot_row, token_bufs, full, empty, count, tokens, rows, PLAN: gl.constexpr):
    """Of a block of tokens the rows of dx, a few tokens and 256 columns a stage: their first slots' rows, their
    second slots', and so on; zeros for a slot without a row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    at = gl.arange(0, PLAN.STAGED_ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    first_token = block.to(gl.int64) * PLAN.TOKENS
    for group in range(0, PLAN.TOKENS, PLAN.TOGETHER):
        token = first_token + group + at % PLAN.TOGETHER
        k = at // PLAN.TOGETHER
        row = gl.load(slot_row + token * PLAN.TOP_K + k, mask=(token < tokens) & (k < PLAN.TOP_K), other=rows)
        owned = (row < rows)[:, None]
        pointers = dx + row.to(gl.int64)[:, None] * PLAN.H + c[None, :]
        for column in range(0, PLAN.H, BLOCK_N):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.arrive(bar, count=1)  # in place of the copy engine
            buffer = token_bufs.index(stage).slice(0, PLAN.STAGED_ROWS, 0)
            if PLAN.H % BLOCK_N == 0:
                gather(buffer, pointers, mask=owned)
            else:
                gather(buffer, pointers, mask=owned & (column + c < PLAN.H)[None, :])
            async_copy.mbarrier_arrive(bar, increment_count=False)
            pointers += BLOCK_N
            count += 1
    return count


@gluon.jit
def combine(
    block, ds, slot_row, d_x, d_weight, peers, counters, pending, token_bufs, full, empty, count, tokens, rows,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """d_x of a block of tokens, this warpgroup's half of each stage's columns; d_weight of its half of the tokens."""
    HALF: gl.constexpr = PLAN.TOKENS // 2
    lane = gl.arange(0, PLAN.HALF_SLOTS, ONE)
    slot = (block.to(gl.int64) * PLAN.TOKENS + WARPGROUP * HALF) * PLAN.TOP_K + lane
    inside = (lane < HALF * PLAN.TOP_K) & (slot < tokens * PLAN.TOP_K)
    of_slot = gl.load(slot_row + slot, mask=inside, other=rows)
    signal(pending, counters, PLAN)
    gradient = gl.load(ds + of_slot, mask=of_slot < rows, other=0.0)

    COLUMNS: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = PLAN.SUM_LAYOUT
    c = WARPGROUP * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    sums = d_x
    if PLAN.RANKS > 1:  # straight to the rank whose tokens they are
        address = room_for_sums(peers, block, d_x, PLAN.TOKENS, PLAN.H)
        sums = gl.multiple_of(address.to(gl.pointer_type(d_x.dtype.element_ty)), 16)
        comes = numbers_at(peers, COMES, gl.uint8)
    for group in range(0, PLAN.TOKENS, PLAN.TOGETHER):
        token = block.to(gl.int64) * PLAN.TOKENS + group + gl.arange(0, PLAN.TOGETHER, gl.SliceLayout(1, layout))
        mine = (token < tokens)[:, None]
        if PLAN.RANKS > 1:
            mine = mine & (gl.load(comes + token, mask=token < tokens, other=0) != 0)[:, None]
        out = sums + token[:, None] * PLAN.H + c[None, :]
        for column in range(0, PLAN.H, BLOCK_N):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            buffer = token_bufs.index(stage)
            total = gl.zeros((PLAN.TOGETHER, COLUMNS), gl.float32, layout)
            for k in gl.static_range(PLAN.TOP_K):
                of_slots = buffer.slice(k * PLAN.TOGETHER, PLAN.TOGETHER, 0).slice(WARPGROUP * COLUMNS, COLUMNS, 1)
                total += of_slots.load(layout).to(gl.float32)
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
            within = mine & (column + c < PLAN.H)[None, :]
            gl.store(out + column, total.to(d_x.dtype.element_ty), mask=within)
    gl.store(d_weight + slot, gradient.to(d_weight.dtype.element_ty), mask=inside)
    return count
