"""Copies of experts that a layer will probably ask for, into slots that nobody reads before it does.

    early.begin(layer, [17, 90])            # while the GPU is busy elsewhere; as many as the layer has spare slots
    early.settle(layer, fetch.from_host)    # the layer has asked, and these were missing
    early.drop(layer)                       # it has asked, and none was; or something else changes the layer

A layer has a few slots of which neither its table nor its map on the GPU knows. An expert that is expected is copied
into one of them. If the layer then asks for it, which it does as for any that is missing, the answer names that slot,
and the slot of whoever leaves for it is spare from then on; else its copy was for nothing. So a wrong guess takes no
expert away and nothing has to be kept off slots that are read: they are as if the copy had not begun.

**It has to pay.** An early copy that is used saves the time of a copy at best, one that is not takes as much of the
link. Where fewer are used than not, or they are few beside all that misses, copies are begun no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from ctypes import Array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory

logger = logging.getLogger("amoeba")

SPARES = 2  # of a layer that has slots enough: a token misses one or two experts of a layer
LEAST_SLOTS = 16  # of a layer; below that two slots are worth more as they are
# Missing experts after which it is judged, again and again, and the share of them that has to have come early.
JUDGED, LEAST_RECALL = 512, 0.1
NOBODY = -1


def spares_of(slots: int, experts: int) -> int:
    """Of that many slots, so many are better spared."""
    return SPARES if LEAST_SLOTS <= slots < experts else 0


class EarlyCopies:
    """early_of: of each layer, for serve.cpp: the slot that an expert has early, or NOBODY."""

    def __init__(self, memory: DeviceMemory, early_of: Sequence[Array]) -> None:
        self._memory, self._early_of = memory, early_of
        self._slot_of: list[dict[int, int]] = [{} for _ in early_of]
        self.is_on = any(memory.spares)
        self._begun = self._used = self._missed = 0  # since it was judged

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
        self._begun += len(loads)
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
        self._memory.cache.counters.prefetched_used += len(used)
        self._used += len(used)
        self._missed += len(from_host)
        self.drop(layer)
        if self.is_on and self._missed >= JUDGED:
            self._judge()

    def drop(self, layer: int) -> None:
        """Copies into these slots that come later come after what is under way."""
        here, cache = self._slot_of[layer], self._memory.cache
        if here:
            cache.top(layer).spare.extend(here.values())
            cache.counters.host_bytes += len(here) * self._memory.store.expert_bytes(layer)
            for expert in here:
                self._early_of[layer][expert] = NOBODY
            here.clear()

    def _judge(self) -> None:
        recall, wasted = self._used / self._missed, self._begun - self._used
        self.is_on = self._used > wasted and recall >= LEAST_RECALL
        if not self.is_on:
            found = f"{self._used} of {self._missed} that were missing came early, {wasted} came for nothing"
            logger.info("experts are no longer copied before they are asked for, it does not pay: %s", found)
        self._begun = self._used = self._missed = 0
