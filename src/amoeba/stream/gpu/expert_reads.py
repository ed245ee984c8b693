"""An expert from the disk into a slot on the device: read into host memory, and copied up part by part.

    event = reads.read_and_copy(layer, expert, host_slot, slot, False, after)       # in a thread that loads

Into its host slot where it gets one; else it passes through one of a few blobs that are there for that. Questions of
captured steps take these blobs for reads of their own (direct_loads.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from torch import Tensor

from amoeba.stream.gpu.device import Device, Event
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.store.store import Store

# Blobs that are neither a slot's nor a host slot's. A question of one token seldom has more on the disk: of 1200 for 8
# of 128 experts, a quarter of them in slots and a quarter in host memory, none had more than 3 (synthetic trace).
PASSING = 4


class ExpertReads:
    def __init__(self, store: Store, device: Device, tiers: Sequence[LayerTiers]) -> None:
        self._store, self._device, self._tiers = store, device, tiers
        self._passing: SimpleQueue[tuple[Tensor, Event | None]] = SimpleQueue()
        largest = max(entry.expert_bytes for entry in store.layers)
        for _ in range(PASSING):
            self._passing.put((device.host_memory(largest), None))

    def take_passing(self) -> Tensor | None:
        """Memory for an expert of any layer, to be given back; None where others have it all, or it is still copied."""
        try:
            memory, before = self._passing.get_nowait()
        except Empty:
            return None
        if before is not None and not before.done():
            self._passing.put((memory, before))
            return None
        return memory

    def give_back(self, memory: Tensor) -> None:
        """To be used again behind the copies until now."""
        self._passing.put((memory, self._device.record(self._device.copies)))

    def read_and_copy(
        self, layer: int, expert: int, host_slot: int | None, slot: int, is_there: bool, after: threading.Event
    ) -> Event:
        """is_there: in its host slot already. after: what the copy of a read to the device waits for."""
        tiers = self._tiers[layer]

        def read(blob: Tensor, copy: Callable[[int, int], None]) -> None:
            def copy_part(begin: int, size: int) -> None:
                after.wait()
                copy(begin, size)

            self._store.read(layer, expert, blob, copy_part)
            after.wait()

        if is_there:
            return tiers.up(slot, host_slot)
        if host_slot is not None:
            assert tiers.blobs is not None
            tiers.blob_is_free(host_slot)
            return tiers.up(slot, host_slot, read=partial(read, tiers.blobs[host_slot]))
        memory, before = self._passing.get()
        try:
            if before is not None:
                before.wait()
            blob = memory[: self._store.expert_bytes(layer)]
            return tiers.up(slot, None, blob, partial(read, blob))
        finally:
            self.give_back(memory)
