"""`--minutes`: as many steps as fit into the time, with a learning-rate schedule that ends with it.

    budget = TimeBudget(trainer, settings, console.say);  trainer.add_callback(budget)

How many steps fit is estimated once the first of them have been timed, and again as the pace changes; never more than
were asked for. The learning rate follows without a jump: from where it is, it falls to 0 at the last step of the new
plan. The plan and the time that is spent are in every checkpoint (the scheduler's file). Over ranks the first one
decides. Evaluations count as part of the time, loading the data and the model does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Any

from transformers import TrainerCallback

from amoeba.jobs.settings import RunSettings

_UNTIMED = 3  # steps after each start, in which much happens once
_LEAST = 10  # steps before the first plan, unless that much of the time is gone
_MUCH = 0.25
_CHECKS = 32  # a plan is checked after this fraction of the steps that it leaves
_NEWEST = 0.5  # weight of the newest time of a step in the estimate
_WORTH_SAYING = 0.1  # change of the number of steps


class RatePlan:
    """The factor of the learning rate at each step: it rises to `peak`, then falls as a cosine to 0 at `total`.

    A LambdaLR keeps these fields in its state.
    """

    def __init__(self, warmup: int, total: int) -> None:
        self.warmup, self.total, self.peak = warmup, total, 1.0
        self.from_step, self.from_progress = warmup, 0.0  # where the fall that is planned begins, and how far it is
        self.used_seconds = 0.0
        self.step_seconds: float | None = None
        self.is_made, self.next_check = False, 0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * step / max(1, self.warmup)
        return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * self._progress(step))))

    def _progress(self, step: int) -> float:
        left = max(1, self.total - self.from_step)
        return min(1.0, self.from_progress + (step - self.from_step) * (1.0 - self.from_progress) / left)

    def end_at(self, total: int, step: int) -> None:
        """From `step` on. A rise that would take more than half of the steps ends where it is."""
        if step < self.warmup and total >= 2 * self.warmup:
            self.total = total
            return
        if step < self.warmup:
            self.peak, self.warmup, self.from_step = self(step), step, step
        self.from_progress = self._progress(step)
        self.from_step, self.total = step, total


class TimeBudget(TrainerCallback):
    def __init__(self, trainer: Any, settings: RunSettings, say: Callable[[str], None]) -> None:
        assert settings.minutes is not None
        self._trainer, self._say, self._minutes = trainer, say, settings.minutes
        self._asked = trainer.args.max_steps
        self.plan = RatePlan(settings.warmup_steps, self._asked)
        self._eval_every = settings.eval_every
        self._began = monotonic()
        self._evaluation_seconds = 0.0
        self._said: int | None = None
        self._steps_here = 0
        self._timed: tuple[int, float] | None = None  # since which step and time the pace is measured

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.max_steps = self.plan.total
        self._began -= self.plan.used_seconds
        self._said = self.plan.total if self.plan.is_made else None
        self._steps_here = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._evaluation_seconds = metrics["eval_runtime"]
        if self._timed is not None:
            self._timed = self._timed[0], self._timed[1] + self._evaluation_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, step = monotonic(), state.global_step
        self.plan.used_seconds = now - self._began
        self._steps_here += 1
        if self._steps_here == _UNTIMED:
            self._timed = step, now
        if step >= state.max_steps or step < self.plan.next_check:
            return
        if not self.plan.is_made and self._steps_here <= _UNTIMED:
            return
        tell = self._trainer.rank_zero.tell
        total, self.plan.next_check = tell(lambda: self._checked(step, now), "the number of steps")
        if total is not None:
            self.plan.is_made = True
            if total != self.plan.total:
                self.plan.end_at(total, step)
                state.max_steps = total

    def _checked(self, step: int, now: float) -> tuple[int | None, int]:
        """How many steps fit, None where it is too early to tell, and after which step to look again."""
        if self._timed is not None and step > self._timed[0]:
            newest = max(0.0, now - self._timed[1]) / (step - self._timed[0])
            known = self.plan.step_seconds
            self.plan.step_seconds = newest if known is None else known + _NEWEST * (newest - known)
            self._timed = step, now
        used, seconds = self.plan.used_seconds, 60.0 * self._minutes
        if not self.plan.is_made and step < _LEAST and used < _MUCH * seconds:
            return None, step + 1
        assert self.plan.step_seconds is not None
        each = self.plan.step_seconds + self._evaluation_seconds / self._eval_every
        left = seconds - used - self._evaluation_seconds  # the last evaluation
        fitting = min(self._asked, step + max(1, int(left / each) if each > 0 else self._asked))
        self._announce(fitting)
        return fitting, step + max(1, (fitting - step) // _CHECKS)

    def _announce(self, fitting: int) -> None:
        if self._said is not None and abs(fitting - self._said) <= _WORTH_SAYING * self._said:
            return
        now = "" if self._said is None else "now "
        within = f"{now}fit in {self._minutes:g} minutes"
        if fitting == self._asked:
            self._say(f"all {fitting} steps {within}")
        else:
            self._say(f"{fitting} of {self._asked} steps {within}, {self.plan.step_seconds:.2f} s each")
        self._said = fitting
