"""One token after another through streamed layers, beside the same layers resident: right first, then timed.

The routing repeats itself as often as a model's does (stream/synthetic.py). A setting whose numbers are not those of
the resident layers gets no times.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amoeba.bench.stream.place import Place, StreamedMemory
from amoeba.bench.stream.problem import Part, StreamProblem
from amoeba.bench.stream.waits import WaitRecord, Waits
from amoeba.bench.workload import relative_error
from amoeba.experts import experts
from amoeba.proof.conformance import TOLERANCE
from amoeba.routing import Routing
from amoeba.stream.simulate import replay
from amoeba.stream.store.store import Store
from amoeba.weights import ExpertWeights

# Tokens ahead of those that are timed, tokens that are compared, and runs of one token whose experts are all there;
# tokens behind all that, whose waits are written down question by question.
WARM, COMPARED, HITS, NOTED = 32, 8, 50, 16


@dataclass(frozen=True)
class Setting:
    """slots, host_slots: experts of each layer in slots, and in pinned memory."""

    name: str
    slots: int
    host_slots: int
    is_on_disk: bool = False
    miss: str = "move"  # or cpu, or auto
    pause_us: float = 0.0  # between layers, as attention would take
    early: bool = False  # copies begin ahead of the question, by the next layer's router

    @property
    def part(self) -> Part:
        return "disk" if self.is_on_disk else "prefetch" if self.pause_us else "decode"


@dataclass(frozen=True)
class DecodeMeasurement:
    """us: microseconds of one layer. least_us: resident, plus what came over the link at its rate.

    median_us: of the tokens: below `us` where a few of them took long. hits_us: where all experts are there, and only
    asking is left.
    simulated_hit_rate: of the same trace, by `amoeba stream simulate`.
    over_disk: the time over that of the bytes from the disk at its rate, the better of one ahead and one behind.
    waits: what questions of some further tokens waited for, and how long each part of that took (waits.py).
    """

    setting: str
    layers: int
    slots: int
    host_slots: int
    tokens: int
    error: float
    same_bits: bool
    reason: str | None = None  # why it has no times
    us: float | None = None
    hits_us: float | None = None
    least_us: float | None = None
    over_least: float | None = None
    hit_rate: float | None = None
    bytes_up_per_token: float | None = None
    bytes_down_per_token: float | None = None
    bytes_from_disk_per_token: float | None = None
    share_of_link: float | None = None
    over_disk: float | None = None
    waited_us: float | None = None  # on the host, for reads
    export_us: float | None = None
    miss: str = "move"
    computed_per_token: float | None = None  # experts that the CPU computed
    computed_us: float | None = None  # of one, lately
    median_us: float | None = None
    simulated_hit_rate: float | None = None
    pause_us: float = 0.0
    early_per_token: float | None = None  # copies that began early
    early_recall: float | None = None  # of what would have missed
    waits: list[Waits] = field(default_factory=list)


class Tokens:
    """Layers, and the memory that a captured step reads and writes. rows: tokens of a step. captured: by itself; else
    `run_once` is, by someone else."""

    def __init__(
        self,
        problem: StreamProblem,
        place: Place,
        kinds: Sequence,
        memory: StreamedMemory | None = None,
        pause_us: float = 0.0,
        rows: int = 1,
        seed: int = 1,
        captured: bool = True,
    ) -> None:
        size, self.place, self._kinds, self._pause_us = problem.size, place, kinds, pause_us
        generator = torch.Generator(problem.device).manual_seed(seed)
        x_TH = torch.empty(rows, size.hidden, dtype=problem.dtype, device=problem.device)
        self._x_TH = x_TH.normal_(generator=generator)
        shape = len(kinds), rows, size.top_k
        self._ids = torch.arange(size.top_k, dtype=torch.int64, device=problem.device).expand(shape).clone()
        self._weight_TK = torch.full((rows, size.top_k), 1 / size.top_k, dtype=torch.float32, device=problem.device)
        self.y: list[Tensor] = []  # of each layer, of the latest step
        self.median = 0.0  # seconds of a token of the latest run
        self._step = place.repeated(self.run_once, memory) if captured else None

    def run_once(self) -> None:
        self.y = []
        with torch.no_grad():
            for layer, kind in enumerate(self._kinds):
                routing = Routing(self._ids[layer], self._weight_TK, trusted=True)
                backend = self.place.backend if isinstance(kind, ExpertWeights) else "auto"
                self.y.append(experts(self._x_TH, routing, kind, backend=backend))
                if self._pause_us:
                    self.place.pause(self._pause_us)

    def outputs(self, ids: Tensor, hint: Tensor | None = None) -> list[Tensor]:
        self.run([ids], [] if hint is None else [hint])
        return [y_TH.clone() for y_TH in self.y]

    def feed(self, ids: Tensor) -> None:
        self._ids.copy_(ids)

    def step(self, ids: Tensor) -> None:
        assert self._step is not None
        self.feed(ids)
        self._step()

    def run(self, routes: Sequence[Tensor], hints: Sequence[Tensor] = ()) -> float:
        """Seconds a token. hints: x_TH of each; none: it stays as it is."""
        self.place.wait()
        began, ended = time.perf_counter(), list[float]()
        for number, ids in enumerate(routes):
            if hints:
                self._x_TH.copy_(hints[number])
            self.step(ids)
            ended.append(time.perf_counter())
        self.place.wait()
        self.median = statistics.median(map(operator.sub, ended, [began, *ended]))
        return (time.perf_counter() - began) / len(routes)


def fill(memory: StreamedMemory) -> None:
    """As many experts come by as fit, so that the tiers are full."""
    for layer, entry in enumerate(memory.store.layers):
        some = range(min(entry.experts, memory.slots[layer] + memory.host_slots[layer]))
        if hasattr(memory, "turn"):
            with memory.turn(layer):
                for _ in memory.lend(layer, some):
                    pass
        else:
            for _ in memory.lend(layer, some, 1):
                pass


def measure(
    problem: StreamProblem,
    place: Place,
    store: Store,
    setting: Setting,
    resident: Callable[..., list[Tensor]],
    resident_us: float,
    tokens: int,
    link: float | None,
    disk: float | None,
) -> DecodeMeasurement:
    """resident: outputs of the same layers. link, disk: bytes/s."""
    layers = len(store.layers)
    trace = problem.trace(layers, WARM + tokens)
    routes = problem.routes(trace)
    hints: Sequence[Any] = problem.hints(routes) if setting.pause_us else ()
    with closing(place.memory(store, setting.slots, setting.host_slots, setting.miss, setting.early)) as memory:
        fill(memory)
        place.wait()
        if setting.early:
            memory.replays.predict_by(problem.routers(layers))
        streamed = Tokens(problem, place, memory.layers, memory, setting.pause_us)
        worst, same_bits = 0.0, True
        for ids, hint in zip(routes[-COMPARED:], hints[-COMPARED:] or [None] * COMPARED, strict=False):
            found, truth = streamed.outputs(ids, hint), resident(ids, hint)
            place.check(memory)
            same_bits &= all(map(torch.equal, found, truth))
            worst = max(worst, *map(relative_error, found, truth))
        begun = setting.name, layers, setting.slots, setting.host_slots, tokens, worst, same_bits
        if not worst <= TOLERANCE[problem.dtype]:
            reason = f"out of tolerance: {worst:.1e} from the resident layers"
            return DecodeMeasurement(*begun, reason=reason, miss=setting.miss)
        if memory.miss != setting.miss:
            return DecodeMeasurement(*begun, reason="the CPU cannot compute experts here", miss=setting.miss)
        streamed.run(routes[:WARM], hints[:WARM])
        memory.cache.restart_counters()
        waited = memory.waited_seconds
        seconds = streamed.run(routes[WARM:], hints[WARM:])
        median = streamed.median
        place.check(memory)
        counters, waited = memory.cache.restart_counters(), memory.waited_seconds - waited
        computed_seconds = 0.0 if setting.miss == "move" else memory.computing.seconds
        hits = streamed.run([routes[-1]] * HITS)
        slots, export = memory.slots, None
        waits = _waits_of(streamed, memory, routes[WARM : WARM + NOTED], link) if place.has_link else []
        if place.has_link and setting.slots < problem.size.experts:
            export = place.export_us(memory, routes[-1][0])
    simulated = None if setting.miss != "move" else replay(trace, slots, warm_up=WARM).top_hit_rate
    per_layer, up = 1e6 / layers, counters.per_token(counters.host_bytes + counters.disk_bytes)
    from_disk = counters.per_token(counters.disk_bytes)
    least = resident_us + (0.0 if link is None else up / link * per_layer)
    return DecodeMeasurement(
        *begun,
        us=seconds * per_layer,
        hits_us=hits * per_layer,
        least_us=least,
        over_least=seconds * per_layer / least,
        hit_rate=counters.top_hit_rate,
        bytes_up_per_token=up,
        bytes_down_per_token=counters.per_token(counters.written_bytes),
        bytes_from_disk_per_token=from_disk,
        share_of_link=None if link is None or not up else up / link / seconds,
        over_disk=None if disk is None or not from_disk else seconds / (from_disk / disk),
        waited_us=waited / tokens * per_layer,
        export_us=export,
        miss=setting.miss,
        computed_per_token=counters.per_token(counters.computed),
        computed_us=computed_seconds * 1e6 or None,
        median_us=median * per_layer,
        simulated_hit_rate=simulated,
        pause_us=setting.pause_us,
        early_per_token=counters.per_token(counters.prefetched) if setting.early else None,
        early_recall=counters.prefetch_recall if setting.early else None,
        waits=waits,
    )


def _waits_of(streamed: Tokens, memory: StreamedMemory, routes: Sequence[Tensor], link: float | None) -> list[Waits]:
    record = WaitRecord(memory, link)
    try:
        for ids in routes:
            streamed.run([ids])  # waits for the GPU, so that all times are whole
            record.collect()
    finally:
        record.close()
    return record.kinds()
