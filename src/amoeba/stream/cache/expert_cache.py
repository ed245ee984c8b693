"""Experts on two tiers over a disk: for a layer's ids, what is on the top tier, what has to come, and from where.

cache = ExpertCache(layers, top=[32] * 48, host=[64] * 48)     # slots per layer
fetch = cache.request(layer, ids)
    fetch.hits, fetch.waiting      # {expert: slot}: there; on their way since earlier
    fetch.writes                   # (expert, slot, host_slot): copy down, before anything is loaded into that slot
    fetch.from_host                # (expert, host_slot, slot): copy up
    fetch.from_disk                # (expert, host_slot or None, slot): read into the host slot, then copy up
cache.arrived(layer, expert)       # a read or a write has reached its host slot
cache.loaded(layer, expert)        # its copy is on the top tier
cache.release(layer, ids)

Without a disk (`host=None`) all experts are in host memory, which then has no slots: the host slot is the expert's
number. With `host=[0] * layers` there is no tier between the disk and the top, as on a machine without a GPU.

**The tiers hold different experts where they can.** A host slot that is needed is taken from an expert that the top
tier has too, the hottest first, because it will be there for long; then from the coldest. What leaves the top tier and
has no copy on the host is written back. In replayed traces (dev/log/streaming.md) this reads 15 to 45 % less from
the disk than a host tier that keeps what passed through it, for copies downwards, in the direction in which the link is
idle. Never keeping two copies would read a little less still, but write back at every eviction, up to three times as
often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from amoeba.core.errors import bad_value
from amoeba.stream.cache.slot_table import LFRU, Plan, Policy, SlotTable
from amoeba.stream.cache.trace import LayerShape


class Fetch(NamedTuple):
    hits: dict[int, int]
    waiting: dict[int, int]
    writes: list[tuple[int, int, int]]
    from_host: list[tuple[int, int, int]]
    from_disk: list[tuple[int, int | None, int]]


@dataclass
class Counters:
    """Of experts that requests asked for, each counted once per request. Bytes are of prefetches too."""

    tokens: int = 0
    requested: int = 0
    hits: int = 0
    waited: int = 0  # on their way when they were asked for, by a prefetch or another sequence's request
    from_host: int = 0
    from_disk: int = 0
    computed: int = 0  # on the CPU, and not moved
    host_bytes: int = 0  # host -> top, of experts that were on the host
    disk_bytes: int = 0  # disk -> top
    written_bytes: int = 0  # top -> host
    misses_of_layer: list[int] = field(default_factory=list)

    @property
    def top_hit_rate(self) -> float:
        return self.hits / max(1, self.requested)

    @property
    def host_hit_rate(self) -> float:
        """Of what was not on the top tier."""
        return self.from_host / max(1, self.from_host + self.from_disk)

    def per_token(self, amount: int) -> float:
        return amount / max(1, self.tokens)

    def floor_seconds(self, link: float, disk: float) -> float:
        """No token can be faster than this: bytes over bandwidths (bytes/s), the slower of the two."""
        up = self.per_token(self.host_bytes + self.disk_bytes) / link
        return max(up, self.per_token(self.written_bytes) / link, self.per_token(self.disk_bytes) / disk)


class _CopiesFirst(Policy):
    """Who leaves the host first: what the top tier has too, the hottest first; then the coldest."""

    def __init__(self, policy: Policy, top: SlotTable) -> None:
        self._policy, self._top = policy, top

    def begin(self, experts: int) -> None:
        """The layer's policy has begun, with its top tier."""

    def use(self, ids: Collection[int]) -> None:
        """The layer's policy hears of it from the top tier."""

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        if not count:
            return []
        copies = [expert for expert in candidates if expert in self._top]
        hottest = self._policy.coldest(copies, len(copies))[::-1][:count]
        alone = [expert for expert in candidates if expert not in self._top]
        return hottest + self._policy.coldest(alone, count - len(hottest))


class _Layer:
    def __init__(self, shape: LayerShape, top: int, host: int | None, policy: type[Policy]) -> None:
        self.anew = partial(_Layer, shape, top, host, policy)
        self.bytes = shape.expert_bytes
        order = policy()
        self.top = SlotTable(top, shape.experts, order)
        self.host = None if host is None else SlotTable(host, shape.experts, _CopiesFirst(order, self.top))
        self.rising: set[int] = set()  # held on the host until they are on the top tier
        self.falling: set[int] = set()  # being written back


class ExpertCache:
    """top, host: slots of each layer on each tier (`share_budget`)."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        top: Sequence[int],
        host: Sequence[int] | None = None,
        policy: type[Policy] = LFRU,
    ) -> None:
        for name, slots in (("top", top), ("host", host)):
            if slots is not None and len(slots) != len(layers):
                raise bad_value(name, f"slots of {len(layers)} layers", len(slots), "give one number per layer")
        hosts = [None] * len(layers) if host is None else host
        self._layers = [_Layer(*each, policy) for each in zip(layers, top, hosts, strict=True)]
        self.counters = Counters(misses_of_layer=[0] * len(layers))

    def top(self, layer: int) -> SlotTable:
        return self._layers[layer].top

    def request(
        self, layer: int, ids: Iterable[int], computed: Sequence[int] = (), passing: Collection[int] = ()
    ) -> Fetch:
        """What `SlotTable.request` refuses, this does, with nothing changed. computed: missing, and computed where they
        are: nothing is fetched for them. passing: are read from the disk without a host slot."""
        here, counters = self._layers[layer], self.counters
        plan = here.top.request(ids, computed)
        present = len(plan.hits) + len(plan.waiting)
        counters.requested += present + len(plan.loads) + len(computed)
        counters.computed += len(computed)
        counters.misses_of_layer[layer] += len(computed)
        counters.hits += len(plan.hits)
        counters.waited += len(plan.waiting)
        if not plan.loads:
            return Fetch(plan.hits, plan.waiting, [], [], [])
        counters.misses_of_layer[layer] += len(plan.loads)
        fetch = self._fetch(here, plan, passing)
        counters.from_host += len(fetch.from_host)
        counters.from_disk += len(fetch.from_disk)
        return fetch

    def use(self, layer: int, ids: Sequence[int]) -> None:
        """Of a pass that found these distinct experts: a request that is released at once."""
        here, counters = self._layers[layer], self.counters
        if not here.top.use(ids):
            self.request(layer, ids)
            self.release(layer, ids)
        else:
            counters.requested += len(ids)
            counters.hits += len(ids)

    def prefetch(self, layer: int, ids: Iterable[int]) -> Fetch:
        """The same for experts that are only expected: not held, as many as there is room for without evicting what the
        layer's latest request used. To be loaded after everything that a request asked for."""
        here = self._layers[layer]
        plan = here.top.prefetch(ids)
        return self._fetch(here, plan)

    def not_written_back(self, layer: int) -> Collection[int]:
        """Those that leave the top tier without a copy downwards."""
        host, experts = self._layers[layer].host, self._layers[layer].top.experts
        return range(experts) if host is None or not host.slots else host.slot_of.keys()

    def on_host(self, layer: int) -> list[tuple[int, int]]:
        """(expert, host slot), of those that are whole there."""
        host = self._layers[layer].host
        if host is None:
            return [(expert, expert) for expert in range(self._layers[layer].top.experts)]
        return [(expert, slot) for expert, slot in host.slot_of.items() if not host.is_loading(expert)]

    def host_slot(self, layer: int, expert: int) -> int | None:
        """Where it is whole on the host."""
        host = self._layers[layer].host
        if host is None:
            return expert
        return None if host.is_loading(expert) else host.slot_of.get(expert)

    def is_on_disk_alone(self, layer: int, expert: int) -> bool:
        """Neither on a tier nor on its way to one."""
        here = self._layers[layer]
        return here.host is not None and expert not in here.host and expert not in here.top

    def begin_anew(self, layer: int) -> None:
        """It is only on the disk, nothing of it is held, and its uses are forgotten."""
        self._layers[layer] = self._layers[layer].anew()

    def waves(self, layer: int, ids: Iterable[int]) -> list[list[int]]:
        return self._layers[layer].top.waves(ids)

    def arrived(self, layer: int, expert: int) -> None:
        """Its read from the disk, or its copy downwards, is whole in its host slot."""
        here = self._layers[layer]
        if here.host is None:
            raise RuntimeError(f"expert {expert} arrived on the host, where all experts are")
        here.host.loaded(expert)
        here.falling.discard(expert)

    def loaded(self, layer: int, expert: int) -> None:
        """Its copy on the top tier is whole, and with it what was read into its host slot for that."""
        here = self._layers[layer]
        here.top.loaded(expert)
        if here.host is not None and expert in here.rising:
            if here.host.is_loading(expert) and expert not in here.falling:
                here.host.loaded(expert)
            self._let_go(here.host, here, expert)

    def failed(self, layer: int, expert: int) -> None:
        """It could not be read or copied up, and nothing writes into its slots any more: they are free, on both tiers
        except for a host copy that is complete or still being written back, and it is not held."""
        here = self._layers[layer]
        here.top.failed(expert)
        if here.host is not None and expert in here.rising:
            if here.host.is_loading(expert) and expert not in here.falling:
                here.host.failed(expert)
                here.rising.discard(expert)
            else:
                self._let_go(here.host, here, expert)

    def dropped(self, layer: int, expert: int) -> None:
        """It was to be written back and was not: its host slot is free. A copy up that waited for it has `failed` too,
        before or after."""
        here = self._layers[layer]
        if here.host is None or expert not in here.falling:
            raise RuntimeError(f"expert {expert} was dropped, but was not being written back")
        here.host.failed(expert)
        here.falling.discard(expert)
        here.rising.discard(expert)

    def release(self, layer: int, ids: Iterable[int]) -> None:
        self._layers[layer].top.release(ids)

    def count_tokens(self, tokens: int) -> None:
        self.counters.tokens += tokens

    def count_hits(self, layer: int, ids: int) -> None:
        """For a pass over a layer with all its experts, which asked for this many without naming them."""
        most = min(ids, self._layers[layer].top.experts)
        self.counters.requested += most
        self.counters.hits += most

    def restart_counters(self) -> Counters:
        """Those until now; the next are counted from 0, as after a prefill or a warm-up."""
        until_now, self.counters = self.counters, Counters(misses_of_layer=[0] * len(self._layers))
        return until_now

    def _fetch(self, here: _Layer, plan: Plan, passing: Collection[int] = ()) -> Fetch:
        if here.host is None:
            self.counters.host_bytes += here.bytes * len(plan.loads)
            return Fetch(plan.hits, plan.waiting, [], [(expert, expert, slot) for expert, slot in plan.loads], [])
        there = here.host.request_some(expert for expert, _ in plan.loads if expert not in passing)
        host_slots = there.hits | there.waiting
        read_into = dict(there.loads)
        here.rising.update(host_slots, read_into)
        from_host = [(expert, host_slots[expert], slot) for expert, slot in plan.loads if expert in host_slots]
        from_disk = [(each, read_into.get(each), slot) for each, slot in plan.loads if each not in host_slots]
        self.counters.host_bytes += here.bytes * len(from_host)
        self.counters.disk_bytes += here.bytes * len(from_disk)
        return Fetch(plan.hits, plan.waiting, self._write_back(here.host, here, plan), from_host, from_disk)

    def _write_back(self, host: SlotTable, here: _Layer, plan: Plan) -> list[tuple[int, int, int]]:
        left = {expert: slot for expert, (_, slot) in zip(plan.evicted, plan.loads, strict=False) if expert not in host}
        if not left:
            return []
        down = host.request_some(left)
        host.release(expert for expert, _ in down.loads)
        here.falling.update(expert for expert, _ in down.loads)
        self.counters.written_bytes += here.bytes * len(down.loads)
        return [(expert, left[expert], host_slot) for expert, host_slot in down.loads]

    @staticmethod
    def _let_go(host: SlotTable, here: _Layer, expert: int) -> None:
        here.rising.discard(expert)
        host.release([expert])
