"""The memory of one layer on both tiers, and the copies between them, each fenced by an event.

S slots on the device · P slots of pinned memory

A slot on the device is gate_up, down and biases, each in a stack of its own, so that the kernels for resident experts
read them as they are (those for many tokens on Hopper would copy what lies between other things). Codes, scales and
biases are a blob there too, in one copy, as kernels for codes take any distance between experts: with a copy of each a
pass that misses took 20 to 30 us longer in fp8 (dev/log). A slot of pinned memory is a blob as the store has it.
All copies to the device are in one stream, so they come to pass in the order of their calls; what has to wait in
addition
that:

    a copy into a slot      for the last pass that reads it         `read_by`
                            for the copy of what leaves it          `down`, in a stream of its own
    a copy from a blob      for the copy into it                    `down`
    a copy into a blob      for all copies to the device that were called before
    a pass                  for the copies that fill its slots      what `up` returns
    a read from the disk    for the copies from and into its blob   `blob_is_free`

Where an expert is read, each part is copied up as soon as it is there. Copies of requests inside of graphs may be
called elsewhere (fast_path.py), by `addresses` and `blob_address`; `copied_from` is told of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from amoeba.stream.gpu.device import Device, Event, Stream
from amoeba.stream.store.layers import LayerEntry, StoredExperts

Read = Callable[[Callable[[int, int], None]], None]
Load = tuple[int, int, int]  # expert, host slot, slot


class LayerTiers:
    def __init__(self, device: Device, entry: LayerEntry, slots: int, host_slots: int) -> None:
        self._device, self._entry = device, entry
        self.blobs = device.host_memory(host_slots * entry.expert_bytes).view(host_slots, -1) if host_slots else None
        self._host_bytes = None if self.blobs is None else self.blobs.view(-1)
        # of each part that is copied: its stack as bytes, how many there are, where they are in a blob
        self._parts: list[tuple[Tensor, int, int]]
        if entry.format is None:
            self._stacks = {
                part.name: torch.empty((slots, *part.shape), dtype=entry.dtype_of(part.name), device=device.device)
                for part in entry.parts
            }
            self._parts = [
                (stack.view(-1).view(torch.uint8), stack.nbytes // slots, part.offset)
                for stack, part in zip(self._stacks.values(), entry.parts, strict=True)
            ]
        else:
            codes = torch.empty((slots, entry.expert_bytes), dtype=torch.uint8, device=device.device)
            self._stacks = entry.tensors(codes)
            self._parts = [(codes.view(-1), entry.expert_bytes, 0)]
        self.addresses = [(stack.data_ptr(), size, offset) for stack, size, offset in self._parts]
        self.first_blob = 0 if self.blobs is None else self.blobs.data_ptr()
        # torch may have given memory that is still used by kernels ahead, of which the stream of copies knows nothing
        self._readers: list[Event | None] = [device.record(device.compute)] * slots
        self._leaving: list[Event | None] = [None] * slots
        self._falling: list[Event | None] = [None] * host_slots
        self._blob_users: list[Event | None] = [None] * host_slots

    @property
    def weights(self) -> StoredExperts:
        return self._entry.weights_of(self._stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack, *_ in self._parts)

    @staticmethod
    def slot_bytes(entry: LayerEntry) -> int:
        return entry.expert_bytes if entry.format is not None else sum(map(entry.size_of, entry.parts))

    def read_by(self, slots: Iterable[int], event: Event) -> None:
        """Passes over a layer come one after the other, so the latest stands for those before it."""
        for slot in slots:
            self._readers[slot] = event

    def up(self, slot: int, host_slot: int | None, passing: Tensor | None = None, read: Read | None = None) -> Event:
        """Into a slot, once its last reader is done, from a host slot or from a blob that is in passing. `read` fills
        the blob first: what it says is there (begin, bytes) is copied while it reads on."""
        if host_slot is None:
            assert passing is not None
            source, start = passing, 0
        else:
            assert self._host_bytes is not None
            source, start = self._host_bytes, host_slot * self._entry.expert_bytes
        device, copies, whole = self._device, self._device.copies, self._entry.expert_bytes
        lock, copied = threading.Lock(), list[int]()

        def copy(begin: int, length: int) -> None:
            with lock:  # the first waits for all
                self._wait_once(copies, self._readers, slot)
                self._wait_once(copies, self._leaving, slot)
                if host_slot is not None:
                    self._wait_once(copies, self._falling, host_slot)
            for stack, size, offset in self._parts:
                first, end = max(begin, offset), min(begin + length, offset + size)
                if first < end:
                    at = slot * size + first - offset
                    device.copy_bytes(copies, stack, at, source, start + first, end - first)
            copied.append(length)

        try:
            if read is not None:
                read(copy)
            if sum(copied) < whole:
                copy(0, whole)
        finally:  # where one fails, those before it are still under way
            event = device.record(copies)
            if host_slot is not None:
                self._blob_users[host_slot] = event
        return event

    def by_what_they_wait_for(self, loads: Sequence[Load]) -> list[list[Load]]:
        """Copies come to pass one after the other: those first that do not wait for copies down, of what leaves their
        slot or of what they are copied from."""
        waits, others = list[Load](), list[Load]()
        for load in loads:
            _, host_slot, slot = load
            has_to_wait = self._leaving[slot] is not None or self._falling[host_slot] is not None
            (waits if has_to_wait else others).append(load)
        return [some for some in (others, waits) if some]

    def up_all(self, loads: Sequence[tuple[int, int]]) -> Event:
        """(slot, host slot) of each: in one call, where the device can, and with one event for all."""
        device, whole = self._device, self._entry.expert_bytes
        self.wait_for_slots([slot for slot, _ in loads])
        for _, host_slot in loads:
            self._wait_once(device.copies, self._falling, host_slot)
        assert self._host_bytes is not None
        try:
            device.copy_all(
                self._host_bytes,
                [
                    (stack, slot * size, host_slot * whole + offset, size)
                    for slot, host_slot in loads
                    for stack, size, offset in self._parts
                ],
            )
        finally:  # where one fails, those before it are still under way
            event = device.record(device.copies)
            for _, host_slot in loads:
                self._blob_users[host_slot] = event
        return event

    def stage(self, staging: Tensor, host_slots: Sequence[int]) -> None:
        """Whole blobs, one after the other, to flat memory on the device that is no slot."""
        assert self._host_bytes is not None
        whole = self._entry.expert_bytes
        pieces = [(staging, place * whole, host_slot * whole, whole) for place, host_slot in enumerate(host_slots)]
        try:
            self._device.copy_all(self._host_bytes, pieces)
        finally:
            self.copied_from(host_slots)

    def up_staged(self, staging: Tensor, places: Sequence[tuple[int, int]]) -> Event:
        """(slot, place) of each, from there."""
        device, whole = self._device, self._entry.expert_bytes
        self.wait_for_slots([slot for slot, _ in places])
        for slot, place in places:
            for stack, size, offset in self._parts:
                first = place * whole + offset
                device.copy(device.copies, stack[slot * size : (slot + 1) * size], staging[first : first + size])
        return device.record(device.copies)

    def blob_address(self, host_slot: int) -> int:
        """0 where a copy from there would have to wait."""
        event = self._falling[host_slot]
        if event is not None and not event.done():
            return 0
        self._falling[host_slot] = None
        return self.first_blob + host_slot * self._entry.expert_bytes

    def copied_from(self, host_slots: Iterable[int]) -> None:
        """By calls that were made elsewhere, in the stream of copies."""
        event = self._device.record(self._device.copies)
        for host_slot in host_slots:
            self._blob_users[host_slot] = event

    def down(self, slot: int, host_slot: int) -> None:
        """A copy for the host; whatever is loaded into that slot next waits for it."""
        assert self.blobs is not None
        device, downs, blob = self._device, self._device.downs, self.blobs[host_slot]
        device.wait(downs, device.record(device.copies))
        try:
            for stack, size, offset in self._parts:
                device.copy_bytes(downs, blob, offset, stack, slot * size, size)
        finally:
            event = device.record(downs)
            self._leaving[slot] = self._falling[host_slot] = self._blob_users[host_slot] = event

    def blob_is_free(self, host_slot: int) -> None:
        """Waits on the host, in the thread that is about to read into that blob."""
        event = self._blob_users[host_slot]
        if event is not None:
            event.wait()

    def targets(self, slot: int) -> list[tuple[int, int, int]]:
        """Where the bytes of a blob go: begin and bytes in it, and an address, of each part."""
        return [(offset, size, address + slot * size) for address, size, offset in self.addresses]

    def wait_for_slots(self, slots: Sequence[int]) -> None:
        """The stream of copies, for their readers and for copies of what leaves them; once for each event."""
        waits: dict[int, Event] = {}
        for slot in slots:
            for events in (self._readers, self._leaving):
                if (event := events[slot]) is not None:
                    waits[id(event)], events[slot] = event, None
        for event in waits.values():
            self._device.wait(self._device.copies, event)

    def _wait_once(self, stream: Stream, events: list[Event | None], at: int) -> None:
        """What comes later in the stream has waited too."""
        event = events[at]
        if event is not None:
            self._device.wait(stream, event)
            events[at] = None
