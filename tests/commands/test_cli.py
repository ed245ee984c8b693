"""The commands as a user meets them: exit codes, the JSON line, errors that say what to do."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from amoeba.backends import eager, registry
from amoeba.bench import ceilings, suite, timing
from amoeba.bench.ceilings import Ceilings, Product
from amoeba.bench.shapes import Shape
from amoeba.cli import app
from amoeba.commands import bench as bench_command
from amoeba.commands.options import DTYPES
from amoeba.commands.output import Output, strict_json
from amoeba.commands.over_ranks import over_ranks
from amoeba.commands.rich_output import RichOutput
from amoeba.cpu.build import CoreUnavailable
from amoeba.jobs.settings import FinetuneSettings, TrainSettings
from amoeba.placements import all_placements
from amoeba.proof import conformance
from amoeba.proof.cases import Case
from amoeba.weights import ExpertWeights
from noted_output import NotedOutput
from planted_backend import Planted, plant

SOURCE = Path(__file__).resolve().parents[2] / "src"
TINY = "37,32,16,6,2"
FEW = [Case(0, 2), Case(1, 2), Case(5, 2, bias=True, pattern="sentinels", num_experts=4)]
SMALL = ceilings.Size(64, 1 << 20, 1)
FOR_EVER = 10_000  # seconds


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """The suite itself is run by test_conformance.py."""
    monkeypatch.setattr(conformance, "cases", lambda thorough=False: FEW)
    monkeypatch.setattr("amoeba.commands.verify.cases", lambda thorough=False: FEW)
    monkeypatch.setattr("amoeba.commands.verify.SECONDS", FOR_EVER)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    monkeypatch.setitem(ceilings.SIZES, "cpu", SMALL)


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def last_line(result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def test_verify_passes_and_names_every_backend_and_gradient():
    result = invoke("verify", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    document = last_line(result)
    assert document["ok"]
    assert {row["backend"] for row in document["backends"]} == set(conformance.backend_names(torch.device("cpu")))
    for row in document["backends"]:
        if row["cases_checked"]:
            placed = {placement.name for placement in all_placements() if not placement.trains}
            base = set() if row["backend"] in placed else {"gate_up", "down", "down_bias"}
            assert {"inference", "output", "x", "weight"} | base <= set(row["worst"])
    assert "every gradient within tolerance" in result.stdout
    for name in ("eager", "float32", "bfloat16", "gate_up_bias", "tolerance"):
        assert name in result.stdout


def test_verify_over_ranks_starts_its_own_processes_and_compares_bits():
    result = invoke("verify", "--ranks", "2", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    document = last_line(result)
    (row,) = document["backends"]
    assert document["ok"] and document["ranks"] == 2 and row["backend"] == "2 ranks" and row["cases_checked"] >= 12
    assert {"inference", "output", "x", "weight", "gate_up", "down_bias", "gate_lora_a"} <= set(row["worst"])
    assert "the bits of one process" in result.stdout


@pytest.mark.parametrize("more", [("--ranks", "99"), ("--ranks", "1"), ("--ranks", "2", "--backend", "eager")])
def test_verify_says_what_does_not_go_with_ranks(more):
    result = invoke("verify", *more)
    assert result.exit_code == 2 and more[-2] in result.output


def test_verify_fails_on_a_backend_with_one_wrong_gradient(monkeypatch):
    def wrong_weight_gradient(request):
        weight_TK = request.routing.weight_TK
        routing = replace(request.routing, weight_TK=weight_TK + (weight_TK - weight_TK.detach()))
        return eager.BACKEND.run(replace(request, routing=routing))

    plant(monkeypatch, Planted("broken", wrong_weight_gradient))
    only = ("--backend", "eager", "--backend", "broken")
    result = invoke("verify", "--device", "cpu", "--dtype", "float32", *only, "--json")
    assert result.exit_code == 1
    document = last_line(result)
    rows = {row["backend"]: row["ok"] for row in document["backends"]}
    assert rows == {"eager": True, "broken": False}
    assert {tuple(failure["out_of_tolerance"]) for failure in document["failures"]} == {("weight",)}
    assert "FAIL" in result.stdout


def test_verify_fails_on_a_backend_that_raises(monkeypatch):
    def raises(request):
        raise RuntimeError("no such kernel")

    plant(monkeypatch, Planted("raising", raises))
    result = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "raising")
    assert result.exit_code == 1
    assert "RuntimeError: no such kernel" in result.stdout


def test_verify_says_who_refuses_and_that_nothing_checked_is_no_success(monkeypatch):
    plant(monkeypatch, Planted("absent", eager.BACKEND.run, lambda request: "needs hardware that is not here"))
    two = ("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "eager", "--backend", "absent")
    result = invoke(*two)
    assert result.exit_code == 0
    assert "not served (-v tells why)" in result.stdout and "\n  absent: float32\n" in result.stdout
    why = invoke(*two, "-v")
    assert "absent (cases: 3 in float32): needs hardware that is not here" in why.stdout
    alone = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "absent")
    assert alone.exit_code == 1
    assert "nothing was checked" in alone.stdout


def test_verify_says_which_cases_the_time_was_too_short_for(monkeypatch):
    monkeypatch.setattr("amoeba.commands.verify.SECONDS", 0)
    monkeypatch.setattr("amoeba.commands.verify._SECONDS_BETWEEN_LINES", 0.0)
    words = ("verify", "--device", "cpu", "--dtype", "fp32", "--dtype", "fp64", "--backend", "eager", "--json")
    result = invoke(*words)
    assert result.exit_code == 0
    document = last_line(result)
    assert (document["cases"], document["cases_left_out"]) == (1, 2)
    assert {row["dtype"] for row in document["backends"] if row["cases_checked"] == 1} == {"float32", "float64"}
    assert (
        "1 of 3 cases within 0 s, the rest was left out; amoeba verify --thorough has 3 and no limit" in result.stdout
    )
    assert "1 of 6 done, now eager in float64: " in result.stderr, "a pipe sees how far it is"
    document = last_line(invoke(*words, "--thorough"))
    assert (document["cases"], document["cases_left_out"]) == (3, 0)


def test_a_pipe_hears_of_a_long_verify_every_few_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("amoeba.commands.verify.time.monotonic", lambda: now.append(now[-1] + 1) or now[-1])
    result = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "eager", "--backend", "cpu")
    assert len([line for line in result.stderr.splitlines() if " of 6 done, now " in line]) in (1, 2)


def test_what_torch_and_transformers_warn_about_is_shown_with_verbose_alone(monkeypatch):
    class Package:
        levels: ClassVar[list[str]] = []

        class logging:
            set_verbosity_error = staticmethod(lambda: Package.levels.append("error"))

    monkeypatch.setitem(sys.modules, "transformers", Package)
    for words, shown in (
        (("doctor",), False),
        (("doctor", "-v"), True),
        (("-v", "doctor"), True),
        (("doctor",), False),
    ):
        Package.levels.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert invoke(*words).exit_code == 0
            warnings.warn_explicit("of torch's", UserWarning, "file", 1, module="torch.nn")
            warnings.warn_explicit("of ours", UserWarning, "file", 2, module="amoeba.cpu.build")
            logging.getLogger("amoeba").warning("something to know")
        assert [str(warning.message) for warning in caught] == (["of torch's", "of ours"] if shown else ["of ours"])
        assert Package.levels == ([] if shown else ["error"])
        assert logging.getLogger("amoeba").isEnabledFor(logging.INFO) == shown
        assert logging.getLogger("amoeba.cpu.build").isEnabledFor(logging.INFO), "a build takes long, it is always said"


def all_commands(group=None, *words: str):
    """Each command by the words that call it; a group of commands (amoeba stream) comes before its own."""
    for name, command in (group or get_command(app)).commands.items():
        yield (*words, name), command
        if hasattr(command, "commands"):
            yield from all_commands(command, *words, name)


def test_every_command_has_the_flag_of_verbose():
    for words, command in all_commands():
        assert hasattr(command, "commands") or any("-v" in parameter.opts for parameter in command.params), words


def test_every_option_of_every_command_has_a_help_text():
    for command in (get_command(app), *(command for _, command in all_commands())):
        assert command.help, command.name
        for parameter in command.params:
            assert parameter.help, f"amoeba {command.name} {parameter.opts[0]}"


@pytest.mark.parametrize(("name", "kind"), [("train", TrainSettings), ("finetune", FinetuneSettings)])
def test_a_default_that_a_help_text_names_is_that_of_the_settings(name, kind):
    defaults = {field.name: field.default for field in fields(kind)}
    said = 0
    for parameter in get_command(app).commands[name].params:
        number = re.search(r"default ([\d.e-]*\d)", parameter.help, re.IGNORECASE)
        if number is not None and parameter.name in defaults:
            assert float(number[1]) == defaults[parameter.name], parameter.help
            said += 1
    assert said >= 5


def test_dtypes_of_the_options_are_those_of_the_proof():
    assert tuple(map(str, conformance.TOLERANCE)) == tuple(f"torch.{name}" for name in DTYPES)


def test_verify_prints_plain_lines_in_a_pipe():
    result = invoke("verify", "--device", "cpu", "--dtype", "float64", "--backend", "eager")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout


def test_doctor_describes_the_machine_and_every_backend():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    document = last_line(result)
    assert document["machine"]["cpu"]["cores"] >= 1
    assert document["versions"]["torch"] == torch.__version__
    assert document["bfloat16_on_cpu"]["computed_in"] in ("bfloat16", "float32")
    assert [row["name"] for row in document["placements"]] == [
        *("cpu-bf16", "cpu-int8", "fp8-weights", "mxfp4-weights", "mxfp8-weights", "nvfp4-weights")
    ]
    assert all((row["how"] is None) != (row["why_not"] is None) for row in document["placements"])
    names = {backend.name for backend in registry.backends_of(ExpertWeights, torch.device("cpu"))}
    assert {row["backend"] for row in document["backends"] if row["device"] == "cpu"} == names
    for row in document["backends"]:
        for reason in row["refusals"].values():
            assert reason is None or reason in result.stdout
    taken = [dtype for row in document["backends"] if row["device"] == "cpu" for dtype in row["auto"]]
    assert sorted(taken) == ["bfloat16", "float16", "float32", "float64"]
    in_fp8 = {row["name"]: row["backend"] for row in document["precisions"] if row["device"] == "cpu"}
    assert in_fp8.keys() == {"fp8", "fp8-ste", "fp8-saved"} and all(
        "plain torch" in backend for backend in in_fp8.values()
    )


@pytest.mark.parametrize(
    ("policy", "threads", "said"),
    [
        (None, 2, "OMP_WAIT_POLICY is not set: they spin; where others compute too, set it to passive"),
        ("passive", 2, "OMP_WAIT_POLICY=passive"),
        (None, 1, "torch has one thread here"),
    ],
)
def test_doctor_says_that_waiting_threads_spin(policy, threads, said, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    found = last_line(result)["waiting_threads"]
    assert found["omp_wait_policy"] == policy
    assert found["what"].startswith(said)
    assert found["what"] in result.stdout


def test_doctor_says_why_experts_cannot_be_packed(monkeypatch):
    def unavailable():
        raise CoreUnavailable("no C++ compiler was found")

    monkeypatch.setattr("amoeba.cpu.placements.load_packed", unavailable)
    result = invoke("doctor", "--json")
    assert "packed for the CPU in int8; not here: no C++ compiler was found" in result.stdout
    for row in last_line(result)["placements"]:
        if row["name"].startswith("cpu-"):
            assert (row["how"], row["why_not"]) == (None, "no C++ compiler was found")


def test_bench_writes_a_document_and_refuses_to_overwrite_it(tmp_path):
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "training", "--repeats", "1")
    result = invoke(*words, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == last_line(result)
    assert str(tmp_path) not in written.read_text()
    again = invoke(*words, "--out", str(tmp_path))
    assert again.exit_code == 2
    assert "not overwritten" in again.stderr


def test_a_benchmark_that_is_stopped_leaves_what_it_has_measured(tmp_path, monkeypatch):
    real, asked = suite._report, []

    def report(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(suite, "_report", report)
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "both", "--repeats", "1", "--out", str(tmp_path))
    result = invoke(*words)
    assert result.exit_code != 0
    (written,) = tmp_path.iterdir()
    document = json.loads(written.read_text())
    assert not document["finished"] and len(document["results"]) == 1
    assert "amoeba cpu" in result.stdout or "amoeba eager" in result.stdout, "its table was printed, too"


def test_bench_exits_with_1_when_one_of_ours_is_wrong(monkeypatch):
    def wrong(request):
        return 1.01 * eager.BACKEND.run(request)

    plant(monkeypatch, Planted("broken", wrong))
    result = invoke("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1", "--json")
    assert result.exit_code == 1
    assert "amoeba broken: refused, out of tolerance: output 1.0e-02 > 1e-05" in result.stdout
    measurements = last_line(result)["results"][0]["measurements"]
    assert [m["median_ms"] for m in measurements if m["implementation"] == "amoeba broken"] == [None]


def test_a_result_with_infinite_errors_is_written_as_strict_json(monkeypatch, tmp_path):
    def not_a_number(request):
        return float("nan") * eager.BACKEND.run(request)

    plant(monkeypatch, Planted("broken", not_a_number))
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1")
    assert invoke(*words, "--out", str(tmp_path)).exit_code == 1
    (written,) = tmp_path.iterdir()
    assert "Infinity" not in written.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bench", "--shape", "1,2,3"), "--shape: expected a name (small, "),
        (("bench", "--shape", "8,8,8,4,5"), "--shape: expected K at most E (4); got K = 5"),
        (
            ("bench", "--suite", "huge"),
            "--suite: expected one of small, cpu, gpu, products, model, stream, ranks; got 'huge'",
        ),
        (("bench", "--suite", "model", "--shape", "small"), "--shape: expected one of tiny, "),
        (("bench", "--device", "cpu", "--sustained", "4"), "--sustained: expected a GPU whose clocks and watts"),
        (("bench", "--suite", "cpu", "--shape", "small"), "either --shape or --suite"),
        (("bench", "--pass", "backward"), "--pass: expected one of forward, training, both; got 'backward'"),
        (("bench", "--suite", "ranks", "--pass", "turns"), "--pass: expected none with --suite ranks; got turns"),
        (("bench", "--suite", "model", "--ranks", "2"), "--ranks: expected --suite ranks with it; got --ranks 2"),
        (("bench", "--suite", "products", "--graphs"), "--graphs: expected none with --suite products"),
        (("bench", "--device", "tpu"), "--device: expected one of auto, cpu, cuda; got 'tpu'"),
        (("verify", "--dtype", "int8"), "--dtype: expected one of float64, "),
        (("verify", "--device", "cpu", "--backend", "fastest"), "--backend: expected one of "),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_was_expected(words, expected):
    result = invoke(*words)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_asking_for_a_gpu_that_is_not_there_says_so():
    result = invoke("verify", "--device", "cuda")
    assert result.exit_code == 2
    assert "finds no GPU" in result.stderr


def test_an_unknown_option_exits_with_2():
    assert invoke("verify", "--dvice", "cpu").exit_code == 2


ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.mark.thorough
def test_as_a_process_the_last_line_is_json_and_the_log_is_on_stderr():
    start = """
        import atexit, logging, runpy
        atexit.register(logging.getLogger("amoeba.experts").info, "said by the library")
        runpy.run_module("amoeba", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(start), "doctor", "--json", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["document"] == "amoeba doctor"
    assert "amoeba: said by the library" in done.stderr


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


def test_no_cell_is_cut_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    names = [f"implementation {index}" for index in range(4)]
    RichOutput().table("title", ["", *names], [["a", "1.234", "2.345", "3.456", "4.567"]])
    out = capsys.readouterr().out
    assert "\x1b" in out
    assert "…" not in out
    assert all(cell in out for cell in ("1.234", "2.345", "3.456", "4.567"))


def bench_tables(measure) -> tuple[NotedOutput, dict]:
    output = NotedOutput()
    shapes = [Shape("layer", 37, 32, 16, 6, 2), Shape("step", 1, 32, 16, 6, 2, forward_only=True)]
    document, _ = bench_command.run(
        shapes, torch.device("cpu"), [torch.float32], "training", 1, None, output, ceilings=measure
    )
    return output, document


def test_bench_shows_the_share_of_the_ceilings():
    limits = Ceilings("cpu", {"float32": Product(2048, 1e9)}, copied_bytes=4096, copy_bytes_per_second=1e8)
    output, document = bench_tables(lambda device, dtypes: limits)
    assert output.lines[0] == limits.line()
    assert document["ceilings"]["copy_bytes_per_second"] == 1e8
    for (columns, rows), result, before, column, rate, limit in zip(
        [table[1:] for table in output.tables],
        document["results"],
        ("GFLOP/s", "weights GB/s"),
        ("of matmul", "of copy"),
        ("flops_per_second", "weight_bytes_per_second"),
        (1e9, 1e8),
        strict=True,
    ):
        place = columns.index(column)
        assert columns[place - 1] == before
        assert len([name for name in columns if name.startswith("of ")]) == 1
        timed = [m for m in result["measurements"] if m["status"] == "timed"]
        assert [row[place] for row in rows] == [f"{100 * m[rate] / limit:.0f}%" for m in timed]


def test_bench_without_ceilings_shows_no_shares():
    output, document = bench_tables(None)
    assert document["ceilings"] is None
    assert not [name for _, columns, _ in output.tables for name in columns if name.startswith("of ")]
    assert not [line for line in output.lines if "ceilings" in line]


def test_infinite_errors_are_still_json():
    assert strict_json({"errors": {"x": float("inf"), "y": (1.0, float("nan"))}}) == {
        "errors": {"x": "inf", "y": [1.0, "nan"]}
    }


def test_one_process_may_go_on_with_what_several_began_and_begins_nothing_over_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with over_ranks("ranks", NotedOutput(), resume=True) as together:
        assert together.count == 1 and together.ranks is not None
    with (
        pytest.raises(ValueError, match="--experts ranks: expected several processes, as torchrun starts them"),
        over_ranks("ranks", NotedOutput()),
    ):
        pass
