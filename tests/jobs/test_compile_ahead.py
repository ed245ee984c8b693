"""The process beside a command: it is told once what to compile, and is gone with the command."""

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from amoeba.jobs import compile_ahead
from amoeba.jobs.compile_ahead import PROMPT_LENGTHS, Work, compiling_ahead, mark_of
from amoeba.jobs.settings import FinetuneSettings, TrainSettings

WORK = Work("train", "tiny", batch_size=3, targets=("experts", "q_proj"))


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for the process writes its id and then what it is told; it does not end by itself."""
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(f"#!/bin/sh\necho $$ > {told}\ncat >> {told}\necho end >> {told}\nexec sleep 100\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(compile_ahead, "has_gpu", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return told


def lines(told: Path) -> list[str]:
    """Once it has been told all."""
    for _ in range(500):
        if told.exists() and told.read_text().endswith("end\n"):
            break
        time.sleep(0.02)
    return told.read_text().splitlines()


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_told_the_work_and_ends_with_the_command(told: Path) -> None:
    seen = []

    def command() -> None:
        with compiling_ahead() as compiler:
            compiler.begin(WORK)
            seen.extend(lines(told))
            assert is_there(int(seen[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command()
    process, line, _ = seen
    assert Work.read(line) == WORK
    assert not is_there(int(process)), "neither running nor a zombie"


def test_what_was_compiled_before_is_not_compiled_again(told: Path) -> None:
    mark_of(WORK).parent.mkdir()
    mark_of(WORK).touch()
    with compiling_ahead() as compiler:
        compiler.begin(WORK)
        assert lines(told)[1:] == ["end"]


def test_one_that_has_ended_is_no_zombie_next_to_a_long_run(told: Path) -> None:
    (told.parent / "python").write_text("#!/bin/sh\nexit 0\n")
    with compiling_ahead() as compiler:
        assert compiler._process is not None
        compiler.begin(WORK)
        for _ in range(500):
            if not is_there(compiler._process.pid):
                break
            time.sleep(0.02)
        assert not is_there(compiler._process.pid)


def test_a_process_that_is_gone_or_cannot_start_is_no_error(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_ahead() as compiler:
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)
        compiler._process.wait()
        compiler.begin(WORK)
    monkeypatch.setattr(sys, "executable", str(told.parent / "absent"))
    with compiling_ahead() as compiler:
        compiler.begin(WORK)


def test_without_a_gpu_nothing_starts(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "has_gpu", lambda: False)
    with compiling_ahead() as compiler:
        assert compiler._process is None


def test_a_mark_is_of_one_model_and_one_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = mark_of(Work("train", str(tmp_path)))
    assert before == mark_of(Work("train", str(tmp_path)))
    assert before != mark_of(Work("train", str(tmp_path), batch_size=2))
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert before != mark_of(Work("train", str(tmp_path)))


def test_settings_say_what_the_passes_depend_on() -> None:
    train = Work.of_run("train", TrainSettings(model="tiny", batch_size=3, precision="fp8"))
    assert (train.batch_size, train.precision, train.rank) == (3, "fp8", 0)
    finetune = Work.of_run("finetune", FinetuneSettings(model="tiny", r=5))
    assert (finetune.rank, finetune.sequence_length) == (5, 1024)


@pytest.mark.parametrize("characters", [0, 1, 63, 1990, 40_000])
def test_a_prompt_is_read_by_kernels_of_likely_lengths(characters: int) -> None:
    lengths = Work.of_prompt("tiny", "x" * characters, "auto").prompt_lengths
    tokens = characters // 4  # as English has them
    assert min(lengths) / 2 <= max(tokens, 16) <= 2 * max(lengths)
    assert all(length in PROMPT_LENGTHS or length > 512 for length in lengths)
