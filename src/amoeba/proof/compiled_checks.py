"""Checks in the order in which what they need is compiled: `amoeba verify` waits for no kernel while a check is ready.

    with second_process("amoeba.proof.compiled_checks", answers=True) as process:       # see `amoeba.jobs`
        results = results_of(device, dtypes, backends, seconds=40, order=order_of(process, dtypes, backends))

A second process goes through the same checks without numbers (see `amoeba.kernels.launch.ahead`), has their kernels and
the parts of the C++ core compiled by the other cores, and says which check is ready. Of those that are ready the most
revealing one is next. Those that launch nothing of ours are ready as soon as that is known, and fill the time.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from amoeba.cpu.build import CoreUnavailable, compiled_library
from amoeba.proof.cases import cases, most_telling_first
from amoeba.proof.conformance import Planned, is_computed_on_cpu, rehearse

# Cores that are left to the checks themselves: threads that wait for one that compiles make small products slow.
OWN_CORES = 2
# Properties of a case that make other kernels; numbers of tokens and of experts, and the routing, rarely do.
_COMPILED_FOR = (
    "activation",
    "bias",
    "hidden",
    "intermediate",
    "recompute",
    "storage",
    "narrow",
    "lora",
    "rank",
    "frozen",
)
_FIRST = 2  # cases by which a backend is known to launch nothing of ours in a dtype


def order_of(
    process: subprocess.Popen[str], dtypes: Sequence[torch.dtype], backends: Sequence[str]
) -> Callable[[list[Planned], float], Iterator[int]]:
    """For `results_of`."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen() -> None:
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError, ValueError):  # it has ended
            with process.stdin as to:
                to.write(json.dumps([[str(dtype).removeprefix("torch.") for dtype in dtypes], list(backends)]) + "\n")
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    return lambda checks, ends: as_they_are_ready(len(checks), ends, lines)


def as_they_are_ready(total: int, ends: float, lines: queue.SimpleQueue[str | None]) -> Iterator[int]:
    """Until the time is over, each place below `total` once. lines: a place that is ready, None behind the last: from
    then on nothing is compiled any more, and the rest follow in their order."""
    left, ready = set(range(total)), list[int]()
    while left and (seconds := ends - time.monotonic()) > 0:
        try:
            line = lines.get(not ready, seconds)
        except queue.Empty:
            if ready and (place := heapq.heappop(ready)) in left:
                left.remove(place)
                yield place
            continue
        if line is None:
            ready = sorted(left)
        else:
            heapq.heappush(ready, int(line))


class _Part(NamedTuple):
    """Of the C++ core; to be submitted to `Workers` as a launch is."""

    key: str

    @property
    def name(self) -> str:
        return f"part {self.key} of the C++ core"

    def compile(self) -> None:
        with suppress(CoreUnavailable):  # the check says so
            compiled_library(self.key)


_PARTS = frozenset(("packed", "node"))  # of the C++ core: experts in the CPU's memory are computed by both


class _Waiting:
    """Which checks wait for what; one that waits for nothing any more is told of."""

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._missing: dict[int, set[Hashable]] = {}
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)
        self._compiled: set[Hashable] = set()

    def add(self, place: int, keys: set[Hashable]) -> None:
        missing = keys - self._compiled
        if not missing:
            self._tell(place)
            return
        self._missing[place] = missing
        for key in missing:
            self._waiting[key].append(place)

    def compiled(self, key: Hashable) -> None:
        """Or given up."""
        self._compiled.add(key)
        for place in self._waiting.pop(key, ()):
            self._missing[place].discard(key)
            if not self._missing[place]:
                self._tell(place)


def _in_groups(checks: list[Planned], first: int) -> list[int]:
    """Behind the first cases those of a group follow each other: their kernels are mostly the same ones."""
    groups: dict[tuple, list[int]] = {}
    for place in range(first, len(checks)):
        case = checks[place][0]
        groups.setdefault(tuple(getattr(case, name) for name in _COMPILED_FOR), []).append(place)
    return list(itertools.chain(*groups.values()))


def main() -> None:
    """Of the second process: imports what it can, and then reads what to do."""
    from amoeba.backends.registry import is_known
    from amoeba.kernels.launch.ahead import (
        DriverModule,
        Launch,
        Workers,
        cores,
        end_with_parent,
        gpu_named,
        noting,
        standing_in,
    )

    end_with_parent()
    os.nice(5)
    line = sys.stdin.readline()
    if not line:  # there is nothing to do, or the command has ended
        return
    names, backends = json.loads(line)
    dtypes = [getattr(torch, name) for name in names]
    checks = list(itertools.product(most_telling_first(cases()), dtypes, backends))
    first = _FIRST * len(dtypes) * len(backends)
    cuda = torch.device("cuda")
    waiting = _Waiting(lambda place: print(place, flush=True))

    def needs(place: int, launches: list[Launch]) -> set[Hashable]:
        _, dtype, name = checks[place]
        return {launch.key for launch in launches} | (_PARTS if is_computed_on_cpu(name, dtype) else set())

    def go_through(place: int) -> int:
        """The number of kernels that it launches."""
        case, dtype, name = checks[place]
        found: list[Launch] = []
        # It does not serve this case, or the host looks at numbers: what it launches after that is compiled when met.
        with noting(found.append), suppress(Exception):
            rehearse(case, name, cuda, dtype)
        for launch in found:
            workers.submit(launch)
        waiting.add(place, needs(place, found))
        workers.go_on()
        return len(found)

    gpu = gpu_named(sys.argv[1] if len(sys.argv) > 1 else None)
    others = max(1, cores() - OWN_CORES)
    with standing_in(gpu), Workers(others, done=lambda launch, ok: waiting.compiled(launch.key)) as workers:
        workers.submit(DriverModule)
        for name in backends:
            is_known(name)
        if any(is_computed_on_cpu(name, dtype) for name in backends for dtype in dtypes):
            for part in sorted(_PARTS):
                workers.submit(_Part(part))
        launched: Counter[tuple] = Counter()
        for place in range(min(first, len(checks))):
            launched[checks[place][1:]] += go_through(place)
        for place in range(first, len(checks)):
            if not launched[checks[place][1:]]:
                waiting.add(place, needs(place, []))
        for place in _in_groups(checks, first):
            if launched[checks[place][1:]]:
                go_through(place)


if __name__ == "__main__":
    main()
