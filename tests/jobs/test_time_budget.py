"""Runs that end by the clock: the steps that fit while the pace changes, a learning rate that falls to the last of them
without a jump, and a resume that has the minutes that were left."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amoeba.jobs.settings import TrainSettings
from amoeba.jobs.train import time_budget
from amoeba.jobs.train.resume import settings_of
from amoeba.parallel.rank_zero import ALONE
from selection import quick
from tiny_runs import KINDS, Quiet, kept_weights, tiny_run, tiny_settings

STEPS, FITTING = 60, 16


class Clock:
    """Goes on with the steps alone: each takes a tenth of a second, or what `takes` says of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.takes: Callable[[int], float] = lambda step: 0.1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, real = Clock(), time_budget.TimeBudget.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        clock.now += clock.takes(state.global_step)
        real(self, args, state, control, **more)

    monkeypatch.setattr(time_budget, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time_budget.TimeBudget, "on_step_end", on_step_end)
    monkeypatch.setattr(time_budget.TimeBudget, "on_evaluate", lambda *_, **__: None)  # takes no time
    return clock


def minutes_for(steps: int) -> float:
    return (steps + 0.5) * 0.1 / 60


def timed(command: str, folder: Path, inputs: Path, **changes: Any) -> Any:
    told = {"steps": STEPS, "minutes": minutes_for(FITTING), "warmup_steps": 4, "log_every": 1, "eval_every": 8}
    return tiny_settings(command, folder, inputs, **told | changes)


def rates_of(console: Quiet) -> list[float]:
    return [line["lr"] for line in console.lines]


def falls_without_a_jump(rates: list[float], warmup: int = 4) -> bool:
    """After the rise no rate is above the one before. Where three steps are left, they take half of it at once."""
    after = rates[warmup:]
    steps = [before - now for before, now in itertools.pairwise(after)]
    return min(steps) >= 0 and max(steps) < 0.8 * max(rates) and rates[-1] < 0.15 * max(rates)


@quick(lambda command: command == "train")
@pytest.mark.parametrize("command", list(KINDS))
def test_as_many_steps_as_fit_and_a_rate_that_falls_to_the_last(command, inputs, tmp_path, clock):
    console = Quiet()
    report = tiny_run(timed(command, tmp_path / "run", inputs), console)
    assert report.steps == FITTING and not report.interrupted
    assert f"{FITTING} of {STEPS} steps fit in {minutes_for(FITTING):g} minutes, 0.10 s each" in console.said
    rates = rates_of(console)
    assert len(rates) == FITTING and rates[4] == max(rates), "the first step after it has risen"
    assert falls_without_a_jump(rates)


# The time of each step. Always, what was spent when the run ends is at most the budget and one of the slowest steps.
PACES: dict[str, Callable[[int], float]] = {
    "becomes busy": lambda step: 0.1 if step < 14 else 0.4,
    "becomes very busy": lambda step: 0.1 if step < 14 else 1.0,
    "becomes free": lambda step: 0.4 if step < 14 else 0.1,
    "comes and goes": lambda step: 0.1 if step // 7 % 2 else 0.3,
    "slow from the first step": lambda step: 0.7,
    "slow at first": lambda step: 1.0 if step < 3 else 0.1,
}


@quick(lambda pace: pace == "becomes busy")
@pytest.mark.parametrize("pace", PACES)
def test_the_minutes_hold_when_the_pace_changes(pace: str, inputs: Path, tmp_path: Path, clock: Clock) -> None:
    clock.takes = PACES[pace]
    console, seconds = Quiet(), 60 * minutes_for(45)
    report = tiny_run(timed("train", tmp_path / "run", inputs, minutes=minutes_for(45), steps=60), console)
    assert clock.now <= seconds + max(clock.takes(step) for step in range(report.steps + 1))
    assert clock.now > 0.8 * seconds, "and they are used"
    if pace not in ("slow from the first step", "becomes very busy"):  # which leave no steps for the fall
        assert falls_without_a_jump(rates_of(console))
    if pace == "becomes busy":
        assert any("steps now fit in" in said for said in console.said)


def test_a_rise_that_would_take_most_of_the_time_ends_early() -> None:
    plan = time_budget.RatePlan(warmup=100, total=400)
    plan.end_at(150, step=20)
    rates = [plan(step) for step in range(151)]
    assert rates[20] == max(rates) == 0.2 and rates[150] == 0.0
    assert all(0 <= before - now < 0.01 for before, now in itertools.pairwise(rates[20:]))


@given(warmup=st.integers(0, 30), plans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), max_size=8))
def test_no_plan_lets_the_rate_jump_or_rise_again(warmup: int, plans: list[tuple[int, int]]) -> None:
    plan, step, seen = time_budget.RatePlan(warmup, 200), 0, [0.0]
    for later, left in [*plans, (0, 20)]:
        for _ in range(min(later, plan.total - step)):
            step += 1
            seen.append(plan(step))
        before = plan(step)
        plan.end_at(step + left, step)
        assert plan(step) == pytest.approx(before, abs=1e-12)
    while step < plan.total:
        step += 1
        seen.append(plan(step))
    peak = seen.index(max(seen))
    assert all(now <= before + 1e-12 for before, now in itertools.pairwise(seen[peak:]))
    assert seen[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.thorough
def test_where_all_steps_fit_nothing_changes(inputs: Path, tmp_path: Path, clock: Clock) -> None:
    console = Quiet()
    told = timed("train", tmp_path / "run", inputs, steps=12)
    assert tiny_run(told, console).steps == 12
    assert f"all 12 steps fit in {minutes_for(FITTING):g} minutes" in console.said
    tiny_run(timed("train", tmp_path / "plain", inputs, steps=12, minutes=None), Quiet())
    assert kept_weights(tmp_path / "run", "train") == kept_weights(tmp_path / "plain", "train")


def test_a_resumed_run_has_the_minutes_that_were_left_and_the_same_bits(inputs, tmp_path, clock):
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny_run(timed("train", whole, inputs), Quiet())
    clock.now = 0.0

    class Stops(Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            super().step(line, total)
            if line["step"] == 13:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(timed("train", run, inputs), Stops())
    clock.now += 1e6  # until somebody resumes it
    console = Quiet()
    report = tiny_run(settings_of(TrainSettings, str(run), None, {}), console, resume=True)
    assert report.steps == FITTING
    assert "resuming from checkpoint-12" in console.said
    assert not any("fit in " in said for said in console.said), "it was said before"
    assert kept_weights(run, "train") == kept_weights(whole, "train")
    state = json.loads((run / "checkpoints" / f"checkpoint-{FITTING}" / "trainer_state.json").read_text())
    assert state["max_steps"] == FITTING


@pytest.mark.thorough
def test_a_resumed_run_on_a_slower_machine_has_fewer_steps(inputs: Path, tmp_path: Path, clock: Clock) -> None:
    clock.takes = lambda step: 0.1 if clock.now < 1e6 else 0.4

    class Stops(Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            if line["step"] == 13:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(timed("train", tmp_path, inputs, minutes=minutes_for(40)), Stops())
    clock.now += 1e6
    report = tiny_run(settings_of(TrainSettings, str(tmp_path), None, {}), Quiet(), resume=True)
    assert 16 <= report.steps <= 22  # 12 steps took 1.2 s of 4.05: at 0.4 s each 7 more fit


def test_evaluations_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((0.0, 10.0, 17.0))  # when it is made, after three steps, after ten: one second a step
    monkeypatch.setattr(time_budget, "monotonic", lambda: next(looks))
    settings = TrainSettings(minutes=1, warmup_steps=0, eval_every=5)
    trainer = SimpleNamespace(args=SimpleNamespace(max_steps=STEPS), rank_zero=ALONE)
    budget = time_budget.TimeBudget(trainer, settings, lambda said: None)
    budget.on_evaluate(None, None, None, metrics={"eval_runtime": 2.0})
    budget._steps_here = 2
    budget.on_step_end(None, SimpleNamespace(global_step=3, max_steps=STEPS), None)
    state = SimpleNamespace(global_step=10, max_steps=STEPS)
    budget.on_step_end(None, state, None)
    # 43 s are left, of which the last evaluation takes 2 and each step 1 and a fifth of an evaluation
    assert state.max_steps == budget.plan.total == 10 + int(41 / 1.4)


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan"), float("inf"), "2"])
def test_minutes_that_are_none_are_refused(minutes: Any) -> None:
    with pytest.raises(ValueError, match="minutes: expected a number above 0"):
        TrainSettings(minutes=minutes)
