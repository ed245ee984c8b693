"""The row passes of the kernel for Hopper: the activation's backward from the ring of stages, and the sums over tokens.

See `amoeba.tasks.hopper_kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from amoeba.kernels.activation import gated_backward
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, reinterpret
from amoeba.tasks.hopper_queue import BLOCK_M, ONE, STAGE_BYTES, STAGES


@gluon.jit
def fill_lines(da_desc, h_desc, da_bufs, h_bufs, full, empty, count, row, end, intermediate, PLAN: gl.constexpr):
    """dA', gate and up of a row tile. Lines behind the last row are another expert's: nobody looks at them.

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
    da, dh, ds, weight, order, da_bufs, h_bufs, scales, full, empty, count, row, end, intermediate,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dh, s·a and ds of this warpgroup's lines: half of each stage, or every second stage where a half would be half a
    pattern of the shared memory's layout. Sums as `_activate_backward` makes them."""
    # All rows' weights at once: one by one each would be waited for.
    own_row = row + gl.arange(0, BLOCK_M, ONE)
    slot = gl.load(order + own_row, mask=own_row < end, other=0)
    scales.store(gl.load(weight + slot, mask=own_row < end, other=0.0).to(gl.float32))
    scale_bufs = reinterpret(scales, gl.float32, [BLOCK_M // PLAN.OWN_LINES, PLAN.OWN_LINES], scales.layout)
    barrier()
    for line in range(row, gl.minimum(end, row + BLOCK_M), PLAN.LINES):
        if PLAN.OWN_LINES < PLAN.LINES:
            first: gl.constexpr = WARPGROUP * PLAN.OWN_LINES
            scale_buf = scale_bufs.index((line - row) // PLAN.OWN_LINES + WARPGROUP)
            count = _activate_lines(
                da, dh, ds, da_bufs, h_bufs, scale_buf, full, empty, count, line + first, end, intermediate, first, PLAN
            )
        elif (line - row) // PLAN.LINES % 2 == WARPGROUP:
            scale_buf = scale_bufs.index((line - row) // PLAN.LINES)
            count = _activate_lines(
                da, dh, ds, da_bufs, h_bufs, scale_buf, full, empty, count, line, end, intermediate, 0, PLAN
            )
        else:  # the other's: given back when it is there, or this one would be two rounds ahead
            for _ in range(0, intermediate, PLAN.BLOCK):
                mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(count % STAGES), count=1)
                count += 1
    return count


@gluon.jit
def _activate_lines(
    da, dh, ds, da_bufs, h_bufs, scale_buf, full, empty, count, row, end, intermediate, FIRST: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Of the stages' lines those from FIRST on."""
    layout: gl.constexpr = PLAN.LINE_LAYOUT
    FEW: gl.constexpr = PLAN.OWN_LINES < PLAN.LINES
    dtype: gl.constexpr = da.dtype.element_ty
    n = row + gl.arange(0, PLAN.OWN_LINES, gl.SliceLayout(1, layout))
    c = gl.arange(0, PLAN.BLOCK, gl.SliceLayout(0, layout))
    own = n < end
    scale = scale_buf.load(gl.SliceLayout(1, layout))[:, None]
    n_64 = n.to(gl.int64)[:, None]
    dot = gl.zeros((PLAN.OWN_LINES, PLAN.BLOCK), gl.float32, layout)
    for first_column in range(0, intermediate, PLAN.BLOCK):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        d = da_bufs.index(stage).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        gate = h_bufs.index(stage * 2).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        up = h_bufs.index(stage * 2 + 1).slice(FIRST, PLAN.OWN_LINES, 0).load(layout)
        if FEW:
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
        d = d.to(gl.float32)
        gate = gate.to(gl.float32)
        up = up.to(gl.float32)
        a, dgate, dup = gated_backward(
            scale * d, gate, up, PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT
        )
        dh_at = dh + n_64 * PLAN.J + column
        gl.store(dh_at, dgate.to(dtype), mask=inside)
        gl.store(dh_at + PLAN.I, dup.to(dtype), mask=inside)
        dot += d * a
        gl.store(da + n_64 * PLAN.I + column, (scale * a).to(dtype), mask=inside)
        if not FEW:
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
    gl.store(ds + n, gl.sum(dot, axis=1), mask=own)
    return count


@gluon.jit
def combine(block, dx, ds, slot_row, d_x, d_weight, tokens, rows, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """d_x and d_weight of this warpgroup's half of a block of tokens."""
    HALF: gl.constexpr = PLAN.TOKENS // 2
    first = block.to(gl.int64) * PLAN.TOKENS + WARPGROUP * HALF
    lane = gl.arange(0, PLAN.HALF_SLOTS, ONE)
    slot = first * PLAN.TOP_K + lane
    inside = (lane < HALF * PLAN.TOP_K) & (slot < tokens * PLAN.TOP_K)
    of_slot = gl.load(slot_row + slot, mask=inside, other=rows)
    gradient = gl.load(ds + of_slot, mask=of_slot < rows, other=0.0)
    gl.store(d_weight + slot, gradient.to(d_weight.dtype.element_ty), mask=inside)

    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    token = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    mine = token < tokens
    sorted_rows = ()  # type: tuple
    for k in gl.static_range(PLAN.TOP_K):
        sorted_rows += (gl.load(slot_row + token * PLAN.TOP_K + k, mask=mine, other=rows),)
    c = gl.arange(0, 256, gl.SliceLayout(0, layout))
    for first_column in range(0, PLAN.H, 256):
        column = (first_column + c)[None, :]
        within = column < PLAN.H
        values = ()  # type: tuple
        total = gl.zeros((HALF, 256), gl.float32, layout)
        for begin in gl.static_range(0, PLAN.TOP_K, PLAN.AT_ONCE):
            for k in gl.static_range(begin, min(begin + PLAN.AT_ONCE, PLAN.TOP_K)):
                at = dx + sorted_rows[k].to(gl.int64)[:, None] * PLAN.H + column
                values += (gl.load(at, mask=(sorted_rows[k] < rows)[:, None] & within, other=0.0),)
            for k in gl.static_range(begin, min(begin + PLAN.AT_ONCE, PLAN.TOP_K)):
                total += values[k].to(gl.float32)
        gl.store(d_x + token[:, None] * PLAN.H + column, total.to(d_x.dtype.element_ty), mask=mine[:, None] & within)
