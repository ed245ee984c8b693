"""Two emulated hosts with torchrun on each: the losses of one host, bit by bit, also when a host is lost on the way.

The hosts share the run's folder and the installation. Model and data are copies of each host's own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_jobs
from amoeba.jobs.train.run_folder import checkpoints, unfinished_checkpoint
from amoeba.parallel.processes import LocalRanks
from emulated_hosts import Host, Network, why_not
from same_runs import check_same_run, lines, weights
from tiny_runs import TOLD

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # on a busy machine
SETTINGS = TOLD | {"batch_size": 4, "log_every": 1, "dtype": "float32", "experts": "ranks"}


class Job:
    """`torchrun ... -m amoeba train ...`, started with the same words on node0 and node1."""

    def __init__(
        self, network: Network, inputs: Path, folder: Path, per_host: int, hosts: str = "2", **changes: Any
    ) -> None:
        self.network, self.inputs, self.run = network, inputs, folder / "run"
        own = network.own_files
        self.logs = {name: folder / f"{name}.log" for name in ("node0", "node1")}
        config = SETTINGS | changes | {"model": str(own / "base"), "data": str(own / "train.jsonl")}
        (folder / "run.yaml").write_text(json.dumps(config))
        self.words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts]
        self.words += ["--nproc-per-node", str(per_host), "--max-restarts", "3", "--rdzv-backend", "c10d"]
        self.words += ["--rdzv-endpoint", "node0:29500", "--rdzv-conf", "last_call_timeout=3", "-m", "amoeba", "train"]
        self.words += ["--config", str(folder / "run.yaml"), "--out", str(self.run)]
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(own),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.hosts: dict[str, Host] = {}
        self.torchruns: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        copy = f"cp -r {self.inputs}/base {self.inputs}/train.jsonl {self.network.own_files}"
        for name in names:
            self.hosts[name] = self.network.host(name)
            words = ["sh", "-c", f'{copy} && exec "$@"', "sh", *self.words]
            self.torchruns[name] = self.hosts[name].start(words, self.logs[name], self.environment)

    def wait(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < ends, self.said()
            assert all(process.poll() is None for process in self.torchruns.values()), self.said()
            time.sleep(0.02)

    def codes(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.torchruns.values()]

    def said(self) -> str:
        return "\n".join(f"--- {name}\n{log.read_text()}" for name, log in self.logs.items() if log.exists())


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network() as made:
        yield made


def on_one_host(processes: LocalRanks, count: int, inputs: Path, folder: Path, **changes: Any) -> Path:
    """The same run by as many ranks of one host, never interrupted."""
    told = SETTINGS | {"model": str(inputs / "base"), "data": str(inputs / "train.jsonl"), "out": str(folder)}
    processes.run(rank_jobs.run_job, [(rank, count, "train", told | changes) for rank in range(count)])
    return folder


def check_same_bits(found: Path, expected: Path) -> None:
    for name in ("step_losses", "step_norms"):
        ours, theirs = ([line[name] for line in lines(folder, "train")] for folder in (found, expected))
        assert ours == theirs
    assert [line["loss"] for line in lines(found, "eval")] == [line["loss"] for line in lines(expected, "eval")]
    ours, theirs = (weights(folder / "model") for folder in (found, expected))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# Rank 1 is lost between two exchanges, and rank 0 waits for it.
MEETS = """
import time
from amoeba.core.errors import RankLost
from amoeba.parallel.launcher import launched_ranks
with launched_ranks(120.0) as ranks:
    print("met", ranks.gather_texts(f"rank {ranks.rank}", "words"), flush=True)
    if ranks.rank == 1:
        time.sleep(600)
    try:
        ranks.gather_texts("again", "words")
    except RankLost as error:
        print(error)
"""


def test_ranks_of_two_hosts_meet_and_name_the_host_that_is_lost(network, tmp_path):
    """A host's own name is a loopback address on it, by which the other would not be reached."""
    found, logs, hosts = [], [tmp_path / "node0", tmp_path / "node1"], [network.host("node0"), network.host("node1")]
    for rank, host in enumerate(hosts):
        words = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2}
        words |= {"MASTER_ADDR": "node0", "MASTER_PORT": 29400, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT / "src"}
        environment = os.environ | {name: str(word) for name, word in words.items()}
        found.append(host.start([sys.executable, "-c", MEETS], logs[rank], environment))
    ends = time.monotonic() + SECONDS
    while not all("met ['rank 0', 'rank 1']" in log.read_text() for log in logs):
        assert time.monotonic() < ends and all(each.poll() is None for each in found), [log.read_text() for log in logs]
        time.sleep(0.05)
    hosts[1].kill()
    assert found[0].wait(SECONDS) == 0, logs[0].read_text()
    said = logs[0].read_text()
    assert "from rank 1, which did not report" in said and "Look at the output of rank 1 on node1" in said


# In every run: how hosts meet, above; what a restart and a resumed run do, in test_torchrun.py and test_resume.py.
@pytest.mark.thorough
def test_a_lost_host_is_replaced_and_the_run_resumes(network, processes, inputs, tmp_path):
    job = Job(network, inputs, tmp_path, per_host=1)
    job.start("node0", "node1")
    job.wait(lambda: bool(checkpoints(job.run)))
    job.hosts["node1"].kill()
    job.start("node1")
    assert job.codes() == [0, 0], job.said()
    said = job.logs["node0"].read_text()
    assert "from rank 1, which did not report" in said and "Look at the output of rank 1 on node1" in said
    assert said.count("resuming from checkpoint-") == said.count("step 12/12") == 1
    assert "loss" not in job.logs["node1"].read_text()  # one of them speaks
    check_same_bits(job.run, on_one_host(processes, 2, inputs, tmp_path / "expected"))


@pytest.mark.thorough
def test_a_host_of_two_by_two_is_lost_while_a_checkpoint_is_written(network, processes, inputs, tmp_path):
    changes = {"expert_ranks": 2, "dense": "fsdp"}
    job = Job(network, inputs, tmp_path, per_host=2, **changes)
    job.start("node0", "node1")
    job.wait(lambda: bool(checkpoints(job.run)) and unfinished_checkpoint(job.run).exists())
    job.hosts["node1"].kill()
    job.start("node1")
    assert job.codes() == [0, 0], job.said()
    assert "resuming from checkpoint-" in job.logs["node0"].read_text()
    assert not unfinished_checkpoint(job.run).exists()
    check_same_bits(job.run, on_one_host(processes, 4, inputs, tmp_path / "expected", **changes))


@pytest.mark.thorough
def test_without_the_rendezvous_host_all_end_and_the_command_resumes(
    network: Network, processes: LocalRanks, inputs: Path, tmp_path: Path
) -> None:
    job = Job(network, inputs, tmp_path, per_host=1, experts="resident")
    job.start("node0", "node1")
    job.wait(lambda: bool(checkpoints(job.run)))
    job.hosts["node0"].kill()
    assert job.torchruns["node1"].wait(SECONDS) != 0
    job.hosts["node1"].kill()
    job.start("node0", "node1")
    assert job.codes() == [0, 0], job.said()
    check_same_bits(job.run, on_one_host(processes, 2, inputs, tmp_path / "expected", experts="resident"))


@pytest.mark.thorough
def test_a_run_that_may_have_fewer_hosts_goes_on_with_the_one_that_is_left(network, processes, inputs, tmp_path):
    job = Job(network, inputs, tmp_path, per_host=1, hosts="1:2")
    job.start("node0", "node1")
    job.wait(lambda: bool(checkpoints(job.run)))
    job.hosts["node1"].kill()
    assert job.torchruns["node0"].wait(SECONDS) == 0, job.said()
    assert "this single process has all experts" in job.logs["node0"].read_text()
    check_same_run(job.run, on_one_host(processes, 2, inputs, tmp_path / "expected"), "model")


@pytest.mark.thorough
def test_a_folder_that_is_not_shared_is_refused_before_the_first_step(network, inputs, tmp_path):
    job = Job(network, inputs, tmp_path, per_host=1)
    job.words[job.words.index("--out") + 1] = str(network.own_files / "run")
    job.words[job.words.index("--max-restarts") + 1] = "0"
    job.start("node0", "node1")
    assert 0 not in job.codes()
    assert "--out: expected a folder on a file system that all hosts share (process" in job.logs["node1"].read_text()
    assert "step" not in job.logs["node0"].read_text()
