"""A process that tries one case after another and says so, line by line, so that its parent knows where it died.

    python -m tests.fuzz.worker --what experts --device cpu --first 0 --step 1 --changes '{}'

One JSON document per line: {"seed": 7, "row": ..., "case": ...} before a case, the same with its verdict and the reason
for it afterwards.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from typing import Any

import torch

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter; before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from . import ranks, router, stores
from .attempt import Outcome, attempt
from .case import describe, draw

SUBJECTS = {
    "experts": (draw, attempt),
    "router": (router.draw, router.attempt),
    "ranks": (ranks.draw, ranks.attempt),
    "stores": (stores.draw, stores.attempt),
}


def case_of(what: str, seed: int, device: str, changes: dict[str, Any]) -> Any:
    """The case of a seed, with the fields that were asked for."""
    return dataclasses.replace(SUBJECTS[what][0](seed, device), **changes)


def attempt_case(what: str, case: Any) -> Outcome:
    return SUBJECTS[what][1](case)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=SUBJECTS, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--changes", type=json.loads, required=True)
    options = parser.parse_args()
    say = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    for seed in itertools.count(options.first, options.step):
        case = case_of(options.what, seed, options.device, options.changes)
        begun = {"seed": seed, "row": case.row, "case": describe(case)}
        print(json.dumps(begun), file=say, flush=True)
        outcome = attempt_case(options.what, case)
        print(json.dumps(begun | dataclasses.asdict(outcome)), file=say, flush=True)


if __name__ == "__main__":
    main()
