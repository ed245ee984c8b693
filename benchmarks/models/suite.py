"""Runs the candidates on whole models, one after another, those of a family in one process.

    reports = run_models([Problem(SIZES["1b"], "training", torch.device("cuda"))], repeats=20)
    reports[0].measurements[0].tokens_per_second

In turns within one process would hide the machine's moods better, but two of these models with their optimizers do not
fit into a GPU together, and one library's patches would be another's. So each is measured for some seconds by itself,
at clocks that it can hold. Candidates of one family (the same experts) share a process on a GPU, so that imports are
paid for once; what one compiled, captured or allocated is dropped before the next. Where one fails, is stopped or dies,
the rest of its family gets a new process. On a CPU, whose peak memory is that of the process, each has its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from amoeba.system.machine import available_memory
from benchmarks.models.candidate import Candidate
from benchmarks.models.candidates import candidates_for
from benchmarks.models.greedy import Agreement, Difference
from benchmarks.models.measure import DecodeTime, ModelMeasurement
from benchmarks.models.problem import Kind, Problem
from benchmarks.models.process import WorkerProcess


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
    so_far: Callable[[ModelReport], None] = lambda report: None,
) -> list[ModelReport]:
    """done: called with each report as soon as there is one; so_far: with what there is of it, after each candidate."""
    reports = []
    with _Workers() as workers:
        if problems:
            workers.start(problems[0])
        for problem in problems:
            report = _empty(problem)
            reports.append(report)
            families = _families(problem, ours, peers)
            for family in families:
                workers.more = family is not families[-1]
                for found in _measured(family, problem, repeats, report, workers, progress):
                    report.measurements.append(found)
                    so_far(report)
            done(report)
    return reports


class _Workers(ExitStack):
    """One that works, and on a GPU one that imports meanwhile what the next will need."""

    more = False  # whether there will be a next one of the same kind

    def __init__(self) -> None:
        super().__init__()
        self._next: tuple[Kind, WorkerProcess] | None = None
        self.callback(self._drop)

    def start(self, problem: Problem) -> None:
        self._drop()
        self._next = problem.kind, WorkerProcess(problem.kind)

    def take(self, problem: Problem) -> WorkerProcess:
        if self._next is None or self._next[0] != problem.kind:
            self.start(problem)
        assert self._next is not None
        (_, worker), self._next = self._next, None
        if self.more and problem.device.type == "cuda":
            self.start(problem)
        return worker

    def _drop(self) -> None:
        if self._next is not None:
            self._next[1].__exit__(None, None, None)
            self._next = None


def _families(problem: Problem, ours: Sequence[str] | None, peers: Sequence[str] | None) -> list[list[Candidate]]:
    """In the order of their first members."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates_for(problem, ours, peers):
        key = candidate.family if problem.device.type == "cuda" else candidate.name
        found.setdefault(key, []).append(candidate)
    return list(found.values())


def _measured(
    family: list[Candidate],
    problem: Problem,
    repeats: int,
    report: ModelReport,
    workers: _Workers,
    progress: Callable[[str], None],
) -> Iterator[ModelMeasurement]:
    waiting = []
    for candidate in family:
        reason = candidate.why_not(problem) or _why_no_memory(candidate, report.parameters, problem)
        if reason is None:
            waiting.append(candidate)
        else:
            yield _without(candidate, "left out", reason)
    while waiting:
        with workers.take(problem) as worker:
            answers = measure_in_process(waiting, problem, repeats, report.flops_per_token, worker, progress)
            for found in answers:
                waiting.pop(0)
                yield found


def measure_in_process(
    candidates: Sequence[Candidate],
    problem: Problem,
    repeats: int,
    flops_per_token: float,
    worker: WorkerProcess,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[ModelMeasurement]:
    """One answer at least, and as many as the process gives: it ends with the first that fails, see `worker`."""
    job = {
        "candidates": [each.name for each in candidates],
        "size": problem.size.name,
        "kind": problem.kind,
        "device": problem.device.type,
        "repeats": repeats,
        "flops_per_token": flops_per_token,
    }
    worker.begin(job)
    for number, candidate in enumerate(list(candidates)):
        progress(f"{problem.size.name} {problem.kind}: {candidate.name}")
        began = time.monotonic()
        line = worker.next_line(began + candidate.limit_seconds)
        if line is not None:
            found = replace(_read(line), process_seconds=time.monotonic() - began)
            yield found
            if found.status == "failed":
                return
            continue
        status = worker.process.poll()
        if status is None:
            yield _without(candidate, "failed", f"was stopped after {candidate.limit_seconds:g} s, its limit")
        elif status != 0 or number == 0:
            yield _without(candidate, "failed", f"its process ended with {status}: {worker.last_words()}")
        return


def _read(line: str) -> ModelMeasurement:
    found = json.loads(line)
    for decode in found["decodes"]:
        if (greedy := decode["greedy"]) is not None:
            greedy["first_differences"] = [Difference(**each) for each in greedy["first_differences"]]
            decode["greedy"] = Agreement(**greedy)
    found["decodes"] = [DecodeTime(**decode) for decode in found["decodes"]]
    return ModelMeasurement(**found)


def _empty(problem: Problem) -> ModelReport:
    batch = problem.batch
    return ModelReport(
        problem.size.name,
        problem.size.about,
        problem.kind,
        problem.device.type,
        problem.parameters(),
        batch.rows,
        batch.length,
        batch.new_tokens,
        problem.flops_per_token(),
        {"model_type": problem.size.model_type} | problem.size.settings,
        [],
    )


def _why_no_memory(candidate: Candidate, parameters: int, problem: Problem) -> str | None:
    free, needed = available_memory(problem.device), parameters * candidate.bytes_per_parameter
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.0f} GiB for its parameters alone, {free / 2**30:.0f} GiB are free"


def _without(candidate: Candidate, status: Any, reason: str) -> ModelMeasurement:
    return ModelMeasurement(candidate.name, candidate.ours, candidate.about, status, reason)
