"""How a training run reports: a progress bar on a terminal, plain lines in a pipe.

step 120/400  loss 4.632  dead experts 3  4 min left  2,390 tok/s  MaxVio 3.59
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from amoeba.commands.output import Output
from amoeba.commands.start import with_seconds

if TYPE_CHECKING:
    from rich.progress import Progress

WIDTH = 80  # of a pipe
_BAR = 16
# In a pipe: this long between lines while a run is young, then ever longer, so that a log of days can be read.
_SECONDS_BETWEEN_LINES, _LONGEST, _SHARE_OF_THE_RUN = 2.0, 60.0, 0.05


class RunConsole:
    """Tells how a run goes, as `amoeba.jobs.train.run_folder.Console`, which imports torch."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar: Progress | None = None
        self._task: Any = None
        self._first: tuple[int, float] | None = None  # step and time of the first line
        self._shown = 0.0
        if output.on_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=_BAR)]
            self._bar = Progress(*(columns if self._has_bar() else columns[:1]), console=output.progress_console)

    def say(self, text: str) -> None:
        text = with_seconds(text) if self._output.verbose else text
        if self._bar is not None and self._bar.live.is_started:
            self._bar.console.print(text, soft_wrap=True)
        else:
            self._output.progress(text)

    def step(self, line: dict[str, Any], total: int) -> None:
        now = time.monotonic()
        self._first = self._first or (line["step"], now)
        (first, began), step = self._first, line["step"]
        left = None if step == first else (now - began) / (step - first) * (total - step)
        if self._bar is None:
            if self._output.verbose or self._due(line["step"], total, now):
                self._shown = now
                self._output.progress(describe(line, total, left))
            return
        room = self._output.progress_console.width - 1 - (_BAR + 1 if self._has_bar() else 0)
        text = describe(line, total, left, room)
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, completed=line["step"], description=text)

    def close(self) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._bar.stop()

    def _has_bar(self) -> bool:
        return self._output.progress_console.width >= WIDTH

    def _due(self, step: int, total: int, now: float) -> bool:
        assert self._first is not None
        first, began = self._first
        pause = min(_LONGEST, max(_SECONDS_BETWEEN_LINES, (now - began) * _SHARE_OF_THE_RUN))
        return step in (first, total) or now - self._shown >= pause


def describe(line: dict[str, Any], total: int, seconds_left: float | None, width: int = WIDTH) -> str:
    """The state of the run, in at most this many columns. If there is no room for all, the last are left out."""
    parts = [
        *([] if seconds_left is None else [f"{duration(seconds_left)} left"]),
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"MaxVio {line['max_violation']:.2f}",
        *([] if line["memory_bytes"] is None else [f"{line['memory_bytes'] / 2**30:.1f} GiB"]),
        *([line["precision"]] if "precision" in line else []),
        f"lr {line['lr']:.1e}",
    ]
    text = f"step {line['step']}/{total}  loss {line['loss']:.3f}  "
    dead = f"dead experts {line['dead_experts']}"
    text += dead if len(text) + len(dead) <= width else dead.replace(" experts", "")
    for part in parts:
        if len(text) + 2 + len(part) > width:
            break
        text += f"  {part}"
    return text


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"
