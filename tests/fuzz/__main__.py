"""The command line of the fuzzer; see the package's docstring."""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from .case import describe
from .runner import Plan, run
from .shrink import apart, shrink
from .worker import SUBJECTS, attempt_case, case_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--what", choices=SUBJECTS, default="experts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--backend", help="this one in every case, instead of a random one")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="in every case")
    parser.add_argument("--case", type=int, metavar="SEED", help="this case alone")
    parser.add_argument("--shrink", action="store_true", help="with --case: make it simpler while it fails")
    parser.add_argument("--digests", type=Path, help="write a hash of each case's results, to compare two versions")
    options = parser.parse_args()
    changes = dict(_field(text) for text in options.set)
    if options.backend is not None:
        changes["backend"] = options.backend
    if options.case is not None:
        return _one(options.what, options.case, options.device, changes, options.shrink)
    plan = Plan(options.what, options.device, options.seconds, options.cases, options.seed, options.jobs, changes)
    counts = run(plan, functools.partial(print, flush=True))
    if options.digests:
        options.digests.write_text("".join(f"{seed} {digest}\n" for seed, digest in sorted(counts.digests.items())))
    for line in counts.lines():
        print(line)
    if not counts.cases:
        print("nothing was checked: starting takes longer than that; give more --seconds")
    return 1 if counts.failures or not counts.cases else 0


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    value = json.loads(value)
    return name, tuple(value) if isinstance(value, list) else value


def _one(what: str, seed: int, device: str, changes: dict[str, Any], simpler: bool) -> int:
    case, attempt = case_of(what, seed, device, changes), functools.partial(attempt_case, what)
    print(describe(case))
    outcome = apart(case, attempt)
    print(f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict)
    if simpler and outcome.verdict == "failed":
        case, outcome = shrink(case, attempt)
        print(f"simplest: {describe(case)}\n{outcome.verdict}: {outcome.reason}")
    return 1 if outcome.verdict == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
