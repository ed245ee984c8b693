"""How the producer of the kernel for Hopper fills the stages of products and of weights' gradients, turn by turn.

A turn is all stages of the ring, each with code of its own: where it lies is found once for a tile, and nothing is
computed between two copies but how far along they are. A turn begins at any stage. See `amoeba.tasks.hopper_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from amoeba.kernels.hopper.descriptor import bulk_load, gather, reinterpret
from amoeba.kernels.hopper.gradient import fill_gradient
from amoeba.kernels.hopper.product_fill import fill_product
from amoeba.kernels.tiles import grouped_order
from amoeba.tasks.hopper_queue import BLOCK_K, BLOCK_M, BLOCK_N, STAGE_BYTES, STAGES

MATRIX_BYTES = gl.constexpr(256 * 64 * 2)


@gluon.jit
def place_in_turn(start, count, TURN: gl.constexpr):
    """Of the TURN-th stage of a turn that begins with stage `start`: which it is, and its parity when it is full."""
    return (start + TURN) & (STAGES - 1), (count // STAGES + (start + TURN) // STAGES) & 1


@gluon.jit
def fill_tile(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, part,
    DEPTH: gl.constexpr, WIDTH: gl.constexpr, GATHER: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The stages of a tile of dA' or of dx, as they come free. pointers: to the rows, where these are gathered."""
    if PLAN.FILL_TURNS and PLAN.WHOLE_TURNS:
        BYTES: gl.constexpr = MATRIX_BYTES if GATHER else STAGE_BYTES
        start = count & (STAGES - 1)
        for first in range(0, DEPTH, STAGES * BLOCK_K):
            for turn in gl.static_range(STAGES):
                stage, parity = place_in_turn(start, count, turn)
                mbarrier.wait(empty.index(stage), parity ^ 1)
                bar = full.index(stage)
                k = first + turn * BLOCK_K
                mbarrier.expect(bar, BYTES)
                bulk_load(matrix_desc, [expert * DEPTH + k, part * BLOCK_N], bar, matrix_bufs.index(stage))
                if GATHER:
                    gather(row_bufs.index(stage), pointers + turn * BLOCK_K)
                else:
                    bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
                async_copy.mbarrier_arrive(bar, increment_count=False)
            if GATHER:
                pointers += STAGES * BLOCK_K
            count += STAGES
    else:
        count = fill_product(
            row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, part, DEPTH,
            WIDTH, WIDTH, GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    return count


@gluon.jit
def fill_gradients(
    right_desc, left, right, order, left_bufs, right_bufs, full, empty, count, part, row, end, bundle,
    WIDTH: gl.constexpr, STRIDE: gl.constexpr, WIDTH_TILES: gl.constexpr, TILES: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The stages of a task's tiles of a weight's gradient."""
    if PLAN.BUNDLED:
        for tile in range(part * bundle, gl.minimum((part + 1) * bundle, TILES)):
            h, w = grouped_order(tile, PLAN.H_TILES, WIDTH_TILES, PLAN.GROUP)
            count = _fill_gradient(
                right_desc, left, right, order, left_bufs, right_bufs, full, empty, count, h, w, row, end, WIDTH,
                STRIDE, PLAN,
            )  # fmt: skip
    else:
        h, w = grouped_order(part, PLAN.H_TILES, WIDTH_TILES, PLAN.GROUP)
        count = _fill_gradient(
            right_desc, left, right, order, left_bufs, right_bufs, full, empty, count, h, w, row, end, WIDTH, STRIDE,
            PLAN,
        )  # fmt: skip
    return count


@gluon.jit
def _fill_gradient(
    right_desc, left, right, order, left_bufs, right_bufs, full, empty, count, h, w, row, end, WIDTH: gl.constexpr,
    STRIDE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The stages of one tile: whole turns, whole stages, and a last one of the rows that are left."""
    whole = row
    if PLAN.FILL_TURNS and PLAN.H % BLOCK_M == 0:  # all rows and columns are there: no masks
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
        base = left + h * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        bufs = reinterpret(left_bufs, left.dtype.element_ty, [STAGES, BLOCK_K, BLOCK_M], PLAN.WIDE_LAYOUT)
        whole = end - (end - row) % BLOCK_K
        turns = end - (end - row) % (STAGES * BLOCK_K)
        slots = order + row + n
        slot = gl.load(slots, mask=row + 0 * n < whole)
        start = count & (STAGES - 1)
        for first in range(row, turns, STAGES * BLOCK_K):
            for turn in gl.static_range(STAGES):
                token = slot.to(gl.uint32) // PLAN.TOP_K
                if turn + 1 < STAGES:
                    slot = gl.load(slots + (turn + 1) * BLOCK_K)
                else:
                    slots += STAGES * BLOCK_K
                    slot = gl.load(slots, mask=first + STAGES * BLOCK_K + 0 * n < whole)
                stage, parity = place_in_turn(start, count, turn)
                at = first + turn * BLOCK_K
                _fill_whole(right_desc, base, token, bufs, right_bufs, full, empty, stage, parity, at, w, PLAN)
            count += STAGES
        for first in range(turns, whole, BLOCK_K):
            token = slot.to(gl.uint32) // PLAN.TOP_K
            slots += BLOCK_K
            slot = gl.load(slots, mask=first + BLOCK_K + 0 * n < whole)
            stage, parity = count % STAGES, (count // STAGES) & 1
            _fill_whole(right_desc, base, token, bufs, right_bufs, full, empty, stage, parity, first, w, PLAN)
            count += 1
    return fill_gradient(
        right_desc, left, right, order, left_bufs, right_bufs, full, empty, count, h, w, whole, end, PLAN.H, WIDTH,
        PLAN.H, STRIDE, PLAN.TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip


@gluon.jit
def _fill_whole(
    right_desc, base, token, bufs, right_bufs, full, empty, stage, parity, row, w, PLAN: gl.constexpr
):  # fmt: skip
    mbarrier.wait(empty.index(stage), parity ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, MATRIX_BYTES)
    bulk_load(right_desc, [row, w * BLOCK_N], bar, right_bufs.index(stage))
    gather(bufs.index(stage), base[None, :] + (token.to(gl.uint64) * PLAN.H)[:, None])
    async_copy.mbarrier_arrive(bar, increment_count=False)
