"""In which order tiles are computed: which ones are there at the same time, and so how many bytes come from memory.

    order = order_of_product(rows, column_tiles, matrix_bytes)      # BY_COLUMNS, or how many row tiles a group has
    listed = list_tiles(table, column_tiles, order)                 # for the latter
    expert, row, end, n = place_of_tile(tile, table or listed, tiles, column_tiles, GROUP_M, ORDER)     # in a kernel
    group = group_of_gradient(height_tiles, width_tiles)

As many tiles as there are multiprocessors are multiplied at once, step by step along the same depth. What they share is
read from memory once, and what the next ones read again is there still only where all of it is small: 128 rows or 256
columns of a matrix of depth 7168 are 2 and 4 MB. So the bytes of a product of one expert follow from how many of its
row tiles and of its column tiles are there together:

    IN_GROUPS    eight row tiles sweep the columns, whichever experts they belong to
    BY_COLUMNS   a row tile's columns one after the other: all of a narrow matrix is there, and each row once
    above 0      about so many row tiles sweep the columns, all of one expert: each column once for a group

An order changes no bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.launch import cdiv, quick

IN_GROUPS, BY_COLUMNS = -1, 0
# Where P tiles are there at once and a column tile has twice a row tile's bytes, a·R + 2b·R with a·b = P is least for
# a = sqrt(2 P): 16 of 132.
TALL, WIDE, PROGRAMS = 16, 8, 132
# A matrix of so many bytes stays in the second-level cache, of 50 MB on an H200, while its expert's tiles are computed.
KEPT_BYTES = 10_000_000
_BLOCK = 256


@cache
def order_of_product(rows: int, column_tiles: int, matrix_bytes: int) -> int:
    """rows: of an expert, in the mean. matrix_bytes: of an expert. The order that reads less if nothing else is kept
    from turn to turn; where a matrix is, the one that needs no list.

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
    tall = height_tiles + 2 * width_tiles * cdiv(height_tiles, TALL)
    wide = 2 * width_tiles + height_tiles * cdiv(width_tiles, WIDE)
    if tall == wide:  # the last group of one turn is the first of the next, and its other side is read again
        return -WIDE if 2 * width_tiles <= height_tiles else TALL
    return -WIDE if wide < tall else TALL


@quick
@triton.jit
def _list_tiles(table, listed, column_tiles, HEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    row_tiles = tl.load(table)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = tile < row_tiles * column_tiles
    slot = tile // column_tiles
    entry = table + 4 + slot * 4
    expert = tl.load(entry, mask=real, other=0)
    row = tl.load(entry + 1, mask=real, other=0)
    end = tl.load(entry + 2, mask=real, other=1)
    of_expert = tl.load(entry + 3, mask=real, other=1)
    before = of_expert - (end - row + BLOCK_M - 1) // BLOCK_M  # row tiles of the expert, before this one
    groups = tl.maximum((of_expert + HEIGHT // 2) // HEIGHT, 1)
    height = (of_expert + groups - 1) // groups
    first = before // height * height
    inside = tile - (slot - before + first) * column_tiles
    height = tl.minimum(of_expert - first, height)
    at = listed + 4 + tile * 4
    tl.store(at, expert, mask=real)
    tl.store(at + 1, row + (first + inside % height - before) * BLOCK_M, mask=real)
    tl.store(at + 2, end, mask=real)
    tl.store(at + 3, inside // height, mask=real)
    if tl.program_id(0) == 0:
        tl.store(listed, row_tiles)
        tl.store(listed + 1, 0)


def list_tiles(table: Tensor, column_tiles: int, height: int) -> Tensor:
    """All tiles of a product as groups of one expert's row tiles sweep its columns: the number of row tiles, a zero for
    `keep_abreast`, two unused places; then for each tile expert, first row, expert's end, column tile.

    height: of a group, give or take a half.
    """
    most = (table.shape[0] // 4 - 1) * column_tiles
    listed = torch.empty(4 + 4 * most, dtype=torch.int32, device=table.device)
    _list_tiles[(cdiv(most, _BLOCK),)](table, listed, column_tiles, HEIGHT=height, BLOCK_M=128, BLOCK=_BLOCK)
    return listed


@gluon.jit
def _slot_of_tile(tile, tiles, column_tiles, GROUP_M: gl.constexpr, ORDER: gl.constexpr):
    """Place in the table, and column tile where it is not told there."""
    if ORDER < 0:
        group_size = GROUP_M * column_tiles
        group = tile // group_size
        first = group * GROUP_M
        height = gl.minimum(tiles - first, GROUP_M)
        inside = tile - group * group_size
        return first + inside % height, inside // height
    elif ORDER == 0:
        slot = tile // column_tiles
        return slot, tile - slot * column_tiles
    else:
        return tile, tile


@gluon.jit
def place_of_tile(tile, table, tiles, column_tiles, GROUP_M: gl.constexpr, ORDER: gl.constexpr = -1):
    """Expert, first row, end of the expert's rows, and column tile of a tile."""
    slot, n = _slot_of_tile(tile, tiles, column_tiles, GROUP_M, ORDER)
    entry = table + 4 + slot * 4
    if ORDER > 0:
        n = gl.load(entry + 3)
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), n


@gluon.jit
def place_ahead(tile, table, tiles, column_tiles, GROUP_M: gl.constexpr, ORDER: gl.constexpr):
    """... where there may be no such tile: its row is -1 then, and so is its last one."""
    there = tile < tiles * column_tiles
    slot, n = _slot_of_tile(gl.where(there, tile, 0), gl.maximum(tiles, 1), column_tiles, GROUP_M, ORDER)
    entry = table + 4 + slot * 4
    if ORDER > 0:
        n = gl.load(entry + 3, mask=there, other=0)
    expert = gl.load(entry, mask=there, other=0)
    row = gl.load(entry + 1, mask=there, other=-1)
    end = gl.load(entry + 2, mask=there, other=0)
    return expert, row, end, n


@gluon.jit
def keep_abreast(begun, before, tiles, LOOKS: gl.constexpr):
    """Waits until most programs have come to this turn: what they share is read from memory once only if they read it
    at about the same time. Not for ever: where others run on the GPU, some programs may have no place yet.

    begun: counts the tiles that programs have come to. before: tiles of the turns before this one.
    """
    programs = gl.num_programs(0)
    wanted = gl.minimum(before + programs - programs // 8, tiles)
    seen = gl.atomic_add(begun, 1, sem="relaxed") + 1
    looks = 0
    while (seen < wanted) & (looks < LOOKS):
        seen = gl.atomic_add(begun, 0, sem="relaxed")
        looks += 1


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
