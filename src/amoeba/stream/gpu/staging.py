"""A few experts of the layer that comes next, on the device before there are slots for them.

    staging.fill(layer)                     # of a layer of which all experts will be asked for next
    staged, event = staging.up(layer, fetch.from_host)      # into their slots, those that are here

Where all experts of a layer pass through its slots, each pass begins with those that are there, and the first that are
not cannot come before these have been computed with: until then the link would have nothing to do, from the last copy
of the layer before on. So the first that will come are copied here, and on to their slots when these are free, which
takes a fiftieth of the time.

All of it is in the stream of copies, in the order of the calls: what is filled again was read before. Weights do not
change, so what is here stays right for as long as it is not written over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.stream.gpu.device import Event
from amoeba.stream.gpu.tiers import Load

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory

# 16 experts of Qwen3-30B's sizes are 151 MB and take 3 ms over the link. Between two layers of a training step with
# 4096 tokens it would rest for one to three, as estimated; not measured yet.
MOST_STAGED, MOST_BYTES = 16, 160 * 2**20


class Staging:
    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._blobs: Tensor | None = None  # allocated when it is needed: beside the budget, as activations are
        self._place_of: dict[tuple[int, int], int] = {}  # of a layer's expert
        self._lock = threading.Lock()
        largest = max(entry.expert_bytes for entry in memory.store.layers)
        self._count = max(1, min(MOST_STAGED, MOST_BYTES // largest))
        self._bytes = self._count * largest

    def fill(self, layer: int) -> None:
        """With the first that the layer's next pass will not find, where they are in host memory."""
        memory, entry = self._memory, self._memory.store.layers[layer]
        if memory.host_slots[layer] == 0 or memory.slots[layer] == entry.experts:
            return
        with memory._counting:
            table = memory.cache.top(layer)
            missing = [expert for expert in range(entry.experts) if expert not in table][: self._count]
            slots = [(expert, memory.cache.host_slot(layer, expert)) for expert in missing]
        tiers = memory._tiers[layer]
        found = [(expert, slot) for expert, slot in slots if slot is not None and tiers.blob_address(slot)]
        if not found:
            return
        with self._lock:
            if self._blobs is None:
                device = memory.device
                self._blobs = torch.empty(self._bytes, dtype=torch.uint8, device=device.device)
                device.wait(device.copies, device.record(device.compute))  # of whom torch may have got it
            self._place_of.clear()
            tiers.stage(self._blobs, [slot for _, slot in found])
            self._place_of.update(((layer, expert), place) for place, (expert, _) in enumerate(found))

    def up(self, layer: int, loads: Sequence[Load]) -> tuple[list[Load], Event | None]:
        """Those of them that were here, and the event behind their copies."""
        with self._lock:
            staged = [load for load in loads if (layer, load[0]) in self._place_of]
            if not staged:
                return [], None
            assert self._blobs is not None
            places = [(slot, self._place_of[layer, expert]) for expert, _, slot in staged]
            return staged, self._memory._tiers[layer].up_staged(self._blobs, places)
