"""The memory of one layer on both tiers, and the copies between them, each fenced by an event.

S slots on the device · P slots of pinned memory

A slot on the device is gate_up, down and biases, each in a stack of its own, so that the kernels for resident experts
read them as they are. A slot of pinned memory is a blob as the store has it. All copies are in one stream, so they
come to pass in the order of their calls; what has to wait beside that:

    a copy into a slot      for the last pass that reads it         `read_by`
    a pass                  for the copies that fill its slots      what `up` returns
    a read from the disk    for the copies from and into its blob   `blob_is_free`
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from amoeba.stream.gpu.device import Device, Event
from amoeba.stream.store.layers import LayerEntry
from amoeba.weights import ExpertWeights


class LayerTiers:
    def __init__(self, device: Device, entry: LayerEntry, slots: int, host_slots: int) -> None:
        self._device, self._entry = device, entry
        self.blobs = device.host_memory(host_slots * entry.expert_bytes).view(host_slots, -1) if host_slots else None
        self._stacks = {
            part.name: torch.empty((slots, *part.shape), dtype=entry.dtype, device=device.device)
            for part in entry.parts
        }
        # torch may have given memory that is still used by kernels ahead, of which the stream of copies knows nothing
        self._readers: list[Event | None] = [device.record(device.compute)] * slots
        self._blob_users: list[Event | None] = [None] * host_slots

    @property
    def weights(self) -> ExpertWeights:
        stacks = self._stacks
        biases = stacks.get("gate_up_bias_J"), stacks.get("down_bias_H")
        return ExpertWeights(stacks["gate_up_JH"], stacks["down_HI"], *biases, self._entry.activation)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks.values())

    @staticmethod
    def slot_bytes(entry: LayerEntry) -> int:
        return sum(torch.Size(part.shape).numel() for part in entry.parts) * entry.dtype.itemsize

    def read_by(self, slots: Iterable[int], event: Event) -> None:
        """Passes over a layer come one after the other, so the latest stands for those before it."""
        for slot in slots:
            self._readers[slot] = event

    def up(self, blob: Tensor, slot: int, host_slot: int | None) -> Event:
        """Into a slot, once its last reader is done. host_slot: where the blob is, unless it is in passing."""
        reader = self._readers[slot]
        if reader is not None:
            self._device.wait(self._device.copies, reader)
            self._readers[slot] = None
        return self._copy(self._parts(slot, blob), host_slot)

    def down(self, slot: int, host_slot: int) -> Event:
        """A copy for the host, ahead of whatever is loaded into that slot next."""
        assert self.blobs is not None
        return self._copy([(part, source) for source, part in self._parts(slot, self.blobs[host_slot])], host_slot)

    def blob_is_free(self, host_slot: int) -> None:
        """Waits on the host, in the thread that is about to read into that blob."""
        event = self._blob_users[host_slot]
        if event is not None:
            event.wait()

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], host_slot: int | None) -> Event:
        device, copies = self._device, self._device.copies
        try:
            for target, source in pairs:
                device.copy(copies, target, source)
        finally:  # where one fails, those before it are still under way
            event = device.record(copies)
            if host_slot is not None:
                self._blob_users[host_slot] = event
        return event

    def _parts(self, slot: int, blob: Tensor) -> list[tuple[Tensor, Tensor]]:
        views = self._entry.views(blob)._asdict()
        return [(stack[slot], views[name]) for name, stack in self._stacks.items()]
