"""Two sequences over the same slots: one after the other, as a batch, and in turns (stream/gpu/turns.py).

Each has a routing of its own, as often repeated as a model's is. Pauses between layers stand for attention; on a GPU
those of two sequences may be at the same time, as that of a few tokens nearly is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.bench.stream import decode
from amoeba.bench.stream.decode import Tokens, fill
from amoeba.bench.stream.place import Place, StreamedMemory
from amoeba.bench.stream.problem import StreamProblem
from amoeba.bench.workload import relative_error
from amoeba.proof.conformance import TOLERANCE
from amoeba.stream.store.store import Store

SEQUENCES = 2
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

    def turns(self, routes: Sequence[Sequence[Tensor]]) -> float:
        """routes: of each sequence. Seconds, of all of it."""
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
    warm = decode.WARM
    routes = [problem.routes(problem.trace(layers, warm + tokens, seed)) for seed in range(SEQUENCES)]
    pairs = [torch.cat(each, dim=1) for each in zip(*routes, strict=True)]
    with closing(place.memory(store, slots, problem.size.experts)) as memory:
        fill(memory)
        place.wait()
        for pause_us in pauses:
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
            ways: dict[str, tuple[Callable[[slice], float], int]] = {
                "alone": (lambda part, both=both: _seconds(both.alone[0], routes[0][part]), 1),
                "one_after_the_other": (
                    lambda part, both=both: both.one_after_the_other([each[part] for each in routes]),
                    SEQUENCES,
                ),
                "batch": (lambda part, both=both: _seconds(both.batch, pairs[part]), SEQUENCES),
                "turns": (lambda part, both=both: both.turns([each[part] for each in routes]), SEQUENCES),
            }
            times: dict[str, float] = {}
            for name, (run, sequences) in ways.items():
                run(slice(0, warm))
                memory.cache.restart_counters()
                seconds = run(slice(warm, None))
                place.check(memory)
                counters = memory.cache.restart_counters()
                times[f"{name}_us"] = seconds / tokens / sequences / layers * 1e6
                times[f"{name}_hit_rate"] = counters.top_hit_rate
            up = counters.per_token(counters.host_bytes + counters.disk_bytes)
            share = None if link is None else up / link / (times["turns_us"] * layers * 1e-6)
            more = {"turns_bytes_up_per_token": up, "turns_share_of_link": share}
            found.append(TurnsMeasurement(*begun, **times, **more))
    return found


def _seconds(tokens: Tokens, routes: Sequence[Tensor]) -> float:
    return tokens.run(routes) * len(routes)
