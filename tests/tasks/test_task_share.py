"""One rank's share of a layer over ranks: its tiles start when their rows are there. Schedules, mutants, tickets."""

from functools import cache

import pytest
from test_task_mutants import EARLY, STUCK, how_it_dies, named, raised, with_gates, with_signals
from test_task_schedules import NAMED, SMALL, check

from amoeba.tasks.graph import Kind
from amoeba.tasks.sizes import Sizes
from benchmarks.schedules.cases import make_case
from schedule_cases import ShareCase, ShareGraph, random_case, share_case
from selection import each_value_once, quick

OVER_RANKS = [name for name, case in NAMED.items() if case.ranks > 1]


@cache
def cases() -> list[ShareCase]:
    found = [*(NAMED[name] for name in OVER_RANKS), *(random_case(number) for number in range(30))]
    several = make_case(Sizes(4, 3, 4, 2), SMALL, [[5, 4]] * 4, (0, 1, 0, 1))
    return [share_case(case) for case in [several, *found] if case.ranks > 1]


@quick(lambda schedules: schedules < 10)
@pytest.mark.parametrize("schedules", [3, 10])
def test_random_schedules_of_random_layers(schedules):
    for number, case in enumerate(cases()):
        job = case.job()
        for schedule in range(schedules):
            check(case, job, 100 * number + schedule)


GATES = [(Kind.SEND, "finished"), (Kind.DOWN, "arrived"), (Kind.COMBINE, "arrived"), (Kind.COMBINE, "rows")]
TOO_EARLY = EARLY | {"written twice"}  # rows of the pass before came behind those of this one
SIGNALS = [(Kind.SEND, "arrived"), (Kind.UP, "rows")]


def test_nothing_but_dy_is_waited_for_from_other_ranks():
    flags = set()
    for case in cases():
        for script in (script for scripts in case.job() for script in scripts):
            for step in script.steps:
                flags |= {(step.task.kind, gate.counter.name) for gate in step.gates}
                assert step.task.kind != Kind.RETURN
    assert {each for each in flags if each[1] in ("arrived", "finished", "ready", "returned")} == set(GATES[:3])


@each_value_once()
@named(GATES)
def test_a_threshold_lower_by_one(kind, name):
    assert how_it_dies(with_gates(kind, name, lambda gate: raised(gate, -1), ShareGraph), cases) in TOO_EARLY


@named(GATES)
def test_a_threshold_higher_by_one(kind, name):
    assert how_it_dies(with_gates(kind, name, lambda gate: raised(gate, 1), ShareGraph), cases) in STUCK


@each_value_once()
@named(GATES)
def test_a_dropped_gate(kind, name):
    assert how_it_dies(with_gates(kind, name, lambda gate: None, ShareGraph), cases) in TOO_EARLY


@named(SIGNALS)
def test_a_lost_emitter(kind, name):
    died = how_it_dies(with_signals(kind, name, lambda signal: [], ShareGraph), cases)
    assert died in STUCK | {"counter"}


def test_the_first_cell_of_a_tile_is_not_all_of_them():
    class Mutant(ShareGraph):
        def gates(self, task, epoch):
            gates = list(super().gates(task, epoch))
            return iter(gates[:1] if task.kind == Kind.DOWN else gates)

    assert how_it_dies(Mutant, cases) in EARLY
