"""Two sequences over the same slots: one after the other, as a batch, and in turns (stream/gpu/interleaved.py).

Each has a routing of its own, as often repeated as a model's is. Pauses between layers stand for attention; on a GPU
those of two sequences may be at the same time, as that of a few tokens nearly is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amoeba.bench.workload import relative_error
from amoeba.proof.conformance import TOLERANCE
from amoeba.stream.store.store import Store
from benchmarks.stream.decode import Tokens, fill
from benchmarks.stream.place import Place, StreamedMemory
from benchmarks.stream.problem import StreamProblem

SEQUENCES = 2
WAYS = "alone", "one_after_the_other", "batch", "turns"
WARM = 32  # tokens of each way, ahead of those that are timed
_COMPARED = 2  # steps of each


@dataclass(frozen=True)
class TurnsMeasurement:
    """Microseconds of one layer for one token of one of the sequences; hit rates of the same runs."""

    slots: int
    layers: int
    tokens: int  # of each sequence
    pause_us: float
    error: float
    same_bits: bool
    reason: str | None = None  # why it has no times
    alone_us: float | None = None  # one sequence, and no other
    one_after_the_other_us: float | None = None
    batch_us: float | None = None
    turns_us: float | None = None
    alone_hit_rate: float | None = None
    one_after_the_other_hit_rate: float | None = None
    batch_hit_rate: float | None = None
    turns_hit_rate: float | None = None
    turns_bytes_up_per_token: float | None = None
    turns_share_of_link: float | None = None


class _Sequences:
    """Both of them, with a step of each alone, one of both as a batch, and steps in turns."""

    def __init__(self, problem: StreamProblem, place: Place, memory: StreamedMemory, pause_us: float) -> None:
        kinds = memory.layers
        self._place = place
        self.alone = [Tokens(problem, place, kinds, memory, pause_us, seed=1 + number) for number in range(SEQUENCES)]
        self.batch = Tokens(problem, place, kinds, memory, pause_us, rows=SEQUENCES)
        self.parted = [
            Tokens(problem, place, kinds, memory, pause_us, seed=1 + number, captured=False)
            for number in range(SEQUENCES)
        ]
        self._in_turns = place.in_turns([tokens.run_once for tokens in self.parted], memory)

    def run(self, name: str, routes: Sequence[Sequence[Tensor]]) -> float:
        """routes: of each sequence, of which one alone takes the first. Seconds, of all of it."""
        if name == "turns":
            return self.turns(routes)
        if name == "one_after_the_other":
            return self.one_after_the_other(routes)
        pairs = [torch.cat(each, dim=1) for each in zip(*routes, strict=True)]
        tokens, own = (self.alone[0], routes[0]) if name == "alone" else (self.batch, pairs)
        return tokens.run(own) * len(own)

    def turns(self, routes: Sequence[Sequence[Tensor]]) -> float:
        feeds = [self._feed(tokens, ids) for tokens, ids in zip(self.parted, routes, strict=True)]
        return self._timed(lambda: self._in_turns(feeds, len(routes[0])))

    def one_after_the_other(self, routes: Sequence[Sequence[Tensor]]) -> float:
        def run() -> None:
            for each in zip(*routes, strict=True):
                for tokens, ids in zip(self.alone, each, strict=True):
                    tokens.step(ids)

        return self._timed(run)

    def _timed(self, run: Callable[[], None]) -> float:
        self._place.wait()
        began = time.perf_counter()
        run()
        self._place.wait()
        return time.perf_counter() - began

    @staticmethod
    def _feed(tokens: Tokens, routes: Sequence[Tensor]) -> Callable[[], None]:
        left = iter(routes)
        return lambda: tokens.feed(next(left))


def measure(
    problem: StreamProblem,
    place: Place,
    store: Store,
    slots: int,
    resident: Callable[[Tensor, int], list[Tensor]],
    pauses: Sequence[float],
    tokens: int,
    link: float | None,
) -> list[TurnsMeasurement]:
    """resident: outputs of the same layers for a token of one of the sequences. pauses: one measurement with each."""
    layers, found = len(store.layers), []
    with closing(place.memory(store, slots, problem.size.experts)) as memory:
        fill(memory)
        place.wait()
        for number_of_pause, pause_us in enumerate(pauses):
            # what came by before would be hit more often: its favourites are known
            seeds = range(number_of_pause * SEQUENCES, (number_of_pause + 1) * SEQUENCES)
            whole = [problem.routes(problem.trace(layers, len(WAYS) * (WARM + tokens), seed)) for seed in seeds]
            routes = [each[:WARM] for each in whole]
            both = _Sequences(problem, place, memory, pause_us)
            worst, same_bits = 0.0, True
            for last in range(1, _COMPARED + 1):
                both.turns([each[:last] for each in routes])
                place.check(memory)
                for number, each in enumerate(both.parted):
                    truth = resident(routes[number][last - 1], number)
                    same_bits &= all(map(torch.equal, each.y, truth))
                    worst = max(worst, *map(relative_error, each.y, truth))
            begun = slots, layers, tokens, pause_us, worst, same_bits
            if not worst <= TOLERANCE[problem.dtype]:
                found.append(TurnsMeasurement(*begun, reason=f"out of tolerance: {worst:.1e} from the resident layers"))
                continue
            times: dict[str, Any] = {}
            for way, name in enumerate(WAYS):
                first = way * (WARM + tokens)
                both.run(name, [each[first : first + WARM] for each in whole])
                memory.cache.restart_counters()
                seconds = both.run(name, [each[first + WARM :][:tokens] for each in whole])
                place.check(memory)
                counters = memory.cache.restart_counters()
                sequences = 1 if name == "alone" else SEQUENCES
                times[f"{name}_us"] = seconds / tokens / sequences / layers * 1e6
                times[f"{name}_hit_rate"] = counters.top_hit_rate
            up = counters.per_token(counters.host_bytes + counters.disk_bytes)
            times["turns_bytes_up_per_token"] = up
            if link is not None:
                times["turns_share_of_link"] = up / link / (times["turns_us"] * layers * 1e-6)
            found.append(TurnsMeasurement(*begun, **times))
    return found
