"""torchrun itself: processes that meet by its environment, its signals, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from amoeba.jobs.train.run_folder import checkpoints
from tiny_runs import make_inputs

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


class Launched:
    """`torchrun --standalone --nproc-per-node COUNT -m amoeba train ... --experts ranks`."""

    def __init__(self, folder: Path, count: int = 2, more: Sequence[str] = ()) -> None:
        make_inputs(folder)
        self.run, self.log = folder / "run", folder / "log"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        words += ["-m", "amoeba", "train", "--experts", "ranks", *more, "--model", str(folder / "base")]
        words += ["--data", str(folder / "train.jsonl"), "--out", str(self.run), "--steps", "100000"]
        words += ["--log-every", "2", "--sequence-length", "32", "--dtype", "float32"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < ends and self.process.poll() is None, self.said()
            time.sleep(0.1)

    def end(self) -> str:
        self.process.wait(SECONDS)
        return self.said()

    def ranks(self) -> list[int]:
        """Their process ids, in order."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in task.read_text().split()]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    yield from running(Launched(tmp_path))


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Launched]:
    """Two groups of two ranks, all of it sharded by FSDP2."""
    yield from running(Launched(tmp_path, 4, ["--expert-ranks", "2", "--dense", "fsdp"]))


def running(started: Launched) -> Iterator[Launched]:
    try:
        started.wait(lambda: "step 2/100000" in started.said())
        yield started
    finally:
        started.process.terminate()
        started.process.wait(SECONDS)


@pytest.mark.thorough  # what the ranks do is in test_commands_over_ranks.py
def test_a_signal_to_torchrun_stops_both_ranks_with_a_checkpoint(launched: Launched) -> None:
    launched.process.send_signal(signal.SIGTERM)
    said = launched.end()
    (checkpoint,) = checkpoints(launched.run)
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert said.count("step 2/100000") == said.count("stopping after this step") == 1  # one of them speaks
    assert f"stopped at step {step}; continue with: torchrun --nproc-per-node 2 -m amoeba train --resume" in said
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    assert (checkpoint / "optimizer-00001-of-00002.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
def test_a_killed_rank_ends_the_other_which_says_who_it_was(launched: Launched) -> None:
    os.kill(launched.ranks()[1], signal.SIGKILL)
    began = time.monotonic()
    said = launched.end()
    assert time.monotonic() - began < 30
    assert "amoeba: rank 0 waited" in said and "from rank 1, which did not report" in said
    assert checkpoints(launched.run) == [] and not (launched.run / "model").exists()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
def test_a_rank_that_fsdp_waits_for_in_vain_ends_all_others_in_words(grid: Launched) -> None:
    os.kill(grid.ranks()[3], signal.SIGKILL)
    began = time.monotonic()
    said = grid.end()
    assert time.monotonic() - began < 45
    assert "rank 3, which did not report" in said and "unexpected" not in said
    assert said.count("exitcode  : 75") == 3  # of each of the others


@pytest.mark.thorough
def test_a_signal_stops_two_by_two_ranks_with_a_checkpoint(grid: Launched) -> None:
    grid.process.send_signal(signal.SIGINT)
    said = grid.end()
    (checkpoint,) = checkpoints(grid.run)
    assert said.count("stopping after this step") == 1
    assert "continue with: torchrun --nproc-per-node 4 -m amoeba train --resume" in said
    assert (checkpoint / "optimizer-00003-of-00004.safetensors").is_file()
