"""The folder of a run, which `amoeba report` and `--resume` read, and one run at a time writes.

    with run_folder("runs/mine", resume=False, say=print) as folder:
        ...

RUN/config.json environment.json metrics.jsonl tensorboard/ checkpoints/ and model/ or adapter/
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from amoeba.core.errors import bad_value
from amoeba.parallel.launcher import may_restart
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.system.files import put_back, shell_words

_UNFINISHED = "writing"  # the checkpoint that is being written
_SET_ASIDE = "set-aside-"
_LOCK = ".lock"
# A file server keeps the lock of a host that is gone for some time: NFSv4 for 90 s.
_SECONDS_AFTER_A_RESTART = 120.0
_SECONDS_UNTIL_SEEN = 15.0  # by other hosts: NFS looks for what is new every few seconds


class Console:
    """Where a run tells how it goes: a progress bar, plain lines or, of a rank other than the first, nothing."""

    def say(self, text: str) -> None: ...

    def step(self, line: dict[str, Any], total: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunReport:
    folder: str
    steps: int
    start_loss: float  # held out
    final_loss: float
    final_loss_step: int  # an interrupted run has the latest that was logged
    perplexity: float
    dead_experts: int
    tokens_per_second: float
    seconds: float
    interrupted: bool
    exit_code: int  # of the command: 0, or 128 and the number of the signal that interrupted it
    peak_memory_bytes: int | None = None  # allocated on the GPU, or resident in this process; None if unknown

    def losses(self) -> str:
        if self.final_loss_step == 0:
            return f"{self.start_loss:.3f} at step 0, and not measured since"
        shown = f"{self.start_loss:.3f} -> {self.final_loss:.3f}"
        return shown if self.final_loss_step == self.steps else f"{shown} at step {self.final_loss_step}"


@contextmanager
def run_folder(out: str, resume: bool, say: Callable[[str], None], rank_zero: RankZero = ALONE) -> Iterator[Path]:
    """The folder, which can be written, holds a run if and only if it is to go on, and is this job's alone. Of several
    ranks the first sees to that, before the others go on."""
    with ExitStack() as held:
        with rank_zero.all_or_none("the run's folder"):
            if rank_zero.here:
                held.enter_context(_checked(Path(out), resume, say))
        _check_shared(Path(out), rank_zero)
        yield Path(out)


def _check_shared(folder: Path, rank_zero: RankZero) -> None:
    """ValueError before the first step where a rank on another host does not see the folder, in which each writes its
    part of a checkpoint and from which each reads."""
    if rank_zero.count == 1:
        return
    held_by = rank_zero.tell(lambda: (folder / _LOCK).read_text(), "who uses the run's folder")
    ends, lock = time.monotonic() + _SECONDS_UNTIL_SEEN, folder / _LOCK
    with rank_zero.all_or_none("the run's folder on all hosts"):
        while not (lock.is_file() and lock.read_text() == held_by):
            if time.monotonic() > ends:
                expected = f"a folder on a file system that all hosts share ({held_by} writes to it)"
                got = f"{folder}, which is another one on {socket.gethostname()}"
                raise bad_value("--out", expected, got, "choose a folder that every host sees under this name")
            time.sleep(0.05)


@contextmanager
def _checked(folder: Path, resume: bool, say: Callable[[str], None]) -> Iterator[None]:
    if resume and not (folder / "config.json").is_file():
        remedy = "check the path, or start a new run"
        raise bad_value("--resume", "the folder of an earlier run", repr(str(folder)), remedy)
    made = not folder.exists()
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise bad_value("--out", "a writable folder", f"{folder} ({error})", "choose another folder") from error
    with _locked(folder, "--resume" if resume else "--out", say):
        if not resume and holds_a_run(folder):
            remedy = f"use {shell_words('--resume', folder)}, or another --out"
            raise bad_value("--out", "a folder without a run", str(folder), remedy)
        try:
            yield
        finally:
            if made:
                _remove_if_empty(folder)


def holds_a_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def _remove_if_empty(folder: Path) -> None:
    """What a run leaves that was refused before it began: data that is not there, a model without experts."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} == {"checkpoints", _LOCK}:
            (folder / "checkpoints").rmdir()
            (folder / _LOCK).unlink()
            folder.rmdir()


@contextmanager
def _locked(folder: Path, option: str, say: Callable[[str], None]) -> Iterator[None]:
    """The kernel lets go of the lock when the process ends, however it ends; the file stays, and says nothing then."""
    if os.environ.get("RANK", "0") != "0":  # the first of the processes of a run has it for all
        yield
        return
    with (folder / _LOCK).open("a+") as file:
        try:
            _wait_for_lock(file, _SECONDS_AFTER_A_RESTART if may_restart() else 0.0, say)
        except BlockingIOError:
            file.seek(0)
            got = f"{folder}, which {file.read().strip() or 'another process'} is using"
            remedy = "wait until it ends, or use another --out"
            raise bad_value(option, "a folder that no other run writes to", got, remedy) from None
        except OSError as error:
            say(f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes to it")
        with suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def _wait_for_lock(file: TextIO, seconds: float, say: Callable[[str], None]) -> None:
    ends, told = time.monotonic() + seconds, False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise
        if not told:
            file.seek(0)
            say(f"waiting up to {seconds:g} s for {file.read().strip() or 'another process'} to release {file.name}")
            told = True
        time.sleep(0.1)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, oldest first. One that is being written has another name."""
    found = (folder / "checkpoints").glob("checkpoint-*")
    return sorted((path for path in found if path.name.removeprefix("checkpoint-").isdigit()), key=step_of)


def set_aside(checkpoint: Path) -> None:
    target = checkpoint.with_name(_SET_ASIDE + checkpoint.name)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(checkpoint, target)


def unfinished_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / _UNFINISHED


def staged_result(target: Path) -> Path:
    return target.with_name(f".{target.name}.{_UNFINISHED}")


def remove_unfinished(folder: Path, kept: str) -> None:
    shutil.rmtree(unfinished_checkpoint(folder), ignore_errors=True)
    shutil.rmtree(staged_result(folder / kept), ignore_errors=True)
    put_back(folder / kept)
    for aside in (folder / "checkpoints").glob(".checkpoint-*.earlier"):
        put_back(aside.with_name(aside.name.removeprefix(".").removesuffix(".earlier")))
