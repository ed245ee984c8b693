"""Questions whose experts are all in host memory: copies are called first, and who is where is written down afterwards.

    fast.prepare(layer)                                   # while the GPU computes: who leaves next, and all addresses
    fast.serve(layer, serial, missing, there)             # False: nothing was done, this takes the long way
    fast.forget(layer)                                    # something else is about to change the layer
    fast.drop_half_served()                               # after an error

A GPU that asks waits, so between "question seen" and the first copy there are a few lookups: the slots of those who
leave, the addresses of those who come. Tables, counters, policy and events follow while the copies run, by the requests
that the long way makes, and with the same result.

**Why tables may be late.** What was prepared holds until somebody changes the layer, and nobody can: a replay has the
turns of all layers, no load of the layer was under way, expected or held when it was prepared, and whoever passes over
the layer outside of a replay forgets it first. No copy has to wait for an event either: who reads the slots comes ahead
of the question (replays.py), nothing that leaves is written down, since it has a copy in host memory, and a blob that
is still being written is no source.

**If it ends half-way** (a copy that fails, an interrupt), tables and slots may differ, and the layer begins anew, empty.
"""

from __future__ import annotations

from ctypes import c_uint32, c_uint64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amoeba.stream.gpu.channel import Channel
    from amoeba.stream.gpu.memory import DeviceMemory

_NO_FLAGS = c_uint32(0)  # a word that is written has a fence ahead of it


class FastPath:
    def __init__(self, memory: DeviceMemory, channel: Channel) -> None:
        self._memory, self._channel = memory, channel
        self._calls = memory.device.calls()
        layers = len(memory.slots)
        self._leave: list[list[int] | None] = [None] * layers  # who leaves next; None: nothing is prepared
        self._sources: list[list[Any]] = [[]] * layers  # of each expert, its parts in host memory or None; []: not known
        self._half_served: int | None = None  # a layer
        self._word = c_uint64(channel.arrived_word)

    def forget(self, layer: int) -> None:
        self._leave[layer], self._sources[layer] = None, []

    def forget_who_leaves(self, layer: int) -> None:
        """A pass used the layer; what is in host memory stays there."""
        self._leave[layer] = None

    def prepare(self, layer: int) -> None:
        memory, tiers = self._memory, self._memory._tiers[layer]
        if self._calls is None or any(number == layer for number, _ in memory._expected):
            return
        with memory._counting:
            leave = memory.cache.leave_next(layer)
            if not leave or memory._shown[layer] != memory.cache.top(layer).slot_of:
                return
            if not self._sources[layer]:
                sources: list[Any] = [None] * memory.store.layers[layer].experts
                for expert, host_slot in memory.cache.on_host(layer):
                    sources[expert] = tiers.source(host_slot)
                self._sources[layer] = sources
            self._leave[layer] = leave

    def serve(self, layer: int, serial: int, missing: list[int], there: list[int]) -> bool:
        waiting, by_expert, count = self._leave[layer], self._sources[layer], len(missing)
        if waiting is None or self._calls is None:
            return False
        leave = [expert for expert in waiting[: count + len(there)] if expert not in there][:count]
        sources = [by_expert[expert] for expert in missing]
        if len(leave) < count or None in sources:
            return False
        copy, write, stream = self._calls
        tiers, shown = self._memory._tiers[layer], self._memory._shown[layer]
        self._half_served, self._leave[layer] = layer, None
        slots = [shown[expert] for expert in reversed(leave)]  # the last that leaves makes room for the first that comes
        for slot, source in zip(slots, sources, strict=True):
            for target, start, size in zip(tiers.targets[slot], source, tiers.sizes, strict=True):
                if code := copy(target, start, size, stream):
                    raise RuntimeError(f"CUDA error {code}")
        self._channel.answer(serial, leave + missing, [-1] * count + slots)
        if code := write(stream, self._word, c_uint32(serial), _NO_FLAGS):
            raise RuntimeError(f"CUDA error {code}")
        self._write_down(layer, missing, there, leave, slots)
        self._half_served = None
        return True

    def drop_half_served(self) -> None:
        layer, self._half_served = self._half_served, None
        if layer is not None:
            self.forget(layer)
            self._memory.cache.begin_anew(layer)

    def _write_down(
        self, layer: int, missing: list[int], there: list[int], leave: list[int], slots: list[int]
    ) -> None:
        memory, ids, shown = self._memory, there + missing, self._memory._shown[layer]
        with memory._counting:
            fetch = memory.cache.request(layer, ids)
            for expert in missing:
                memory.cache.loaded(layer, expert)
            memory.cache.release(layer, ids)
        if [slot for _, _, slot in fetch.from_host] != slots or fetch.writes:
            raise RuntimeError(f"layer {layer}: experts were copied into slots {slots}, and not as {fetch} says")
        memory._tiers[layer].copied_from(host_slot for _, host_slot, _ in fetch.from_host)
        for expert in leave:
            del shown[expert]
        shown.update(zip(missing, slots, strict=True))
