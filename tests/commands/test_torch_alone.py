"""Without typer and rich, or without one of them, the commands say and return the same."""

from __future__ import annotations

import functools
import json
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
from few_cases import ENVIRONMENT, FEW, FOR_EVER, SMALL, TINY, all_commands, invoke, last_line, only_few_cases

from amoeba.commands.output import Output


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    only_few_cases(monkeypatch)


# Runs commands one after another as `python -m amoeba` does, where some packages cannot be imported: each set of them
# in a process of its own, which takes over torch from the first.
WITHOUT = """
    import contextlib, io, json, os, pickle, runpy, sys

    from amoeba.proof import conformance
    from amoeba.bench import ceilings, timing

    class Absent:
        def __init__(self, names):
            self.names = names

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in self.names:
                raise ImportError(f"No module named {name!r}", name=name)

    few, small, for_ever, commands_without = pickle.load(sys.stdin.buffer)
    for absent, commands in commands_without.items():
        if os.fork():
            assert os.wait()[1] == 0
            continue
        sys.meta_path.insert(0, Absent(absent))
        from amoeba.commands import verify

        conformance.cases = verify.cases = lambda thorough=False: few
        verify.SECONDS = for_ever
        timing.LEAST_SECONDS = 0.0
        ceilings.SIZES["cpu"] = small
        done = []
        for words in commands:
            sys.argv = ["amoeba", *words]
            code, out, err = 0, io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    runpy.run_module("amoeba", run_name="__main__")
                except SystemExit as left:
                    code = left.code or 0
            done.append([code, out.getvalue(), err.getvalue()])
        present = [name for name in (*absent, "torch._dynamo") if name in sys.modules]
        print(json.dumps({"done": done, "present": present}), flush=True)
        os._exit(0)
"""
TORCH_ALONE = ("typer", "rich", "click", "transformers", "yaml", "safetensors")
VERIFY = ("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "eager", "--json")
BENCH = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "training", "--repeats", "1", "--json")
BAD_USAGE = [
    ("bench", "--shape", "1,2,3"),
    ("bench", "--suite", "cpu", "--shape", "small"),
    ("verify", "--device", "cpu", "--backend", "fastest"),
    ("bench", "--repeats", "0"),
    ("bench", "--repeats", "x"),
    ("verify", "--dvice", "cpu"),
    ("verify", "--thor"),
    ("stream",),
    ("stream", "nothing"),
    ("stream", "simulate"),
    ("nothing",),
    (),
]


def run_without(commands, *, compiler=False):
    """Exit code, stdout and stderr of each command, by the packages that are not there.

    compiler: whether a command may import torch's compiler, as bench does.
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT)],
        input=pickle.dumps((FEW, SMALL, FOR_EVER, commands)),
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    answers = dict(zip(commands, map(json.loads, ran.stdout.splitlines()), strict=True))
    present = {name for answer in answers.values() for name in answer["present"]}
    assert present <= ({"torch._dynamo"} if compiler else set())
    return {absent: list(zip(commands[absent], answer["done"], strict=True)) for absent, answer in answers.items()}


@pytest.fixture(scope="module")
def told_without():
    """What the commands say at once."""
    helps = [(*words, "--help") for words, _ in all_commands()]
    commands = {TORCH_ALONE: [*BAD_USAGE, *helps]}
    return run_without(commands | {(name,): [("--version",), VERIFY[:-1]] for name in ("typer", "rich")})


def outline(value):
    """The keys of a document, without its numbers."""
    if isinstance(value, dict):
        return {key: outline(inner) for key, inner in value.items()}
    return [outline(inner) for inner in value] if isinstance(value, list) else None


def without_errors(text: str) -> str:
    """Rounding depends on what torch's products did before in a process, so the digits of an error may differ."""
    return re.sub(r"\d\.\de-\d\d", "#", text)


@pytest.mark.thorough
def test_with_torch_alone_the_commands_say_and_return_the_same(tmp_path):
    folder = tmp_path / "without"
    bench = (*BENCH, "--out", str(folder))
    ran = run_without({TORCH_ALONE: [VERIFY, bench, bench, ("doctor", "--json")]}, compiler=True)
    plain_verify, plain_bench, again, doctor = (done for _, done in ran[TORCH_ALONE])

    expected = invoke(*VERIFY)
    code, out, _ = plain_verify
    assert (code, expected.exit_code) == (0, 0)
    assert without_errors(out).splitlines()[:-1] == without_errors(expected.stdout).splitlines()[:-1]
    assert outline(json.loads(out.splitlines()[-1])) == outline(last_line(expected))

    expected = invoke(*BENCH, "--out", str(tmp_path / "with"))
    code, out, err = plain_bench
    assert (code, expected.exit_code) == (0, 0), err
    (written,) = folder.iterdir()
    document, as_typer = json.loads(written.read_text()), last_line(expected)
    assert document == json.loads(out.splitlines()[-1])
    assert document["command"] == as_typer["command"]
    results, expected_results = document.pop("results"), as_typer.pop("results")
    assert outline(document) == outline(as_typer)
    for result, expected_result in zip(results, expected_results, strict=True):
        measurements, others = result.pop("measurements"), expected_result.pop("measurements")
        assert result == expected_result
        assert {m["implementation"] for m in measurements} == {m["implementation"] for m in others}
        assert {key for m in measurements for key in m} == {key for m in others for key in m}
    assert f"{TINY} (T=37 H=32 I=16 E=6 K=2) training, float32 on cpu" in out

    assert again[0] == 2
    assert "not overwritten" in again[2]

    expected = invoke("doctor", "--json")
    code, out, _ = doctor
    assert code == 0
    assert outline(json.loads(out.splitlines()[-1])) == outline(last_line(expected))


def test_with_torch_alone_bad_usage_exits_with_2(told_without):
    ran = [(words, done) for words, done in told_without[TORCH_ALONE] if words in BAD_USAGE]
    assert len(ran) == len(BAD_USAGE)
    for words, (code, out, err) in ran:
        expected = invoke(*words)
        assert (code, out) == (2, ""), words
        assert expected.exit_code == 2
        if expected.stderr.startswith("amoeba: "):
            assert err == expected.stderr
        else:
            assert "usage: amoeba" in err


def test_with_torch_alone_every_option_is_there(told_without):
    helps = {words[:-1]: done for words, done in told_without[TORCH_ALONE] if words[-1:] == ("--help",)}
    assert ("stream", "simulate") in helps
    for words, command in all_commands():
        code, out, _ = helps[words]
        assert code == 0
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]:
                assert option in out


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_with_only_one_of_typer_and_rich_the_commands_run(told_without, absent):
    (_, version), (_, verify) = told_without[(absent,)]
    assert version[:2] == [0, invoke("--version").stdout]
    assert verify[0] == 0
    assert without_errors(verify[1]) == without_errors(verified())


@functools.cache
def verified() -> str:
    return invoke(*VERIFY[:-1]).stdout


def test_a_plain_table_is_aligned(capsys):
    Output().table("title", ["", "ms"], [["a", "10.5"], ["long", "7"]])
    assert capsys.readouterr().out == "\ntitle\n          ms\n  a     10.5\n  long     7\n"
