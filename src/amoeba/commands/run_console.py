"""The voice of a run that trains: a progress bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amoeba.commands.output import Output

if TYPE_CHECKING:
    from rich.progress import Progress


class RunConsole:
    """Tells how a run goes; see `amoeba.jobs.run_folder.Console`."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar: Progress | None = None
        self._task: Any = None
        if output.on_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
            self._bar = Progress(*columns, console=output.progress_console)

    def say(self, text: str) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._bar.console.print(text)
        else:
            self._output.progress(text)

    def step(self, line: dict[str, Any], total: int) -> None:
        text = describe(line, total)
        if self._bar is None:
            self._output.progress(text)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, completed=line["step"], description=text)

    def close(self) -> None:
        if self._bar is not None and self._bar.live.is_started:
            self._bar.stop()


def describe(line: dict[str, Any], total: int) -> str:
    """One line of numbers: step, loss, lr, tok/s, share of peak, memory, MaxVio, dead experts."""
    return (
        f"step {line['step']}/{total}  loss {line['loss']:.3f}  lr {line['lr']:.1e}  "
        f"{line['tokens_per_second']:,.0f} tok/s  {line['share_of_peak']:.0%} of peak  "
        f"{line['memory_bytes'] / 2**30:.1f} GiB  MaxVio {line['max_violation']:.2f}  dead {line['dead_experts']}"
    )
