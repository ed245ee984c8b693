"""Runs that end by the clock: the steps that fit, a learning rate that falls towards the last, and a resume that keeps
the number."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")

from amoeba.jobs import time_budget
from amoeba.jobs.resume import settings_of
from amoeba.jobs.settings import TrainSettings
from selection import quick
from tiny_runs import KINDS, Quiet, kept_weights, make_inputs, tiny_run, tiny_settings

STEPS, FITTING = 60, 16


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def one_second_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the clock when it is made, after three steps and after ten: seven of them take a second."""
    looks = itertools.count()
    monkeypatch.setattr(time_budget, "monotonic", lambda: float(next(looks)))
    monkeypatch.setattr(time_budget.TimeBudget, "on_evaluate", lambda *_, **__: None)  # takes no time


def minutes_for(steps: int) -> float:
    return (2 + (steps - 10 + 0.5) / 7) / 60


def timed(command: str, folder: Path, inputs: Path, **changes: Any) -> Any:
    told = {"steps": STEPS, "minutes": minutes_for(FITTING), "warmup_steps": 4, "log_every": 1, "eval_every": 8}
    return tiny_settings(command, folder, inputs, **told | changes)


@quick(lambda command: command == "train")
@pytest.mark.parametrize("command", list(KINDS))
@pytest.mark.usefixtures("one_second_between_looks")
def test_as_many_steps_as_fit_and_a_rate_that_falls_towards_the_last(
    command: str, inputs: Path, tmp_path: Path
) -> None:
    console = Quiet()
    report = tiny_run(timed(command, tmp_path / "run", inputs), console)
    assert report.steps == FITTING and not report.interrupted
    assert f"{FITTING} of {STEPS} steps fit into {minutes_for(FITTING):g} minutes, 0.14 s each" in console.said
    rates = {line["step"]: line["lr"] for line in console.lines}
    assert list(rates) == list(range(1, FITTING + 1))
    assert rates[5] == max(rates.values()), "the first step after it has risen"
    # the rate of a run of so many steps from the eleventh on; before, that of a longer one
    plain = Quiet()
    tiny_run(timed(command, tmp_path / "plain", inputs, steps=FITTING, minutes=None), plain)
    expected = {line["step"]: line["lr"] for line in plain.lines}
    assert [rates[step] for step in range(11, FITTING + 1)] == [expected[step] for step in range(11, FITTING + 1)]
    assert rates[FITTING] < 0.05 * rates[5]
    assert all(rates[step] >= expected[step] for step in range(6, 11))


@pytest.mark.thorough
@pytest.mark.usefixtures("one_second_between_looks")
def test_where_all_steps_fit_nothing_changes(inputs: Path, tmp_path: Path) -> None:
    console = Quiet()
    told = timed("train", tmp_path / "run", inputs, steps=12)
    assert tiny_run(told, console).steps == 12
    assert f"all 12 steps fit into {minutes_for(FITTING):g} minutes" in console.said
    tiny_run(timed("train", tmp_path / "plain", inputs, steps=12, minutes=None), Quiet())
    assert kept_weights(tmp_path / "run", "train") == kept_weights(tmp_path / "plain", "train")


@pytest.mark.usefixtures("one_second_between_looks")
def test_a_resumed_run_has_the_steps_that_were_decided_and_the_same_bits(inputs: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny_run(timed("train", whole, inputs), Quiet())

    class Stops(Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            super().step(line, total)
            if line["step"] == 13:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(timed("train", run, inputs), Stops())
    console = Quiet()
    report = tiny_run(settings_of(TrainSettings, str(run), None, {}), console, resume=True)
    assert report.steps == FITTING
    assert "resuming from checkpoint-12" in console.said
    assert not any("steps fit into" in said for said in console.said), "it was decided before"
    assert kept_weights(run, "train") == kept_weights(whole, "train")
    state = json.loads((run / "checkpoints" / f"checkpoint-{FITTING}" / "trainer_state.json").read_text())
    assert state["max_steps"] == FITTING


def test_evaluations_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((0.0, 10.0, 17.0))  # when it is made, after three steps, after ten: one second a step
    monkeypatch.setattr(time_budget, "monotonic", lambda: next(looks))
    settings = TrainSettings(minutes=1, warmup_steps=0, eval_every=5)
    budget = time_budget.TimeBudget(None, settings, lambda said: None)
    budget.on_evaluate(None, None, None, metrics={"eval_runtime": 2.0})
    budget.on_step_end(None, SimpleNamespace(global_step=3, max_steps=STEPS), None)
    # 43 s are left, of which the last evaluation takes 2 and each step 1 and a fifth of an evaluation
    assert budget._fitting(SimpleNamespace(global_step=10, max_steps=STEPS)) == 10 + int(41 / 1.4)


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan"), float("inf"), "2"])
def test_minutes_that_are_none_are_refused(minutes: Any) -> None:
    with pytest.raises(ValueError, match="minutes: expected a number above 0"):
        TrainSettings(minutes=minutes)
