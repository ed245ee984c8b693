"""Budgets of device and host memory over a store: slots on the device, pinned memory below them, and what fills them.

memory = DeviceMemory(store, CudaDevice(...), slots=[32] * 48, host_slots=[64] * 48, ids=64 * 8)
with memory.pool.turn(layer):                             # one pass at a time uses a layer's slots
    with closing(memory.loads.acquire(layer, ids)) as acquired:
        for slot_of in acquired:                          # {expert: slot}, shown to the device, until the next turn
            compute(memory.layers[layer].slots, slot_of)
memory.replays                                            # passes inside of CUDA graphs
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from amoeba.stream.cache.trace import Recorder
from amoeba.stream.cpu.memory import show_range
from amoeba.stream.experts import ExpertsInSlots, of_all
from amoeba.stream.gpu.device import Device
from amoeba.stream.gpu.graphs import GpuReplays
from amoeba.stream.gpu.host_compute import make_host_compute
from amoeba.stream.gpu.loader import GroupLoads, Loader
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.reads import DirectLoads, ExpertReads
from amoeba.stream.gpu.serving import Serving
from amoeba.stream.sizes import show_size
from amoeba.stream.store.store import Store


@dataclass(frozen=True, eq=False)
class GpuStreamedExperts(ExpertsInSlots):
    """Experts of one layer of which a few are in slots on a GPU: the kind of weights "streamed-gpu".

    replays: passes of a few tokens may be captured (`amoeba.core.graph_replays`).
    """

    memory: DeviceMemory = field(repr=False)

    placement = "streamed-gpu"

    @property
    def replays(self) -> GpuReplays:
        return self.memory.replays


class DeviceMemory:
    """
    layers: the kind of weights of each layer, in the store's order.
    pool:   slots and what is in them; cache: what is where, and what that cost so far.
    loads:  what fills slots; reads, direct: from the disk.
    computing: of experts that are missing, on the CPU; None: they are moved.
    hits_lately: of each layer, whether its latest pass found all of its experts.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        slots: Sequence[int],
        host_slots: Sequence[int],
        ids: int,
        miss: str = "move",
    ) -> None:
        self.store, self.device = store, device
        self.pool = pool = SlotPool(store, device, slots, host_slots, ids)
        self.slots, self.host_slots, self.cache = pool.slots, pool.host_slots, pool.cache
        self.layers = tuple(
            GpuStreamedExperts(self, layer, weights, of_all(weights, entry.experts))
            for layer, (entry, tiers) in enumerate(zip(store.layers, pool.tiers, strict=True))
            for weights in [tiers.weights]
        )
        self.reads = ExpertReads(pool)
        self.direct = DirectLoads(pool, self.reads)
        self.loads = GroupLoads(pool, self.reads)
        self._release = weakref.finalize(self, _release, self.loads.loader, device)  # if it is never closed
        self.hits_lately = [False] * len(pool.slots)
        self.computing = make_host_compute(pool, miss)
        self.miss = "move" if self.computing is None else miss
        self.replays = GpuReplays(pool, self.loads, Serving(pool, self.loads, self.direct, self.computing))

    @property
    def slot_bytes(self) -> int:
        return self.pool.slot_bytes

    @property
    def waited_seconds(self) -> float:
        """On the host, for reads and for ids."""
        return self.pool.waited_seconds

    @property
    def recorder(self) -> Recorder | None:
        return self.pool.recorder

    def __str__(self) -> str:
        experts = max(entry.experts for entry in self.store.layers)
        below = f"{show_range(self.host_slots)} in {show_size(self.pool.host_bytes)} of host memory"
        below += "" if self.computing is None else f", {self.computing}"
        there = f"{show_range(self.slots)} of {experts} experts per layer in {show_size(self.slot_bytes)}"
        return f"{there}{self.store.as_codes}, {below}"

    def record(self, recorder: Recorder | None) -> None:
        """Hands every pass that begins from now on to the recorder; each then waits for its ids."""
        self.pool.recorder = recorder

    def close(self) -> None:
        """Waits for loads and passes that are under way. No pass may begin after it."""
        if self.pool.is_closed:
            return
        self.pool.is_closed = True
        if self.computing is not None:
            self.computing.close()
        self._release()
        self.store.close()
        if self.recorder is not None:
            self.recorder.close()


def _release(loader: Loader, device: Device) -> None:
    loader.close()
    device.close()
