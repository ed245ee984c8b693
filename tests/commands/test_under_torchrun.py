"""Commands as torchrun starts them: its own parser lets our options pass, and what is for one process says so."""

import contextlib
import io
from argparse import Namespace

import pytest
from few_cases import all_commands
from typer.main import get_command

from amoeba.cli import app
from amoeba.commands.over_ranks import _with_torchrun
from called import call
from selection import each_value_once

OVER_RANKS = ("train", "finetune", "generate")
OPTIONS = [
    (name, tuple(parameter.opts))
    for name in OVER_RANKS
    for parameter in get_command(app).commands[name].params  # type: ignore[attr-defined]
    if parameter.param_type_name == "option"
]


def as_torchrun_reads_it(words: list[str]) -> Namespace | None:
    """None where it refuses them."""
    from torch.distributed.run import get_args_parser

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return get_args_parser().parse_args(["--standalone", "--nproc-per-node", "2", "-m", *words])
    except SystemExit:
        return None


@pytest.mark.parametrize(("command", "names"), OPTIONS, ids=[f"{name} {opts[-1]}" for name, opts in OPTIONS])
def test_torchrun_hands_on_every_option_by_one_of_its_names(command: str, names: tuple[str, ...]) -> None:
    passed = []
    for name in names:
        words = ["amoeba", command, name, "4"]
        found = as_torchrun_reads_it(words)
        passed.append(found is not None and [found.training_script, *found.training_script_args] == words)
    # older versions of Python take --r for the beginning of several options of torchrun
    assert all(passed) or (names == ("--r", "--lora-rank") and passed[1])


def test_the_command_to_type_has_the_name_that_torchrun_hands_on() -> None:
    said = _with_torchrun(["finetune", "my model", "--r", "4", "--resume", "run"])
    assert said == "torchrun --nproc-per-node 2 -m amoeba finetune 'my model' --lora-rank 4 --resume run"
    assert _with_torchrun(["finetune", "--r=4"]).endswith("finetune --lora-rank=4")


FOR_ONE_PROCESS = {
    " ".join(words): command
    for words, command in all_commands()
    if words[0] not in OVER_RANKS and not hasattr(command, "commands")
}


@each_value_once()
@pytest.mark.parametrize("words", FOR_ONE_PROCESS)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_command_for_one_process_is_refused_once(words: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    needed = [parameter for parameter in FOR_ONE_PROCESS[words].params if parameter.required]
    given = [word for each in needed for word in (*each.opts[:1], "1")[each.param_type_name == "argument" :]]
    result = call(*words.split(), *given, code=2)
    assert result.stdout == ""
    said = "torchrun: expected train, finetune or generate; got 2 processes of another command"
    assert (said in result.stderr) == (rank == "0")
