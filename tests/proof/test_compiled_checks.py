"""The order of checks while kernels are compiled: what is ready first, and nothing waits that need not."""

import itertools
import json
import os
import queue
import subprocess
import sys
import time

import pytest
import torch

from amoeba.proof import compiled_checks
from amoeba.proof.cases import Case, cases, most_telling_first
from amoeba.proof.compiled_checks import UNKNOWN, as_they_are_ready

CASES = [Case(tokens, 2) for tokens in (1, 2, 3, 4)]
CHECKS = [(case, torch.float32, name) for case in CASES for name in ("kernels", "plain")]  # places 0 to 7


def told(*lines: str | None) -> queue.SimpleQueue:
    found: queue.SimpleQueue = queue.SimpleQueue()
    for line in lines:
        found.put(line)
    return found


def test_what_is_ready_comes_first_and_what_needs_no_kernel_fills_the_time() -> None:
    lines = told("1 0", "3 0", "2 5", "0 5")
    order = as_they_are_ready(CHECKS, time.monotonic() + 60, lines)
    assert [next(order) for _ in range(6)] == [0, 1, 2, 3, 5, 7], "5 and 7 were never told of"
    lines.put("6 5")
    assert next(order) == 6
    lines.put(None)
    assert list(order) == [4], "nobody compiles it any more"


def test_without_the_process_beside_checks_come_one_after_the_other() -> None:
    assert list(as_they_are_ready(CHECKS, time.monotonic() + 60, told(None))) == list(range(8))


def test_when_the_time_is_over_the_first_cases_still_come() -> None:
    began = time.monotonic()
    assert list(as_they_are_ready(CHECKS, began + 0.2, told("0 5", f"1 {UNKNOWN}"))) == [0, 1, 2, 3]
    assert 0.2 <= time.monotonic() - began < 5


@pytest.mark.thorough
def test_the_process_beside_tells_what_launches_no_kernel() -> None:
    """Without a GPU, for one that is named."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = json.dumps([["float32"], ["grouped", "eager"]])
    command = [sys.executable, "-m", compiled_checks.__name__, given, "sm_90"]
    finished = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    assert finished.stdout.split("\n") == ["0 0", "1 0", "2 0", "3 0", ""], "of two cases; then both are known"


def test_cases_that_share_kernels_follow_each_other() -> None:
    checks = [(case, torch.float32, "plain") for case in most_telling_first(cases())]
    places = compiled_checks._in_groups(checks, 2)
    assert places[:2] == [0, 1] and sorted(places) == list(range(len(checks)))
    groups = [tuple(getattr(checks[place][0], name) for name in compiled_checks._COMPILED_FOR) for place in places[2:]]
    changes = sum(before != after for before, after in itertools.pairwise(groups))
    assert changes == len(set(groups)) - 1
