"""How the stages of a product are filled: the matrix by the bulk copy engine, rows likewise or gathered by threads.

For a plan of `amoeba.kernels.hopper.product_kernel`, or another with its PAIRED, B_K_MAJOR, COLUMNS and GATHER.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from amoeba.kernels.hopper.descriptor import bulk_load, gather


@gluon.jit
def _fill_stage(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, bar, stage, expert, row, k, n, depth, width, columns,
    GATHER: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Threads that gather say themselves that they have."""
    MATRIX_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    BYTES: gl.constexpr = MATRIX_BYTES if GATHER else MATRIX_BYTES + BLOCK_M * BLOCK_K * 2
    matrix_buf = matrix_bufs.index(stage)
    mbarrier.expect(bar, BYTES)
    if PLAN.PAIRED:
        at = expert * width + n * PLAN.COLUMNS
        gate_buf = matrix_buf.slice(0, PLAN.COLUMNS, 0)
        up_buf = matrix_buf.slice(PLAN.COLUMNS, PLAN.COLUMNS, 0)
        bulk_load(matrix_desc, [at, k], bar, gate_buf)
        bulk_load(matrix_desc, [at + columns, k], bar, up_buf)
    elif PLAN.B_K_MAJOR:
        bulk_load(matrix_desc, [expert * width + n * BLOCK_N, k], bar, matrix_buf)
    else:
        bulk_load(matrix_desc, [expert * depth + k, n * BLOCK_N], bar, matrix_buf)
    if GATHER:
        gather(row_bufs.index(stage), pointers)
    else:
        bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))


@gluon.jit
def fill_product(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width, columns,
    GATHER: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The stages of one tile, as they come free. pointers: to the rows, where these are gathered."""
    for k in range(0, depth, BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        _fill_stage(
            row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, bar, stage, expert, row, k, n, depth, width,
            columns, GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATHER:
            pointers += BLOCK_K
        if PLAN.GATHER:
            async_copy.mbarrier_arrive(bar, increment_count=False)
        count += 1
    return count


@gluon.jit
def fill_unrolled(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width, columns,
    PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`fill_product` where a tile is whole turns of the ring. count: of these turns."""
    for first in range(0, depth, STAGES * BLOCK_K):
        for stage in gl.static_range(STAGES):
            mbarrier.wait(empty.index(stage), (count & 1) ^ 1)
            rows = pointers
            if PLAN.GATHER:
                rows = pointers + stage * BLOCK_K
            bar = full.index(stage)
            _fill_stage(
                row_desc, matrix_desc, rows, row_bufs, matrix_bufs, bar, stage, expert, row, first + stage * BLOCK_K,
                n, depth, width, columns, PLAN.GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if PLAN.GATHER:
                async_copy.mbarrier_arrive(bar, increment_count=False)
        if PLAN.GATHER:
            pointers += STAGES * BLOCK_K
        count += 1
    return count


@gluon.jit
def row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """To the first of the depth of a tile's rows; behind the last one, to the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
    token = gl.load(order + sorted_row) // top_k
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    return x + (token.to(gl.int64) * x_stride)[:, None] + k[None, :]
