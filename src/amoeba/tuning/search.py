"""One search: candidates are run, compared with our own choice on the same inputs, and timed; the best is found.

    search = Search("up float16 rows=256 ...", torch.float16, candidates, make)     # candidates: our own choice first
    found = find_best(search, clock=time.monotonic, deadline=clock() + 10, measure=median_ms)

A candidate that does not compile, asks for more than the GPU has, or computes something else is left out with the
reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import is_out_of_memory, one_line
from amoeba.core.torch_internals import capture
from amoeba.system import tuned

# A candidate's result may differ from ours by this much, relative in the L2 norm: the order of a sum is another one.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Another tile may change the last bits, so it has to be worth it. Repeated medians differ by less than this.
LEAST_GAIN = 0.02
WARM_MS, MEASURED_MS = 5, 25

Run = Callable[[Any], Sequence[Tensor]]
Measure = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Search:
    """candidates: our own choice first. make: gives what computes with one of them and returns what it wrote."""

    key: str
    dtype: torch.dtype
    candidates: Sequence[Any]
    make: Callable[[], Run]


@dataclass(frozen=True)
class Found:
    best: Any
    best_ms: float
    default_ms: float
    error: float
    tried: int
    left_out: dict[str, str] = field(default_factory=dict)  # candidate -> reason

    @property
    def gain(self) -> float:
        return self.default_ms / self.best_ms

    def entry(self) -> dict[str, Any]:
        times = {"configuration": tuned.plain(self.best), "ms": self.best_ms, "default_ms": self.default_ms}
        return times | {"error": self.error, "tried": self.tried}


def find_best(search: Search, *, measure: Measure, clock: Callable[[], float], deadline: float) -> Found:
    """Our own choice is always measured; another one has to be faster by LEAST_GAIN."""
    run = search.make()
    ours, *others = search.candidates
    results = run(ours)
    truth = [result.clone() for result in results]
    default_ms = best_ms = measure(lambda: run(ours))
    best, best_error, tried = ours, 0.0, 1
    left_out: dict[str, str] = {}
    for candidate in others:
        if clock() >= deadline:
            break
        try:
            for result in results:
                result.fill_(math.nan)  # so that what a candidate leaves unwritten is seen
            results = run(candidate)
            error = _error(results, truth)
        except Exception as reason:
            if is_out_of_memory(reason):
                raise
            left_out[str(candidate)] = one_line(reason)
            continue
        if not error <= TOLERANCE[search.dtype]:  # nor NaN
            left_out[str(candidate)] = f"its result differs from ours by {error:.1e}"
            continue
        tried += 1
        ms = measure(lambda candidate=candidate: run(candidate))  # type: ignore[misc]
        if ms < best_ms and ms * (1 + LEAST_GAIN) < default_ms:
            best, best_ms, best_error = candidate, ms, error
    return Found(best, best_ms, default_ms, best_error, tried, left_out)


def _error(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    errors = []
    for result, true in zip(results, truth, strict=True):
        wide, expected = result.double(), true.double()
        errors.append(((wide - expected).norm() / expected.norm().clamp_min(1e-30)).item())
    return max(errors, key=lambda error: (error != error, error))


def median_ms(run: Callable[[], object]) -> float:
    """On the GPU, with its caches flushed before each run, and without the host: what a few tokens take is less than a
    launch from Python does, and would be timed in its place."""
    from triton.testing import do_bench

    return statistics.median(do_bench(_captured(run), warmup=WARM_MS, rep=MEASURED_MS, return_mode="all"))


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """run: has run before, so nothing is compiled meanwhile. What cannot be captured is timed with its launches."""
    graph, side_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    try:
        with capture(graph, stream=side_stream):
            run()
    except RuntimeError as reason:
        if is_out_of_memory(reason):
            raise
        return run
    return graph.replay
