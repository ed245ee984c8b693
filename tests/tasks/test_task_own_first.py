"""The device's order of row tiles over ranks is the graph's, for random layouts."""

import random

import pytest
import torch

from amoeba.tasks.graph import Kind
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from amoeba.kernels.launch import next_power_of_2  # noqa: E402
from amoeba.tasks.triton.arrivals import local_tiles_first, make_local_table  # noqa: E402
from amoeba.tasks.triton.tickets import make_table  # noqa: E402
from schedule_cases import ShareGraph  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _reorder(
    out, first_tile, first_local, local_before, count, EXPERTS: tl.constexpr, WAVE: tl.constexpr, B: tl.constexpr
):
    for item in range(0, count):
        found = local_tiles_first(item, tl.arange(0, B), first_tile, first_local, local_before, EXPERTS, WAVE)
        tl.store(out + item, found)


def random_share(seed: int) -> tuple[ShareGraph, torch.Tensor, torch.Tensor, int]:
    """A graph, and order_N and offs_E of its rows as the device has them; and T of each rank."""
    draw = random.Random(seed)
    ranks, experts, top_k, tokens = draw.choice((2, 3)), draw.randint(1, 7), 2, draw.choice((1, 4, 9, 20))
    rank = draw.randrange(ranks)
    owner = [draw.randrange(ranks) for _ in range(experts)]
    owner[draw.randrange(experts)] = rank
    ids = [
        [[draw.choice((draw.randrange(-1, experts), 0)) for _ in range(top_k)] for _ in range(tokens)]
        for _ in range(ranks)
    ]
    rows = divide_rows(ids, owner, ranks, row_block := draw.randint(1, 4), everywhere=True)
    tiling = Tiling(rows=row_block, sent=draw.randint(1, 4), wave=draw.randint(1, 4))
    mine = rows[rank]
    order = [row.received * top_k + row.slot for row in mine.rows]
    counts = [0] * mine.experts
    for tile in mine.tiles:
        counts[tile.expert] += tile.end - tile.first
    offs = torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)
    graph = ShareGraph(rank, rows, Sizes(4, 4, experts, top_k), tiling)
    return graph, torch.tensor(order, dtype=torch.int32, device=DEVICE), offs, tokens


def test_24_random_layouts():
    seen = 0
    for seed in range(24):
        graph, order_N, offs_E, tokens = random_share(seed)
        block, top_k, (first, end) = (
            graph.tiling.rows,
            graph.sizes.top_k,
            (graph.rank * tokens, (graph.rank + 1) * tokens),
        )
        table = make_table(offs_E, block)
        own = make_local_table(order_N, offs_E, table, block, top_k, first, end)
        expected_first, expected_before = graph._own
        assert own.first_local.tolist() == expected_first, seed
        assert own.local_before.tolist() == expected_before, seed
        lanes = [lane for run in graph.runs() for lane in run if lane.kind == Kind.ACTIVATE]
        expected = [graph.lane_task(lane.kind, lane.wave, at).item for lane in lanes for at in range(lane.size)]
        found = torch.empty(len(expected), dtype=torch.int32, device=DEVICE)
        experts = offs_E.shape[0]
        _reorder[(1,)](
            found, table.first_tile, *own, len(expected), EXPERTS=experts, WAVE=graph.tiling.wave,
            B=next_power_of_2(experts),
        )  # fmt: skip
        assert found.tolist() == expected, seed
        seen += expected != sorted(expected)
    assert seen > 4
