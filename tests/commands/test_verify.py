"""`amoeba verify` as a user meets it: what it checks, what it says, and its exit codes."""

import logging
import sys
import warnings
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from few_cases import FEW, invoke, last_line, only_few_cases

from amoeba.backends import eager
from amoeba.commands import verify_run
from amoeba.placements import all_placements
from amoeba.proof import conformance
from amoeba.proof.cases import Case
from planted_backend import Planted, plant


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    only_few_cases(monkeypatch)


def test_verify_passes_and_names_every_backend_and_gradient(monkeypatch):
    for module in (conformance, verify_run):  # one case: every backend, dtype and format meets it
        monkeypatch.setattr(module, "cases", lambda thorough=False: FEW[-1:])
    result = invoke("verify", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    document = last_line(result)
    assert document["ok"]
    cpu = torch.device("cpu")
    # Without being asked for, they are checked as well.
    by_name = {"tasks", "cpu-fused", "exact"}
    assert {row["backend"] for row in document["backends"]} == {*conformance.backend_names(cpu), *by_name}
    checked = {row["backend"] for row in document["backends"] if row["cases_checked"]}
    core = conformance.why_not(Case(1, 2), "cpu-fused", cpu, torch.bfloat16) is None
    kernels = conformance.why_not(Case(1, 2), "tasks", cpu, torch.float32) is None
    assert by_name & checked == ({"cpu-fused", "exact"} if core else set()) | ({"tasks"} if kernels else set())
    for row in document["backends"]:
        if row["cases_checked"]:
            placed = {placement.name for placement in all_placements() if not placement.trains} | {"cpu-fused"}
            biases = set() if row["backend"] == "tasks" else {"down_bias"}  # which it has no tasks for
            base = set() if row["backend"] in placed else {"gate_up", "down", *biases}
            assert {"inference", "output", "x", "weight"} | base <= set(row["worst"])
    assert "every gradient within tolerance" in result.stdout
    for name in ("eager", "float32", "bfloat16", "gate_up_bias", "tolerance"):
        assert name in result.stdout


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
    assert "not supported (-v shows why)" in result.stdout and "\n  absent: float32\n" in result.stdout
    why = invoke(*two, "-v")
    assert "absent (cases: 3 in float32): needs hardware that is not here" in why.stdout
    alone = invoke("verify", "--device", "cpu", "--dtype", "fp32", "--backend", "absent")
    assert alone.exit_code == 1
    assert "nothing was checked" in alone.stdout


def test_verify_says_which_cases_the_time_was_too_short_for(monkeypatch):
    monkeypatch.setattr("amoeba.commands.verify_run.SECONDS", 0)
    monkeypatch.setattr("amoeba.commands.verify_run._SECONDS_BETWEEN_LINES", 0.0)
    words = ("verify", "--device", "cpu", "--dtype", "fp32", "--dtype", "fp64", "--backend", "eager", "--json")
    result = invoke(*words)
    assert result.exit_code == 0
    document = last_line(result)
    assert (document["cases"], document["cases_left_out"]) == (1, 2)
    assert {row["dtype"] for row in document["backends"] if row["cases_checked"] == 1} == {"float32", "float64"}
    said = "checks (a case on a backend in a dtype) in 0 s, the rest were skipped; amoeba verify --thorough has 3 cases"
    assert said in result.stdout
    assert "1 of 6 done, now eager in float64: " in result.stderr, "a pipe sees how far it is"
    document = last_line(invoke(*words, "--thorough"))
    assert (document["cases"], document["cases_left_out"]) == (3, 0)


def test_a_pipe_hears_of_a_long_verify_every_few_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("amoeba.commands.verify_run.time.monotonic", lambda: now.append(now[-1] + 1) or now[-1])
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


def test_verify_prints_plain_lines_in_a_pipe():
    result = invoke("verify", "--device", "cpu", "--dtype", "float64", "--backend", "eager")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
