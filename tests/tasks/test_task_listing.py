"""The list of tasks is what Python says of each ticket, with its rows and its gate, for random layouts."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from test_task_decoder import layout_of, random_graph

from amoeba.tasks.graph import OF_EXPERT, Graph, Kind
from amoeba.tasks.hopper.task_list import make_list
from amoeba.tasks.triton.tickets import make_table
from selection import quick

FIRST_ROW_COUNTER = 1000  # any number that is no other counter's


def expected(graph: Graph, ticket: int, starts: list[int]) -> list[int]:
    """Counters are of two warpgroups: twice what the graph counts."""
    kind, item, part = graph.decode(ticket)
    tiling = graph.tiling
    if kind == Kind.COMBINE:
        return [kind, item, part, item, 0, 0, FIRST_ROW_COUNTER + item, 0]
    if kind in OF_EXPERT:
        tiles = -(-(starts[item + 1] - starts[item]) // tiling.rows)
        return [kind, item, part, item, starts[item], starts[item + 1], 1 + item, 2 * tiles]
    expert, first, _ = graph.rows.tiles[item]
    gate, least = FIRST_ROW_COUNTER + item, 0
    if kind == Kind.ACTIVATE:
        least = 2 * graph.parts(Kind.DOWN)
    if kind == Kind.UP:
        least = 2 * (graph.parts(Kind.DOWN) + 1)
    return [kind, item, part, expert, first, starts[expert + 1], gate, least]


def check(seed: int) -> None:
    graph, offs_E = random_graph(seed)
    layout = layout_of(graph)
    most = layout.most_tickets(graph.rows.first_tile[-1]) + 3
    table = make_table(offs_E, graph.tiling.rows)
    found = make_list(table, offs_E, layout, most, row_counters=FIRST_ROW_COUNTER)
    starts = [0, *offs_E.tolist()]
    told = [list(map(int, expected(graph, ticket, starts))) for ticket in range(graph.tickets)]
    assert found[: graph.tickets].tolist() == told, seed


@quick(lambda chunk: chunk == 0)
@pytest.mark.parametrize("chunk", range(4))
def test_every_task_of_50_random_layouts(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        check(seed)
