"""Hopper's products in e4m3 with the ends of tiles under products: the matrix unit works while a half of a tile leaves.

The consuming part of `amoeba.kernels.hopper.fp8_gemm_kernel` for plans that are UNDER. A warpgroup has one
transient result of the matrix unit, and its sums are final one half after the other:

    ... | last product of the right half | first product of the next tile's left half | of its right half | ...
        | the left half leaves           | the right half leaves, or a                |

The next tile's place is asked for before the last step, its rows' tokens under the first of these products and its
first scales under the second: nobody waits for them. Sums are added up in the same order as elsewhere. A tile has two
steps or more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from amoeba.kernels.activation import gated
from amoeba.kernels.hopper.epilogue import add_bias, now, store_tile
from amoeba.kernels.hopper.fp8_gemm_parts import (
    begin_turns,
    end_turns,
    first_scales,
    load_scales,
    product_in_turn,
    scales_of_columns,
    store_codes,
    token_rows,
)
from amoeba.kernels.hopper.tile_order import clamped_place


@gluon.jit
def _begin_left(
    row_bufs, matrix_bufs, full, zero, count, there, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
    HEIGHT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A stage's product of the left half, begun when the stage is full; unless it is there, of whatever it holds."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1, pred=there)
    if PLAN.GATHER and PLAN.BEHIND == 0:
        fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(0, BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _begin_right(
    row_bufs, matrix_bufs, zero, count, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, HEIGHT: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stage = count % STAGES
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(BLOCK, BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _finish_right(
    found, right, of_right, of_far, empty, count, there, PLAN: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The sums with a stage's product of the right half, and the stage after it."""
    done = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(empty.index(count % STAGES), count=1, pred=there)
    if PLAN.SHIFTED:
        near = (gl.arange(0, BLOCK, gl.SliceLayout(0, right.type.layout)) < BLOCK // 2)[None, :]
        right += done * gl.where(near, of_right[:, None], of_far[:, None])
    else:
        right += done * of_right[:, None]
    return right, count + 1


@gluon.jit
def _store(sums, bias_row, out, desc, buffer, stride, row, end, column, width, PLAN: gl.constexpr):
    """128 columns of a tile that is not activated, with their bias."""
    if PLAN.BIAS:
        sums = add_bias(sums, bias_row, column, width, sums.shape[1])
    store_tile(sums, out, desc, buffer, stride, row, end, column, width, 0, 1)


@gluon.jit
def consume_under(
    table, row_bufs, matrix_bufs, full, empty, staging, out_desc, order, row_scale, matrix_scale, bias, out, out_scale,
    depth, width, columns, out_stride, top_k, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, add the bias, then activate gates and quantise, or store."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    first_buffer: gl.constexpr = WARPGROUP * PLAN.BUFFERS
    steps = gl.cdiv(depth, BLOCK)
    blocks = gl.cdiv(width, BLOCK)
    count = 0
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    expert, row, end, n = clamped_place(
        gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, GROUP_M, PLAN.ORDER
    )
    m = token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
    of_row, of_left, of_right, of_far = first_scales(
        row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK
    )
    some = gl.program_id(0) < tiles * column_tiles
    begin_turns(WARPGROUP, PLAN)
    found = _begin_left(row_bufs, matrix_bufs, full, zero, count, some, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
    left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
    found = _begin_right(row_bufs, matrix_bufs, zero, count, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
    right, count = _finish_right(
        found, zero, of_row * of_right, of_row * of_far, empty, count, some, PLAN, BLOCK, STAGES
    )  # fmt: skip
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        row_scales = row_scale + m * steps
        left_scales, right_scales, far_scales = scales_of_columns(
            matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK
        )
        next_row, next_left, next_right, next_far = load_scales(
            row_scales + 1, left_scales + 1, right_scales + 1, far_scales + 1, PLAN
        )
        for step in range(2, steps):
            by_left, by_right, by_far = next_row * next_left, next_row * next_right, next_row * next_far
            next_row, next_left, next_right, next_far = load_scales(
                row_scales + step, left_scales + step, right_scales + step, far_scales + step, PLAN
            )
            begun = _begin_left(row_bufs, matrix_bufs, full, zero, count, True, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
            left += warpgroup_mma_wait(0, deps=(begun,)) * by_left[:, None]
            begun = _begin_right(row_bufs, matrix_bufs, zero, count, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
            right, count = _finish_right(begun, right, by_right, by_far, empty, count, True, PLAN, BLOCK, STAGES)
        last = _begin_left(row_bufs, matrix_bufs, full, zero, count, True, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
        coming_expert, coming_row, coming_end, coming_n = clamped_place(
            next_tile, table, tiles, column_tiles, WARPGROUP * HEIGHT, GROUP_M, PLAN.ORDER
        )
        left = now(left + warpgroup_mma_wait(0, deps=(last,)) * (next_row * next_left)[:, None])
        last = _begin_right(row_bufs, matrix_bufs, zero, count, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
        m = token_rows(order, coming_row, coming_end, top_k, PLAN, HEIGHT, mma)
        bias_row = bias + expert.to(gl.int64) * width
        gate = left
        if PLAN.PAIRED:
            if PLAN.BIAS:
                gate = add_bias(left, bias_row, n * BLOCK, columns, BLOCK)
            gate = gate.to(gl.bfloat16)
        else:
            _store(
                left, bias_row, out, out_desc, staging.index(first_buffer), out_stride, row, end, 2 * n * BLOCK, width,
                PLAN,
            )  # fmt: skip
        right, count = _finish_right(
            last, right, next_row * next_right, next_row * next_far, empty, count, True, PLAN, BLOCK, STAGES
        )  # fmt: skip
        right = now(right)
        some = next_tile < tiles * column_tiles
        found = _begin_left(row_bufs, matrix_bufs, full, zero, count, some, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
        of_row, of_left, of_right, of_far = first_scales(
            row_scale, matrix_scale, m, coming_expert, coming_n, columns, blocks, steps, PLAN, BLOCK
        )
        if PLAN.PAIRED:
            if PLAN.BIAS:
                right = add_bias(right, bias_row + columns, n * BLOCK, columns, BLOCK)
            up = right.to(gl.bfloat16)
            a = gated(
                gate.to(gl.float32), up.to(gl.float32), PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT
            )  # fmt: skip
            store_codes(
                a, out, out_desc, out_scale, staging.index(first_buffer), out_stride, row, end,
                n * BLOCK, columns, 0, gl.cdiv(columns, BLOCK), 0, PLAN,
            )  # fmt: skip
        else:
            _store(
                right, bias_row, out, out_desc, staging.index(first_buffer + 1), out_stride, row, end,
                (2 * n + 1) * BLOCK, width, PLAN,
            )  # fmt: skip
        left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
        found = _begin_right(row_bufs, matrix_bufs, zero, count, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES)
        right, count = _finish_right(
            found, zero, of_row * of_right, of_row * of_far, empty, count, some, PLAN, BLOCK, STAGES
        )  # fmt: skip
        expert, row, end, n = coming_expert, coming_row, coming_end, coming_n
    end_turns(WARPGROUP, PLAN)
    tma.store_wait(0)
