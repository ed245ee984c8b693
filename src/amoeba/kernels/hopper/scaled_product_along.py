"""Hopper's products in e4m3 with gathered rows, where scales come along with rows, a stage's with its codes.

The producing and the consuming part of `amoeba.kernels.hopper.scaled_product_kernel` for plans that are ALONG, whose
tiles are whole turns of the ring of stages. Each row has one thread that asks for its scale, by an asynchronous copy
into the stage. So consumers know no token, and have no loads of their own under way when they fence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from amoeba.kernels.activation import gated
from amoeba.kernels.hopper.descriptor import bulk_load, gather
from amoeba.kernels.hopper.product_kernel import place_of_tile
from amoeba.kernels.hopper.product_store import add_bias, rounded
from amoeba.kernels.hopper.scaled_product_scales import blocks_of_columns
from amoeba.kernels.hopper.scaled_product_store import keep, store_codes, store_halves


@gluon.jit
def produce_along(
    matrix_desc, rows, row_scale, matrix_scale, order, table, row_bufs, matrix_bufs, scale_bufs, column_bufs, full,
    empty, depth, width, columns, row_stride, top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fills the stages, turn after turn, as they come free."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    steps = depth // BLOCK
    blocks = gl.cdiv(width, BLOCK)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
        token = gl.load(order + sorted_row) // top_k
        k_offset = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        pointers = rows + (token.to(gl.int64) * row_stride)[:, None] + k_offset[None, :]
        own_row = gl.minimum(row + gl.arange(0, BLOCK_M, flat), end - 1)
        of_rows = row_scale + gl.load(order + own_row) // top_k * steps
        first, second, far = blocks_of_columns(n, columns, blocks, PLAN, BLOCK)
        which = gl.arange(0, 4, flat)
        block = gl.where(which == 0, first, gl.where(which == 1, second, far))
        of_columns = matrix_scale + expert * blocks * steps + block * steps
        at = expert * width + n * PLAN.COLUMNS
        for k in range(0, depth, STAGES * BLOCK):
            for stage in gl.static_range(STAGES):
                mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
                bar = full.index(stage)
                matrix_buf = matrix_bufs.index(stage)
                mbarrier.expect(bar, BLOCK_N * BLOCK)
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
def _scales(
    scale_bufs, column_bufs, stage, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, HEIGHT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of the left half's sums, of the right half's, and of that one's last 64 columns."""
    of_row = scale_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0).load(LAYOUT)
    of_columns = column_bufs.index(stage)
    of_left, of_right = of_columns.slice(0, 1, 0).load(LAYOUT), of_columns.slice(1, 1, 0).load(LAYOUT)
    of_far = of_right
    if PLAN.SHIFTED:
        of_far = of_columns.slice(2, 1, 0).load(LAYOUT)
    return of_row * of_left, of_row * of_right, of_row * of_far


@gluon.jit
def _begin(
    row_bufs, matrix_bufs, zero, stage, WARPGROUP: gl.constexpr, HALF: gl.constexpr, HEIGHT: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """A stage's product of a half."""
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(HALF * BLOCK, BLOCK, 0).permute((1, 0))
    return warpgroup_mma(rows, matrix, zero, use_acc=False, is_async=True)


@gluon.jit
def _step(
    left, right, zero, row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty, count, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr, HEIGHT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums with a stage's products; the stage is given back."""
    mma: gl.constexpr = left.type.layout
    stage = count & (STAGES - 1)
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    of_sums: gl.constexpr = gl.SliceLayout(1, mma)
    if not PLAN.ACTIVATE:  # asked for later, they are waited for between the products; the up projection gains nothing
        of_left, of_right, of_far = _scales(scale_bufs, column_bufs, stage, WARPGROUP, PLAN, HEIGHT, of_sums)
    found = _begin(row_bufs, matrix_bufs, zero, stage, WARPGROUP, 0, HEIGHT, BLOCK)
    if PLAN.ACTIVATE:
        of_left, of_right, of_far = _scales(scale_bufs, column_bufs, stage, WARPGROUP, PLAN, HEIGHT, of_sums)
    left += warpgroup_mma_wait(0, deps=(found,)) * of_left[:, None]
    found = _begin(row_bufs, matrix_bufs, zero, stage, WARPGROUP, 1, HEIGHT, BLOCK)
    done = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(empty.index(stage), count=1)
    if PLAN.SHIFTED:
        near = (gl.arange(0, BLOCK, gl.SliceLayout(0, mma)) < BLOCK // 2)[None, :]
        right += done * gl.where(near, of_right[:, None], of_far[:, None])
    else:
        right += done * of_right[:, None]
    return left, right


@gluon.jit
def _widened(pairs):
    """From bf16, two at a time, without taking them apart first."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=&r,r", [pairs], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def consume_along(
    table, row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty, staging, kept, h_desc, out_desc, bias, h,
    h_scale, out, out_scale, depth, width, columns, h_stride, out_stride, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, add the bias, then activate gates and quantise, or store."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    blocks = gl.cdiv(width, BLOCK)
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    buffer = staging.index(WARPGROUP * PLAN.BUFFERS)
    count = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        row += WARPGROUP * HEIGHT
        left, right = zero, zero
        for _ in range(0, depth, BLOCK):
            left, right = _step(
                left, right, zero, row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty, count, WARPGROUP, PLAN,
                HEIGHT, BLOCK, STAGES,
            )  # fmt: skip
            count += 1
        bias_row = bias + expert.to(gl.int64) * width
        if PLAN.PAIRED:
            column = n * BLOCK
            if PLAN.BIAS:
                left = add_bias(left, bias_row, column, columns, BLOCK)
            gate = rounded(left)
            if PLAN.KEEP:
                keep(
                    gate, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, 0, blocks, WARPGROUP, False,
                    PLAN,
                )  # fmt: skip
            if PLAN.BIAS:
                right = add_bias(right, bias_row + columns, column, columns, BLOCK)
            up = rounded(right)
            if PLAN.KEEP:
                keep(
                    up, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, columns, blocks, WARPGROUP, True,
                    PLAN,
                )  # fmt: skip
            a = gated(_widened(gate), _widened(up), PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT)
            store_codes(
                a, out, out_desc, out_scale, buffer, out_stride, row, end, column, columns, 0, gl.cdiv(columns, BLOCK),
                1 if PLAN.ALTERNATE else 0, PLAN,
            )  # fmt: skip
        else:
            one, other = staging.index(WARPGROUP * PLAN.BUFFERS), staging.index(WARPGROUP * PLAN.BUFFERS + 1)
            for half in gl.static_range(2):
                sums = right if half else left
                column = (2 * n + half) * BLOCK
                if PLAN.BIAS:
                    sums = add_bias(sums, bias_row, column, width, BLOCK)
                store_halves(rounded(sums), out, out_desc, one, other, out_stride, row, end, column, width, 0, 1, 1)
    tma.store_wait(0)
