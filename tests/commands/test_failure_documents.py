"""With --json the last line of stdout is a document also where a command fails; and an empty value is no value."""

import json
import typing

import pytest
from few_cases import all_commands

from amoeba.commands import exits
from amoeba.core.errors import bad_value
from called import Ended
from selection import each_value_once

COMMANDS = {words: command for words, command in all_commands() if not hasattr(command, "commands")}
IDS = [" ".join(words) for words in COMMANDS]


def arguments_of(command) -> list[str]:
    return ["nowhere" for parameter in command.params if parameter.param_type_name == "argument" and parameter.required]


def takes_text(command, parameter) -> bool:
    """By our own annotation: what typer makes of it changes from version to version."""
    kind, *_ = typing.get_args(typing.get_type_hints(command.callback, include_extras=True)[parameter.name])
    return parameter.param_type_name == "option" and kind in (str, str | None, list[str] | None)


TEXT_OPTIONS = [
    (words, parameter.opts[0])
    for words, command in COMMANDS.items()
    for parameter in command.params
    if takes_text(command, parameter)
]


def check(ended: Ended, code: int) -> None:
    assert ended.code == code
    document = ended.document
    assert (document["document"], document["ok"], document["exit_code"]) == ("amoeba error", False, code)
    assert document["error"] and document["remedy"]
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.parametrize("words", COMMANDS, ids=IDS)
def test_an_unknown_option_of_every_command_ends_with_a_document(words, amoeba):
    ended = amoeba(*words, "--no-such-option", "--json")
    check(ended, exits.BAD_USAGE)
    assert ended.document["error"].startswith("No such option: --no-such-option")


@each_value_once()
@pytest.mark.parametrize(("words", "option"), TEXT_OPTIONS, ids=lambda value: "".join(value))
def test_an_empty_value_is_refused_by_every_option_that_takes_text(words, option, amoeba):
    ended = amoeba(*words, *arguments_of(COMMANDS[words]), option, "", "--json")
    check(ended, exits.BAD_USAGE)
    assert ended.document["error"].startswith(f"--{option.strip('-')}: expected a value; got an empty one. ")
    assert ended.document["remedy"] == "Write one after it, or leave the option out."
    assert ended.document["error"] in ended.err


def test_there_are_such_options():
    assert {option for _, option in TEXT_OPTIONS} >= {"--ram", "--vram", "--shape", "--dtype", "--out"}


FAILURES = {
    "a value of ours": (bad_value("x", "1", 2, "take 1"), exits.BAD_USAGE, "x: expected 1; got 2. Take 1.", "Take 1."),
    "an error of others": (ValueError("no\n good"), exits.BAD_USAGE, "no good", None),
    "a bug": (KeyError("place"), exits.BUG, "unexpected KeyError: 'place'. This is a bug", "AMOEBA_TRACEBACK=1"),
    "a file": (FileNotFoundError(2, "No such file", "x.txt"), exits.BAD_USAGE, "x.txt: expected", "Check the path."),
    "a home": (
        RuntimeError("Could not determine home directory."),
        exits.BAD_USAGE,
        "~: expected the home",
        "whole path",
    ),
    "Ctrl-C": (KeyboardInterrupt(), exits.INTERRUPTED, "interrupted", "Run the same command again"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_document_says_what_happened_and_what_to_do(name, amoeba, monkeypatch):
    error, code, said, remedy = FAILURES[name]

    def fail(output):
        raise error

    monkeypatch.setattr("amoeba.commands.doctor_run.run", fail)
    ended = amoeba("doctor", "--json")
    check(ended, code)
    assert said in ended.document["error"]
    assert (remedy or "AMOEBA_TRACEBACK=1") in ended.document["remedy"]
    assert said.split(":")[0] in ended.err
    assert amoeba("doctor").out == "", "without --json stdout has results alone"


def test_a_check_that_failed_has_its_own_document_alone(amoeba, monkeypatch):
    monkeypatch.setattr(
        "amoeba.commands.verify_run.run", lambda *_: ({"document": "amoeba verify", "ok": False}, False)
    )
    ended = amoeba("verify", "--device", "cpu", "--json")
    assert ended.code == exits.CHECK_FAILED
    assert [json.loads(line)["document"] for line in ended.out.splitlines()] == ["amoeba verify"]


def test_of_several_ranks_the_first_prints_the_document(amoeba, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert amoeba("trace", "--shape", "nowhere", "--json").out == ""
