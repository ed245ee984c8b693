"""The console script in this process, with its own exit code and outputs."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from called import Ended


@pytest.fixture
def amoeba(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ended]:
    from amoeba import cli

    monkeypatch.chdir(tmp_path)  # where an option is not refused, the command runs

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["amoeba", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Ended(int(left.value.code or 0), *capsys.readouterr())

    return run
