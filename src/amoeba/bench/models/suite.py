"""Runs the candidates on whole models, one after another, each in a process of its own.

    reports = run_models([Problem(SIZES["1b"], "training", torch.device("cuda"))], repeats=20)
    reports[0].measurements[0].tokens_per_second

In turns within one process would hide the machine's moods better, but two of these models with their optimizers do not
fit into a GPU together, and one candidate's compiled code, patches and memory would be another's. So each is measured
for some seconds by itself, at clocks that it can hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import amoeba
from amoeba.bench.models.candidate import Candidate
from amoeba.bench.models.candidates import candidates_for
from amoeba.bench.models.measure import DecodeTime, ModelMeasurement
from amoeba.bench.models.problem import Kind, Problem
from amoeba.machine import available_memory

_WORKER = "amoeba.bench.models.worker"


@dataclass(frozen=True)
class ModelReport:
    """All candidates on one model and one kind of work."""

    model: str
    about: str
    kind: Kind
    device: str
    parameters: int
    rows: int  # of a decode there are several, see `decodes`
    length: int
    new_tokens: int
    flops_per_token: float
    settings: dict[str, Any]  # of the model's configuration
    measurements: list[ModelMeasurement]


def run_models(
    problems: Sequence[Problem],
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
    done: Callable[[ModelReport], None] = lambda report: None,
    ours: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
) -> list[ModelReport]:
    """done: called with each report as soon as there is one."""
    reports = []
    for problem in problems:
        parameters, flops_per_token = problem.parameters(), problem.flops_per_token()
        measurements = []
        for candidate in candidates_for(problem, ours, peers):
            reason = candidate.why_not(problem) or _why_no_memory(candidate, parameters, problem)
            if reason is not None:
                measurements.append(_without(candidate, "left out", reason))
                continue
            progress(f"{problem.size.name} {problem.kind}: {candidate.name}")
            measurements.append(measure_in_process(candidate, problem, repeats, flops_per_token))
        batch = problem.batch
        reports.append(
            ModelReport(
                problem.size.name,
                problem.size.about,
                problem.kind,
                problem.device.type,
                parameters,
                batch.rows,
                batch.length,
                batch.new_tokens,
                flops_per_token,
                {"model_type": problem.size.model_type} | problem.size.settings,
                measurements,
            )
        )
        done(reports[-1])
    return reports


def measure_in_process(
    candidate: Candidate, problem: Problem, repeats: int, flops_per_token: float
) -> ModelMeasurement:
    job = {
        "candidate": candidate.name,
        "size": problem.size.name,
        "kind": problem.kind,
        "device": problem.device.type,
        "repeats": repeats,
        "flops_per_token": flops_per_token,
    }
    source = str(Path(amoeba.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": source if not others else f"{source}{os.pathsep}{others}"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+", errors="replace") as said:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", _WORKER, str(result), json.dumps(job)]
        # a session of its own: what it starts to compile goes with it
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(candidate.limit_seconds)
        except subprocess.TimeoutExpired:
            return _without(candidate, "failed", f"was stopped after {candidate.limit_seconds:g} s, its limit")
        finally:
            _end(process)
        if not result.exists():
            said.seek(0)
            lines = said.read().strip().splitlines() or ["without a word"]
            return _without(candidate, "failed", f"its process ended with {process.returncode}: {lines[-1][:300]}")
        found = json.loads(result.read_text())
    found["decodes"] = [DecodeTime(**decode) for decode in found["decodes"]]
    return replace(ModelMeasurement(**found), process_seconds=time.perf_counter() - began)


def _end(process: subprocess.Popen) -> None:
    """With all that it has started; nothing of it is left where it has ended by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of nobody but the ended one
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why_no_memory(candidate: Candidate, parameters: int, problem: Problem) -> str | None:
    free, needed = available_memory(problem.device), parameters * candidate.bytes_per_parameter
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.0f} GiB for its parameters alone, {free / 2**30:.0f} GiB are free"


def _without(candidate: Candidate, status: Any, reason: str) -> ModelMeasurement:
    return ModelMeasurement(candidate.name, candidate.ours, candidate.about, status, reason)
