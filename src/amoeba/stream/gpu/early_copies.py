"""Copies of experts that a layer will probably ask for, into slots that nobody reads before it does.

    early.begin(layer, [17, 90])            # while the GPU is busy elsewhere; as many as the layer has spare slots
    early.settle(layer, fetch.from_host)    # the layer has asked, and these were missing
    early.drop(layer)                       # it has asked, and none was; or something else changes the layer

A layer has a few slots of which neither its table nor its map on the GPU knows. An expert that is expected is copied
into one of them. If the layer then asks for it, which it does as for any that is missing, the answer names that slot,
and the slot of whoever leaves for it is spare from then on; else its copy was for nothing. So a wrong guess takes no
expert away and nothing has to be kept off slots that are read: they are as if the copy had not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory

SPARES = 2  # of a layer that has slots enough: a token misses one or two experts of a layer
LEAST_SLOTS = 16  # of a layer; below that two slots are worth more as they are
NOBODY = -1


def spares_of(slots: int, experts: int) -> int:
    """Of that many slots, so many are better spared."""
    return SPARES if LEAST_SLOTS <= slots < experts else 0


class EarlyCopies:
    """early_of: of each layer, for serve.cpp: the slot that an expert has early, or NOBODY."""

    def __init__(self, memory: DeviceMemory, early_of: Sequence[Array]) -> None:
        self._memory, self._early_of = memory, early_of
        self._slot_of: list[dict[int, int]] = [{} for _ in early_of]

    def __getitem__(self, layer: int) -> dict[int, int]:
        return self._slot_of[layer]

    def begin(self, layer: int, experts: Iterable[int]) -> None:
        """Those of them that are in host memory and not on the device, the first first."""
        memory, here, of_layer = self._memory, self._slot_of[layer], self._early_of[layer]
        loads = []
        with memory._counting:
            table = memory.cache.top(layer)
            for expert in experts:
                if not table.spare:
                    break
                host_slot = memory.cache.host_slot(layer, expert)
                if expert in table or expert in here or host_slot is None:
                    continue
                slot = table.spare.pop()
                here[expert] = of_layer[expert] = slot
                loads.append((slot, host_slot))
            memory.cache.counters.prefetched += len(loads)
        if loads:
            memory._tiers[layer].up_all(loads)

    def settle(self, layer: int, from_host: Sequence[tuple[int, int, int]]) -> None:
        """The table has given slots to these, (expert, host slot, slot); those that were early are in others."""
        here, table = self._slot_of[layer], self._memory.cache.top(layer)
        used = [(expert, slot) for expert, _, slot in from_host if expert in here]
        for expert, slot in used:
            table.move(expert, here.pop(expert))
            table.spare.append(slot)
            self._early_of[layer][expert] = NOBODY
        counters = self._memory.cache.counters
        counters.prefetched_used += len(used)
        counters.from_host -= len(used)  # they were on their way
        counters.waited += len(used)
        self.drop(layer)

    def drop(self, layer: int) -> None:
        """Copies into these slots that come later come after what is under way."""
        here, cache = self._slot_of[layer], self._memory.cache
        if here:
            cache.top(layer).spare.extend(here.values())
            cache.counters.host_bytes += len(here) * self._memory.store.expert_bytes(layer)
            for expert in here:
                self._early_of[layer][expert] = NOBODY
            here.clear()
