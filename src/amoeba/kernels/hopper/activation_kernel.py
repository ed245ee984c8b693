"""The kernel of `amoeba.kernels.hopper.activation`: one warp feeds a ring of stages, two warpgroups take turns.

Stages, by their number n = 0, 1, ... over all tiles of a program, and what says that they may be used:

    full[n % TURNS]     the copy engine has filled stage n % STAGES. Warpgroup n % 2 waits for it, and since TURNS is
                        even it has waited for this barrier's last phase too: a parity is enough to tell them apart.
                        (By n % STAGES, with three stages, each warpgroup would wait for every second phase only. Ahead
                        of the phase between, it would take the one before that for its own, and begin too early.)
    empty[n % STAGES]   warpgroup n % 2 has done with it: the matrix unit has multiplied, the copy engine has read what
                        it stores, no thread reads. The feeding warp waits for every phase, before it fills n + STAGES.
    thin_full, thin_empty[t % THINS]        the same for the thin rows of tile t, which both warpgroups take
    given, taken        warpgroup 1's sums of tile t are there; warpgroup 0 has them

dh may lie where h lies. A stage's columns are stored after they were read, other stages read other columns; rows behind
an expert's end may be read while another program writes them, and are made zeros before anything is computed.
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

from amoeba.kernels.activation import gated_backward
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, bulk_store, reinterpret
from amoeba.kernels.launch import quick


@gluon.jit
def _place(table, turn):
    """Expert, first row and end of the expert's rows, of a program's turn-th tile."""
    entry = table + 4 + (gl.program_id(0) + turn * gl.num_programs(0)) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _produce(
    da_desc, h_desc, factor_desc, low_desc, down_desc, table, ring, thin, intermediate, PLAN: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free, and ahead of a tile's stages its thin rows."""
    da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty = ring
    low_bufs, down_bufs, thin_full, thin_empty = thin
    tiles = gl.load(table)
    count = 0
    for turn in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        expert, row, _ = _place(table, turn)
        slot = turn % PLAN.THINS
        mbarrier.wait(thin_empty.index(slot), ((turn // PLAN.THINS) & 1) ^ 1)
        bar = thin_full.index(slot)
        mbarrier.expect(bar, PLAN.THIN_BYTES)
        bulk_load(low_desc, [row, 0], bar, low_bufs.index(slot))
        bulk_load(down_desc, [row, 0], bar, down_bufs.index(slot))
        for column in range(0, intermediate, BLOCK):
            stage = count % PLAN.STAGES
            mbarrier.wait(empty.index(stage), ((count // PLAN.STAGES) & 1) ^ 1)
            bar = full.index(count % PLAN.TURNS)
            mbarrier.expect(bar, PLAN.STAGE_BYTES)
            bulk_load(h_desc, [row, column], bar, gate_bufs.index(stage))
            bulk_load(h_desc, [row, column + intermediate], bar, up_bufs.index(stage))
            bulk_load(da_desc, [row, column], bar, da_bufs.index(stage))
            line = expert * 2 * intermediate + column
            bulk_load(factor_desc, [line, 0], bar, gate_factors.index(stage))
            bulk_load(factor_desc, [line + intermediate, 0], bar, up_factors.index(stage))
            count += 1


@gluon.jit
def _chunks(buffers, CHUNK: gl.constexpr):
    """The same memory in chunks of so many rows, which a loop that is not unrolled can count through."""
    HEIGHT: gl.constexpr = buffers.shape[1]
    COUNT: gl.constexpr = buffers.shape[0] * (HEIGHT // CHUNK)
    return reinterpret(buffers, buffers.dtype, [COUNT, CHUNK, buffers.shape[2]], buffers.layout)


@gluon.jit
def _clear(buffers, at, rows, CHUNK: gl.constexpr):
    """Zeros from `rows` on: what other experts' rows hold, or nobody's, may be NaN, which a zero does not cancel."""
    CHUNKS: gl.constexpr = buffers.shape[1] // CHUNK
    WIDTH: gl.constexpr = buffers.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    chunks = _chunks(buffers, CHUNK)
    for chunk in range(rows // CHUNK, CHUNKS):
        buffer = chunks.index(at * CHUNKS + chunk)
        value = buffer.load(layout)
        buffer.store(gl.where(m < rows - chunk * CHUNK, value, gl.zeros_like(value)))


@gluon.jit
def _store_rows(buffers, at, rows, out, stride, CHUNK: gl.constexpr):
    """The first `rows`."""
    CHUNKS: gl.constexpr = buffers.shape[1] // CHUNK
    WIDTH: gl.constexpr = buffers.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    chunks = _chunks(buffers, CHUNK)
    for chunk in range(gl.cdiv(rows, CHUNK)):
        value = chunks.index(at * CHUNKS + chunk).load(layout)
        gl.store(out + chunk * CHUNK * stride + (m * stride + c), value, mask=m < rows - chunk * CHUNK)


@gluon.jit
def _store_part(part, parts, line, FIRST: gl.constexpr, RANKS: gl.constexpr):
    """The ranks from FIRST on of the columns from `line` on."""
    layout: gl.constexpr = part.type.layout
    c = gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
    r = gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    own = (r >= FIRST) & (r < FIRST + RANKS)
    at = parts + line * part.shape[1]
    gl.store(at + ((c * part.shape[1])[:, None] + r[None, :]), part, mask=own[None, :])


@gluon.jit
def _in_threads(tile):
    """Row sums as far as a thread has them, (rows, 8)."""
    return gl.sum(tile.reshape((tile.shape[0], 8, tile.shape[1] // 8)), axis=2)


@gluon.jit
def _store_sums(sums, others, ds, row, end):
    layout: gl.constexpr = sums.type.layout
    n = row + gl.arange(0, sums.shape[0], layout)
    gl.store(ds + n, sums + others.load(layout), mask=n < end)


@gluon.jit
def _differentiate(da_buf, gate_buf, up_buf, scale, PLAN: gl.constexpr, layout: gl.constexpr):
    """s·a, dgate and dup in place of da, gate and up, and da · a summed as far as a thread has it."""
    dtype: gl.constexpr = da_buf.dtype
    da = da_buf.load(layout).to(gl.float32)
    gate = gate_buf.load(layout).to(gl.float32)
    up = up_buf.load(layout).to(gl.float32)
    a, dgate, dup = gated_backward(scale * da, gate, up, PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT)
    da_buf.store((scale * a).to(dtype))
    gate_buf.store(dgate.to(dtype))
    up_buf.store(dup.to(dtype))
    return _in_threads(da * a)


@gluon.jit
def _consume(
    dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate, dh_stride, ring,
    thin, exchange, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of the stages."""
    da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty = ring
    low_bufs, down_bufs, thin_full, thin_empty = thin
    total_buf, ds_bufs, given, taken = exchange
    dtype: gl.constexpr = dh.dtype.element_ty
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [4, 1], [1, 0])
    of_ranks: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.R, 16])
    of_down: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.D, 16])
    zeros = gl.zeros((BLOCK, PLAN.R), gl.float32, of_ranks)
    down_zeros = gl.zeros((BLOCK, PLAN.D), gl.float32, of_down)
    da_chunks = _chunks(da_bufs, CHUNK)
    gate_chunks = _chunks(gate_bufs, CHUNK)
    up_chunks = _chunks(up_bufs, CHUNK)
    tiles = gl.load(table)
    steps = intermediate // BLOCK
    for turn in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        expert, row, end = _place(table, turn)
        start = gl.load(offs_E + expert - 1, mask=expert > 0, other=0)
        place = (start // BLOCK_M + expert + (row - start) // BLOCK_M).to(gl.int64)  # as `find_tile` numbers them
        rows = gl.minimum(end - row, BLOCK_M)
        m = row + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        scales = ()  # type: tuple
        ds_rows = ()  # type: tuple
        for i in gl.static_range(CHUNKS):
            own = m + i * CHUNK < end
            slot = gl.load(order + m + i * CHUNK, mask=own, other=0)
            scales += (gl.load(weight + slot, mask=own, other=0.0).to(gl.float32)[:, None],)
            ds_rows += (_in_threads(gl.zeros((CHUNK, BLOCK), gl.float32, layout)),)
        thin_slot = turn % PLAN.THINS
        mbarrier.wait(thin_full.index(thin_slot), (turn // PLAN.THINS) & 1)
        if rows < BLOCK_M:  # both warpgroups do, and write the same
            _clear(low_bufs, thin_slot, rows, CHUNK)
            _clear(down_bufs, thin_slot, rows, CHUNK)
            fence_async_shared()
        total = gl.zeros((BLOCK_M, PLAN.R), gl.float32, of_ranks)
        for step in range((turn * steps + WARPGROUP) & 1, steps, 2):
            count = turn * steps + step
            column = step * BLOCK
            stage = count % PLAN.STAGES
            da_buf = da_bufs.index(stage)
            gate_buf = gate_bufs.index(stage)
            up_buf = up_bufs.index(stage)
            mbarrier.wait(full.index(count % PLAN.TURNS), (count // PLAN.TURNS) & 1)
            if rows < BLOCK_M:
                _clear(da_bufs, stage, rows, CHUNK)
                _clear(gate_bufs, stage, rows, CHUNK)
                _clear(up_bufs, stage, rows, CHUNK)
            for chunk in range(gl.cdiv(rows, CHUNK)):
                at = stage * CHUNKS + chunk
                scale = scales[0]
                for i in gl.static_range(1, CHUNKS):
                    scale = gl.where(chunk == i, scales[i], scale)
                sums = _differentiate(
                    da_chunks.index(at), gate_chunks.index(at), up_chunks.index(at), scale, PLAN, layout
                )
                found = ()  # type: tuple
                for i in gl.static_range(CHUNKS):
                    found += (ds_rows[i] + gl.where(chunk == i, sums, 0.0),)
                ds_rows = found
            fence_async_shared()  # threads wrote, the copy engine and the matrix unit read as other parties
            barrier()
            if rows == BLOCK_M:
                bulk_store(dh_desc, [row, column], gate_buf)
                bulk_store(dh_desc, [row, column + intermediate], up_buf)
            else:
                dh_rows = dh + row.to(gl.int64) * dh_stride + column
                _store_rows(gate_bufs, stage, rows, dh_rows, dh_stride, CHUNK)
                _store_rows(up_bufs, stage, rows, dh_rows + intermediate, dh_stride, CHUNK)
            # The slot found from what changes in this loop: or 16 descriptors stay in registers, and others leave them.
            low = low_bufs.index(count // steps % PLAN.THINS)
            down = down_bufs.index(count // steps % PLAN.THINS)
            total = warpgroup_mma(gate_buf, gate_factors.index(stage), total, is_async=True)
            total = warpgroup_mma(up_buf, up_factors.index(stage), total, is_async=True)
            of_gate = warpgroup_mma(gate_buf.permute((1, 0)), low, zeros, use_acc=False, is_async=True)
            of_up = warpgroup_mma(up_buf.permute((1, 0)), low, zeros, use_acc=False, is_async=True)
            of_a = warpgroup_mma(da_buf.permute((1, 0)), down, down_zeros, use_acc=False, is_async=True)
            total, of_gate, of_up, of_a = warpgroup_mma_wait(0, deps=(total, of_gate, of_up, of_a))
            own_parts = parts + place * 2 * intermediate * PLAN.R
            _store_part(of_gate, own_parts, column, 0, PLAN.GATE_RANK)
            _store_part(of_up, own_parts, column + intermediate, PLAN.UP_FIRST, PLAN.UP_RANK)
            _store_part(of_a, down_parts + place * intermediate * PLAN.D, column, 0, PLAN.D)
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if WARPGROUP == 1:
            mbarrier.wait(taken, (turn & 1) ^ 1)
            total_buf.store(total)
            for i in gl.static_range(CHUNKS):
                ds_bufs.index(i).store(gl.sum(ds_rows[i], axis=1))
            barrier()
            mbarrier.arrive(given, count=1)
        else:
            mbarrier.wait(given, turn & 1)
            total += total_buf.load(of_ranks)
            for i in gl.static_range(CHUNKS):
                _store_sums(gl.sum(ds_rows[i], axis=1), ds_bufs.index(i), ds, row + i * CHUNK, end)
            barrier()
            mbarrier.arrive(taken, count=1)
            n = gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_ranks))
            r = gl.arange(0, PLAN.R, gl.SliceLayout(0, of_ranks))
            own = (n < rows)[:, None]
            dlow_at = dlow + row.to(gl.int64) * PLAN.R + (n[:, None] * PLAN.R + r[None, :])
            gl.store(dlow_at, (total * scaling).to(dtype), mask=own)
        mbarrier.arrive(thin_empty.index(thin_slot), count=1)


@quick
@gluon.jit
def activation_kernel(
    da_desc, h_desc, dh_desc, factor_desc, low_desc, down_desc, weight, order, offs_E, table, dh, ds, dlow, parts,
    down_parts, scaling, intermediate, dh_stride, PLAN: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    FACTOR_LAYOUT: gl.constexpr, LOW_LAYOUT: gl.constexpr, DOWN_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A program owns whole rows of an expert, so that ds and dh · B need no second pass."""
    dtype: gl.constexpr = dh.dtype.element_ty
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    of_total: gl.constexpr = gl.SwizzledSharedLayout(2, 1, PLAN.R // 2 if PLAN.R < 32 else 16, [1, 0])
    da_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    gate_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    up_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    gate_factors = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK, PLAN.R], FACTOR_LAYOUT)
    up_factors = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK, PLAN.R], FACTOR_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [PLAN.TURNS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [PLAN.STAGES, 1], barriers)
    low_bufs = gl.allocate_shared_memory(dtype, [PLAN.THINS, BLOCK_M, PLAN.R], LOW_LAYOUT)
    down_bufs = gl.allocate_shared_memory(dtype, [PLAN.THINS, BLOCK_M, PLAN.D], DOWN_LAYOUT)
    thin_full = gl.allocate_shared_memory(gl.int64, [PLAN.THINS, 1], barriers)
    thin_empty = gl.allocate_shared_memory(gl.int64, [PLAN.THINS, 1], barriers)
    total_buf = gl.allocate_shared_memory(gl.float32, [BLOCK_M, PLAN.R], of_total)
    ds_bufs = gl.allocate_shared_memory(gl.float32, [BLOCK_M // CHUNK, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = gl.allocate_shared_memory(gl.int64, [1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(PLAN.TURNS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(PLAN.STAGES):
        mbarrier.init(empty.index(i), count=1)  # the warpgroup whose turn it was
    for i in gl.static_range(PLAN.THINS):
        mbarrier.init(thin_full.index(i), count=1)
        mbarrier.init(thin_empty.index(i), count=2)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    ring = (da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty)
    thin = (low_bufs, down_bufs, thin_full, thin_empty)
    exchange = (total_buf, ds_bufs, given, taken)
    gl.warp_specialize(
        [
            (_consume, (
                dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate,
                dh_stride, ring, thin, exchange, gl.constexpr(0), PLAN, BLOCK_M, BLOCK, CHUNK,
            )),
            (_consume, (
                dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate,
                dh_stride, ring, thin, exchange, gl.constexpr(1), PLAN, BLOCK_M, BLOCK, CHUNK,
            )),
            (_produce, (
                da_desc, h_desc, factor_desc, low_desc, down_desc, table, ring, thin, intermediate, PLAN, BLOCK,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
