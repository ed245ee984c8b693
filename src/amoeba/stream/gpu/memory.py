"""Budgets of device and host memory over a store: slots on the device, pinned memory below them, and what fills them.

    memory = DeviceMemory(store, CudaDevice(...), slots=[32] * 48, host_slots=[64] * 48, ids=64 * 8)
    with memory.turn(layer):                                  # one pass at a time uses a layer's slots
        with closing(memory.lend(layer, ids)) as lent:
            for slot_of in lent:                              # {expert: slot}, shown to the device, until the next turn
                compute(memory.layers[layer].slots, slot_of)

`lend` waits on the host for reads from the disk alone. Copies are waited for by the stream that computes, and a slot is
loaded again once the last pass that reads it is done. What comes next is copied while a group computes, where there
are slots for both.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from amoeba.core.errors import bad_value
from amoeba.stream.cache import ExpertCache
from amoeba.stream.gpu.computing import make_computing
from amoeba.stream.gpu.device import Device, Event
from amoeba.stream.gpu.direct_loads import DirectLoads
from amoeba.stream.gpu.expert_reads import ExpertReads
from amoeba.stream.gpu.experts import GpuStreamedExperts
from amoeba.stream.gpu.export import IndexExport
from amoeba.stream.gpu.loader import Loader
from amoeba.stream.gpu.loads import Group, GroupLoads
from amoeba.stream.gpu.replays import GpuReplays
from amoeba.stream.gpu.staging import Staging
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.memory import of_all, show_range
from amoeba.stream.recorder import Recorder
from amoeba.stream.sizes import show_size
from amoeba.stream.store.store import Store
from amoeba.stream.trace import LayerShape


class DeviceMemory:
    """
    layers: the kind of weights of each layer, in the store's order.
    cache:  what is where, and what that cost so far.
    computing: of experts that are missing, on the CPU; None: they are moved.
    waited_seconds: on the host, for reads and for ids.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        slots: Sequence[int],
        host_slots: Sequence[int],
        ids: int,
        miss: str = "move",
        spares: Sequence[int] | None = None,
    ) -> None:
        """spares: of the slots of each layer, those for copies that begin early (early_copies.py)."""
        self.store, self.device = store, device
        self.spares = (0,) * len(slots) if spares is None else tuple(spares)
        self.slots = tuple(whole - spare for whole, spare in zip(slots, self.spares, strict=True))
        self.host_slots = tuple(host_slots)
        shapes = [LayerShape(entry.experts, 1, entry.expert_bytes) for entry in store.layers]
        self.cache = ExpertCache(shapes, self.slots, host=self.host_slots, spares=self.spares)
        self._tiers = [LayerTiers(device, *sizes) for sizes in zip(store.layers, slots, self.host_slots, strict=True)]
        self.export = IndexExport(device, [entry.experts for entry in store.layers], slots, ids)
        self.layers = tuple(
            GpuStreamedExperts(self, layer, weights, of_all(weights, entry.experts))
            for layer, (entry, tiers) in enumerate(zip(store.layers, self._tiers, strict=True))
            for weights in [tiers.weights]
        )
        self.reads = ExpertReads(store, device, self._tiers)
        self.direct = DirectLoads(self)
        self.staging = Staging(self)
        self.loads = GroupLoads(self)
        self._release = weakref.finalize(self, _release, self.loads.loader, device)  # where nobody closes it
        self._shown: list[dict[int, int]] = [{} for _ in shapes]
        self._changed = [False] * len(shapes)  # since all that is there was shown
        self.hits_lately = [False] * len(shapes)  # whether the latest pass found all of its experts
        self._last: list[Event | None] = [None] * len(shapes)  # pass over each layer
        self._replayed: Event | None = None  # the latest replay, which passes over all layers
        self._turns = [threading.RLock() for _ in shapes]
        self._counting = threading.Lock()
        self.waited_seconds, self._closed = 0.0, False
        self._promoted: Event | None = None  # copies of the latest replay that nobody waited for
        self.computing = make_computing(self, miss)
        self.miss = "move" if self.computing is None else miss
        self.replays = GpuReplays(self, ids)
        self.recorder: Recorder | None = None

    @property
    def slot_bytes(self) -> int:
        return sum(tiers.nbytes for tiers in self._tiers)

    @property
    def host_bytes(self) -> int:
        return sum(0 if tiers.blobs is None else tiers.blobs.nbytes for tiers in self._tiers)

    def __str__(self) -> str:
        experts = max(entry.experts for entry in self.store.layers)
        below = f"{show_range(self.host_slots)} in {show_size(self.host_bytes)} of host memory"
        below += "" if self.computing is None else f", {self.computing}"
        there = f"{show_range(self.slots)} of {experts} experts per layer in {show_size(self.slot_bytes)}"
        return f"{there}{self.store.as_codes}, {below}"

    def record(self, recorder: Recorder | None) -> None:
        """Hands every pass that begins from now on to the recorder; each then waits for its ids."""
        self.recorder = recorder

    def check_open(self) -> None:
        if self._closed:
            raise bad_value("experts", "a store that is open", "a closed one", "attach the model again")

    @contextmanager
    def turn(self, layer: int) -> Iterator[None]:
        """A pass over a layer: passes come one after the other, in whatever streams they run."""
        self.check_open()
        with self._turns[layer]:
            self.replays.serving.forget(layer)
            device, last = self.device, self._last[layer]
            if last is not None:
                device.wait(device.compute, last)
                if last is self._replayed:
                    if self._promoted is not None:
                        device.wait(device.compute, self._promoted)
                    self._tiers[layer].read_by(range(self.slots[layer] + self.spares[layer]), last)
            try:
                yield
            finally:
                if self._changed[layer]:
                    self._show_all(layer)
                done = self._last[layer] = device.record(device.compute)
                self._tiers[layer].read_by(self._shown[layer].values(), done)

    def is_complete(self, layer: int) -> bool:
        """All experts are there and shown: nothing of the layer is ever evicted or missing."""
        return len(self._shown[layer]) == self.store.layers[layer].experts

    def wait_for_ids(self, layer: int) -> None:
        began = time.perf_counter()
        self.export.wait(layer)
        with self._counting:
            self.waited_seconds += time.perf_counter() - began

    def count(self, layer: int, tokens: int) -> None:
        if layer == 0:
            with self._counting:
                self.cache.count_tokens(tokens)

    def used(self, layer: int, ids: Iterable[int]) -> None:
        """A pass found these in their slots."""
        ids = list(ids)
        self.replays.serving.forget_who_leaves(layer)
        with self._counting:
            self.cache.use(layer, ids)

    def lend(self, layer: int, ids: Iterable[int]) -> Generator[dict[int, int], None, None]:
        """Distinct experts in groups, each there until the next is asked for. In one group if all have slots; else in
        as many as it takes, those that are there first. Inside a `turn`.

        StoreError where one cannot be read. Then, and when the caller stops half-way, its slots are free again.
        """
        there = self.cache.top(layer).slot_of
        distinct = sorted(ids, key=lambda expert: expert not in there)
        slots = self.slots[layer]
        size = slots if len(distinct) <= slots else max(1, slots // 2)
        parts = [distinct[first : first + size] for first in range(0, len(distinct), size)]
        ahead = len(parts) > 1 and slots > 1
        groups: list[Group] = []
        try:
            for number, part in enumerate(parts):
                if not groups:
                    groups.append(self.loads.begin(layer, part))
                if ahead and number + 1 < len(parts):
                    groups.append(self.loads.begin(layer, parts[number + 1]))
                self.loads.finish(layer, groups[0])
                self._show(layer, groups[0].slot_of)
                yield groups[0].slot_of
                self.loads.end(layer, groups.pop(0))
        finally:
            for group in groups:  # nobody waited for their copies, and they are shown from now on
                self.loads.compute_waits_for(group.copied.values())
                self.loads.end(layer, group)

    def prefetch(self, layer: int, ids: Iterable[int]) -> None:
        """Has experts loaded that will be asked for soon, where the layer has room, after all that is needed now. Those
        that leave for it are hidden from kernels when this returns."""
        with self.turn(layer):
            with self._counting:
                fetch = self.cache.prefetch(layer, ids)
            if not (fetch.from_host or fetch.from_disk):
                return  # there is no room: nobody leaves
            self._changed[layer] = True
            self.loads.expect(layer, fetch)

    def expect_all(self, layer: int) -> None:
        """All experts of the layer will be asked for next."""
        self.prefetch(layer, range(self.store.layers[layer].experts))
        with self.turn(layer):
            self.staging.fill(layer)

    def _show(self, layer: int, slot_of: dict[int, int]) -> None:
        if slot_of != self._shown[layer]:
            self.export.show(layer, slot_of)
            self._shown[layer] = dict(slot_of)

    def _show_all(self, layer: int) -> None:
        """Everything that is there, or whose copy has come to pass unasked."""
        with self._counting:
            table = self.cache.top(layer)
            slot_of = {expert: slot for expert, slot in table.slot_of.items() if not table.is_loading(expert)}
            for expert in list(slot_of):
                event = self.loads.arrived.get((layer, expert))
                if event is None:
                    continue
                if event.done():
                    del self.loads.arrived[layer, expert]
                    self.loads.expected.pop((layer, expert), None)
                else:
                    del slot_of[expert]
            self._changed[layer] = len(slot_of) < len(table.slot_of)
        self._show(layer, slot_of)

    def close(self) -> None:
        """Waits for loads and passes that are under way. No pass may begin after it."""
        if self._closed:
            return
        self._closed = True
        if self.computing is not None:
            self.computing.close()
        self._release()
        self.store.close()
        if self.recorder is not None:
            self.recorder.close()


def _release(loader: Loader, device: Device) -> None:
    loader.close()
    device.close()
