"""How long each task would take on one multiprocessor of an H200, from what was measured there: an estimate.

T tokens · H hidden · I intermediate · J = 2I · E experts · K experts per token

    job = [scripts_of(sizes, tokens=8192, ranks=1)]      # a layer of real size, its order alone
    simulate(job, WORKERS, Pace(0, [1.0], even=True, work=microseconds))
    simulate(job, WORKERS, Pace(0, [1.0], even=True, work=in_order(ORDERS["small"])))

A program finds out what its next task is and waits at its gates while the stages of this one are computed, of which
there are four: so of a ticket's time those of a task's last four stages are hidden, and of a short task all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from amoeba.tasks.graph import Graph, Kind, Task
from amoeba.tasks.orders import MEASURED, Order, tiling_of
from amoeba.tasks.regions import NoRegions, Regions
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.simulate import Script
from amoeba.tasks.sizes import Sizes

WORKERS = 132
# Of sonic_a's own trace (2026-11-16, docs/log.md), in bf16 and over all of them; the router's were not timed.
FLOP_PER_MICROSECOND = {
    Kind.DOWN: 644e6 / WORKERS,
    Kind.UP: 700e6 / WORKERS,
    Kind.DOWN_WEIGHTS: 606e6 / WORKERS,
    Kind.UP_WEIGHTS: 634e6 / WORKERS,
    Kind.ROUTER: 600e6 / WORKERS,
    Kind.ROUTER_WEIGHTS: 600e6 / WORKERS,
}
# A row pass, if all did one at once; sums over tokens are taken to be as fast. Weights and their gradients, where an
# expert has so few rows that they are all there is to do, go at the memory's own pace.
BYTES_PER_MICROSECOND = 4.5e6 / WORKERS
# what one program of many puts through NVLink, with 24 of them at 450 GB/s
LINK_BYTES_PER_MICROSECOND = 450e3 / 24
BYTES = 2  # of a number in bf16
# To draw a ticket; and to find out its task, look at an open gate and have the first rows. With this sum qwen3's layer
# at 128 tokens, nearly all of whose tasks are shorter, takes about as long as it did (0.82 ms).
TICKET_MICROSECONDS, GATE_MICROSECONDS = 0.7, 2.8
RING = 4  # stages
_STAGE_FLOP = 2.0 * 128 * 256 * 64


def microseconds(graph: Graph, task: Task) -> float:
    """In the order that was measured."""
    return _microseconds(graph, task, MEASURED)


def in_order(order: Order) -> Callable[[Graph, Task], float]:
    return lambda graph, task: _microseconds(graph, task, order)


def _microseconds(graph: Graph, task: Task, order: Order) -> float:
    flop = _flop(graph, task)
    few = task.kind in (Kind.DOWN, Kind.UP) and order.small and _rows(graph, task) <= graph.tiling.rows // 2
    work = max(
        flop * (0.5 if few else 1.0) / FLOP_PER_MICROSECOND.get(task.kind, 1.0),
        _bytes(graph, task) / BYTES_PER_MICROSECOND,
        _sent_bytes(graph, task) / LINK_BYTES_PER_MICROSECOND,
    )
    ticket = GATE_MICROSECONDS + (0.0 if order.small or order.listed else TICKET_MICROSECONDS)
    return work + max(0.0, ticket - work * min(1.0, RING * _STAGE_FLOP / max(flop, _STAGE_FLOP)))


def _rows(graph: Graph, task: Task) -> int:
    _, first, end = graph.rows.tiles[task.item]
    return end - first


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
        return float(_rows(graph, task) * 6 * intermediate * BYTES)
    if task.kind in (Kind.DOWN, Kind.UP) and len(graph.rows.tiles) <= graph.rows.experts:  # each reads its weights
        depth, columns = (
            (hidden, graph.tiling.down_columns)
            if task.kind == Kind.DOWN
            else (2 * intermediate, graph.tiling.up_columns)
        )
        return float(depth * columns * BYTES)
    if task.kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        return float(len(graph.bundled(task)) * graph.tiling.weight_rows * graph.tiling.weight_columns * BYTES)
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
    order: Order = MEASURED,
    router: bool = True,
    memory: bool = True,
) -> list[Script]:
    """Of each rank, with random routing. skew: exponent of a Zipf law for the experts' popularity.
    memory: whether each read is checked against the writes before it; in a layer of real size that takes minutes."""
    own = sizes._replace(experts=max(1, sizes.experts // ranks))
    tiling = tiling_of(own, tokens, tokens * sizes.top_k, WORKERS, order)
    generator = torch.Generator().manual_seed(seed)
    popular_E = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu") ** -skew
    popular_E = popular_E[torch.randperm(sizes.experts, generator=generator, dtype=torch.int64, device="cpu")]
    chosen = torch.multinomial(popular_E.expand(ranks * tokens, -1), sizes.top_k, generator=generator)
    owner = tuple(expert * ranks // sizes.experts for expert in range(sizes.experts))
    rows = divide_rows(chosen.view(ranks, tokens, sizes.top_k).tolist(), owner, ranks, tiling.rows)
    graphs = [Graph(rank, rows, sizes, tiling, remote=remote, router=router) for rank in range(ranks)]
    return [Script((Regions if memory else NoRegions)(graph, epoch)) for graph in graphs]
