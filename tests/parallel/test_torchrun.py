"""torchrun itself: processes that meet by its environment and again after a restart, its signals, a killed rank."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from amoeba.jobs.train.run_folder import checkpoints, run_folder
from amoeba.parallel.launcher import _own_part
from called import call
from selection import quick
from tiny_runs import kept_weights, make_inputs

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


# --- restarts


def meet(server: dist.TCPStore, ranks: Sequence[int], count: int, late: float = 0.0) -> dict[int, dist.Store | str]:
    """What each of the ranks has after they met; those behind the first come later."""
    found: dict[int, dist.Store | str] = {}

    def join(rank: int, seconds: float) -> None:
        time.sleep(seconds)
        timeout = datetime.timedelta(seconds=1)
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
        try:
            found[rank] = _own_part(client, rank, count, deadline=1.0)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank, late * at)) for at, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_restarted_ranks_do_not_find_what_the_ended_ones_left_in_the_store(order: tuple[int, ...]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for late in (0.0, 0.1, 0.1):
        stores = meet(server, order, 3, late)
        assert not any(store.check(["address of rank 0"]) for store in stores.values())
        stores[0].set("address of rank 0", "here")
        assert all(store.get("address of rank 0") == b"here" for store in stores.values())


def test_a_rank_that_does_not_come_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet(server, (0, 1, 2, 3), 4)  # of these word is left
    assert meet(server, (0, 2), 4)[0] == "nothing from ranks 1, 3"


@quick(lambda command: command == "train")
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_the_same_command_resumes_where_torchrun_may_restart_it(command, inputs, tmp_path, monkeypatch):
    words = ["train", "--model"] if command == "train" else ["finetune", "--lora-rank", "2"]
    words += [str(inputs / "base"), "--data", str(inputs / f"{command}.jsonl"), "--dtype", "float32"]
    words += ["--steps", "4", "--save-every", "2", "--sequence-length", "32", "--out", str(tmp_path / "run")]
    call(*words)
    weights = kept_weights(tmp_path / "run", command)
    refused = call(*words, code=2)
    assert "--out: expected a folder without a run" in refused.stderr
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ended = call(*words)
    assert "already finished after 4 steps" in ended.stderr
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"final"' not in line))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-4")  # as if it had been killed before that one
    resumed = call(*words)
    assert "resuming from checkpoint-2" in resumed.stderr
    assert kept_weights(tmp_path / "run", command) == weights
    other = call(*words, "--learning-rate", "1", code=2)
    assert "--learning-rate: expected 0.00" in other.stderr
    chosen = call(command, "--resume", tmp_path / "run", "--from", "2", code=2)
    assert "--from: expected torchrun without --max-restarts" in chosen.stderr


def test_a_restarted_run_waits_until_the_ended_one_lets_go_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    said: list[str] = []
    earlier = run_folder(str(tmp_path / "run"), False, said.append)
    earlier.__enter__()
    threading.Timer(0.3, earlier.__exit__, (None, None, None)).start()
    with run_folder(str(tmp_path / "run"), False, said.append):
        assert [text.partition(" for ")[0] for text in said] == ["waiting up to 120 s"]
