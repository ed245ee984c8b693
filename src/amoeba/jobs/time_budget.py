"""A run that ends by the clock: as many steps as fit into so many minutes, with a learning rate that falls to its end.

    budget = TimeBudget(trainer, settings, console.say);  trainer.add_callback(budget)

How many steps fit is decided once, after the first of them have been timed, and announced. Until the learning rate has
risen it is the same however many steps follow, so nothing is lost by deciding that late. The number is in every
checkpoint from then on: a resumed run has as many steps as it had before. Evaluations count as part of the time,
loading the data and the model does not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback, TrainerState, get_scheduler

from amoeba.jobs.settings import RunSettings

_UNTIMED = 3  # the first steps, in which much happens once
_LEAST = 10  # steps before it is decided


class TimeBudget(TrainerCallback):
    def __init__(self, trainer: Any, settings: RunSettings, say: Callable[[str], None]) -> None:
        assert settings.minutes is not None
        self._trainer, self._say, self._seconds = trainer, say, 60.0 * settings.minutes
        self._decided_after = max(settings.warmup_steps, _LEAST)
        self._eval_every, self._minutes = settings.eval_every, settings.minutes
        self._began = self._timed_since = monotonic()
        self._evaluation_seconds = 0.0

    def go_on_from(self, checkpoint: Path) -> None:
        """The number of steps that was decided before the checkpoint was written, if it was."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= self._decided_after:
            self._trainer.args.max_steps = state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._evaluation_seconds = metrics["eval_runtime"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == _UNTIMED:
            self._timed_since = monotonic()
        if state.global_step == self._decided_after < state.max_steps:
            self._decide(state)

    def _decide(self, state: Any) -> None:
        fitting = self._trainer.together.tell(lambda: self._fitting(state), "the number of steps")
        if fitting >= state.max_steps:
            self._say(f"all {state.max_steps} steps fit into {self._minutes:g} minutes")
            return
        state.max_steps = self._trainer.args.max_steps = fitting
        _fall_towards(fitting, self._trainer)

    def _fitting(self, state: Any) -> int:
        now, done = monotonic(), state.global_step
        one_step = (now - self._timed_since) / (done - _UNTIMED)
        left = self._seconds - (now - self._began) - self._evaluation_seconds  # the last evaluation
        fitting = done + max(int(left / (one_step + self._evaluation_seconds / self._eval_every)), 1)
        if fitting < state.max_steps:
            self._say(f"{fitting} of {state.max_steps} steps fit into {self._minutes:g} minutes, {one_step:.2f} s each")
        return fitting


def _fall_towards(steps: int, trainer: Any) -> None:
    """The learning rate of the steps that follow, as if there had been so many from the beginning."""
    arguments, optimizer, scheduler = trainer.args, trainer.optimizer, trainer.lr_scheduler
    shorter = get_scheduler(arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, steps)
    scheduler.lr_lambdas = shorter.lr_lambdas
    at = scheduler.last_epoch
    rates = [rate * falls(at) for rate, falls in zip(scheduler.base_lrs, shorter.lr_lambdas, strict=True)]
    scheduler._last_lr = rates  # which is what get_last_lr tells
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
