"""One token after another through streamed layers, beside the same layers resident: right first, then timed.

The routing repeats itself as often as a model's does (stream/synthetic.py). A setting whose numbers are not those
of the resident layers gets no times. The others are timed in rounds in turns with the resident layers, and every token
comes by once:

    fill ─> compared ─> warm ─> [ahead, timed] [ahead, timed] ... ─> the last token repeated
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from amoeba.bench.workload import relative_error
from amoeba.experts import experts
from amoeba.proof.conformance import TOLERANCE
from amoeba.routing.router import Routing
from amoeba.stream.cache.expert_cache import Counters
from amoeba.stream.store.layers import StoredExperts
from amoeba.stream.store.store import Store
from benchmarks.stream.cache import replay
from benchmarks.stream.place import Place, StreamedMemory
from benchmarks.stream.problem import Part, StreamProblem

# Tokens ahead of the rounds: slots need about 60 to hold what they will hold (a disk takes a second for a dozen). Of
# these the first are compared.
WARM, WARM_FROM_DISK, COMPARED = 64, 32, 8
# Rounds, and tokens of each that are not timed.
ROUNDS, AHEAD = 5, 4
# Runs of the last token, behind the rounds.
HITS = 50
# What a layer may take whose experts come from pinned memory: so many times what has to be, and so many microseconds.
BAR_TIMES, BAR_BYTES_PER_SECOND, BAR_US = 1.10, 55e9, 15.0


@dataclass(frozen=True)
class Setting:
    """slots, host_slots: experts of each layer in slots, and in pinned memory."""

    name: str
    slots: int
    host_slots: int
    is_on_disk: bool = False
    miss: str = "move"  # or cpu, or auto

    @property
    def part(self) -> Part:
        return "disk" if self.is_on_disk else "decode"


@dataclass(frozen=True)
class Round:
    """us, resident_us: of one layer. bar_us: what it may take (`BAR_TIMES`), by its own bytes and resident time."""

    tokens: int
    us: float
    resident_us: float
    hit_rate: float
    bytes_up_per_token: float
    bytes_from_disk_per_token: float
    bar_us: float
    waited_us: float  # on the host, for reads
    link_bytes_per_second: float | None  # just before


@dataclass(frozen=True)
class DecodeMeasurement:
    """us: microseconds of one layer, the median of the rounds. Bytes and hits are of all of them.

    least_us: resident, plus what came over the link at its rate, the best that was seen; over_least, over_bar and
    over_disk are medians of the rounds, each by its own bytes.
    median_us: of the tokens. It is below `us`, since the layers of a synthetic trace choose new experts at the same
    tokens. hits_us: where all experts are there, and only asking is left.
    simulated_hit_rate: of the same trace, by `python -m benchmarks cache`.
    over_disk: the time over that of the bytes from the disk at its rate, the better of one ahead and one behind.
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
    over_bar: float | None = None  # where all experts are in pinned memory or in slots, and misses are moved
    rounds: list[Round] = field(default_factory=list)


class Tokens:
    """Layers, and the memory that a captured step reads and writes."""

    def __init__(
        self, problem: StreamProblem, place: Place, kinds: Sequence, memory: StreamedMemory | None = None
    ) -> None:
        size, self.place, self._kinds = problem.size, place, kinds
        generator = torch.Generator(problem.device).manual_seed(1)
        x_TH = torch.empty(1, size.hidden, dtype=problem.dtype, device=problem.device)
        self._x_TH = x_TH.normal_(generator=generator)
        shape = len(kinds), 1, size.top_k
        self._ids = torch.arange(size.top_k, dtype=torch.int64, device=problem.device).expand(shape).clone()
        self._weight_TK = torch.full((1, size.top_k), 1 / size.top_k, dtype=torch.float32, device=problem.device)
        self.y: list[Tensor] = []  # of each layer, of the latest step
        self.seconds: list[float] = []  # of each token of the latest run
        self._step = place.repeated(self._run_once, memory)

    def _run_once(self) -> None:
        self.y = []
        with torch.no_grad():
            for layer, kind in enumerate(self._kinds):
                routing = Routing(self._ids[layer], self._weight_TK, trusted=True)
                backend = self.place.backend if isinstance(kind, StoredExperts) else "auto"
                self.y.append(experts(self._x_TH, routing, kind, backend=backend))

    def outputs(self, ids: Tensor) -> list[Tensor]:
        self.run([ids])
        return [y_TH.clone() for y_TH in self.y]

    def step(self, ids: Tensor) -> None:
        self._ids.copy_(ids)
        self._step()

    def run(self, routes: Sequence[Tensor]) -> float:
        """Seconds a token."""
        self.place.wait()
        began, ended = time.perf_counter(), list[float]()
        for ids in routes:
            self.step(ids)
            ended.append(time.perf_counter())
        self.place.wait()
        self.seconds = [*map(operator.sub, ended, [began, *ended])]
        return (time.perf_counter() - began) / len(routes)


def fill(memory: StreamedMemory) -> None:
    """As many experts come by as fit, so that the tiers are full."""
    for layer, entry in enumerate(memory.store.layers):
        some = range(min(entry.experts, memory.slots[layer] + memory.host_slots[layer]))
        if hasattr(memory, "pool"):
            with memory.pool.turn(layer):
                for _ in memory.loads.acquire(layer, some):
                    pass
        else:
            for _ in memory.acquire(layer, some, 1):
                pass


def measure(
    problem: StreamProblem,
    place: Place,
    store: Store,
    setting: Setting,
    resident: Tokens,
    tokens: int,
    link: float | None,
    disk: float | None,
) -> DecodeMeasurement:
    """resident: the same layers. link, disk: bytes/s."""
    layers, warm = len(store.layers), WARM_FROM_DISK if setting.is_on_disk else WARM
    rounds = min(ROUNDS, tokens)
    of_round = AHEAD + tokens // rounds
    behind = warm + rounds * of_round
    trace = problem.trace(layers, behind)
    routes = problem.routes(trace)
    parts = [routes[at : at + of_round] for at in range(warm, behind, of_round)]
    with closing(place.memory(store, setting.slots, setting.host_slots, setting.miss)) as memory:
        fill(memory)
        place.wait()
        streamed = Tokens(problem, place, memory.layers, memory)
        worst, same_bits = 0.0, True
        for ids in routes[:COMPARED]:
            found, truth = streamed.outputs(ids), resident.outputs(ids)
            place.check(memory)
            same_bits &= all(map(torch.equal, found, truth))
            worst = max(worst, *map(relative_error, found, truth))
        begun = setting.name, layers, setting.slots, setting.host_slots, rounds * (of_round - AHEAD), worst, same_bits
        if not worst <= TOLERANCE[problem.dtype]:
            reason = f"out of tolerance: {worst:.1e} from the resident layers"
            return DecodeMeasurement(*begun, reason=reason, miss=setting.miss)
        if memory.miss != setting.miss:
            return DecodeMeasurement(*begun, reason="the CPU cannot compute experts here", miss=setting.miss)
        streamed.run(routes[COMPARED:warm])
        timed, every, of_tokens = list[Round](), list[Counters](), list[float]()
        for each, counters in timed_rounds(streamed, resident, memory, place, parts, AHEAD):
            timed.append(each)
            every.append(counters)
            of_tokens += streamed.seconds
        computed_seconds = 0.0 if setting.miss == "move" else memory.computing.seconds
        hits = streamed.run([routes[-1]] * HITS)
        slots, export = memory.slots, None
        if place.has_link and setting.slots < problem.size.experts:
            export = place.export_us(memory, routes[-1][0])
    simulated, is_whole = None, setting.slots >= problem.size.experts  # then nothing misses, and the host runs ahead
    if setting.miss == "move" and not is_whole:
        simulated = replay(trace, slots, warm_up=warm).top_hit_rate
    per_layer, counters = 1e6 / layers, summed(every)
    link = max(
        (rate for rate in (link, *(each.link_bytes_per_second for each in timed)) if rate is not None), default=None
    )
    least = [each.resident_us + (0.0 if link is None else each.bytes_up_per_token / link * per_layer) for each in timed]
    up, from_disk = (
        counters.per_token(each) for each in (counters.host_bytes + counters.disk_bytes, counters.disk_bytes)
    )
    has_bar = place.has_link and not setting.is_on_disk and setting.miss == "move"
    return DecodeMeasurement(
        *begun,
        us=statistics.median(each.us for each in timed),
        hits_us=hits * per_layer,
        least_us=statistics.median(least),
        over_least=statistics.median(each.us / of_it for each, of_it in zip(timed, least, strict=True)),
        hit_rate=counters.top_hit_rate,
        bytes_up_per_token=up,
        bytes_down_per_token=counters.per_token(counters.written_bytes),
        bytes_from_disk_per_token=from_disk,
        share_of_link=None
        if link is None or not up
        else up / link * per_layer / statistics.fmean(each.us for each in timed),
        over_disk=None if disk is None else _over_disk(timed, disk, per_layer),
        waited_us=statistics.fmean(each.waited_us for each in timed),
        export_us=export,
        miss=setting.miss,
        computed_per_token=counters.per_token(counters.computed),
        computed_us=computed_seconds * 1e6 or None,
        median_us=None if is_whole else statistics.median(of_tokens) * per_layer,
        simulated_hit_rate=simulated,
        over_bar=statistics.median(each.us / each.bar_us for each in timed) if has_bar else None,
        rounds=timed,
    )


def timed_rounds(
    streamed: Tokens,
    resident: Tokens,
    memory: StreamedMemory,
    place: Place,
    parts: Sequence[Sequence[Tensor]],
    ahead: int,
) -> Iterator[tuple[Round, Counters]]:
    """Each round times the same part of a trace through resident layers and streamed ones, and goes on where the one
    before it ended. A part that came by before would be no fair one: the cache has counted its favourites. With half of
    128 experts in slots the hits go from 88.8 to 89.9 % where a trace of 152 tokens is repeated, and a layer is 8 %
    faster by that alone.

    ahead: tokens of each part that are not timed, behind which link and host are as they are within a run."""
    per_layer = 1e6 / len(memory.store.layers)
    for routes in parts:
        first, rest = routes[:ahead], routes[ahead:]
        link = place.link_rate()
        resident.run(first)
        resident_us = resident.run(rest) * per_layer
        streamed.run(first)
        memory.cache.restart_counters()
        waited = memory.waited_seconds
        us = streamed.run(rest) * per_layer
        place.check(memory)
        counters = memory.cache.restart_counters()
        up = counters.per_token(counters.host_bytes + counters.disk_bytes)
        bar = BAR_TIMES * (resident_us + up / BAR_BYTES_PER_SECOND * per_layer) + BAR_US
        from_disk = counters.per_token(counters.disk_bytes)
        waited = (memory.waited_seconds - waited) / len(rest) * per_layer
        yield Round(len(rest), us, resident_us, counters.top_hit_rate, up, from_disk, bar, waited, link), counters


def summed(every: Sequence[Counters]) -> Counters:
    found = [asdict(each) for each in every]
    layers = zip(*(each.pop("misses_of_layer") for each in found), strict=True)
    return Counters(
        **{name: sum(each[name] for each in found) for name in found[0]}, misses_of_layer=[*map(sum, layers)]
    )


def _over_disk(rounds: Sequence[Round], disk: float, per_layer: float) -> float | None:
    """None where nothing was read."""
    read = [each for each in rounds if each.bytes_from_disk_per_token]
    if not read:
        return None
    return statistics.median(each.us / (each.bytes_from_disk_per_token / disk * per_layer) for each in read)
