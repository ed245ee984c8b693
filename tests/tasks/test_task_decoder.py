"""The device's tickets are Python's, for random layouts."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from amoeba.tasks.graph import Graph, Kind
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling
from selection import quick

pytest.importorskip("triton")
from amoeba.tasks.decoder import Layout, decode, make_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_graph(seed: int) -> tuple[Graph, torch.Tensor]:
    draw = random.Random(seed)
    experts, top_k = draw.randint(1, 6), 1
    tokens = draw.choice((0, 1, 2, 5, 9, 14))
    ids = [[draw.choice((draw.randrange(-1, experts), 0))] for _ in range(tokens)]
    rows = divide_rows([ids], (0,) * experts, 1, row_block := draw.randint(1, 4))
    tiling = Tiling(
        rows=row_block,
        down_columns=draw.randint(2, 6),
        up_columns=draw.randint(3, 6),
        weight_rows=draw.randint(4, 9),
        weight_columns=draw.randint(3, 9),
        tokens=draw.randint(1, 5),
        wave=draw.randint(1, 4),
        group=draw.randint(1, 3),
        mixed=draw.random() < 0.5,
        kept=draw.randint(1, 4),
        behind=draw.choice((0, 1, 5, 99)),
        bundle=draw.randint(1, 3),
    )
    sizes = Sizes(draw.randint(1, 9), draw.randint(1, 7), experts, top_k)
    counts = [sum(each == [expert] for each in ids) for expert in range(experts)]
    offs_E = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=DEVICE)
    return Graph(0, rows, sizes, tiling, router=False), offs_E


def layout_of(graph: Graph) -> Layout:
    kinds = (Kind.DOWN, Kind.UP, Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS)
    parts = (graph.parts(kind) for kind in kinds)
    tiling = graph.tiling
    return Layout(
        graph.rows.experts,
        tiling.rows,
        *parts,
        graph.token_blocks,
        tiling.wave,
        tiling.group,
        tiling.mixed,
        tiling.kept,
        tiling.behind,
    )


def check(seed: int, most: int) -> None:
    """most: of the tickets, so many at random; the interpreter takes two milliseconds for one."""
    graph, offs_E = random_graph(seed)
    table = make_table(offs_E, graph.tiling.rows)
    assert table.heaviest_E.tolist() == list(graph.rows.heaviest)
    assert table.first_tile.tolist() == list(graph.rows.first_tile)
    tickets = random.Random(seed).sample(range(graph.tickets), min(most, graph.tickets))
    expected = [list(map(int, graph.decode(ticket))) for ticket in tickets] + [[graph.tickets] * 3]
    given = torch.tensor(tickets, dtype=torch.int32, device=DEVICE)
    assert decode(given, offs_E, layout_of(graph)).tolist() == expected, seed


@quick(lambda chunk: chunk == 0)
@pytest.mark.parametrize("chunk", range(4))
def test_50_random_layouts(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        check(seed, most=4)


@pytest.mark.thorough
def test_every_ticket_of_200_random_layouts():
    for seed in range(200):
        check(seed, most=1 << 30)
