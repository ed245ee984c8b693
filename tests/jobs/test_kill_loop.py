"""Killed and resumed runs end with the bits of undisturbed ones; tests/support/kill_loop.py goes on for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")

SUPPORT = Path(__file__).parents[1] / "support"


# In every run: the bits of resumed runs in test_resume.py, a process that is stopped in test_train.py.
@pytest.mark.thorough
@pytest.mark.parametrize("kills", [1, 4])
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_killed_and_resumed_runs_end_with_the_bits_of_undisturbed_ones(command: str, kills: int) -> None:
    arguments = ["--rounds=1", f"--kills={kills}", "--seed=0", f"--command={command}"]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "kill_loop.py"), *arguments],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT.parents[1] / 'src'}{os.pathsep}{SUPPORT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["identical"] == {command: 1}
