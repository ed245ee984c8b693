"""Every rule of the graph is needed: a graph with one of them broken is found out by random schedules."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from test_task_schedules import NAMED, run_at_random

from amoeba.tasks.graph import BIAS_OF, FLAGS, Counter, Gate, Graph, Kind, Lane, Signal, Task
from benchmarks.schedules.cases import TOLERANCE, ScheduleCase
from benchmarks.schedules.computation import Computation, Region, Regions
from benchmarks.schedules.simulator import ScheduleFault
from schedule_cases import random_case
from selection import quick

GATES = [
    (Kind.SEND, "finished"),
    (Kind.DOWN, "arrived"),
    (Kind.ACTIVATE, "rows"),
    (Kind.ACTIVATE, "finished"),
    (Kind.UP, "rows"),
    (Kind.DOWN_WEIGHTS, "expert"),
    (Kind.UP_WEIGHTS, "expert"),
    (Kind.DOWN_BIAS, "expert"),
    (Kind.UP_BIAS, "expert"),
    (Kind.RETURN, "rows"),
    (Kind.COMBINE, "rows"),
    (Kind.COMBINE, "ready"),
    (Kind.COMBINE, "returned"),
    (Kind.ROUTER, "tokens"),
    (Kind.ROUTER_WEIGHTS, "router"),
]
SIGNALS = [
    (Kind.SEND, "arrived"),
    (Kind.DOWN, "rows"),
    (Kind.ACTIVATE, "rows"),
    (Kind.ACTIVATE, "expert"),
    (Kind.UP, "rows"),
    (Kind.UP, "ready"),
    (Kind.RETURN, "returned"),
    (Kind.COMBINE, "tokens"),
    (Kind.ROUTER, "router"),
    (Kind.ROUTER_WEIGHTS, "done"),
    (Kind.ROUTER_WEIGHTS, "finished"),
]


def named(pairs: list[tuple[Kind, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("kind", "name"), pairs, ids=[f"{kind.name} {name}" for kind, name in pairs])


def kinds(*found: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", found, ids=[kind.name for kind in found])


EARLY, STUCK = {"read too early", "overwritten too early"}, {"stuck"}


@cache
def cases() -> list[ScheduleCase]:
    return [*NAMED.values(), *(random_case(number) for number in range(20))]


def how_it_dies(mutant: Callable[..., Graph], cases: Callable[[], list[ScheduleCase]] = cases) -> str | None:
    """The rule that some schedule breaks; None where it lives. One schedule of each case, then another of each: most
    mutants die of the first in which what they break takes part."""
    jobs = []
    try:
        for schedule in range(12):
            for number, case in enumerate(cases()):
                if schedule == 0:
                    jobs.append(case.job(mutant))
                errors = case.check(run_at_random(case, jobs[number], 100 * number + schedule))
                if max(errors.values()) > TOLERANCE:
                    return "wrong gradient"
    except ScheduleFault as fault:
        return fault.rule
    return None


def with_gates(kind: Kind, name: str, change: Callable[[Gate], Gate | None], graph: type[Graph] = Graph) -> type[Graph]:
    class Mutant(graph):
        def gates(self, task: Task, epoch: int) -> Iterator[Gate]:
            for gate in super().gates(task, epoch):
                changed = change(gate) if (task.kind, gate.counter.name) == (kind, name) else gate
                if changed is not None:
                    yield changed

    return Mutant


def with_signals(
    kind: Kind, name: str, change: Callable[[Signal], list[Signal]], graph: type[Graph] = Graph
) -> type[Graph]:
    class Mutant(graph):
        def signals(self, task: Task, epoch: int) -> Iterator[Signal]:
            for signal in super().signals(task, epoch):
                yield from change(signal) if (task.kind, signal.counter.name) == (kind, name) else [signal]

    return Mutant


def raised(gate: Gate, by: int) -> Gate:
    return gate._replace(at_least=gate.at_least + by)


def test_the_mutants_know_every_gate_and_every_signal():
    gates, signals = set(), set()
    for case in cases():
        for scripts in case.job():
            for script in scripts:
                for step in script.steps:
                    gates |= {(step.task.kind, gate.counter.name) for gate in step.gates}
                    signals |= {(step.task.kind, signal.counter.name) for signal in step.signals}
    assert gates == set(GATES)
    ending = {(kind, name) for kind in Kind for name in ("done", "finished")}  # of every kind; here of the last
    assert signals == set(SIGNALS) | ending


@quick(lambda kind, name: (kind, name) in GATES[::3])
@named(GATES)
def test_a_threshold_lower_by_one(kind, name):
    """Of a flag: the epoch of the pass before."""
    assert how_it_dies(with_gates(kind, name, lambda gate: raised(gate, -1))) in EARLY


@quick(lambda kind, name: (kind, name) in GATES[1::3])  # the others one lower
@named(GATES)
def test_a_threshold_higher_by_one(kind, name):
    # one pass more of a reader's would be right, as if there were one cell instead of two
    by = 2 if name == "finished" else 1
    assert how_it_dies(with_gates(kind, name, lambda gate: raised(gate, by))) in STUCK


@quick(lambda kind, name: (kind, name) in GATES[1::4])  # lower by one is harder to find
@named(GATES)
def test_a_dropped_gate(kind, name):
    assert how_it_dies(with_gates(kind, name, lambda gate: None)) in EARLY


@quick(lambda kind, name: name == "arrived" or kind == Kind.ACTIVATE)
@named([gate for gate in GATES if gate[1] in FLAGS])
def test_a_stale_epoch(kind, name):
    """Two passes old: the same cell, and something in it."""
    assert how_it_dies(with_gates(kind, name, lambda gate: raised(gate, -2))) in EARLY


@named([signal for signal in SIGNALS if signal[1] not in FLAGS])
def test_a_doubled_emitter(kind, name):
    died = how_it_dies(with_signals(kind, name, lambda signal: [signal, signal]))
    assert died in EARLY | STUCK | {"counter", "never ran"}


@named(SIGNALS)
def test_a_lost_emitter(kind, name):
    assert how_it_dies(with_signals(kind, name, lambda signal: [])) in STUCK | {"counter"}


def test_a_tile_that_is_ready_with_its_first_column():
    assert how_it_dies(with_signals(Kind.UP, "ready", lambda signal: [signal._replace(once=None)])) in EARLY


@kinds(Kind.DOWN, Kind.UP)
def test_a_swapped_stride(kind):
    """The row tile's column by the other product's number of them: down_tiles for up_tiles."""

    class Mutant(Graph):
        def lane_task(self, found: Kind, wave: int, index: int) -> Task:
            if found != kind:
                return super().lane_task(found, wave, index)
            other = Kind.UP if kind == Kind.DOWN else Kind.DOWN
            tile, part = divmod(index, self.parts(other))
            return super().lane_task(kind, wave, tile * self.parts(kind))._replace(part=part)

    assert how_it_dies(Mutant) in {"no such task", "ran twice", "never ran"}


@kinds(*(kind for kind in Kind if kind not in BIAS_OF.values()))  # these: below
def test_a_task_that_is_handed_out_twice(kind):
    class Mutant(Graph):
        def lane_task(self, found: Kind, wave: int, index: int) -> Task:
            return super().lane_task(found, wave, 0 if found == kind else index)

    assert how_it_dies(Mutant) in {"ran twice", "written twice"}


@kinds(Kind.DOWN_BIAS, Kind.UP_BIAS)
def test_a_bias_that_is_one_task_short(kind):
    class Mutant(Graph):
        def parts(self, found: Kind) -> int:
            return max(super().parts(found) - (found == kind), 0)

    assert how_it_dies(Mutant) == "never ran"


@kinds(Kind.DOWN_BIAS, Kind.UP_BIAS)
def test_columns_of_a_bias_that_are_summed_twice(kind):
    class Mutant(Graph):
        def lane_task(self, found: Kind, wave: int, index: int) -> Task:
            task = super().lane_task(found, wave, index)
            return task._replace(part=0) if task.kind == kind else task

    assert how_it_dies(Mutant) in {"ran twice", "written twice"}


def test_a_routing_weight_whose_gradient_leaves_the_bias_out(monkeypatch):
    honest = Computation._activate

    def without_bias(self, task, values):
        self.down_bias_EH = None
        return honest(self, task, values[: self.graph.down_tiles])

    monkeypatch.setattr(Computation, "_activate", without_bias)
    assert how_it_dies(Graph) == "wrong gradient"


@kinds(Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS)
def test_an_empty_expert_that_is_skipped(kind):
    class Mutant(Graph):
        def full(self, wave: int) -> list[int]:
            begin, end = self._experts_of(kind, wave)
            return [expert for expert in self.rows.heaviest[begin:end] if self.tiles_of_expert(expert)]

        def lane_size(self, found: Kind, wave: int) -> int:
            return len(self.full(wave)) * self.expert_parts(kind) if found == kind else super().lane_size(found, wave)

        def lane_task(self, found: Kind, wave: int, index: int) -> Task:
            if found != kind:
                return super().lane_task(found, wave, index)
            place, part = divmod(index, self.expert_parts(kind))
            within = super().lane_task(found, wave, part)
            return within._replace(item=self.full(wave)[place])

    assert how_it_dies(Mutant) == "never ran"


def reordered(change: Callable[[list[tuple[Lane, ...]]], list[tuple[Lane, ...]]]) -> type[Graph]:
    class Mutant(Graph):
        def runs(self) -> list[tuple[Lane, ...]]:
            return change(super().runs())

    return Mutant


def test_sums_before_what_peers_wait_for():
    """Two ranks with one worker each, both at a sum that needs what the other has not returned yet."""

    def change(runs):
        sums = [run for run in runs if any(lane.kind == Kind.COMBINE for lane in run)]
        first = [run for run in runs if any(lane.kind in (Kind.SEND, Kind.DOWN) for lane in run)]
        return first[:1] + sums + [run for run in runs if run not in first[:1] and run not in sums]

    assert how_it_dies(reordered(change)) == "stuck"


def test_products_before_what_is_sent():
    def change(runs):
        return [run for run in runs if run[0].kind != Kind.SEND] + [run for run in runs if run[0].kind == Kind.SEND]

    assert how_it_dies(reordered(change)) == "stuck"


def test_one_cell_instead_of_two(monkeypatch):
    def one_cell(self, rank: int, name: str, *index: int) -> Region:
        return Region(rank, name, (0, *index), heap=True)

    monkeypatch.setattr(Regions, "_cell", one_cell)
    assert how_it_dies(Graph) == "overwritten too early"


def test_a_fault_says_who_waits_for_what():
    (script,) = NAMED["one rank"].job(with_gates(Kind.UP, "rows", lambda gate: raised(gate, 1)))[0]
    with pytest.raises(ScheduleFault, match=r"stuck: rank 0 is at .*UP.* waits for .*'rows'.*at_least=5.*sees 4"):
        run_at_random(NAMED["one rank"], [[script]], 0)
    assert script.graph.totals()[Counter(0, "rows", (0,))] == script.graph.complete
