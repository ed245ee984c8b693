"""Without transformers, PyYAML and safetensors, the commands that need none of them run."""

import json
import pickle
import subprocess
import sys
import textwrap

import pytest
from few_cases import ENVIRONMENT, FEW, FOR_EVER, SMALL, TINY, invoke

from amoeba.commands.output import Output

# Runs commands one after another as `python -m amoeba` does, where some packages cannot be imported.
WITHOUT = """
    import contextlib, io, json, pickle, runpy, sys

    absent, few, small, for_ever, commands = pickle.load(sys.stdin.buffer)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in absent:
                raise ImportError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    from amoeba.bench import timing
    from amoeba.commands import verify_run
    from amoeba.proof import conformance

    conformance.cases = verify_run.cases = lambda thorough=False: few
    verify_run.SECONDS = for_ever
    timing.LEAST_SECONDS = 0.0
    timing.SIZES["cpu"] = small
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
    present = [name for name in absent if name in sys.modules]
    print(json.dumps({"done": done, "present": present}), flush=True)
"""
ABSENT = ("transformers", "yaml", "safetensors")
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
    ("nothing",),
    (),
]


def run_without(commands):
    """Exit code, stdout and stderr of each command."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT)],
        input=pickle.dumps((ABSENT, FEW, SMALL, FOR_EVER, commands)),
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert not answer["present"]
    return answer["done"]


@pytest.mark.thorough
def test_with_torch_alone_the_commands_run(tmp_path):
    bench = (*BENCH, "--out", str(tmp_path / "without"))
    verified, benched, again, doctor = run_without([VERIFY, bench, bench, ("doctor", "--json")])
    assert verified[0] == 0 and json.loads(verified[1].splitlines()[-1])["document"] == "amoeba verify"
    assert benched[0] == 0, benched[2]
    (written,) = (tmp_path / "without").iterdir()
    assert json.loads(written.read_text()) == json.loads(benched[1].splitlines()[-1])
    assert f"{TINY} (T=37 H=32 I=16 E=6 K=2) training, float32 on cpu" in benched[1]
    assert again[0] == 2 and "not overwritten" in again[2]
    assert doctor[0] == 0 and json.loads(doctor[1].splitlines()[-1])["document"] == "amoeba doctor"


@pytest.mark.parametrize("words", BAD_USAGE, ids=" ".join)
def test_bad_usage_exits_with_2(words):
    told = invoke(*words)
    assert told.exit_code == 2
    assert told.stderr.startswith("amoeba: ") or "Usage: amoeba" in told.output


def test_a_table_in_a_pipe_is_plain_and_aligned(capsys):
    Output().table("title", ["", "ms"], [["a", "10.5"], ["long", "7"]])
    assert capsys.readouterr().out == "\ntitle\n          ms\n  a     10.5\n  long     7\n"
