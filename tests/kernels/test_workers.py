"""Processes that compile: as many as there are cores, and none is left behind."""

import os
import time
from pathlib import Path

import pytest

from amoeba.kernels.launch.ahead import Workers, cores


class Job:
    name = "job"

    def __init__(self, folder: Path, seconds: float = 0.0, fails: bool = False) -> None:
        self.folder, self.seconds, self.fails = folder, seconds, fails
        self.key: object = object()

    def compile(self) -> None:
        (self.folder / str(os.getpid())).touch()
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("no such instruction")


def started(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def test_a_job_that_fails_is_counted_and_the_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    told = []
    with Workers(2, lambda job, ok: told.append(ok)) as workers:
        for fails in (False, True, False, False, False):
            workers.submit(Job(tmp_path, fails=fails))
    assert (workers.failed, sorted(told)) == (1, [False, True, True, True, True])
    assert "job: RuntimeError: no such instruction" in capfd.readouterr().err
    assert len(started(tmp_path)) == 5


def test_an_interruption_ends_them_all(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Workers(3) as workers:
            for _ in range(3):
                workers.submit(Job(tmp_path, seconds=60))
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # not even a zombie


def test_no_more_run_at_a_time_than_were_asked_for(tmp_path: Path) -> None:
    began = time.monotonic()
    with Workers(1) as workers:
        for _ in range(3):
            workers.submit(Job(tmp_path, seconds=0.1))
        assert time.monotonic() - began < 0.3, "who submits does not wait"
    assert time.monotonic() - began >= 0.3
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_what_is_submitted_twice_is_compiled_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with Workers(2) as workers:
        workers.submit(job)
        workers.submit(job)
    assert len(started(tmp_path)) == 1
