"""Ctrl-C at any moment of any command, see tests/support/interrupted_commands.py."""

from pathlib import Path

import pytest

from interrupted_commands import JOBS, call, interrupted, prepare

CHEAP = "trace"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    return folder


def test_a_command_that_has_just_been_started_ends_without_a_traceback(tmp_path: Path) -> None:
    assert interrupted(CHEAP, tmp_path, tmp_path / "out", after=0.02) in ("130", "by the signal")


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_an_interrupted_command_ends_in_order_and_can_be_called_again(name: str, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = call(JOBS[name].words(inputs, tmp_path / "whole"), None, tmp_path / "whole")
    assert whole.code == 0, whole.err
    for moment in (0.1, 0.5, 0.9):
        interrupted(name, inputs, tmp_path / str(moment), moment * whole.seconds)
