"""How a command that cannot go on ends: one sentence, whose it is, and the exit code."""

import os
import signal

import pytest
import typer

from amoeba.commands.exits import BAD_USAGE, INTERRUPTED, RANK_LOST, need, run, usage
from amoeba.core.errors import TOLD, RankLost


def ends_with(error: Exception) -> int:
    with pytest.raises(typer.Exit) as ended, usage():
        raise error
    return ended.value.exit_code


@pytest.mark.parametrize(("rank", "who"), [(None, "amoeba"), ("0", "amoeba"), ("2", "amoeba, rank 2")])
def test_a_rank_other_than_the_first_says_which_it_is(rank, who, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert ends_with(ValueError("x: expected 1;\n  got 2.")) == BAD_USAGE
    assert capsys.readouterr().err == f"{who}: x: expected 1; got 2.\n"


def test_a_lost_rank_has_its_own_exit_code_and_is_reported_once(capsys):
    assert ends_with(RankLost("rank 1 is gone")) == RANK_LOST
    assert "rank 1 is gone" in capsys.readouterr().err
    error = ValueError("the same on every rank")
    error.add_note(TOLD)
    assert ends_with(error) == BAD_USAGE
    assert capsys.readouterr().err == ""


def test_what_only_a_bug_raises_is_not_taken_for_the_users():
    with pytest.raises(KeyError), usage():
        raise KeyError("place")


@pytest.mark.parametrize(
    ("name", "remedy"), [("peft.tuners", "amoeba-moe[hf,lora]"), ("torchao", "pip install torchao.")]
)
def test_a_missing_package_is_looked_for_where_it_is(name, remedy, capsys):
    assert ends_with(ModuleNotFoundError("No module", name=name)) == BAD_USAGE
    assert remedy in capsys.readouterr().err


def loses_an_interrupt() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except BaseException:
        pass


def fails_as_a_bug() -> None:
    raise RecursionError("maximum recursion depth exceeded")


def fails_as_a_mistake() -> None:
    with usage():
        raise ImportError("cannot import name 'dtypes'")


def imports_more() -> None:
    need("json")


@pytest.mark.parametrize("then", [fails_as_a_bug, fails_as_a_mistake, imports_more])
def test_ctrl_c_that_a_package_swallows_still_interrupts_the_command(then, monkeypatch, capsys):
    def app(prog_name: str) -> None:
        loses_an_interrupt()
        then()

    monkeypatch.setattr("sys.argv", ["amoeba"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            run(app)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == INTERRUPTED
    assert capsys.readouterr().err == "amoeba: interrupted\n"
