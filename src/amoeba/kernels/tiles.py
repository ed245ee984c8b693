"""Tiles of products and passes over sorted rows: which one a program computes.

N = T·K routed rows · E experts

Expert e owns the sorted rows offs_E[e-1] : offs_E[e]; only the device knows them. A grid of an upper bound of tiles is
launched, and a program that finds no rows exits. Expert e is given the slots from offs_E[e-1] // BLOCK_M + e on: that
is always enough for its rows (ceil((b - a)/m) <= b//m - a//m + 1), and so a program finds its expert by counting the
experts that begin at or before its slot. That costs one load of offs_E and one sum: no scan, no kernel ahead of it, no
tables. The price, at most E slots without rows, is the one that any upper bound pays. Where there are fewer rows than
that, as in decoding, every row gets a slot instead.

    chosen = configuration_on(device, "product", Product(N, E, H, J, x_TH.dtype))
    grid = (slots(N, E, chosen.block_m) * column_tiles,)
    expert, row, row_end, column_tile = find_tile(offs_E, ...)  # in the kernel

Row passes, which have a program for each row, ask how wide a tile is and which expert a sorted row belongs to:

    block = column_block(2880, most=1024)              # 1024: three blocks, 1/16 of the lanes idle
    expert = expert_of_row(offs, row, E, E_PADDED)     # inside a kernel; E for rows past the last expert's

Widths and row strides go into the row passes as compile-time constants: a model has few of them, and a width that is a
multiple of 8 but not of 16 still gets 16-byte accesses, which the launcher's own divisibility test (16) would refuse.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.kernels.tile_sizes import Configuration


def slots(rows: int, experts: int, block_m: int) -> int:
    """Upper bound of the tiles of rows, wherever the rows are routed; see `find_tile`."""
    return min(rows, rows // block_m + experts)


def tile_constants(rows: int, experts: int, chosen: Configuration, column_tiles: int = 1) -> dict[str, object]:
    """The compile-time constants of `find_tile`."""
    return {
        "EXPERTS": experts,
        "BLOCK_E": next_power_of_2(experts),
        "SLOT_PER_ROW": rows < rows // chosen.block_m + experts,
        "COLUMN_TILES": column_tiles,
        "BLOCK_M": chosen.block_m,
        "GROUP_M": chosen.group_m,
    }


@triton.jit
def grouped_order(program, row_tiles, COLUMN_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Position of a program in its plane of tiles: GROUP_M tiles of rows sweep the columns together."""
    group = program // (GROUP_M * COLUMN_TILES)
    within = program % (GROUP_M * COLUMN_TILES)
    first = group * GROUP_M
    size = tl.minimum(row_tiles - first, GROUP_M)
    return first + within % size, within // size


@triton.jit
def find_tile(offs_E, TILES: tl.constexpr):
    """This program's expert, its first sorted row, the end of the expert's rows, and its tile of columns.

    No rows are left for this program where the first row is not before the end. TILES: a group with the constants of
    `tile_constants`.
    """
    EXPERTS: tl.constexpr = TILES.EXPERTS
    SLOT_PER_ROW: tl.constexpr = TILES.SLOT_PER_ROW
    COLUMN_TILES: tl.constexpr = TILES.COLUMN_TILES
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    slot, column_tile = grouped_order(tl.program_id(0), tl.num_programs(0) // COLUMN_TILES, COLUMN_TILES, TILES.GROUP_M)
    expert_E = tl.arange(0, TILES.BLOCK_E)
    start_E = tl.load(offs_E + expert_E - 1, mask=(expert_E > 0) & (expert_E < EXPERTS), other=0)
    first_slot_E = start_E if SLOT_PER_ROW else start_E // BLOCK_M + expert_E
    expert = tl.sum(((first_slot_E <= slot) & (expert_E < EXPERTS)).to(tl.int32), 0) - 1
    start = tl.load(offs_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_E + expert)
    first_slot = start if SLOT_PER_ROW else start // BLOCK_M + expert
    return expert, start + (slot - first_slot) * BLOCK_M, end, column_tile


@triton.jit
def rows_of_tile(order_N, row, row_end, GATHER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sorted rows of a tile, and where to read them: behind the last one, the last one again.

    Rows do not mix in a product, so what is read twice needs no mask; only what is stored does.
    """
    row_M = row + tl.arange(0, BLOCK_M)
    source_M = tl.minimum(row_M, row_end - 1)
    if GATHER:
        source_M = tl.load(order_N + source_M).to(tl.int32) // TOP_K
    return row_M, source_M


# A block narrower than 64 elements (128 bytes of bf16, one cache line) is only used for narrower rows.
NARROWEST_BLOCK = 64
# Idle lanes cost instructions, not bytes: a wider block is taken as long as no more than this share idles. Not measured
# yet.
IDLE_SHARE = 1 / 16


@cache
def column_block(width: int, most: int) -> int:
    """The widest power of two up to `most` that leaves few lanes idle in the last block of a row."""
    if width < NARROWEST_BLOCK:
        return min(most, max(16, next_power_of_2(width)))
    candidates = [1 << bit for bit in range(most.bit_length() - 1, -1, -1) if 1 << bit >= min(NARROWEST_BLOCK, most)]

    def idle(block: int) -> float:
        return 1 - width / (cdiv(width, block) * block)

    return next((block for block in candidates if idle(block) <= IDLE_SHARE), min(candidates, key=idle))


@triton.jit
def expert_of_row(offs, row, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """Expert of each of a vector of sorted rows: how many experts end at or before it."""
    index = tl.arange(0, EXPERTS_PADDED)
    end = tl.load(offs + index, mask=index < NUM_EXPERTS, other=2147483647)
    return tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
