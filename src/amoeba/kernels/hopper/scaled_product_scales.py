"""Where the scales of a tile's rows and columns lie, in Hopper's products in e4m3."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.hopper.product_kernel import place_of_tile


@gluon.jit
def load_scales(row_scales, left_scales, right_scales, far_scales, PLAN: gl.constexpr):
    of_row, of_left, of_right = gl.load(row_scales), gl.load(left_scales), gl.load(right_scales)
    of_far = of_right
    if PLAN.SHIFTED:
        of_far = gl.load(far_scales)
    return of_row, of_left, of_right, of_far


@gluon.jit
def clamped_place(tile, table, tiles, column_tiles, shift, GROUP_M: gl.constexpr, ORDER: gl.constexpr):
    """As `place_of_tile`, `shift` rows further; behind the last tile that of the last one, without any the first row's,
    so that all may be loaded that belongs to it."""
    some = tiles > 0
    last = gl.maximum(tiles * column_tiles - 1, 0)
    tile = gl.minimum(tile, last)
    expert, row, end, n = place_of_tile(tile, table, gl.maximum(tiles, 1), column_tiles, GROUP_M, ORDER)
    return gl.where(some, expert, 0), gl.where(some, row, 0) + shift, gl.where(some, end, 1), gl.where(some, n, 0)


@gluon.jit
def first_scales(
    row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Of a tile's rows and columns, as `_multiply_tile` takes them."""
    left, right, far = scales_of_columns(matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK)
    return load_scales(row_scale + m * steps, left, right, far, PLAN)


@gluon.jit
def token_rows(order, row, end, top_k, PLAN: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which row of the scales belongs to each of a warpgroup's rows; behind the last one, that of the last one."""
    m = gl.minimum(row + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT)), end - 1)
    if PLAN.GATHER:
        m = gl.load(order + m) // top_k
    return m


@gluon.jit
def scales_of_columns(
    matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Pointers along the depth to the scales of a tile's left half, its right half, and that one's last 64 columns."""
    first, second, far = blocks_of_columns(n, columns, blocks, PLAN, BLOCK)
    of_expert = matrix_scale + expert * blocks * steps  # scales are few: their number fits 32 bits
    if PLAN.AHEAD:  # one for each row, by a zero: as single numbers they are waited for between products
        of_expert += m >> 31
    return of_expert + first * steps, of_expert + second * steps, of_expert + far * steps


@gluon.jit
def blocks_of_columns(n, columns, blocks, PLAN: gl.constexpr, BLOCK: gl.constexpr):
    """Of an expert's matrix those that a tile's left half, its right half, and that one's last 64 columns lie in."""
    if PLAN.PAIRED:
        return n, n + columns // BLOCK, gl.minimum(n + (columns + BLOCK // 2) // BLOCK, blocks - 1)
    else:
        second = gl.minimum(2 * n + 1, blocks - 1)
        return 2 * n, second, second
