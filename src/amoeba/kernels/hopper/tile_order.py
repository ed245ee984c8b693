"""The order in which the tiles of a product are computed, which determines what stays in the L2 cache.

    order = order_of_product(matrix_bytes, column_tiles, activated)         # BY_COLUMNS, or how tall groups are
    listed = list_tiles(table, column_tiles, order, BLOCK_M)                # for the latter
    expert, row, end, n = place_of_tile(tile, table or listed, tiles, column_tiles, GROUP_M, ORDER)     # in a kernel

As many tiles as there are multiprocessors are multiplied at once, along the same depth. What they share is read from
memory once, and what the next ones read again is still there only if all of it is small: 128 rows or 256 columns of a
matrix of depth 7168 are 2 and 4 MB.

    IN_GROUPS    eight row tiles sweep the columns, whichever experts they belong to
    BY_COLUMNS   a row tile's columns one after the other: all of a narrow matrix is there, and each row once
    above 0      about this many row tiles sweep the columns, all of one expert: each column once for a group

`split_table` makes two lists of one: the tiles whose rows all come from some of the tokens, and the others. Rows of an
expert are sorted by their tokens: the first and the last row of a tile tell of all of them.

An order changes no bits. On an H200 a step takes 1 to 2 % less time by them, back to back (dev/log, 2026-11-17).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.launch import cdiv, quick

IN_GROUPS, BY_COLUMNS = -1, 0
BLOCK_M = 128  # rows of a tile
FEW_ROWS = 64  # ... where experts have few: the least that the matrix unit multiplies
# Where P tiles are there at once and a column tile has twice a row tile's bytes, a·R + 2b·R with a·b = P is least for
# a = sqrt(2 P): 16 of 132.
TALL = 16
# A matrix of this many bytes stays in the second-level cache, of 60 MB on an H200, while its expert's tiles are
# computed.
KEPT_BYTES = 10_000_000
# Column tiles of the up projection up to which it makes no difference, and a list would be one more launch.
FEW_COLUMNS = 4
_BLOCK = 256


def order_of_product(matrix_bytes: int, column_tiles: int, activated: bool) -> int:
    """matrix_bytes: of an expert. activated: the up projection, which was faster in tall groups with small matrices too
    (with rests: 1.02 times for qwen3_30b, 1.01 for olmoe), where other products were as fast or faster by columns."""
    if matrix_bytes > KEPT_BYTES or (activated and column_tiles > FEW_COLUMNS):
        return TALL
    return BY_COLUMNS


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


def list_tiles(table: Tensor, column_tiles: int, height: int, block_m: int) -> Tensor:
    """All tiles of a product as groups of one expert's row tiles sweep its columns: the number of row tiles, a zero for
    `sync_tiles`, two unused places; then for each tile expert, first row, expert's end, column tile.

    height: of a group, give or take a half. block_m: rows of a tile.
    """
    most = (table.shape[0] // 4 - 1) * column_tiles
    listed = torch.empty(4 + 4 * most, dtype=torch.int32, device=table.device)
    _list_tiles[(cdiv(most, _BLOCK),)](table, listed, column_tiles, HEIGHT=height, BLOCK_M=block_m, BLOCK=_BLOCK)
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
def clamped_place(tile, table, tiles, column_tiles, shift, GROUP_M: gl.constexpr, ORDER: gl.constexpr):
    """As `place_of_tile`, `shift` rows further; behind the last tile that of the last one, without any the first row's,
    so that all may be loaded that belongs to it."""
    some = tiles > 0
    last = gl.maximum(tiles * column_tiles - 1, 0)
    tile = gl.minimum(tile, last)
    expert, row, end, n = place_of_tile(tile, table, gl.maximum(tiles, 1), column_tiles, GROUP_M, ORDER)
    return gl.where(some, expert, 0), gl.where(some, row, 0) + shift, gl.where(some, end, 1), gl.where(some, n, 0)


@gluon.jit
def sync_tiles(begun, before, tiles, looked, LOOKS: gl.constexpr):
    """Waits until most programs have come to this turn: what they share is read from memory once only if they read it
    at about the same time. Returns `looked` for the next turn.

    begun: counts the tiles that programs have come to. before: tiles of the turns before this one. looked: 0 at first,
    LOOKS once the others did not come: where something else runs on the GPU, some programs have no place yet, and a
    program that has waited for them once does not do so again.
    """
    programs = gl.num_programs(0)
    wanted = gl.minimum(before + programs - programs // 8, tiles)
    seen = gl.atomic_add(begun, 1, sem="relaxed") + 1
    looks = looked
    while (seen < wanted) & (looks < LOOKS):
        seen = gl.atomic_add(begun, 0, sem="relaxed")
        looks += 1
    return gl.where(looks < LOOKS, 0, LOOKS)


def split_table(table: Tensor, order_N: Tensor, first_slot: int, last_slot: int) -> tuple[Tensor, Tensor]:
    """Of the tokens whose slots are from first_slot up to last_slot, and the rest. table: of `tile_table`."""
    inside, outside = torch.empty_like(table), torch.empty_like(table)
    _split_table[(1,)](table, order_N, inside, outside, first_slot, last_slot, BLOCK_M=BLOCK_M, BLOCK=1024)
    return inside, outside


@quick
@triton.jit(do_not_specialize=["first_slot", "last_slot"])
def _split_table(table, order_N, inside, outside, first_slot, last_slot, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.load(table)
    inner = tiles * 0
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        real = tile < tiles
        entry = table + 4 + tile * 4
        expert = tl.load(entry, mask=real, other=0)
        row = tl.load(entry + 1, mask=real, other=0)
        end = tl.load(entry + 2, mask=real, other=1)
        first = tl.load(order_N + row, mask=real, other=0)
        last = tl.load(order_N + tl.minimum(row + BLOCK_M, end) - 1, mask=real, other=0)
        is_inside = real & (first >= first_slot) & (last < last_slot)
        before = inner + tl.cumsum(is_inside.to(tl.int32), axis=0) - is_inside.to(tl.int32)
        at = 4 + 4 * tl.where(is_inside, before, tile - before)
        for place in tl.static_range(3):
            value = expert if place == 0 else (row if place == 1 else end)
            tl.store(inside + at + place, value, mask=is_inside)
            tl.store(outside + at + place, value, mask=real & (is_inside == 0))
        inner += tl.sum(is_inside.to(tl.int32), axis=0)
    tl.store(inside, inner)
    tl.store(outside, tiles - inner)
