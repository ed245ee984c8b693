"""The process that the candidates of one family are measured in, one after another.

    python -m benchmarks.models.worker RESULTS KIND

imports what measuring KIND needs, waits for one line on stdin, {"candidates": [...], "size": ..., "kind": ..., ...},
and appends a line to the file RESULTS for each candidate, also for one that failed, with what it said. After one that
failed, or has left memory behind, it ends: the rest is for another process. It also ends with whoever holds its stdin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import one_line
from amoeba.integrations.compile_cache import keep_compiled_code
from benchmarks.models.candidate import Candidate
from benchmarks.models.candidates import CANDIDATES
from benchmarks.models.measure import ModelMeasurement, measure
from benchmarks.models.problem import SIZES, Problem

# Of a training or LoRA step, whose model is gone: libraries keep some workspaces.
LEFT_BEHIND_BYTES = 1 << 30


def run(job: dict[str, Any]) -> Iterator[ModelMeasurement]:
    problem = Problem(SIZES[job["size"]], job["kind"], torch.device(job["device"]))
    for name in job["candidates"]:
        candidate = next(each for each in CANDIDATES if (each.name, each.kind) == (name, problem.kind))
        found = _measured(candidate, problem, job["repeats"], job["flops_per_token"])
        yield found
        if found.status == "failed" or _has_left_memory(problem):
            return


def _measured(candidate: Candidate, problem: Problem, repeats: int, flops_per_token: float) -> ModelMeasurement:
    try:
        return measure(candidate, problem, repeats, flops_per_token)
    except Exception as error:  # whatever it raises is its answer to this problem
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        return ModelMeasurement(candidate.name, candidate.ours, candidate.about, "failed", reason)


def _has_left_memory(problem: Problem) -> bool:
    torch.compiler.reset()
    gc.collect()
    if problem.device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    holds_a_model = problem.kind == "decode"  # for the next one, see `decoding`
    return not holds_a_model and torch.cuda.memory_allocated(problem.device) > LEFT_BEHIND_BYTES


def _import_all(kind: str) -> None:
    import amoeba.integrations.transformers

    if kind != "decode":
        import amoeba.jobs.train.training_loop  # noqa: F401


def _end_with(stdin: int) -> None:
    while os.read(stdin, 1):
        pass
    os._exit(1)


def main(results: str, kind: str) -> None:
    keep_compiled_code()
    _import_all(kind)
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_end_with, args=[sys.stdin.fileno()], daemon=True).start()
    with Path(results).open("a") as file:
        for found in run(json.loads(line)):
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
