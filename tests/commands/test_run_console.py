"""What a run that trains says: one line that fits the terminal, and few of them in a pipe."""

import io
import logging
import re
from typing import Any

import pytest
from rich.console import Console

from amoeba.commands import run_console
from amoeba.commands.output import Output
from amoeba.commands.run_console import RunConsole, describe, duration
from amoeba.commands.start import start


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 4.6321,
        "lr": 1e-3,
        "tokens_per_second": 239_000.4,
        "share_of_peak": 0.05,
        "memory_bytes": 6 * 2**30,
        "max_violation": 3.59,
        "dead_experts": 27,
    } | changes


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("left", [None, 59.0, 7_400.0, 500_000.0])
def test_the_line_fits_and_keeps_step_loss_and_dead_experts(width, left):
    text = describe(line(1_200), 4_000, left, width)
    assert len(text) <= width
    assert text.startswith("step 1200/4000  loss 4.632  dead ")
    assert "27" in text
    if width >= 60 and left is not None:
        assert f"{duration(left)} left" in text
    assert ("lr 1.0e-03" in text) == (width == 120)


def test_in_a_pipe_it_has_80_columns():
    assert len(describe(line(99_999, loss=float("nan")), 100_000, 1e6)) <= 80


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (89, "89 s"), (200, "3 min"), (7_400, "2 h 3 min"), (5e5, "5.8 days")]
)
def test_durations_are_words(seconds, said):
    assert duration(seconds) == said


class Lines(Output):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def progress(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(run_console.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_the_first_the_last_and_few_between(clock):
    output, hours = Lines(), 10
    console = RunConsole(output)
    for step in range(10, 36_001 * 10, 10):  # a line each second
        console.step(line(step), 360_000)
        clock[0] += 1
    assert output.lines[0].startswith("step 10/360000")
    assert output.lines[-1].startswith("step 360000/360000")
    assert 100 < len(output.lines) < hours * 60 + 100
    assert "10 h 0 min left" in output.lines[1]


def test_verbose_gets_every_line(clock):
    output = Lines()
    output.verbose = True
    console = RunConsole(output)
    for step in range(1, 51):
        console.step(line(step), 50)
    assert len(output.lines) == 50


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_nothing_is_wrapped_or_cut(width, clock):
    output, screen = Output(), io.StringIO()
    output.progress_console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    console = RunConsole(output)
    for step in (10, 20):
        console.step(line(step), 400)
        clock[0] += 30
    console.close()
    last = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").split("\n")[-2]
    assert "dead experts 27" in last and "19 min left" in last
    assert "…" not in last
    assert len(last) <= width
    assert any(part in last for part in "━╸╺") == (width >= 80)


def test_with_verbose_a_line_ends_with_the_seconds_since_the_command_began():
    output = Lines()
    RunConsole(output).say("model: demo")
    output.verbose = True
    RunConsole(output).say("model: demo")
    assert output.lines[0] == "model: demo" and re.fullmatch(r"model: demo  \[\d+\.\d s\]", output.lines[1])


@pytest.mark.parametrize(("verbose", "said"), [(False, r""), (True, r"amoeba: the backend is eager  \[\d+\.\d s\]\n")])
def test_with_verbose_so_does_a_decision(verbose, said, capsys):
    start(verbose)
    logging.getLogger("amoeba").info("the backend is eager")
    assert re.fullmatch(said, capsys.readouterr().err)
