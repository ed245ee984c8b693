"""Hopper's products in e4m3 with gathered rows, whose scales are loaded into the stage with the rows.

The producing and the consuming part of `amoeba.kernels.hopper.fp8_gemm_kernel` for plans with SCALES_IN_STAGE, whose
tiles are whole turns of the ring of stages. Each row has one thread that asks for its scale, by an asynchronous copy
into the stage. So consumers know no token, and have no loads of their own under way when they fence.

Warpgroups multiply alternately, and a tile is stored under products, as in `fp8_gemm_kernel`: its left half under the
last one of its right half, the rest under the first one of the next tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from amoeba.kernels.activation import factor, plain
from amoeba.kernels.hopper.epilogue import now, rounded
from amoeba.kernels.hopper.fp8_gemm_parts import (
    begin_turns,
    blocks_of_columns,
    end_turns,
    keep,
    product_in_turn,
    store_both_halves,
    store_codes,
    store_halves,
)
from amoeba.kernels.hopper.tile_order import clamped_place, place_of_tile
from amoeba.kernels.hopper.tma import bulk_load, gather


@gluon.jit
def produce_scales_in_stage(
    matrix_desc, rows, row_scale, matrix_scale, order, table, ring, depth, width, columns, row_stride, top_k,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Fills the stages, turn after turn, as they come free."""
    row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty = ring
    BLOCK: gl.constexpr = PLAN.BLOCK
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    STAGES: gl.constexpr = PLAN.STAGES
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    steps = depth // BLOCK
    blocks = gl.cdiv(width, BLOCK)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
        sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
        token = gl.load(order + sorted_row) // top_k
        k_offset = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        pointers = rows + (token.to(gl.int64) * row_stride)[:, None] + k_offset[None, :]
        own_row = gl.minimum(row + gl.arange(0, BLOCK_M, flat), end - 1)
        of_rows = row_scale + gl.load(order + own_row) // top_k * steps
        first, second, far = blocks_of_columns(n, columns, blocks, PLAN)
        which = gl.arange(0, 4, flat)  # the first two are read
        block = gl.where(which == 0, first, gl.where(which == 1, second, far))
        of_columns = matrix_scale + expert * blocks * steps + block * steps
        at = expert * width + n * PLAN.COLUMNS
        for k in range(0, depth, STAGES * BLOCK):
            for stage in gl.static_range(STAGES):
                mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
                bar = full.index(stage)
                matrix_buf = matrix_bufs.index(stage)
                mbarrier.expect(bar, PLAN.BLOCK_N * BLOCK)
                if PLAN.PAIRED:
                    bulk_load(matrix_desc, [at, k + stage * BLOCK], bar, matrix_buf.slice(0, BLOCK, 0))
                    bulk_load(matrix_desc, [at + columns, k + stage * BLOCK], bar, matrix_buf.slice(BLOCK, BLOCK, 0))
                else:
                    bulk_load(matrix_desc, [at, k + stage * BLOCK], bar, matrix_buf)
                gather(row_bufs.index(stage), pointers + stage * BLOCK)
                gather(scale_bufs.index(stage), of_rows + stage)
                gather(column_bufs.index(stage), of_columns + stage)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            pointers += STAGES * BLOCK
            of_rows += STAGES
            of_columns += STAGES
            turn += 1


@gluon.jit
def _scales(ring, stage, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the left half's sums, and of the right half's."""
    _, _, scale_bufs, column_bufs, _, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    of_row = scale_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0).load(LAYOUT)
    of_columns = column_bufs.index(stage)
    of_left, of_right = of_columns.slice(0, 1, 0).load(LAYOUT), of_columns.slice(1, 1, 0).load(LAYOUT)
    return of_row * of_left, of_row * of_right


@gluon.jit
def _open(ring, count, there, PLAN: gl.constexpr):
    """The next stage, when it is full. Unless it is there: whatever that holds."""
    stage = count & (PLAN.STAGES - 1)
    mbarrier.wait(ring[4].index(stage), (count // PLAN.STAGES) & 1, pred=there)
    fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    return stage


@gluon.jit
def _begin(ring, zero, stage, WARPGROUP: gl.constexpr, RIGHT: gl.constexpr, PLAN: gl.constexpr):
    """A stage's product of a half."""
    row_bufs, matrix_bufs, _, _, _, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(RIGHT * PLAN.BLOCK, PLAN.BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _finish_right(found, right, of_right, ring, stage, there):
    """The sums with a stage's product of the right half; the stage is given back."""
    done = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(ring[5].index(stage), count=1, pred=there)
    return right + done * of_right[:, None]


@gluon.jit
def _step(left, right, zero, ring, count, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The sums with a stage's products."""
    of_sums: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    stage = _open(ring, count, True, PLAN)
    if not PLAN.ACTIVATE:  # asked for later, they are waited for between the products; the up projection gains nothing
        of_left, of_right = _scales(ring, stage, WARPGROUP, PLAN, of_sums)
    found = _begin(ring, zero, stage, WARPGROUP, 0, PLAN)
    if PLAN.ACTIVATE:
        of_left, of_right = _scales(ring, stage, WARPGROUP, PLAN, of_sums)
    left += warpgroup_mma_wait(0, deps=(found,)) * of_left[:, None]
    found = _begin(ring, zero, stage, WARPGROUP, 1, PLAN)
    return left, _finish_right(found, right, of_right, ring, stage, True)


@gluon.jit
def _widened(pairs):
    """From bf16, two at a time, without taking them apart first."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=&r,r", [pairs], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def consume_scales_in_stage(
    table, ring, buffers, descs, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, then activate gates and quantise, or store."""
    staging, kept = buffers
    h_desc, out_desc = descs
    _, h, h_scale, out, out_scale = results
    depth, width, columns, h_stride, out_stride, _ = shape
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    of_sums: gl.constexpr = gl.SliceLayout(1, mma)
    blocks = gl.cdiv(width, BLOCK)
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    buffer = staging.index(WARPGROUP * PLAN.BUFFERS)
    left, right, count = zero, zero, 0
    begin_turns(WARPGROUP, PLAN)
    if PLAN.EARLY:
        _expert, row, end, n = clamped_place(
            gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
        )
        some = gl.program_id(0) < tiles * column_tiles
        stage = _open(ring, count, some, PLAN)
        found = _begin(ring, zero, stage, WARPGROUP, 0, PLAN)
        of_left, of_right = _scales(ring, stage, WARPGROUP, PLAN, of_sums)
        left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * of_left[:, None])
        found = _begin(ring, zero, stage, WARPGROUP, 1, PLAN)
        right = _finish_right(found, zero, of_right, ring, stage, some)
        count = 1
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        if not PLAN.EARLY:
            _expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
            row += WARPGROUP * HEIGHT
        for _ in range(2 * BLOCK if PLAN.EARLY else BLOCK, depth, BLOCK):
            left, right = _step(left, right, zero, ring, count, WARPGROUP, PLAN)
            count += 1
        stage = _open(ring, count, True, PLAN)
        last = _begin(ring, zero, stage, WARPGROUP, 0, PLAN)
        of_left, of_right = _scales(ring, stage, WARPGROUP, PLAN, of_sums)
        next_tile = tile + gl.num_programs(0)
        if PLAN.EARLY:
            _next_expert, next_row, next_end, next_n = clamped_place(
                next_tile, table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
            )
        left = now(left + warpgroup_mma_wait(0, deps=(last,)) * of_left[:, None])
        last = _begin(ring, zero, stage, WARPGROUP, 1, PLAN)
        column = n * PLAN.COLUMNS
        left_half = rounded(left)
        if not PLAN.PAIRED:
            one, other = buffer, staging.index(WARPGROUP * PLAN.BUFFERS + 1)
            store_halves(left_half, out, out_desc, one, other, out_stride, row, end, column, width, 0, 1, 1)
        elif PLAN.CODED:
            keep(left_half, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, 0, blocks, WARPGROUP, PLAN)
        elif PLAN.KEEP:
            one, other = kept.index(WARPGROUP * PLAN.BUFFERS), kept.index(WARPGROUP * PLAN.BUFFERS + 1)
            store_both_halves(left_half, h, h_desc, one, other, h_stride, row, end, column, columns, 0)
        right = now(_finish_right(last, right, of_right, ring, stage, True))
        count += 1
        if PLAN.EARLY:
            some = next_tile < tiles * column_tiles
            stage = _open(ring, count, some, PLAN)
            found = _begin(ring, zero, stage, WARPGROUP, 0, PLAN)
        if PLAN.PAIRED:
            up = rounded(right)
            if PLAN.CODED:
                keep(
                    up, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, columns, blocks, WARPGROUP, PLAN
                )  # fmt: skip
            act = plain(_widened(left_half), PLAN)
            if PLAN.KEEP and not PLAN.CODED:  # meanwhile its left half was read
                store_both_halves(up, h, h_desc, one, other, h_stride, row, end, column, columns, columns)
            store_codes(
                act * factor(_widened(up), PLAN), out, out_desc, out_scale, buffer, out_stride, row, end, column,
                columns, 0, gl.cdiv(columns, BLOCK), 1 if PLAN.TWO_BUFFERS else 0, PLAN,
            )  # fmt: skip
        else:
            store_halves(
                rounded(right), out, out_desc, one, other, out_stride, row, end, column + BLOCK, width, 0, 1, 1
            )  # fmt: skip
        left, right = zero, zero
        if PLAN.EARLY:
            of_left, of_right = _scales(ring, stage, WARPGROUP, PLAN, of_sums)
            left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * of_left[:, None])
            found = _begin(ring, zero, stage, WARPGROUP, 1, PLAN)
            right = _finish_right(found, zero, of_right, ring, stage, some)
            count += 1
            row, end, n = next_row, next_end, next_n
    end_turns(WARPGROUP, PLAN)
    tma.store_wait(0)
