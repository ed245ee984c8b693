"""The process that one candidate is measured in.

python -m amoeba.bench.models.worker RESULT '{"candidate": ..., "size": ..., "kind": ..., "device": ..., ...}'

writes what it found to the file RESULT, also where the candidate failed, with what it said.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.models.candidates import CANDIDATES
from amoeba.bench.models.measure import ModelMeasurement, measure
from amoeba.bench.models.problem import SIZES, Problem
from amoeba.errors import one_line


def run(job: dict[str, Any]) -> ModelMeasurement:
    candidate = next(each for each in CANDIDATES if (each.name, each.kind) == (job["candidate"], job["kind"]))
    problem = Problem(SIZES[job["size"]], job["kind"], torch.device(job["device"]))
    try:
        return measure(candidate, problem, job["repeats"], job["flops_per_token"])
    except Exception as error:  # whatever it raises is its answer to this problem
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        return ModelMeasurement(candidate.name, candidate.ours, candidate.about, "failed", reason)


def main(result: str, job: str) -> None:
    Path(result).write_text(json.dumps(asdict(run(json.loads(job)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
