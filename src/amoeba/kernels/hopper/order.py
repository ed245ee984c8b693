"""In which order tiles are computed: which ones are there at the same time, and so how many bytes come from memory.

    order = order_of_product(rows, column_tiles, matrix_bytes)        # BY_COLUMNS, or how many row tiles a group has
    entry = entry_of_tile(tile, table, tiles, column_tiles, ORDER, GROUP_M)      # in a kernel
    expert, row, end, n = place_in_entry(entry, column_tiles, ORDER, BLOCK_M)
    group = group_of_gradient(height_tiles, width_tiles)

As many tiles as there are multiprocessors are multiplied at once, step by step along the same depth. What they share is
read from memory once, and what the next ones read again is there still only where all of it is small: 128 rows or 256
columns of a matrix of depth 7168 are 2 and 4 MB. So the bytes of a product of one expert follow from how many
of its row tiles and of its column tiles are there together:

    IN_GROUPS    eight row tiles sweep the columns, whichever experts they belong to
    BY_COLUMNS   a row tile's columns one after the other: all of a narrow matrix is there, and each row once
    above 0      about so many row tiles sweep the columns, all of one expert: each column once for a group

An order changes no bits.
"""

from __future__ import annotations

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

IN_GROUPS, BY_COLUMNS = -1, 0
# Where P tiles are there at once and a column tile has twice a row tile's bytes, a·R + 2b·R with a·b = P is least for
# a = sqrt(2 P): 16 of 132.
TALL, WIDE, PROGRAMS = 16, 8, 132
# A matrix of so many bytes stays in the second-level cache, of 50 MB on an H200, while its expert's tiles are computed.
KEPT_BYTES = 10_000_000


@cache
def order_of_product(rows: int, column_tiles: int, matrix_bytes: int) -> int:
    """rows: of an expert, in the mean. matrix_bytes: of an expert. The order that reads less if nothing else is kept
    from turn to turn; where a matrix is, the one whose places are found by the least computing.

    A run of n tiles meets 1 + (n - 1) / PROGRAMS turns in the mean.
    """

    def turns(tiles: float) -> float:
        return 1 + max(tiles - 1, 0) / PROGRAMS

    if matrix_bytes <= KEPT_BYTES:
        return BY_COLUMNS
    row_tiles = rows / 128 + 0.5  # an expert's last one is half full
    groups = max(1, round(row_tiles / TALL))
    height = row_tiles / groups
    by_columns = row_tiles * turns(column_tiles) + 2 * column_tiles * turns(row_tiles * column_tiles)
    tall = row_tiles * turns(height * column_tiles) + 2 * column_tiles * groups * turns(height)
    return BY_COLUMNS if by_columns <= tall else TALL


@cache
def group_of_gradient(height_tiles: int, width_tiles: int) -> int:
    """How many tiles along H sweep W together, or, below 0, how many along W sweep H.

    A group's own side is read once and stays, the other side once for each group. A tile is 128 high and 256 wide.
    """
    tall = height_tiles + 2 * width_tiles * -(-height_tiles // TALL)
    wide = 2 * width_tiles + height_tiles * -(-width_tiles // WIDE)
    if tall == wide:  # the last group of one turn is the first of the next, and its other side is read again
        return -WIDE if 2 * width_tiles <= height_tiles else TALL
    return -WIDE if wide < tall else TALL


@gluon.jit
def entry_of_tile(tile, table, tiles, column_tiles, ORDER: gl.constexpr, GROUP_M: gl.constexpr):
    """What `place_in_entry` needs of the table, and the column tile where that is known already."""
    slot, n = slot_of_tile(tile, tiles, column_tiles, ORDER, GROUP_M)
    entry = table + 4 + slot * 4
    of_expert = n
    if ORDER > 0:
        of_expert = gl.load(entry + 3)
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), n, of_expert


@gluon.jit
def entry_ahead(tile, table, tiles, column_tiles, ORDER: gl.constexpr, GROUP_M: gl.constexpr):
    """... where there may be no such tile: it has no rows then, and row -1."""
    there = tile < tiles * column_tiles
    slot, n = slot_of_tile(gl.where(there, tile, 0), gl.maximum(tiles, 1), column_tiles, ORDER, GROUP_M)
    entry = table + 4 + slot * 4
    expert = gl.load(entry, mask=there, other=0)
    row = gl.load(entry + 1, mask=there, other=-1)
    end = gl.load(entry + 2, mask=there, other=0)
    of_expert = n
    if ORDER > 0:
        of_expert = gl.load(entry + 3, mask=there, other=1)
    return expert, row, end, n, of_expert


@gluon.jit
def slot_of_tile(tile, tiles, column_tiles, ORDER: gl.constexpr, GROUP_M: gl.constexpr):
    """Place in the table, and column tile."""
    if ORDER < 0:
        group_size = GROUP_M * column_tiles
        group = tile // group_size
        first = group * GROUP_M
        height = gl.minimum(tiles - first, GROUP_M)
        inside = tile - group * group_size
        return first + inside % height, inside // height
    else:
        slot = tile // column_tiles
        return slot, tile - slot * column_tiles


@gluon.jit
def place_in_entry(entry, column_tiles, ORDER: gl.constexpr, BLOCK_M: gl.constexpr):
    """Expert, first row, end of the expert's rows, and column tile of a tile."""
    expert, row, end, n, of_expert = entry
    if ORDER > 0:
        before = of_expert - gl.cdiv(end - row, BLOCK_M)  # row tiles of the expert, before the one of the entry
        groups = gl.maximum((of_expert + ORDER // 2) // ORDER, 1)
        height = gl.cdiv(of_expert, groups)
        first = before // height * height
        inside = (before - first) * column_tiles + n
        height = gl.minimum(of_expert - first, height)
        row += (first + inside % height - before) * BLOCK_M
        n = inside // height
    return expert, row, end, n


@gluon.jit
def place_in_gradient(inside, h_tiles, w_tiles, GROUP: gl.constexpr):
    """Tile along H and along W of an expert's tile. GROUP: of `group_of_gradient`."""
    if GROUP > 0:
        group = inside // (GROUP * w_tiles)
        height = gl.minimum(h_tiles - group * GROUP, GROUP)
        inside = inside % (GROUP * w_tiles)
        return group * GROUP + inside % height, inside // height
    else:
        group = inside // (-GROUP * h_tiles)
        width = gl.minimum(w_tiles + group * GROUP, -GROUP)
        inside = inside % (-GROUP * h_tiles)
        return inside // width, inside % width - group * GROUP
