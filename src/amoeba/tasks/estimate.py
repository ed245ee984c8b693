"""How long a scheduled backward would take on H200s, from the times of tasks that were measured there: an estimate.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I

    job = [scripts_without_tensors(sizes, tokens=8192, ranks=1)]      # a layer of real size, its order alone
    ran = simulate(job, WORKERS, Pace(0, [1.0], work=microseconds))

A worker finds its next task and waits at its gates while the four stages in flight are computed. So the time a ticket
takes is hidden behind the last four stages of the task before it; behind a short task not all of it fits.
"""

from __future__ import annotations

import torch

from amoeba.tasks.computation import OrderOnly
from amoeba.tasks.graph import Graph, Kind, Task
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.simulator import Script
from amoeba.tasks.sizes import Sizes, is_small, tiling_of

WORKERS = 132
# In bf16, from a trace of sonic_a (H200, 2026-11-16), for all workers together. The router's kinds were not timed.
FLOP_PER_MICROSECOND = {
    Kind.DOWN: 644e6 / WORKERS,
    Kind.UP: 700e6 / WORKERS,
    Kind.DOWN_WEIGHTS: 606e6 / WORKERS,
    Kind.UP_WEIGHTS: 634e6 / WORKERS,
    Kind.ROUTER: 600e6 / WORKERS,
    Kind.ROUTER_WEIGHTS: 600e6 / WORKERS,
}
# A row pass, if all workers run one at once. Sums over tokens are assumed to be as fast, and so are weights and their
# gradients where an expert has so few rows that memory is the limit.
BYTES_PER_MICROSECOND = 4.5e6 / WORKERS
LINK_BYTES_PER_MICROSECOND = 450e3 / 24  # one worker's share of NVLink, with 24 of them at 450 GB/s
BYTES = 2  # of a number in bf16
# To draw a ticket, where no list of tasks was made in advance; and to decode the task, check an open gate and load the
# first rows. With their sum, qwen3's layer at 128 tokens, nearly all of whose tasks are shorter, takes about as long
# as measured (0.82 ms without a list).
TICKET_MICROSECONDS, GATE_MICROSECONDS = 0.7, 2.8
RING = 4  # stages
_STAGE_FLOP = 2.0 * 128 * 256 * 64


def microseconds(graph: Graph, task: Task) -> float:
    flop = _flop(graph, task)
    half = task.kind in (Kind.DOWN, Kind.UP) and _small(graph) and _rows(graph, task) <= graph.tiling.rows // 2
    sent = graph.tiling.sent * graph.sizes.hidden * BYTES if task.kind in (Kind.SEND, Kind.RETURN) else 0
    work = max(
        flop * (0.5 if half else 1.0) / FLOP_PER_MICROSECOND.get(task.kind, 1.0),
        _bytes(graph, task) / BYTES_PER_MICROSECOND,
        sent / LINK_BYTES_PER_MICROSECOND,
    )
    ticket = GATE_MICROSECONDS + (TICKET_MICROSECONDS if graph.ranks > 1 else 0.0)  # over ranks there is no list
    return work + max(0.0, ticket - work * min(1.0, RING * _STAGE_FLOP / max(flop, _STAGE_FLOP)))


def _small(graph: Graph) -> bool:
    hidden, intermediate, _, top_k = graph.sizes
    return is_small(graph.rows.tokens * top_k, hidden, intermediate, over_ranks=graph.ranks > 1)


def _rows(graph: Graph, task: Task) -> int:
    _, first, end = graph.rows.tiles[task.item]
    return end - first


def _product(graph: Graph, kind: Kind) -> int:
    """Numbers of the weights that a tile of DOWN or UP reads."""
    if kind == Kind.DOWN:
        return graph.sizes.hidden * graph.tiling.down_columns
    return graph.sizes.width * graph.tiling.up_columns


def _flop(graph: Graph, task: Task) -> float:
    kind, sizes, tiling, rows = task.kind, graph.sizes, graph.tiling, graph.rows
    if kind in (Kind.DOWN, Kind.UP):  # whole tiles, also where few rows are left
        return 2.0 * tiling.rows * _product(graph, kind)
    if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        count = sum(tile.end - tile.first for tile in rows.tiles[slice(*graph.tile_range(task.item))])
        return 2.0 * count * tiling.weight_rows * tiling.weight_columns * len(graph.bundled(task))
    if kind == Kind.ROUTER:
        return 2.0 * len(graph.tokens_of(task.item)) * sizes.experts * sizes.hidden
    return 2.0 * rows.tokens * sizes.experts * tiling.router_columns if kind == Kind.ROUTER_WEIGHTS else 0.0


def _bytes(graph: Graph, task: Task) -> int:
    kind, sizes, tiling = task.kind, graph.sizes, graph.tiling
    if kind == Kind.ACTIVATE:  # dA' and h in, s·a and dh out
        return _rows(graph, task) * 6 * sizes.intermediate * BYTES
    if kind in (Kind.DOWN, Kind.UP) and len(graph.rows.tiles) <= graph.rows.experts:  # each reads its weights
        return _product(graph, kind) * BYTES
    if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        return len(graph.bundled(task)) * tiling.weight_rows * tiling.weight_columns * BYTES
    if kind == Kind.COMBINE:
        return len(graph.tokens_of(task.item)) * (sizes.top_k + 1) * sizes.hidden * BYTES
    return 0


def scripts_without_tensors(
    sizes: Sizes,
    tokens: int,
    ranks: int,
    *,
    skew: float = 0.0,
    remote: frozenset[int] = frozenset(),
    seed: int = 0,
    epoch: int = 1,
) -> list[Script]:
    """One pass of each rank with random routing, in the order that Hopper's kernel uses for a layer of this size.
    skew: exponent of a Zipf law for the experts' popularity."""
    own, rows = sizes._replace(experts=max(1, sizes.experts // ranks)), tokens * sizes.top_k
    small = is_small(rows, sizes.hidden, sizes.intermediate, over_ranks=ranks > 1)
    tiling = tiling_of(own, rows, WORKERS, small)
    generator = torch.Generator().manual_seed(seed)
    popular_E = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu") ** -skew
    popular_E = popular_E[torch.randperm(sizes.experts, generator=generator, dtype=torch.int64, device="cpu")]
    chosen = torch.multinomial(popular_E.expand(ranks * tokens, -1), sizes.top_k, generator=generator)
    owner = tuple(expert * ranks // sizes.experts for expert in range(sizes.experts))
    divided = divide_rows(chosen.view(ranks, tokens, sizes.top_k).tolist(), owner, ranks, tiling.rows)
    graphs = (Graph(rank, divided, sizes, tiling, remote=remote, router=ranks > 1) for rank in range(ranks))
    return [Script(OrderOnly(graph, epoch)) for graph in graphs]
