"""Checks in the order in which their kernels are compiled, so that `amoeba verify` never waits for one kernel alone.

    with compiled_beside(dtypes, backends) as order:
        results = verify(device, dtypes, backends, seconds=40, order=order)

A process beside goes through the same checks without numbers (see `amoeba.kernels.launch.ahead`), has their kernels
compiled by all cores, and says which check is ready. Those that launch none of ours fill the time between. Where that
process cannot start, checks come one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from amoeba.proof.cases import cases, most_telling_first
from amoeba.proof.conformance import Planned, rehearse

UNKNOWN = -1  # kernels of a check that cannot be gone through without numbers
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
_FIRST = 2  # cases whose checks all backends come to, whatever time it is


@contextmanager
def compiled_beside(
    dtypes: Sequence[torch.dtype], backends: Sequence[str]
) -> Iterator[Callable[[list[Planned], float], Iterator[int]] | None]:
    told = json.dumps([[str(dtype).removeprefix("torch.") for dtype in dtypes], list(backends)])
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, told],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    except OSError:
        yield None
        return
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield lambda checks, ends: as_they_are_ready(checks, ends, lines)
    finally:
        process.kill()  # its own processes end with it
        process.wait()
        thread.join()


def as_they_are_ready(checks: list[Planned], ends: float, lines: queue.SimpleQueue[str | None]) -> Iterator[int]:
    """lines: "place kernels" of a check that is ready, None behind the last. After the end those of the first cases
    that are left."""
    first = _FIRST * len({(dtype, name) for _, dtype, name in checks})
    left, ready = dict.fromkeys(range(len(checks))), set[int]()
    launches: dict[tuple, list[int]] = defaultdict(list)  # of the first cases, by dtype and backend
    listening = True
    while left and time.monotonic() < ends:
        place = min(ready, default=None)
        if place is None:
            free = (each for each in left if _is_free(launches[checks[each][1:]]) or not listening)
            place = next(free, None)
        if listening:
            try:
                line = lines.get(timeout=0 if place is not None else min(1.0, max(0.0, ends - time.monotonic())))
                listening = line is not None
                if line is not None:
                    number, kernels = map(int, line.split())
                    if number < first:
                        launches[checks[number][1:]].append(kernels)
                    if number in left and kernels != UNKNOWN:
                        ready.add(number)
                    continue  # there may be more
            except queue.Empty:
                pass
        if place is not None:
            del left[place]
            ready.discard(place)
            yield place
    yield from (each for each in left if each < first)


def _is_free(kernels: list[int]) -> bool:
    """Whether such checks launch nothing of ours, by those of the first cases."""
    return len(kernels) == _FIRST and not any(kernels)


def _in_groups(checks: list[Planned], first: int) -> list[int]:
    """Behind the first cases those of a group follow each other: their kernels are mostly the same ones."""
    groups: dict[tuple, list[int]] = {}
    for place in range(first, len(checks)):
        case = checks[place][0]
        groups.setdefault(tuple(getattr(case, name) for name in _COMPILED_FOR), []).append(place)
    return [*range(min(first, len(checks))), *itertools.chain(*groups.values())]


def main() -> None:
    """Of the process beside."""
    from amoeba.backends.registry import is_known
    from amoeba.kernels.launch.ahead import Launch, Workers, end_with_parent, gpu_named, noting, standing_in

    end_with_parent()
    os.nice(5)
    names, backends = json.loads(sys.argv[1])
    dtypes = [getattr(torch, name) for name in names]
    checks = list(itertools.product(most_telling_first(cases()), dtypes, backends))
    first = _FIRST * len(dtypes) * len(backends)
    waits_for: dict[int, set[Hashable]] = {}
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    counts: dict[int, int] = {}
    compiled: set[Hashable] = set()
    seen: dict[tuple, list[int]] = defaultdict(list)

    def tell(place: int) -> None:
        print(place, counts[place], flush=True)

    def done(launch: Launch, ok: bool) -> None:
        compiled.add(launch.key)
        for place in waiting.pop(launch.key, ()):
            waits_for[place].discard(launch.key)
            if not waits_for[place]:
                tell(place)

    gpu = gpu_named(sys.argv[2] if len(sys.argv) > 2 else None)
    with standing_in(gpu), Workers(done=done) as workers:
        for name in backends:
            is_known(name)
        for place in _in_groups(checks, first):
            case, dtype, name = checks[place]
            if place >= first and _is_free(seen[dtype, name]):
                continue
            found: list[Launch] = []
            with noting(found.append):
                try:
                    rehearse(case, name, torch.device("cuda"), dtype)
                    counts[place] = len(found)
                except Exception:  # it does not serve this case, or the host looks at numbers
                    counts[place] = UNKNOWN if found else 0
            if place < first:
                seen[dtype, name].append(counts[place])
            for launch in found:
                workers.submit(launch)
            waits_for[place] = {launch.key for launch in found} - compiled
            for key in waits_for[place]:
                waiting[key].append(place)
            if not waits_for[place]:
                tell(place)
            workers.go_on()


if __name__ == "__main__":
    main()
