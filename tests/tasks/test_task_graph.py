"""Tickets and gates of the scheduled backward, without running it."""

from collections import Counter as Multiset
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amoeba.tasks.graph import FLAGS, Graph, Kind, Lane, grouped, merged
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling
from benchmarks.schedules.simulator import all_tasks
from schedule_cases import random_case

SIX = {"gradCombine", "gradPostGEMM", "gradGateCombine", "gradPreGEMM", "gradInputCombine", "gradGateGEMM"}
FLASHMOE_KIND = {
    Kind.SEND: "gradCombine",
    Kind.DOWN: "gradPostGEMM",
    Kind.ACTIVATE: "gradGateCombine",
    Kind.UP: "gradPreGEMM",
    Kind.DOWN_WEIGHTS: "gradPostGEMM",
    Kind.UP_WEIGHTS: "gradPreGEMM",
    Kind.RETURN: "gradInputCombine",
    Kind.COMBINE: "gradInputCombine",
    Kind.ROUTER: "gradGateGEMM",
    Kind.ROUTER_WEIGHTS: "gradGateGEMM",
    Kind.DOWN_BIAS: "gradPostGEMM",
    Kind.UP_BIAS: "gradPreGEMM",
}


def graphs():
    for number in range(60):
        for scripts in random_case(number).job():
            yield from (script.graph for script in scripts)


@given(st.integers(0, 40), st.integers(0, 40))
def test_two_lanes_are_merged_evenly(first, second):
    lanes = (Lane(Kind.ACTIVATE, 0, first), Lane(Kind.DOWN, 1, second))
    found = [merged(lanes, index) for index in range(first + second)]
    for lane in lanes:
        assert [index for other, index in found if other == lane] == list(range(lane.size))
    for end in range(first + second):
        among = sum(lane == lanes[0] for lane, _ in found[:end])
        assert abs(among - end * first / (first + second)) <= 1


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 9))
def test_groups_of_row_tiles_cover_every_tile_once(tiles, columns, group):
    found = [grouped(index, tiles, columns, group) for index in range(tiles * columns)]
    assert sorted(found) == [(tile, column) for tile in range(tiles) for column in range(columns)]
    for tile, _ in found[: group * columns]:
        assert tile < group


def test_tickets_are_all_tasks_once():
    for graph in graphs():
        assert Multiset(map(graph.decode, range(graph.tickets))) == Multiset(all_tasks(graph))


def test_every_gate_is_opened_by_smaller_tickets():
    """On the rank itself. Flags of others: see the order of what is sent and returned."""
    for graph in graphs():
        counted: Multiset = Multiset()
        for task in map(graph.decode, range(graph.tickets)):
            for counter, at_least in graph.gates(task, epoch=1):
                assert counter.name in FLAGS or counted[counter] >= at_least, (task, counter)
            counted.update(counter for counter, _ in graph.signals(task, epoch=1))
        assert all(counted[counter] == total for counter, total in graph.totals().items())


def test_what_peers_wait_for_comes_before_what_waits_for_peers():
    stages = {Kind.SEND: 0, Kind.RETURN: 1, Kind.COMBINE: 2}
    for graph in graphs():
        kinds = [graph.decode(ticket).kind for ticket in range(graph.tickets)]
        found = [stages[kind] for kind in kinds if kind in stages]
        assert found == sorted(found)
        if Kind.COMBINE in kinds:
            assert Kind.UP not in kinds[kinds.index(Kind.COMBINE) :]
        if Kind.SEND in kinds:
            assert set(kinds[: kinds.count(Kind.SEND)]) == {Kind.SEND}


def test_own_rows_come_before_those_of_peers():
    """Within a wave of experts."""
    seen = 0
    for graph in graphs():
        for lane in (lane for run in graph.runs() for lane in run if lane.kind == Kind.ACTIVATE):
            tiles = [graph.lane_task(Kind.ACTIVATE, lane.wave, index).item for index in range(lane.size)]
            waits = [bool(graph.sources(tile)) for tile in tiles]
            assert waits == sorted(waits)
            seen += waits != sorted(waits, reverse=True)
    assert seen


def test_thresholds_by_the_seeds_names():
    rows = divide_rows([[[0, 1], [1, 0], [1, -1]]], (0, 0), 1, row_block=2)
    graph = Graph(0, rows, Sizes(hidden=700, intermediate=300, experts=2, top_k=2), Tiling(rows=2))
    assert (graph.down_tiles, graph.up_tiles, graph.activated, graph.complete) == (2, 3, 3, 6)
    assert [tile.expert for tile in rows[0].tiles] == [1, 1, 0]  # the heaviest first
    gates = {kind: list(graph.gates(task, 1)) for task in all_tasks(graph) if (kind := task.kind) and task.item == 0}
    assert [gate.at_least for gate in gates[Kind.ACTIVATE]] == [2]
    assert [gate.at_least for gate in gates[Kind.UP]] == [3]
    assert {gate.at_least for gate in gates[Kind.COMBINE]} == {6}
    assert [gate.at_least for gate in gates[Kind.DOWN_WEIGHTS]] == [1]  # expert 0 has one row tile


def test_row_passes_run_next_to_the_products_of_the_next_wave():
    ids = [[[token % 8, (token + 3) % 8] for token in range(512)]]
    rows = divide_rows(ids, (0,) * 8, 1, row_block=32)
    graph = Graph(0, rows, Sizes(512, 256, 8, 2), Tiling(rows=32, down_columns=64, wave=2))
    kinds = [graph.decode(ticket).kind for ticket in range(graph.tickets)]
    passes = [ticket for ticket, kind in enumerate(kinds) if kind == Kind.ACTIVATE]
    beside = [after - before for before, after in pairwise(passes)]
    assert Multiset(beside).most_common(1)[0][0] == graph.down_tiles + 1  # one after down_tiles products


def test_the_six_kinds_of_the_seeds_are_all_here():
    assert set(FLASHMOE_KIND) == set(Kind) and set(FLASHMOE_KIND.values()) == SIX


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_ordered_by_source_and_token_within_an_expert(ranks):
    ids = [[[(token + rank) % 3, 2 - token % 2] for token in range(4 + rank)] for rank in range(ranks)]
    for found in divide_rows(ids, tuple(expert % ranks for expert in range(3)), ranks, row_block=2):
        for tile in found.tiles:
            keys = [(*found.received[row.received], row.slot) for row in found.rows[tile.first : tile.end]]
            assert keys == sorted(keys)
        assert len(found.tile_of_slot) == len(found.rows)
