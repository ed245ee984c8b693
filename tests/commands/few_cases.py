"""The commands as a user calls them, with a suite of three cases."""

import json
import os
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from amoeba.bench import timing
from amoeba.cli import app
from amoeba.proof import conformance
from amoeba.proof.cases import Case

SOURCE = Path(__file__).resolve().parents[2] / "src"
TINY = "37,32,16,6,2"
FEW = [Case(0, 2), Case(1, 2), Case(5, 2, bias=True, pattern="sentinels", num_experts=4)]
SMALL = timing.Size(64, 1 << 20, 1)
FOR_EVER = 10_000  # seconds


def only_few_cases(monkeypatch):
    """The suite itself is run by test_conformance.py."""
    monkeypatch.setattr(conformance, "cases", lambda thorough=False: FEW)
    monkeypatch.setattr("amoeba.commands.verify_run.cases", lambda thorough=False: FEW)
    monkeypatch.setattr("amoeba.commands.verify_run.SECONDS", FOR_EVER)


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def last_line(result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def all_commands(group=None, *words: str):
    """Each command by the words that call it; a group of commands (amoeba stream) comes before its own."""
    for name, command in (group or get_command(app)).commands.items():
        yield (*words, name), command
        if hasattr(command, "commands"):
            yield from all_commands(command, *words, name)


ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
