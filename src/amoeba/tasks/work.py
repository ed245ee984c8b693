"""How long each task would take on one multiprocessor of an H200, from what was measured there: an estimate.

T tokens · H hidden · I intermediate · J = 2I · E experts · K experts per token

    job = [scripts_of(sizes, tokens=8192, ranks=1)]      # a layer of real size, its order alone
    simulate(job, WORKERS, Pace(0, [1.0], even=True, work=microseconds))
"""

from __future__ import annotations

import torch

from amoeba.tasks.graph import Graph, Kind, Task
from amoeba.tasks.regions import Regions
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.simulate import Script
from amoeba.tasks.sizes import Sizes, Tiling

WORKERS = 132
# 800 TFLOP/s of bf16 over all of them: a tile of 128 x 256 x 2048 takes 22 us
FLOP_PER_MICROSECOND = 800e6 / WORKERS
# 24 programs copy at 2.06 TB/s; row passes and sums run beside products, a few at a time
BYTES_PER_MICROSECOND = 2.06e6 / 24
# what one program of many puts through NVLink, with 24 of them at 450 GB/s
LINK_BYTES_PER_MICROSECOND = 450e3 / 24
BYTES = 2  # of a number in bf16
# a ticket and a release, which nothing hides where tasks are small
TICKET_MICROSECONDS = 0.73


def microseconds(graph: Graph, task: Task) -> float:
    return max(
        TICKET_MICROSECONDS,
        _flop(graph, task) / FLOP_PER_MICROSECOND,
        _bytes(graph, task) / BYTES_PER_MICROSECOND,
        _sent_bytes(graph, task) / LINK_BYTES_PER_MICROSECOND,
    )


def _flop(graph: Graph, task: Task) -> float:
    (hidden, intermediate, experts, _), tiling, rows = graph.sizes, graph.tiling, graph.rows
    kind = task.kind
    if kind in (Kind.DOWN, Kind.UP):  # whole tiles, also where few rows are left
        depth, columns = (hidden, tiling.down_columns) if kind == Kind.DOWN else (2 * intermediate, tiling.up_columns)
        return 2.0 * tiling.rows * depth * columns
    if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        count = sum(tile.end - tile.first for tile in rows.tiles[slice(*graph.tile_range(task.item))])
        return 2.0 * count * tiling.weight_rows * tiling.weight_columns * len(graph.bundled(task))
    if kind == Kind.ROUTER:
        return 2.0 * len(graph.tokens_of(task.item)) * experts * hidden
    return 2.0 * rows.tokens * experts * tiling.router_columns if kind == Kind.ROUTER_WEIGHTS else 0.0


def _bytes(graph: Graph, task: Task) -> float:
    hidden, intermediate, _, top_k = graph.sizes
    if task.kind == Kind.ACTIVATE:  # dA' and h in, s·a and dh out
        _, first, end = graph.rows.tiles[task.item]
        return float((end - first) * 6 * intermediate * BYTES)
    if task.kind == Kind.COMBINE:
        return float(len(graph.tokens_of(task.item)) * (top_k + 1) * hidden * BYTES)
    return 0.0


def _sent_bytes(graph: Graph, task: Task) -> float:
    return float(graph.tiling.sent * graph.sizes.hidden * BYTES) if task.kind in (Kind.SEND, Kind.RETURN) else 0.0


def scripts_of(
    sizes: Sizes,
    tokens: int,
    ranks: int,
    *,
    skew: float = 0.0,
    remote: frozenset[int] = frozenset(),
    seed: int = 0,
    epoch: int = 1,
    tiling: Tiling | None = None,
) -> list[Script]:
    """Of each rank, with random routing. skew: exponent of a Zipf law for the experts' popularity."""
    tiling = tiling or Tiling()
    generator = torch.Generator().manual_seed(seed)
    popular_E = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu") ** -skew
    popular_E = popular_E[torch.randperm(sizes.experts, generator=generator, dtype=torch.int64, device="cpu")]
    chosen = torch.multinomial(popular_E.expand(ranks * tokens, -1), sizes.top_k, generator=generator)
    owner = tuple(expert * ranks // sizes.experts for expert in range(sizes.experts))
    rows = divide_rows(chosen.view(ranks, tokens, sizes.top_k).tolist(), owner, ranks, tiling.rows)
    graphs = [Graph(rank, rows, sizes, tiling, remote=remote) for rank in range(ranks)]
    return [Script(Regions(graph, epoch)) for graph in graphs]
