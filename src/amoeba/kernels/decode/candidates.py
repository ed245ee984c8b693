"""The ways to decode that a search may choose among, and that what was found earlier has to be one of.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from amoeba.kernels.decode.configuration import (
    LARGEST_CHUNK,
    MOST_UP_BYTES,
    Configuration,
    Layer,
    Tile,
    by_expert,
    by_slot,
    configuration,
)
from amoeba.kernels.launch import next_power_of_2
from amoeba.kernels.tile_sizes import shared_bytes
from amoeba.system import tuned

# By slot an expert's weights are read once for each of its slots: with more tokens than this it is never the best.
MOST_TOKENS_BY_SLOT = 8
WEIGHT_ROWS = (32, 128)  # of a program by expert, other than ours


def decode_key(
    dtype: torch.dtype, tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool
) -> str:
    """What one measurement stands for: tokens up to a power of two."""
    return tuned.key(
        "decode",
        dtype,
        tokens=next_power_of_2(tokens),
        top_k=top_k,
        experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        gated=int(gated),
    )


def candidates(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool,
    itemsize: int,
    overlap: bool,
    capability: tuple[int, int] | None,
) -> tuple[Configuration, ...]:
    """Of weights with contiguous rows; without repetitions, our own choice first."""
    default = configuration(
        tokens, top_k, num_experts, hidden, intermediate, gated=gated, itemsize=itemsize, overlap=overlap
    )
    rows_per_column = 2 if gated else 1
    layer = Layer(tokens, top_k, num_experts, hidden, intermediate, rows_per_column, itemsize, True, overlap)
    ways = [*_by_slot(layer)] if tokens <= MOST_TOKENS_BY_SLOT else []
    found = (*ways, *(each for each in _by_expert(layer) if _fits(each, layer, shared_bytes(capability))))
    return tuple(dict.fromkeys((default, *found)))


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
