"""The graph of the scheduled backward in random schedules: nothing is read too early, nothing gets stuck, and the
gradients are those of the reference."""

import itertools
import random

import pytest

from amoeba.tasks.graph import Kind
from amoeba.tasks.sizes import Sizes, Tiling
from benchmarks.schedules.cases import TOLERANCE, ScheduleCase, make_case
from benchmarks.schedules.simulator import Pace, Script, simulate
from schedule_cases import random_case
from selection import quick

SMALL = Tiling(
    rows=2,
    down_columns=2,
    up_columns=2,
    weight_rows=8,
    weight_columns=8,
    router_columns=3,
    tokens=1,
    sent=2,
    wave=1,
    group=2,
    bias_columns=3,
)
CHUNKS, CASES, SCHEDULES = 8, 10, 25  # 2000 in all


def run_at_random(case: ScheduleCase, job: list[list[Script]], seed: int):
    """Few workers and many, ranks of one speed and of very different ones, rows that arrive at once or late."""
    draw = random.Random(seed)
    slowness = [1.0] * case.ranks
    slowness[draw.randrange(case.ranks)] = draw.choice((1.0, 3.0, 200.0))
    pace = Pace(seed, slowness, latency=draw.choice((0.0, 1.0, 30.0)))
    return simulate(job, draw.choice((1, 1, 2, 3, 5, 40)), pace, ahead=draw.random() < 0.5)


def check(case: ScheduleCase, job: list[list[Script]], seed: int) -> None:
    errors = case.check(run_at_random(case, job, seed))
    assert max(errors.values()) < TOLERANCE, errors


@quick(lambda chunk: chunk < CHUNKS // 8)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_250_random_schedules_of_random_layers(chunk):
    for number in range(chunk * CASES, (chunk + 1) * CASES):
        case = random_case(number)
        job = case.job()
        for schedule in range(SCHEDULES):
            check(case, job, 1000 * number + schedule)


NAMED = {
    "one rank": make_case(Sizes(6, 5, 4, 2), SMALL, [[7]], (0, 0, 0, 0)),
    "no tokens at all": make_case(Sizes(4, 3, 2, 1), SMALL, [[0, 0]], (0, 1)),
    "all tokens on one expert": make_case(Sizes(4, 3, 5, 1), SMALL, [[6, 6]], (0, 1, 0, 1, 0), skew=100.0),
    "every expert chosen by every token": make_case(Sizes(4, 3, 3, 3), SMALL, [[3, 2, 1]], (2, 0, 1)),
    "every slot dropped": make_case(Sizes(4, 3, 3, 2), SMALL, [[3, 2]], (1, 0, 1), dropped=1.0),
    "a rank without experts, a rank without tokens": make_case(Sizes(4, 3, 4, 2), SMALL, [[5, 0, 2]] * 3, (1, 1, 2, 1)),
    "all ranks remote": make_case(Sizes(4, 3, 4, 2), SMALL, [[3, 4, 2]] * 3, (0, 1, 2, 1), frozenset((0, 1, 2))),
    "one rank remote": make_case(Sizes(4, 3, 4, 2), SMALL, [[3, 4, 2]] * 3, (0, 1, 2, 1), frozenset((1,))),
    "with biases, one rank remote": make_case(
        Sizes(4, 3, 4, 2), SMALL, [[3, 4, 2]] * 3, (0, 1, 2, 1), frozenset((2,)), biases=True
    ),
    "a sender runs ahead": make_case(Sizes(4, 3, 2, 2), SMALL, [[4, 2], [0, 2], [4, 2]], (1, 1)),
    "a reader falls behind": make_case(Sizes(4, 3, 2, 2), SMALL, [[4, 2], [0, 2], [0, 2]], (1, 1)),
}


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_a_layer_of_its_own_kind(case):
    job = case.job()
    for schedule in range(20):
        check(case, job, schedule)


@pytest.mark.parametrize("slowness", list(itertools.permutations((1, 100), 2)))
def test_ranks_that_run_ahead_or_fall_behind(slowness):
    """A row pass writes what peers may still be loading two passes later: a gate that was missing at first."""
    for name in ("a sender runs ahead", "a reader falls behind"):
        job = NAMED[name].job()
        for seed in range(20):
            simulate(job, 1 + seed % 3, Pace(seed, slowness))


def test_with_one_worker_nobody_ever_waits_on_one_rank():
    """Tickets are in topological order."""
    case = NAMED["one rank"]
    ran = simulate(case.job(), 1, Pace(0, [1.0]))
    assert all(record.started == record.came for record in ran.records)
    assert [record.ticket for record in ran.records] == list(range(len(ran.records)))


def test_two_runs_of_one_schedule_are_the_same():
    case = NAMED["all ranks remote"]
    first, second = (run_at_random(case, case.job(), 5) for _ in range(2))
    assert first.records == second.records and first.arrows == second.arrows
    for left, right in zip(first.memory[0], second.memory[0], strict=True):
        assert left.keys() == right.keys() and all(left[region].equal(right[region]) for region in left)


def test_an_arrow_goes_from_the_task_that_opened_the_last_gate():
    ran = run_at_random(NAMED["a sender runs ahead"], NAMED["a sender runs ahead"].job(), 3)
    waits_for = {
        Kind.DOWN: {Kind.SEND},
        Kind.ACTIVATE: {Kind.DOWN},
        Kind.UP: {Kind.ACTIVATE},
        Kind.DOWN_WEIGHTS: {Kind.ACTIVATE},
        Kind.UP_WEIGHTS: {Kind.ACTIVATE},
        Kind.COMBINE: {Kind.UP},
        Kind.ROUTER: {Kind.COMBINE},
        Kind.ROUTER_WEIGHTS: {Kind.ROUTER},
    }
    kinds = {(before.task.kind, after.task.kind) for before, after in ran.arrows if before.epoch == after.epoch}
    assert {after for _, after in kinds} == set(waits_for)
    assert all(before in waits_for[after] for before, after in kinds)
    assert all(before.ended <= after.started for before, after in ran.arrows)


def test_no_workers_are_refused():
    with pytest.raises(ValueError, match="at least 1 for each rank; got 0"):
        simulate(NAMED["one rank"].job(), 0, Pace(0, [1.0]))
