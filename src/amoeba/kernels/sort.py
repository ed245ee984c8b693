"""Routed rows sorted by expert: the sort of `core.layout`, as a counting sort in three launches, or one for few rows.

T tokens · K experts per token · N = T·K routed rows · E experts · B blocks of rows, one per program ·
C = E rounded up to a power of two

    order_N, slot_row_N, offs_E = sort_rows(expert_TK, num_experts=E)

order_N:    int32, sorted position -> position in the list of rows as it came
slot_row_N: int32, position as it came -> sorted position; N for the row of a sentinel
offs_E:     int32, cumulative ends of the experts' rows (no leading 0)

Rows of one expert keep their order. Rows whose id lies outside [0, E), those of sentinels, follow behind offs_E[-1],
in order too. The values are exactly those of `build_layout`, whose maps are int64.

The first launch counts each block's rows per expert, the second adds these up over the blocks, and in the third each
program sorts tiles of its rows by (expert, position in the tile): such keys are all different, so the order is that of
a stable sort whatever the network does. No atomics in global memory, no host synchronisation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

MAX_EXPERTS = 1024  # registers: each program holds a few counts per expert
MAX_ROWS = 2**30  # row numbers are int32 throughout

# One program of the second launch adds up the counts of all blocks for one expert. In two launches, with every program
# of the last adding up at most 128 blocks' counts and sorting 2048 rows, the whole took 36 µs for 262144 rows and 128
# experts (H200, 2026-11-15).
MAX_BLOCKS = 4096
# rows per tile -> warps. A tile is sorted in one go: log²-many steps, of which those across warps go through shared
# memory. Few rows are one tile, many are tiles of 512.
WARPS_OF_TILE = {128: 4, 512: 4, 1024: 8, 2048: 8}
LARGEST_TILE = max(WARPS_OF_TILE)
USUAL_TILE = 512


def sort_rows(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order_N, slot_row_N and offs_E, all int32, of the ids in expert_TK (int32 or int64, any shape)."""
    rows, device = expert_TK.numel(), expert_TK.device
    if expert_TK.dtype not in (torch.int32, torch.int64):
        raise bad_value("expert_TK", "dtype int32 or int64", expert_TK.dtype, "convert it with .long()")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise bad_value("num_experts", f"1 to {MAX_EXPERTS}", num_experts, "use amoeba.core.layout.build_layout")
    if rows > MAX_ROWS:
        raise bad_value("expert_TK", f"at most {MAX_ROWS} rows", rows, "use amoeba.core.layout.build_layout")
    order_N = torch.empty(rows, dtype=torch.int32, device=device)
    slot_row_N = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return order_N, slot_row_N, torch.zeros(num_experts, dtype=torch.int32, device=device)
    offs_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    expert_N = expert_TK.contiguous().view(rows)  # reshape alone may return a view of stride 0

    tile, blocks, tiles = partition(rows)
    bins = max(next_power_of_2(num_experts), 2)
    sizes = {"EXPERTS": num_experts, "BINS": bins, "TILE": tile, "num_warps": WARPS_OF_TILE[tile]}
    count_CB = total_C = None
    if blocks > 1:
        count_CB = torch.empty(bins, blocks, dtype=torch.int32, device=device)
        total_C = torch.empty(bins, dtype=torch.int32, device=device)
        _count_rows[(blocks,)](expert_N, count_CB, rows, tiles, blocks, **sizes)
        _add_up_blocks[(bins,)](count_CB, total_C, blocks, BLOCKS=next_power_of_2(blocks), num_warps=4)
    _place_rows[(blocks,)](expert_N, count_CB, total_C, order_N, slot_row_N, offs_E, rows, tiles, blocks, **sizes)
    return order_N, slot_row_N, offs_E


def partition(rows: int) -> tuple[int, int, int]:
    """Rows per tile, number of blocks, tiles per block."""
    if rows <= LARGEST_TILE:  # one tile holds them all: nothing to count beforehand
        return min(tile for tile in WARPS_OF_TILE if tile >= rows), 1, 1
    tiles = cdiv(rows, MAX_BLOCKS * USUAL_TILE)
    return USUAL_TILE, cdiv(rows, USUAL_TILE * tiles), tiles


@triton.jit
def _load_tile(expert_N, first_row, rows, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """The ids of a tile (0 for sentinels), which of them are owned, and which lie inside the list."""
    row = first_row + tl.arange(0, TILE)
    inside = row < rows
    expert = tl.load(expert_N + row, mask=inside, other=-1)
    owned = (expert >= 0) & (expert < EXPERTS)  # before narrowing: an int64 id may be anything
    return tl.where(owned, expert, 0).to(tl.int32), owned, inside


@quick
@triton.jit
def _count_rows(expert_N, count_CB, rows, tiles, blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0)
    count = tl.zeros((BINS,), tl.int32)
    for tile in range(tiles):
        expert, owned, _ = _load_tile(expert_N, (block * tiles + tile) * TILE, rows, EXPERTS, TILE)
        count += tl.histogram(expert, BINS, mask=owned)
    tl.store(count_CB + tl.arange(0, BINS) * blocks + block, count)


@quick
@triton.jit
def _add_up_blocks(count_CB, total_C, blocks, BLOCKS: tl.constexpr):
    """Each block's count becomes that of the blocks before it."""
    bin = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    here = count_CB + bin * blocks + block
    count = tl.load(here, mask=block < blocks, other=0)
    tl.store(here, tl.cumsum(count, axis=0) - count, mask=block < blocks)
    tl.store(total_C + bin, tl.sum(count, axis=0))


@quick
@triton.jit
def _place_rows(
    expert_N,
    count_CB,  # of the blocks before; None: there is one block, of one tile
    total_C,
    order_N,
    slot_row_N,
    offs_E,
    rows,
    tiles,
    blocks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    bin_C = tl.arange(0, BINS)
    if count_CB is None:
        expert, owned, _ = _load_tile(expert_N, 0, rows, EXPERTS, TILE)
        total_C = tl.histogram(expert, BINS, mask=owned)
        before_C = tl.zeros((BINS,), tl.int32)
    else:
        before_C = tl.load(count_CB + bin_C * blocks + block)
        total_C = tl.load(total_C + bin_C)
    ends_C = tl.cumsum(total_C, axis=0)
    if block == 0:
        tl.store(offs_E + bin_C, ends_C, mask=bin_C < EXPERTS)

    next_C = ends_C - total_C + before_C  # where the block's next row of each expert goes
    all_owned = tl.sum(total_C, axis=0)
    owned_before = tl.sum(before_C, axis=0)
    rank = tl.arange(0, TILE)
    for tile in range(tiles):
        first_row = (block * tiles + tile) * TILE
        expert, owned, inside = _load_tile(expert_N, first_row, rows, EXPERTS, TILE)
        # behind all experts the rows of sentinels, behind these what lies past the end of the list
        bin = tl.where(owned, expert, tl.where(inside, BINS, BINS + 1))
        key = tl.sort(bin * TILE + rank)
        bin = key // TILE
        row = first_row + key % TILE

        count_C = tl.histogram(expert, BINS, mask=owned)
        owned_here = tl.sum(count_C, axis=0)
        first_rank_C = tl.cumsum(count_C, axis=0) - count_C
        shift = tl.gather(next_C - first_rank_C, tl.minimum(bin, BINS - 1), axis=0)
        unowned_shift = all_owned + (first_row - owned_before) - owned_here
        dest = rank + tl.where(bin < BINS, shift, unowned_shift)
        tl.store(order_N + dest, row, mask=bin <= BINS)
        tl.store(slot_row_N + row, tl.where(bin < BINS, dest, rows), mask=bin <= BINS)
        next_C += count_C
        owned_before += owned_here
