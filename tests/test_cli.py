"""The commands as a user meets them: exit codes, the JSON line, errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from amoeba import conformance
from amoeba.backends import eager, registry
from amoeba.bench import timing
from amoeba.cli import app
from amoeba.commands.output import strict_json
from amoeba.conformance import Case

SOURCE = Path(__file__).resolve().parents[1] / "src"
TINY = "37,32,16,6,2"


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """The suite itself is run by test_conformance.py."""
    few = [Case(0, 2), Case(1, 2), Case(63, 2, bias=True, pattern="sentinels")]
    monkeypatch.setattr(conformance, "cases", lambda thorough=False: few)
    monkeypatch.setattr("amoeba.commands.verify.cases", lambda thorough=False: few)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def last_line(result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def plant(monkeypatch, name: str, operator, why_not=lambda request: None) -> None:
    backend = registry.Backend(name, "planted by a test", why_not, operator)
    others = tuple(registry.backends_for(torch.device("cpu")))
    monkeypatch.setitem(registry._BY_DEVICE, "cpu", (*others, backend))


def test_verify_passes_and_names_every_backend_and_gradient():
    result = invoke("verify", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    document = last_line(result)
    assert document["ok"]
    assert {row["backend"] for row in document["backends"]} == set(conformance.backend_names(torch.device("cpu")))
    for row in document["backends"]:
        if row["cases_checked"]:
            assert {"inference", "output", "x", "weight", "gate_up", "down", "down_bias"} <= set(row["worst"])
    assert "every gradient within tolerance" in result.stdout
    for name in ("eager", "float32", "bfloat16", "gate_up_bias", "tolerance"):
        assert name in result.stdout


def test_verify_fails_on_a_backend_with_one_wrong_gradient(monkeypatch):
    def wrong_weight_gradient(problem, **keywords):
        doubled = problem.weight_TK + (problem.weight_TK - problem.weight_TK.detach())
        return eager.operator(problem._replace(weight_TK=doubled), **keywords)

    plant(monkeypatch, "broken", wrong_weight_gradient)
    result = invoke("verify", "--device", "cpu", "--dtype", "float32", "--json")
    assert result.exit_code == 1
    document = last_line(result)
    rows = {row["backend"]: row["ok"] for row in document["backends"]}
    assert not rows.pop("broken")
    assert all(rows.values())
    assert {tuple(failure["out_of_tolerance"]) for failure in document["failures"]} == {("weight",)}
    assert "FAIL" in result.stdout


def test_verify_fails_on_a_backend_that_raises(monkeypatch):
    def raises(problem, **keywords):
        raise RuntimeError("no such kernel")

    plant(monkeypatch, "raising", raises)
    result = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "raising")
    assert result.exit_code == 1
    assert "RuntimeError: no such kernel" in result.stdout


def test_verify_says_who_refuses_and_that_nothing_checked_is_no_success(monkeypatch):
    plant(monkeypatch, "absent", eager.operator, why_not=lambda request: "needs hardware that is not here")
    result = invoke("verify", "--device", "cpu", "--dtype", "fp32")
    assert result.exit_code == 0
    assert "absent (cases: 3 in float32): needs hardware that is not here" in result.stdout
    alone = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "absent")
    assert alone.exit_code == 1
    assert "nothing was checked" in alone.stdout


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
    names = {backend.name for backend in registry.backends_for(torch.device("cpu"))}
    assert {row["backend"] for row in document["backends"] if row["device"] == "cpu"} == names
    for row in document["backends"]:
        for reason in row["refusals"].values():
            assert reason is None or reason in result.stdout
    taken = [dtype for row in document["backends"] if row["device"] == "cpu" for dtype in row["auto"]]
    assert sorted(taken) == ["bfloat16", "float16", "float32", "float64"]


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


def test_bench_exits_with_1_when_one_of_ours_is_wrong(monkeypatch):
    def wrong(problem, **keywords):
        return 1.01 * eager.operator(problem, **keywords)

    plant(monkeypatch, "broken", wrong)
    result = invoke("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1", "--json")
    assert result.exit_code == 1
    assert "amoeba broken: refused, out of tolerance 1e-05: output 1.0e-02" in result.stdout
    measurements = last_line(result)["results"][0]["measurements"]
    assert [m["median_ms"] for m in measurements if m["implementation"] == "amoeba broken"] == [None]


def test_a_result_with_infinite_errors_is_written_as_strict_json(monkeypatch, tmp_path):
    def not_a_number(problem, **keywords):
        return float("nan") * eager.operator(problem, **keywords)

    plant(monkeypatch, "broken", not_a_number)
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1")
    assert invoke(*words, "--out", str(tmp_path)).exit_code == 1
    (written,) = tmp_path.iterdir()
    assert "Infinity" not in written.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bench", "--shape", "1,2,3"), "--shape: expected a name (small, "),
        (("bench", "--shape", "8,8,8,4,5"), "--shape: expected K at most E (4); got K = 5"),
        (("bench", "--suite", "huge"), "--suite: expected one of small, cpu, gpu; got 'huge'"),
        (("bench", "--suite", "cpu", "--shape", "small"), "either --shape or --suite"),
        (("bench", "--pass", "backward"), "--pass: expected one of forward, training, both; got 'backward'"),
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


def run_python(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


def test_as_a_process_the_last_line_is_json_and_the_log_is_on_stderr():
    done = run_python("-m", "amoeba", "bench", "--shape", TINY, "--pass", "forward", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["document"] == "amoeba bench"
    assert "amoeba: experts of torch.float32 on cpu: backend" in done.stderr


def test_without_typer_a_sentence_says_what_to_install():
    done = run_python("-c", "import sys; sys.modules['typer'] = None; import amoeba.cli")
    assert done.returncode == 2
    assert done.stderr == "amoeba: the command line needs typer. Install it with: pip install typer rich\n"


def test_infinite_errors_are_still_json():
    assert strict_json({"errors": {"x": float("inf"), "y": (1.0, float("nan"))}}) == {
        "errors": {"x": "inf", "y": [1.0, "nan"]}
    }
