"""A rank that does not come, or is gone: the others stop, and say who waited for whom, for what."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rank_jobs
from amoeba.parallel import Ranks
from amoeba.parallel.processes import LocalRanks, RankFailed


def test_a_wait_has_a_deadline_and_a_killed_rank_ends_the_others() -> None:
    with rank_jobs.started(3) as processes:
        vain, _ = processes.run(rank_jobs.wait_in_vain, [(0, 1.0), (1, 1.0)])
        waited = r"rank 0 waited \d+\.\d s \(deadline 1 s\) for the numbers of tokens to come, exchange 1, "
        assert re.match(waited, vain), vain
        assert "from rank 1, which did not report. Look at the output of rank 1" in vain

        with pytest.raises(RankFailed) as raised:
            processes.run(rank_jobs.lose_a_rank, [(rank,) for rank in range(3)])
        assert list(raised.value.failures) == [2]  # the others came back
        assert "exit code -9" in raised.value.failures[2]
        for rank in (0, 1):
            said, seconds = raised.value.results[rank]
            assert said.startswith(f"rank {rank} waited") and "from rank 2, which did not report" in said
            assert "the connection says" in said and seconds < 10


def end_as_a_library_does(rank: int) -> None:
    if rank == 1:
        os.write(2, b"not supported with limited runs\n")
        os._exit(255)


def test_what_a_rank_wrote_before_it_ended_is_part_of_the_failure(capfd: pytest.CaptureFixture) -> None:
    with LocalRanks(2) as processes, pytest.raises(RankFailed) as raised:
        processes.run(end_as_a_library_does, [(0,), (1,)])
    assert "exit code 255; it had written\nnot supported with limited runs" in raised.value.failures[1]
    assert "not supported with limited runs" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="peers is interpreted on a CPU only where there is no GPU")
def test_a_kernel_that_waits_has_the_same_deadline() -> None:
    with rank_jobs.started(2) as processes:
        vain, _ = processes.run(rank_jobs.wait_for_peers_in_vain, [(0,), (1,)])
    assert vain.startswith("rank 0 waited 0.5 s on its device for ids and routing weights, exchange 2, from rank 1;")
    assert "0 of 2 parts had come. Look at the output of rank 1" in vain


def test_a_deadline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="deadline: expected seconds, more than 0; got 0"):
        Ranks(deadline=0)


@pytest.mark.thorough
def test_ctrl_c_while_ranks_are_being_started_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('begun').touch()\ntime.sleep(3)\n"
    )
    program = """
import sys
from amoeba.parallel.processes import LocalRanks
try:
    LocalRanks(1, preload=["slow_import"])
except KeyboardInterrupt:
    sys.exit(130)
"""
    paths = os.pathsep.join((*(path for path in sys.path if path), str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 130)
