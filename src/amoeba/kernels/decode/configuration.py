"""Which decode kernel runs for few tokens, and the tiles of each launch.

T tokens · K experts per token · E experts · H hidden · I intermediate

    chosen = configuration(Layer(tokens, top_k, *down_EHI.shape, gated=True, itemsize=2))

`candidates` are the ways that a search may choose among, and that what was found earlier has to be one of.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil, sqrt
from typing import NamedTuple

import torch

from amoeba.core.problem import Problem
from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.kernels.tile_sizes import shared_bytes
from amoeba.system import tuned

# By slot an expert is read once for each of its slots, by expert once. One token names no expert twice. Up to this many
# tokens, by slot is faster as long as few slots share an expert. With random routing, by slot against by expert (H200,
# 2026-11-15; in brackets the slots per touched expert):
#   H=2048 I=768 E=128 K=8    T=2 38.1 : 45.1 us [1.03], T=3 54.3 : 59.9 [1.06], T=4 70.8 : 75.4 [1.10]
#   H=2048 I=1024 E=64 K=8    T=2 48.9 : 57.3 [1.07], T=4 91.7 : 90.9 [1.21]
#   H=4096 I=14336 E=8 K=2    T=2 311 : 274 [1.14]
BY_SLOT_TOKENS, SLOTS_PER_EXPERT = 4, 1.1
# Bytes of weights that a program of the up projection has in flight at once, where whole rows fit, in 256 threads.
# With H = 2048 that is two columns; one (in 128 threads) or four made T = 1 23.8 or 24.3 us instead of 21.9. Two are
# better than one even if they take 32 KB: with H = 4096, I = 14336 161 us instead of 181 (H200, 2026-11-15).
UP_BYTES, MOST_UP_BYTES, UP_WARPS = 16384, 32768, 8
# The same for the down projection: up to two rows of y, all slots, 256 bytes in a thread. Two rows against one: 38.1 to
# 39.2 us with T = 2 of the first layer above; 32 KB in 4 warps against 8: 167 to 174 us with H = 7168, I = 2048, K = 8.
DOWN_ROWS, DOWN_BYTES_PER_WARP = 2, 8192
FEWEST_DOWN_WARPS, MOST_DOWN_WARPS = 4, 8
# I is cut into pieces of a power of two, not narrower than what a warp reads at a time, in elements of two bytes.
NARROWEST_PIECE, MOST_PIECES = 256, 8
# Where the weights are not at once in flight, by slot. Programs that a launch should have at least: about 4 for each of
# an H200's 132 SMs.
BY_SLOT_PROGRAMS = 512
# Columns per program: each program reads the whole input row, so few columns mean much reading in addition to the
# weights (a quarter of their bytes at 4). With 4, 8 and 16 columns up took 32.7 to 33.4 us together with down (H200,
# 2026-11-15, before the cache was filled by reading).
BY_SLOT_LEAST_COLUMNS, BY_SLOT_MOST_COLUMNS = 4, 16
# Elements of the weight tile of a program: 32 in each of 128 threads.
BY_SLOT_TILE = 4096
# By the slots of an expert that a program computes together: rows of weights in its tile, bytes of each in a step, and
# stages. A program reads the rows of all its slots as well: the more slots, the taller the tile. Up and down in us on
# an H200 (dev/log, 2026-11-18), 128 and 512 tokens of the first layer above, then 64 and 128 of the last one:
#   64 rows, 256 bytes, 3 stages    191 + 109 (16)   -                674 (32)   -
#   128 rows, 128 bytes, 4 stages   197 + 109 (16)   204 + 116 (64)   664 (32)   678 (64)
#   64 rows, 128 bytes, 4 stages    -                207 + 118 (64)   -          700 (64)
BY_EXPERT_TILE = {16: (64, 256, 3), 32: (128, 128, 4), 64: (128, 128, 4)}
SMALLEST_CHUNK, LARGEST_CHUNK = min(BY_EXPERT_TILE), max(BY_EXPERT_TILE)
# Slots from which on a launch of its own lists them (`Configuration.listed`), where launches overlap: a program without
# a loop over chunks has more registers. Up and down of fp8 take 280 us where the whole pass took 331 (the second layer
# above, 8 tokens); MXFP4 97 in place of 103 with 128 slots of the first one (dev/log).
FEWEST_LISTED = 16


class Like(NamedTuple):
    """The pass by which a configuration is chosen: where only some of its tokens, or of its experts, are at hand, they
    are computed as in the whole."""

    tokens: int
    experts: int


class Tile(NamedTuple):
    """How a product is cut: `columns` of its result per program, `depth` of the summed dimension per step.

    Both are powers of two. A gated up projection reads two rows of weights per column.
    at_once: a program has all its weights in flight before it needs the first of them. By slot only: in the up
    projection `depth` then covers a whole row, in the down projection a row is read in pieces of `depth`.
    chunks: of 16 bytes of a row, in as many lanes: see `one_token`; 0 where another kernel runs. `depth` is then what a
    step reads, any number of pieces of that many chunks.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    at_once: bool = False
    chunks: int = 0


class Configuration(NamedTuple):
    """rows: the slots of an expert that are computed together, a power of two of at least 16; not used by slot.

    overlap: the down projection starts while the up projection ends (programmatic dependent launch, from Hopper on);
    by slot, where down is at once in flight.
    listed: by expert, where experts are no more than slots, a launch of its own lists the slots of each expert; else
    each program compares ranks with ids.
    Of quantised weights by expert alone:
    by_lanes: numbers of four bits are unpacked in the order that takes the fewest integer instructions, see
    `weights.scaled_lanes_e2m1`.
    e4m3: rows are quantised as well, and multiplied by the weights' codes. Of fp8-128 alone.
    early: up's programs write down the slots that they found, down's read them, and with `overlap` the sum starts while
    the down projection ends.
    """

    by_slot: bool
    up: Tile
    down: Tile
    rows: int = SMALLEST_CHUNK
    overlap: bool = False
    by_lanes: bool = False
    listed: bool = False
    early: bool = False
    e4m3: bool = False

    def lists(self, problem: Problem) -> bool:
        """Whether slots are listed for this one."""
        return self.listed and problem.weights.num_experts <= problem.rows


class Layer(NamedTuple):
    """What the tiles depend on.

    contiguous_rows: whether W1 is stored along H and W2 along I. Otherwise a tile needs many columns to read whole
    sectors of memory, and nothing is read at once.
    overlap: whether the device can start a launch before the one ahead of it ends.
    """

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    itemsize: int
    contiguous_rows: bool = True
    overlap: bool = False

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    @property
    def rows_per_column(self) -> int:
        """Of W1 for one of a."""
        return 2 if self.gated else 1


def configuration(layer: Layer) -> Configuration:
    """The way and the tiles."""
    return (by_slot if goes_by_slot(layer.tokens, layer.top_k, layer.num_experts) else by_expert)(layer)


def goes_by_slot(tokens: int, top_k: int, num_experts: int) -> bool:
    few_share = tokens * top_k <= SLOTS_PER_EXPERT * _touched(tokens, top_k, num_experts)
    return tokens == 1 or (tokens <= BY_SLOT_TOKENS and few_share)


def slots_together(slots: int, experts: int, fewest: int = SMALLEST_CHUNK, most: int = LARGEST_CHUNK) -> int:
    """Slots of an expert that are computed together: what it gets on average, and one standard deviation of even
    routing."""
    return min(max(next_power_of_2(ceil(usual_slots(slots, experts))), fewest), most)


def usual_slots(slots: int, experts: int) -> float:
    expected = slots / max(experts, 1)
    return expected + sqrt(expected)


def by_slot(layer: Layer) -> Configuration:
    at_once = layer.contiguous_rows
    up = _up_at_once(layer.hidden, layer.rows_per_column, layer.itemsize) if at_once else None
    down = _down_at_once(layer.top_k, layer.intermediate, layer.itemsize) if at_once else None
    return Configuration(
        by_slot=True,
        up=up or _tile_by_slot(layer.slots, layer.intermediate, layer.hidden, rows_per_column=layer.rows_per_column),
        down=down or _tile_by_slot(layer.tokens, layer.hidden, layer.intermediate, rows_per_column=1),
        overlap=layer.overlap and down is not None,
    )


def by_expert(layer: Layer, weight_rows: int | None = None) -> Configuration:
    rows = slots_together(layer.slots, layer.num_experts)
    height, depth_bytes, stages = BY_EXPERT_TILE[rows]
    # fp32 has no tensor core in full precision: its operands pass through registers, so its tiles are small
    if layer.itemsize > 2:
        height, depth_bytes = 64, depth_bytes // 2
    height = weight_rows or height
    sizes = {"depth": depth_bytes // layer.itemsize, "stages": stages}
    up_columns = height // layer.rows_per_column
    return Configuration(
        by_slot=False,
        up=_tile_by_expert(layer.intermediate, layer.hidden, columns=up_columns, **sizes),
        down=_tile_by_expert(layer.hidden, layer.intermediate, columns=height, **sizes),
        rows=rows,
        overlap=layer.overlap,
        listed=layer.overlap and layer.slots >= FEWEST_LISTED,
    )


def _touched(tokens: int, top_k: int, num_experts: int) -> float:
    """Experts that tokens with random routing name, on average."""
    return num_experts * (1 - (1 - min(top_k / num_experts, 1)) ** tokens)


def _up_at_once(hidden: int, rows_per_column: int, itemsize: int) -> Tile | None:
    depth = next_power_of_2(hidden)
    bytes_per_column = rows_per_column * depth * itemsize
    columns = max(UP_BYTES // bytes_per_column, min(MOST_UP_BYTES // bytes_per_column, 2))
    return Tile(columns, depth, UP_WARPS, at_once=True) if columns else None


def _down_at_once(top_k: int, intermediate: int, itemsize: int) -> Tile | None:
    """In the pieces that leave the least of the last one empty; of those, the narrowest."""
    widest = next_power_of_2(intermediate)
    narrowest = min(max(NARROWEST_PIECE, widest // MOST_PIECES), widest)
    widths = [narrowest << doublings for doublings in range((widest // narrowest).bit_length())]
    width = min(widths, key=lambda width: cdiv(intermediate, width) * width)
    bytes_per_row = next_power_of_2(top_k) * cdiv(intermediate, width) * width * itemsize
    rows = min(max(FEWEST_DOWN_WARPS * DOWN_BYTES_PER_WARP // bytes_per_row, 1), DOWN_ROWS)
    warps = max(next_power_of_2(cdiv(rows * bytes_per_row, DOWN_BYTES_PER_WARP)), FEWEST_DOWN_WARPS)
    return Tile(rows, width, warps, at_once=True) if warps <= MOST_DOWN_WARPS else None


def _tile_by_slot(lines: int, width: int, depth: int, *, rows_per_column: int) -> Tile:
    columns = BY_SLOT_MOST_COLUMNS
    while columns > BY_SLOT_LEAST_COLUMNS and lines * cdiv(width, columns) < BY_SLOT_PROGRAMS:
        columns //= 2
    room = BY_SLOT_TILE // (columns * rows_per_column)
    return Tile(columns, min(next_power_of_2(depth), room, 1024), warps=4, stages=4)


def _tile_by_expert(width: int, depth_in_all: int, *, columns: int, depth: int, stages: int) -> Tile:
    columns = min(columns, next_power_of_2(width))
    return Tile(max(columns, 16), max(min(depth, next_power_of_2(depth_in_all)), 16), warps=4, stages=stages)


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


# By slot an expert's weights are read once for each of its slots: with more tokens than this it is never the best.
MOST_TOKENS_BY_SLOT = 8
WEIGHT_ROWS = (32, 64, 128)  # of a program by expert, ours among them


def decode_key(dtype: torch.dtype, layer: Layer) -> str:
    """What one measurement stands for: tokens up to a power of two."""
    tokens, top_k, experts, hidden, intermediate, gated = layer[:6]
    sizes = {"top_k": top_k, "experts": experts, "hidden": hidden, "intermediate": intermediate, "gated": int(gated)}
    return tuned.key("decode", dtype, tokens=next_power_of_2(tokens), **sizes)


def candidates(layer: Layer, capability: tuple[int, int] | None) -> tuple[Configuration, ...]:
    """Of weights with contiguous rows and tokens up to a power of two; without repetitions, our own choice first."""
    layer = layer._replace(tokens=next_power_of_2(layer.tokens))
    ways = [*_by_slot(layer)] if layer.tokens <= MOST_TOKENS_BY_SLOT else []
    found = (*ways, *(each for each in _by_expert(layer) if _fits(each, layer, shared_bytes(capability))))
    return tuple(dict.fromkeys((configuration(layer), *found)))


def _by_slot(layer: Layer) -> Iterator[Configuration]:
    ours = by_slot(layer)
    yield ours
    if ours.up.at_once:
        row_bytes = layer.rows_per_column * ours.up.depth * layer.itemsize
        for columns in (ours.up.columns // 2, ours.up.columns * 2):
            if columns and columns * row_bytes <= MOST_UP_BYTES:
                yield ours._replace(up=ours.up._replace(columns=columns))
    if ours.down.at_once and ours.down.columns > 1:
        yield ours._replace(down=ours.down._replace(columns=ours.down.columns // 2))


def _by_expert(layer: Layer) -> Iterator[Configuration]:
    ours = by_expert(layer)
    yield ours
    for weight_rows in WEIGHT_ROWS:
        yield by_expert(layer, weight_rows)
    yield from (_deeper(ours, 2), _deeper(ours, 0.5))
    if ours.rows < LARGEST_CHUNK:
        yield ours._replace(rows=2 * ours.rows)


def _deeper(ours: Configuration, times: float) -> Configuration:
    def tile(of: Tile) -> Tile:
        return of._replace(depth=max(16, int(of.depth * times)))

    return ours._replace(up=tile(ours.up), down=tile(ours.down))


def _fits(chosen: Configuration, layer: Layer, most: int) -> bool:
    return all(
        tile.stages * (weight_rows + chosen.rows) * tile.depth * layer.itemsize <= most
        for tile, weight_rows in (
            (chosen.up, chosen.up.columns * layer.rows_per_column),
            (chosen.down, chosen.down.columns),
        )
    )
