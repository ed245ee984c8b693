"""`python -m benchmarks models`: the candidates on whole models, one after another; a table per model and kind of work.

    reports = run_models([Problem(SIZES["1b"], "training", torch.device("cuda"))], repeats=20)
    reports[0].measurements[0].tokens_per_second

Alternating within one process would hide noise better, but two of these models with their optimizers do not
fit into a GPU together, and one library's patches would be another's. So each is measured for some seconds by itself,
at clocks that it can hold. Candidates of one family (the same experts) share a process on a GPU, so that imports are
paid for once; what one compiled, captured or allocated is dropped before the next. Where one fails, is stopped or dies,
the rest of its family gets a new process. On a CPU, whose peak memory is that of the process, each has its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amoeba.bench.timing import Ceilings, measure_ceilings
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value, counted
from amoeba.system.machine import available_memory
from benchmarks import command
from benchmarks.models.candidates import Candidate, candidates_for
from benchmarks.models.decoding import Agreement, Difference
from benchmarks.models.measure import DecodeTime, ModelMeasurement, without_figures
from benchmarks.models.problem import Kind, Problem
from benchmarks.models.worker import WorkerProcess

NONE_OF_THEM = "none"  # as --ours or --peer


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
            yield without_figures(candidate, "left out", reason)
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
            yield without_figures(candidate, "failed", f"was stopped after {candidate.limit_seconds:g} s, its limit")
        elif status != 0 or number == 0:
            yield without_figures(candidate, "failed", f"its process ended with {status}: {worker.last_words()}")
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


class Chosen(NamedTuple):
    """Names of the candidates that are wanted, or parts of them; None: all."""

    ours: tuple[str, ...] | None
    peers: tuple[str, ...] | None


def choose_candidates(problems: Sequence[Problem], ours: Sequence[str], peers: Sequence[str]) -> Chosen:
    for option, parts, is_ours in (("--ours", ours, True), ("--peer", peers, False)):
        names = {each.name: None for problem in problems for each in candidates_for(problem) if each.ours == is_ours}
        for part in parts:
            if part != NONE_OF_THEM and not any(part in name for name in names):
                remedy = f"leave it out for all, or {NONE_OF_THEM} for none of them"
                raise bad_value(option, f"one of these, or a part of it: {'; '.join(names)}", repr(part), remedy)
    chosen = (tuple(part for part in parts if part != NONE_OF_THEM) if parts else None for parts in (ours, peers))
    return Chosen(*chosen)


def command_line(problems: Sequence[Problem], repeats: int, chosen: Chosen) -> str:
    """The command that measures the same again."""
    kinds = {problem.kind for problem in problems}
    return command(
        "models",
        device=problems[0].device.type,
        shape=list(dict.fromkeys(problem.size.name for problem in problems)),
        pass_=kinds.pop() if len(kinds) == 1 else None,
        repeats=repeats,
        **{
            option: None if names is None else list(names or [NONE_OF_THEM])
            for option, names in (("ours", chosen.ours), ("peer", chosen.peers))
        },
    )


def run(
    problems: Sequence[Problem],
    repeats: int,
    chosen: Chosen,
    path: Path | None,
    output: Output,
    ceilings: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] = measure_ceilings,
) -> tuple[dict[str, Any], bool]:
    """Prints the tables; returns the document, and False if a candidate of ours failed."""
    measured = BenchRun(command_line(problems, repeats, chosen), "models", path, output)
    peak = measured.measure_ceilings(problems[0].device, [problems[0].dtype], ceilings)
    rate = peak.matmul_flops_per_second(problems[0].dtype)
    reports = run_models(
        problems,
        repeats,
        measured.progress,
        lambda report: _print(report, rate, output),
        chosen.ours,
        chosen.peers,
        measured.keep,
    )
    failed = [each for report in reports for each in report.measurements if each.ours and each.status == "failed"]
    return measured.finish(), not failed


def _print(report: ModelReport, peak: float, output: Output) -> None:
    decode = report.kind == "decode"
    sizes = (
        f"prompts of {report.length} tokens, {report.new_tokens} new" if decode else f"{report.rows} x {report.length}"
    )
    title = f"{report.model} ({report.parameters / 1e9:.2f}B parameters) {report.kind}, {sizes}, on {report.device}"
    measured: dict[str | None, ModelMeasurement] = {
        each.candidate: each for each in report.measurements if each.status == "measured"
    }
    rows = [(_decode_row(each, measured) if decode else _step_row(each, measured, peak)) for each in measured.values()]
    output.table(title, list(rows[0]) if rows else [""], [list(row.values()) for row in rows])
    output.line("  one after another, each with a model of its own, its steps back to back without rests")
    if decode:
        output.line("  ms a step; first: until the first token; start: the model made, and the first decode of one row")
        output.line("  greedy: the tokens of the plain loop, or at how many logits it parted from them (median margin)")
    else:
        output.line(
            "  start: the model made, and the first step with what it compiles; of matmul: of the dense product of "
            f"{peak / 1e12:.3g} TFLOP/s, {report.flops_per_token / 1e9:.3g} GFLOP a token"
        )
    if any(each.against in measured for each in measured.values()):
        output.line("  x: the time over that of the same without factors")
    if (line := _beside_peers(list(measured.values()), report.kind == "lora")) is not None:
        output.line(f"  {line}")
    for each in report.measurements:
        if each.status != "measured":
            style = "bold red" if each.ours and each.status == "failed" else None
            output.line(f"  {each.candidate}: {each.status}, {each.reason}", style=style)
        for sentence in each.said:
            output.line(f"  {each.candidate}: {sentence}")


def _beside_peers(measured: Sequence[ModelMeasurement], with_factors: bool) -> str | None:
    """The fastest of ours over the fastest of the peers: in LoRA steps those with factors, else those without."""
    same = [each for each in measured if (each.against is not None) == with_factors]
    ours, peers = ([each for each in same if each.ours == is_ours] for is_ours in (True, False))
    if not ours or not peers:
        return None
    if measured[0].decodes:
        texts = []
        for number, decode in enumerate(measured[0].decodes):
            best, other = (min(some, key=lambda each: each.decodes[number].ms) for some in (ours, peers))
            ratio = other.decodes[number].ms / best.decodes[number].ms
            texts.append(f"{decode.rows} rows: {best.candidate} {ratio:.2f} times as fast as {other.candidate}")
        return "; ".join(texts)
    best, other = (min(some, key=lambda each: each.ms or 0.0) for some in (ours, peers))
    return f"{best.candidate}: {(other.ms or 0.0) / (best.ms or 1.0):.2f} times as fast as {other.candidate}"


def _step_row(found: ModelMeasurement, measured: Mapping[str | None, ModelMeasurement], peak: float) -> dict[str, str]:
    assert found.ms is not None and found.tokens_per_second is not None and found.flops_per_second is not None
    assert found.first_step_seconds is not None
    other = measured.get(found.against)
    row = {
        "": found.candidate,
        "ms": three_digits(found.ms),
        "tokens/s": f"{found.tokens_per_second:,.0f}",
        "of matmul": f"{found.flops_per_second / peak:.1%}",
    }
    if any(each.against in measured for each in measured.values()):
        row["x"] = "-" if other is None or other.ms is None else f"{found.ms / other.ms:.3f}"
    return row | {
        "peak GiB": _gib(found.peak_bytes),
        "start s": _start(found, found.first_step_seconds),
        "loss": f"{found.first_loss:.3f}",
    }


def _decode_row(found: ModelMeasurement, measured: Mapping[str | None, ModelMeasurement]) -> dict[str, str]:
    row, other = {"": found.candidate}, measured.get(found.against)
    compared = any(each.against in measured for each in measured.values())
    for number, each in enumerate(found.decodes):
        row[f"ms, {counted(each.rows, 'row')}"] = three_digits(each.ms)
        row[f"first ms, {each.rows}"] = three_digits(each.first_token_ms)
        if compared:
            row[f"x, {each.rows}"] = "-" if other is None else f"{each.ms / other.decodes[number].ms:.2f}"
    row["greedy"] = "; ".join(_agreement(each) for each in found.decodes) if found.decodes[0].greedy else "-"
    return row | {"peak GiB": _gib(found.peak_bytes), "start s": _start(found, found.decodes[0].first_call_seconds)}


def _agreement(decode: DecodeTime) -> str:
    greedy = decode.greedy
    if greedy is None or greedy.same:
        return "same"
    widest = max(each.margin for each in greedy.first_differences)
    count = len(greedy.first_differences)
    return f"{count} of {decode.rows} rows part, at {widest:.2g} ({greedy.median_margin:.2g})"


def _start(found: ModelMeasurement, first: float) -> str:
    return f"{found.prepare_seconds or 0:.1f} + {first:.1f}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"
