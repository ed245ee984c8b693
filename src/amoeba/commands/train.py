"""`amoeba train`: the run's voice. A progress bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amoeba.commands.output import Output
from amoeba.errors import bad_value
from amoeba.jobs.settings import TrainSettings, load_settings

if TYPE_CHECKING:
    from rich.progress import Progress


class TrainConsole:
    """Tells how a run goes; see `amoeba.jobs.train.Console`."""

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


def settings_of(resume: str | None, config: str | None, given: dict[str, Any]) -> TrainSettings:
    """Of a new run, or of the one in the folder `resume` (what is given then changes it)."""
    if resume is None:
        return load_settings(config, given)
    path = Path(resume) / "config.json"
    if not path.is_file():
        raise bad_value("--resume", "the folder of an earlier run", resume, "check the path, or train without --resume")
    earlier = json.loads(path.read_text())
    earlier.pop("model_config", None)
    return TrainSettings(**(earlier | given | {"out": resume}))


def run(settings: TrainSettings, resume: bool, output: Output) -> dict[str, Any]:
    from amoeba.jobs.train import train

    console = TrainConsole(output)
    try:
        report = train(settings, console, resume=resume)
    finally:
        console.close()
    output.heading("trained" if not report.interrupted else "stopped")
    output.facts(
        [
            (
                "held-out loss",
                f"{report.start_loss:.3f} -> {report.final_loss:.3f} (perplexity {report.perplexity:.1f})",
            ),
            ("steps", f"{report.steps} in {report.seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s at the end"),
            ("dead experts", str(report.dead_experts)),
            ("model", f'{report.model}    try: amoeba generate {report.model} "The with statement"'),
            ("run", f"{report.folder}    look: amoeba report {report.folder}"),
        ]
    )
    return asdict(report)
