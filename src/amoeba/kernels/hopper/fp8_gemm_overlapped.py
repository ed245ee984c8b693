"""Hopper's products in e4m3 with the ends of tiles under products: the matrix unit works while a half of a tile leaves.

The consuming part of `amoeba.kernels.hopper.fp8_gemm_kernel` for plans that are OVERLAPPED. A warpgroup has one
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
from amoeba.kernels.hopper.epilogue import now, store_tile
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
def _begin_left(ring, zero, count, there, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """A stage's product of the left half, begun when the stage is full; unless it is there, of whatever it holds."""
    row_bufs, matrix_bufs, _, _, full, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    stage = count % PLAN.STAGES
    mbarrier.wait(full.index(stage), (count // PLAN.STAGES) & 1, pred=there)
    if PLAN.GATHER:
        fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(0, PLAN.BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _begin_right(ring, zero, count, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    row_bufs, matrix_bufs, _, _, _, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    stage = count % PLAN.STAGES
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(PLAN.BLOCK, PLAN.BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _finish_right(found, right, of_right, ring, count, there, PLAN: gl.constexpr):
    """The sums with a stage's product of the right half, and the stage after it."""
    done = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(ring[5].index(count % PLAN.STAGES), count=1, pred=there)
    right += done * of_right[:, None]
    return right, count + 1


@gluon.jit
def consume_overlapped(
    table, ring, buffers, descs, scaled, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, then activate gates and quantise, or store."""
    staging, _ = buffers
    _, out_desc = descs
    order, row_scale, matrix_scale = scaled
    _, _, _, out, out_scale = results
    depth, width, columns, _, out_stride, top_k = shape
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    first_buffer: gl.constexpr = WARPGROUP * PLAN.BUFFERS
    steps = gl.cdiv(depth, BLOCK)
    blocks = gl.cdiv(width, BLOCK)
    count = 0
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    expert, row, end, n = clamped_place(
        gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
    )
    m = token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
    of_row, of_left, of_right, _ = first_scales(row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN)
    some = gl.program_id(0) < tiles * column_tiles
    begin_turns(WARPGROUP, PLAN)
    found = _begin_left(ring, zero, count, some, WARPGROUP, PLAN)
    left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
    found = _begin_right(ring, zero, count, WARPGROUP, PLAN)
    right, count = _finish_right(found, zero, of_row * of_right, ring, count, some, PLAN)
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        row_scales = row_scale + m * steps
        left_scales, right_scales, far_scales = scales_of_columns(
            matrix_scale, m, expert, n, columns, blocks, steps, PLAN
        )
        next_row, next_left, next_right, _ = load_scales(
            row_scales + 1, left_scales + 1, right_scales + 1, far_scales + 1, PLAN
        )
        for step in range(2, steps):
            by_left, by_right = next_row * next_left, next_row * next_right
            next_row, next_left, next_right, _ = load_scales(
                row_scales + step, left_scales + step, right_scales + step, far_scales + step, PLAN
            )
            begun = _begin_left(ring, zero, count, True, WARPGROUP, PLAN)
            left += warpgroup_mma_wait(0, deps=(begun,)) * by_left[:, None]
            begun = _begin_right(ring, zero, count, WARPGROUP, PLAN)
            right, count = _finish_right(begun, right, by_right, ring, count, True, PLAN)
        last = _begin_left(ring, zero, count, True, WARPGROUP, PLAN)
        coming_expert, coming_row, coming_end, coming_n = clamped_place(
            next_tile, table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
        )
        left = now(left + warpgroup_mma_wait(0, deps=(last,)) * (next_row * next_left)[:, None])
        last = _begin_right(ring, zero, count, WARPGROUP, PLAN)
        m = token_rows(order, coming_row, coming_end, top_k, PLAN, HEIGHT, mma)
        gate = left
        if PLAN.PAIRED:
            gate = gate.to(gl.bfloat16)
        else:
            buffer = staging.index(first_buffer)
            store_tile(left, out, out_desc, buffer, out_stride, row, end, 2 * n * BLOCK, width, 0, 1)
        right, count = _finish_right(last, right, next_row * next_right, ring, count, True, PLAN)
        right = now(right)
        some = next_tile < tiles * column_tiles
        found = _begin_left(ring, zero, count, some, WARPGROUP, PLAN)
        of_row, of_left, of_right, _ = first_scales(
            row_scale, matrix_scale, m, coming_expert, coming_n, columns, blocks, steps, PLAN
        )
        if PLAN.PAIRED:
            up = right.to(gl.bfloat16)
            a = gated(
                gate.to(gl.float32), up.to(gl.float32), PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT
            )  # fmt: skip
            store_codes(
                a, out, out_desc, out_scale, staging.index(first_buffer), out_stride, row, end,
                n * BLOCK, columns, 0, gl.cdiv(columns, BLOCK), 0, PLAN,
            )  # fmt: skip
        else:
            buffer = staging.index(first_buffer + 1)
            store_tile(right, out, out_desc, buffer, out_stride, row, end, (2 * n + 1) * BLOCK, width, 0, 1)
        left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
        found = _begin_right(ring, zero, count, WARPGROUP, PLAN)
        right, count = _finish_right(found, zero, of_row * of_right, ring, count, some, PLAN)
        expert, row, end, n = coming_expert, coming_row, coming_end, coming_n
    end_turns(WARPGROUP, PLAN)
    tma.store_wait(0)
