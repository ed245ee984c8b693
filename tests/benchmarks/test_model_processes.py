"""Candidates of a family share a process, and whatever happens to one of them, the others have their results."""

import json
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.models import run as suite
from benchmarks.models import worker as process
from benchmarks.models.candidates import Candidate, candidates_for
from benchmarks.models.problem import SIZES, Problem
from benchmarks.models.run import measure_in_process, run_models
from benchmarks.models.worker import WorkerProcess

# Answers as the worker does, without importing what it imports: the name of a candidate says how it behaves.
PLAYED = """
import json, os, sys, time
print("played")
job = json.loads(sys.stdin.readline())
with open(os.environ["STARTED"], "a") as started:
    started.write(" ".join(job["candidates"]) + "\\n")
for name in job["candidates"]:
    if name == "sleeps":
        time.sleep(60)
    if name == "dies":
        print("its last words", flush=True)
        os._exit(3)
    fails = name == "fails"
    found = {"candidate": name, "ours": True, "about": "", "status": "failed" if fails else "measured", "decodes": []}
    with open(sys.argv[1], "a") as results:
        results.write(json.dumps(found) + "\\n")
    if fails or name == "leaves memory behind":
        sys.exit()
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Which candidates each process was asked for."""
    (tmp_path / "played.py").write_text(PLAYED)
    log = tmp_path / "started"
    log.touch()
    monkeypatch.setenv("STARTED", str(log))
    monkeypatch.setattr(process, "COMMAND", [sys.executable, str(tmp_path / "played.py")])
    return lambda: log.read_text().splitlines()


def _plant(monkeypatch, device: str, **families: list[str]) -> Problem:
    planted = [
        Candidate(name, True, "training", "", lambda problem, stage: None, family, 0.0, limit_seconds=limit)
        for family, names in families.items()
        for name in names
        for limit in [0.3 if name == "sleeps" else 60.0]
    ]
    monkeypatch.setattr(suite, "candidates_for", lambda problem, ours, peers: planted)
    monkeypatch.setattr(suite, "available_memory", lambda device: None)
    return Problem(SIZES["tiny"], "training", torch.device(device))


def test_a_family_shares_a_process_and_loses_nothing_when_one_of_it_fails(started, monkeypatch):
    names = ["first", "fails", "second", "dies", "third", "sleeps", "leaves memory behind", "fourth"]
    problem = _plant(monkeypatch, "cuda", ours=names, theirs=["fifth"])
    kept = []
    monkeypatch.setattr(suite, "_empty", lambda problem: replace(_REPORT, measurements=[]))
    (report,) = run_models([problem], 1, so_far=lambda report: kept.append(len(report.measurements)))
    found = {each.candidate: (each.status, each.reason) for each in report.measurements}
    assert list(found) == [*names, "fifth"]
    assert kept == list(range(1, 10)), "told after each"
    assert {name for name, (status, _) in found.items() if status == "failed"} == {"fails", "dies", "sleeps"}
    assert found["dies"][1] == "its process ended with 3: its last words"
    assert found["sleeps"][1] == "was stopped after 0.3 s, its limit"
    assert started() == [
        " ".join(names), " ".join(names[2:]), " ".join(names[4:]), " ".join(names[6:]), "fourth", "fifth",
    ]  # fmt: skip


_REPORT = suite.ModelReport("tiny", "", "training", "cuda", 1, 1, 1, 0, 1.0, {}, [])


def test_on_a_cpu_where_memory_is_counted_by_process_each_has_its_own(started, monkeypatch):
    problem = _plant(monkeypatch, "cpu", ours=["first", "second"])
    run_models([problem], 1)
    assert started() == ["first", "second"]


def test_a_process_that_never_answers_fails_its_first_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "COMMAND", [sys.executable, "-m", "benchmarks.models.nobody"])
    problem = _plant(monkeypatch, "cpu", ours=["first"])
    (report,) = run_models([problem], 1)
    assert report.measurements[0].reason.startswith("its process ended with 1: ")
    assert "No module named" in report.measurements[0].reason


@pytest.mark.thorough
def test_the_worker_measures_and_ends_with_whoever_started_it():
    problem = Problem(SIZES["tiny"], "training", torch.device("cpu"))
    ours = [each for each in candidates_for(problem) if each.name == "amoeba, fp32 + autocast"]
    with WorkerProcess("training") as worker:
        (found,) = measure_in_process(ours, problem, 1, 1e6, worker)
    assert (found.status, found.reason) == ("measured", None)
    assert found.process_seconds > found.prepare_seconds > 0
    assert worker.process.returncode is not None
    assert json.dumps(found.said) == "[]"


@pytest.mark.thorough
def test_a_worker_whose_parent_is_gone_ends_by_itself(tmp_path, monkeypatch):
    text = "import os, sys, threading, time\nfrom benchmarks.models.worker import _end_with\n"
    text += "threading.Thread(target=_end_with, args=[0], daemon=True).start()\ntime.sleep(60)\n"
    (tmp_path / "waits.py").write_text(text)
    monkeypatch.setattr(process, "COMMAND", [sys.executable, str(tmp_path / "waits.py")])
    with WorkerProcess("training") as worker:
        worker.process.stdin.close()
        began = time.monotonic()
        assert worker.process.wait(50) == 1
        assert time.monotonic() - began < 50
