"""One candidate measured in this process.

    found = measure(candidate, problem, repeats=20)
    found.ms, found.tokens_per_second, found.peak_bytes

Steps run back to back, as in training, and the GPU is waited for once, after the last. A decode's first token is the
time of decoding one, and a step of it what each of the others adds.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor

from amoeba.bench.sustained import marker
from amoeba.system.machine import peak_memory
from benchmarks.models.candidates import Candidate
from benchmarks.models.decoding import Agreement
from benchmarks.models.problem import DECODE_ROWS, Decode, Problem, Stage, Step

Status = Literal["measured", "failed", "left out"]

WARM_STEPS = 2  # after the first; what is compiled for shapes that vary is compiled in the second
# Steps that take longer are measured less often than asked for.
MOST_SECONDS, LEAST_STEPS = 20.0, 3
DECODES = 3
SLOW_DECODE_SECONDS = 2.0  # one that takes longer is measured once


@dataclass(frozen=True)
class DecodeTime:
    """ms: of a step, which gives each row a token; the medians of some decodes. first_call_seconds: of the very first
    decode of so many rows, with all that is compiled or captured in it; prepare_seconds: what that took more than a
    later one. greedy: whether the tokens are those of the plain loop; None where it was not asked."""

    rows: int
    ms: float
    tokens_per_second: float
    first_token_ms: float
    first_call_seconds: float
    prepare_seconds: float
    greedy: Agreement | None = None


@dataclass(frozen=True)
class ModelMeasurement:
    """One candidate. Without figures, `reason` says why. Of a decode there are `decodes` instead of steps."""

    candidate: str
    ours: bool
    about: str
    status: Status
    reason: str | None = None
    against: str | None = None  # the candidate that its time is a multiple of
    said: list[str] = field(default_factory=list)  # by the candidate, and warnings in the log
    prepare_seconds: float | None = None  # until the model and its optimizer are made
    first_step_seconds: float | None = None  # of the very first step, with all that is compiled in it
    steps: int = 0
    ms: float | None = None  # the whole time over the steps
    median_ms: float | None = None
    min_ms: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    decodes: list[DecodeTime] = field(default_factory=list)
    peak_bytes: int | None = None  # from the first step on, parameters and all; on a CPU of the whole process
    process_seconds: float | None = None  # of all of it, with the imports where it was the first of its process


def without_figures(candidate: Candidate, status: Status, reason: str) -> ModelMeasurement:
    return ModelMeasurement(candidate.name, candidate.ours, candidate.about, status, reason)


def measure(candidate: Candidate, problem: Problem, repeats: int, flops_per_token: float) -> ModelMeasurement:
    """Raises what the candidate raises; ValueError for a loss that is no number, and for tokens that are missing."""
    with Stage() as stage:
        stage.enter_context(_warnings_in(stage.said))
        if problem.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(problem.device)
        began = time.perf_counter()
        prepared = candidate.prepare(problem, stage)
        _wait(problem.device)
        nothing = ModelMeasurement(
            candidate.name,
            candidate.ours,
            candidate.about,
            "measured",
            against=candidate.against,
            said=stage.said,
            prepare_seconds=time.perf_counter() - began,
        )
        if problem.kind == "decode":
            decodes = [_decode_time(cast(Decode, prepared), problem, rows, stage) for rows in DECODE_ROWS]
            return replace(nothing, decodes=decodes, peak_bytes=peak_memory(problem.device))
        return _measured_steps(nothing, cast(Step, prepared), problem, repeats, flops_per_token)


def _measured_steps(
    nothing: ModelMeasurement, step: Step, problem: Problem, repeats: int, flops_per_token: float
) -> ModelMeasurement:
    if problem.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(problem.device)  # now: what a captured pass takes is seen in its capture
    began = time.perf_counter()
    first_loss = _finite(step())
    first_step_seconds = time.perf_counter() - began
    for _ in range(WARM_STEPS):
        warm_seconds, _ = _timed(step, problem.device)
    count = max(LEAST_STEPS, min(repeats, int(MOST_SECONDS / warm_seconds)))
    times_ms, loss = _back_to_back(step, problem.device, count)
    ms = statistics.fmean(times_ms)
    return replace(
        nothing,
        first_step_seconds=first_step_seconds,
        steps=count,
        ms=ms,
        median_ms=statistics.median(times_ms),
        min_ms=min(times_ms),
        tokens_per_second=problem.tokens / ms * 1e3,
        flops_per_second=flops_per_token * problem.tokens / ms * 1e3,
        first_loss=first_loss,
        last_loss=_finite(loss),
        peak_bytes=peak_memory(problem.device),
    )


def _back_to_back(step: Step, device: torch.device, count: int) -> tuple[list[float], Tensor]:
    mark = marker(device)
    marks = [mark()]
    for _ in range(count):
        loss = step()
        marks.append(mark())
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], loss


def _decode_time(decode: Decode, problem: Problem, rows: int, stage: Stage) -> DecodeTime:
    ids, new_tokens = problem.ids(rows), problem.batch.new_tokens
    first_call_seconds, _ = _timed(lambda: decode(ids, new_tokens), problem.device)
    decode(ids, 1)
    first_token_ms = 1e3 * statistics.median(_timed(lambda: decode(ids, 1), problem.device)[0] for _ in range(DECODES))
    seconds = list[float]()
    while len(seconds) < DECODES and sum(seconds) < SLOW_DECODE_SECONDS:
        taken, made = _timed(lambda: decode(ids, new_tokens), problem.device)
        if made.shape != (rows, new_tokens):
            raise ValueError(f"expected {new_tokens} new tokens for each of {rows} rows, got {tuple(made.shape)}")
        seconds.append(taken)
    middle = statistics.median(seconds)
    ms = (1e3 * middle - first_token_ms) / (new_tokens - 1)
    return DecodeTime(
        rows,
        ms,
        rows / ms * 1e3,
        first_token_ms,
        first_call_seconds,
        max(0.0, first_call_seconds - middle),
        stage.compare(ids, made) if stage.compare is not None else None,
    )


@contextmanager
def _warnings_in(said: list[str]) -> Iterator[None]:
    """What our log warns of while it lasts."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("amoeba")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _timed(run: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    _wait(device)
    began = time.perf_counter()
    result = run()
    _wait(device)
    return time.perf_counter() - began, result


def _finite(loss: Tensor) -> float:
    number = float(loss)
    if not math.isfinite(number):
        raise ValueError(f"the loss is {number}")
    return number


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
