"""How few tokens are computed: the way, and the tiles of each launch.

T tokens · K experts per token · E experts · H hidden · I intermediate

    chosen = configuration(tokens, top_k, *down_EHI.shape, gated=True, itemsize=2)
"""

from __future__ import annotations

from typing import NamedTuple

from amoeba.kernels.launch import cdiv, next_power_of_2

# Up to this many tokens the way is by slot. Not measured yet; at T = 2 few slots share an expert if E >> K.
BY_SLOT_TOKENS = 1
# Programs that a launch by slot should have at least: about 4 for each of an H200's 132 SMs.
BY_SLOT_PROGRAMS = 512
# Columns per program by slot: each program reads the whole input row, so few columns mean much reading beside the
# weights (a quarter of their bytes at 4). With 4, 8 and 16 columns up took 32.7 to 33.4 us together with down (H200,
# 2026-11-15, before the cache was filled by reading).
BY_SLOT_LEAST_COLUMNS, BY_SLOT_MOST_COLUMNS = 4, 16
# Elements of the weight tile of a program by slot: 32 in each of 128 threads.
BY_SLOT_TILE = 4096
# A program of the down projection that has all its weights in flight at once: its columns, and the most elements of its
# tile, 128 in each of 128 threads.
AT_ONCE_COLUMNS, AT_ONCE_ELEMENTS = 2, 16384
# Rows of weights in the tile of a program by expert (one wgmma is 64 high), and bytes of each.
# With T = 8 and 64, 64 or 128 rows of 128 or 256 bytes are within 2 %; 512 bytes cost 5 to 25 % (H200, 2026-11-15).
BY_EXPERT_WEIGHT_ROWS = 64
BY_EXPERT_DEPTH_BYTES = 256
# The expected number of an expert's slots times this is the room that a chunk has for them. Room
# for 32 instead of 16 cost 5 % with T = 8 and 18 % with T = 64 (H200, 2026-11-15).
CHUNK_HEADROOM = 3
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 64


class Tile(NamedTuple):
    """How a product is cut: `columns` of its result per program, `depth` of the summed dimension per step.

    Both are powers of two. A gated up projection reads two rows of weights per column.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


class Configuration(NamedTuple):
    """rows: the slots of an expert that are computed together, a power of two of at least 16; not used by slot.

    at_once: a program of the down projection has all its weights in flight before it needs the first of them.
    overlap: with at_once, the down projection starts while the up projection ends (programmatic dependent launch, from
    Hopper on).
    """

    by_slot: bool
    up: Tile
    down: Tile
    rows: int = SMALLEST_CHUNK
    at_once: bool = False
    overlap: bool = False


def configuration(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool,
    itemsize: int,
    overlap: bool = False,
) -> Configuration:
    """The way and the tiles. overlap: whether the device can start a launch before the one ahead of it ends."""
    slots = tokens * top_k
    if tokens <= BY_SLOT_TOKENS:
        up = _tile_by_slot(slots, intermediate, hidden, rows_per_column=2 if gated else 1)
        if next_power_of_2(top_k) * next_power_of_2(intermediate) * AT_ONCE_COLUMNS <= AT_ONCE_ELEMENTS:
            return Configuration(
                True, up, Tile(AT_ONCE_COLUMNS, next_power_of_2(intermediate)), at_once=True, overlap=overlap
            )
        return Configuration(True, up, _tile_by_slot(tokens, hidden, intermediate, rows_per_column=1))
    expected = CHUNK_HEADROOM * slots // min(num_experts, slots)
    rows = min(max(next_power_of_2(expected), SMALLEST_CHUNK), LARGEST_CHUNK)
    # fp32 has no tensor core in full precision: its operands pass through registers, so its steps are a quarter
    depth = BY_EXPERT_DEPTH_BYTES // itemsize if itemsize == 2 else BY_EXPERT_DEPTH_BYTES // itemsize // 2
    if rows == LARGEST_CHUNK:  # three stages of both operands fit in the 99 KB of shared memory of the smaller GPUs
        depth //= 2
    return Configuration(
        by_slot=False,
        up=_tile_by_expert(intermediate, hidden, rows_per_column=2 if gated else 1, depth=depth),
        down=_tile_by_expert(hidden, intermediate, rows_per_column=1, depth=depth),
        rows=rows,
    )


def _tile_by_slot(lines: int, width: int, depth: int, *, rows_per_column: int) -> Tile:
    columns = BY_SLOT_MOST_COLUMNS
    while columns > BY_SLOT_LEAST_COLUMNS and lines * cdiv(width, columns) < BY_SLOT_PROGRAMS:
        columns //= 2
    room = BY_SLOT_TILE // (columns * rows_per_column)
    return Tile(columns, min(next_power_of_2(depth), room, 1024), warps=4, stages=4)


def _tile_by_expert(width: int, depth_in_all: int, *, rows_per_column: int, depth: int) -> Tile:
    columns = min(BY_EXPERT_WEIGHT_ROWS // rows_per_column, next_power_of_2(width))
    return Tile(max(columns, 16), max(min(depth, next_power_of_2(depth_in_all)), 16), warps=4, stages=3)
