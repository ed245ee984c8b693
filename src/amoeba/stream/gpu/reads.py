"""Experts from the disk into slots on the device: read into host memory, and copied up piece by piece.

    event = reads.read_and_copy(layer, expert, host_slot, slot, False, after)       # in a thread that loads

Into its host slot where it gets one; else it passes through one of a few blobs that are there for that.

Experts of a request that are on the disk alone are read, copied and told to the GPU without Python:

    direct = loads.begin(layer, missing)    # reads begin, before it is known who leaves; None: there are none such
    direct.slot_of = {17: 4, 90: 11}        # of those in `direct`; the stream of copies waits for their users
    direct.open(place, value)               # where they go, and the word for which the GPU waits
    direct.end()                            # waits; whether all are there and the word is called
    direct.drop()                           # nothing more goes on

A read of a few milliseconds has a beginning and an end in which the disk rests. Here the first read is enqueued as soon
as a request was read, before any table changes, into memory that is no slot; the threads that read copy each piece to
the GPU, and the last of them calls for the word: no thread has to wake up for that, and none needs Python's lock
(store/csrc/copy_to_device.h).

What passed by without a host slot is on the GPU alone. That costs nothing: a host slot would have been the first to be
taken again (cache.py), and in replayed traces 1 to 5 % fewer experts are read from the disk without it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_void_p
from functools import partial
from queue import Empty, SimpleQueue

from torch import Tensor

from amoeba.stream.gpu.device import Event
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.store.compiled_reads import CompiledLoads, LoadTimes, Onward
from amoeba.stream.store.error import StoreError

# Blobs that are neither a slot's nor a host slot's. A request of one token seldom has more on the disk: of 1200 for 8
# of 128 experts, a quarter of them in slots and a quarter in host memory, none had more than 3 (synthetic trace).
PASSING = 4


class ExpertReads:
    def __init__(self, pool: SlotPool) -> None:
        self._store, self._device, self._tiers = pool.store, pool.device, pool.tiers
        self._passing: SimpleQueue[tuple[Tensor, Event | None]] = SimpleQueue()
        largest = max(entry.expert_bytes for entry in pool.store.layers)
        for _ in range(PASSING):
            self._passing.put((pool.device.host_memory(largest), None))

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


class DirectLoads:
    def __init__(self, pool: SlotPool, reads: ExpertReads) -> None:
        self._pool, self._reads = pool, reads
        self._calls = pool.device.calls()
        self._onward: Onward | None = None
        if (calls := self._calls) is not None:
            functions = calls.enter, calls.to_device, calls.write_word
            pointers = (0 if call is None else ctypes.cast(call, c_void_p).value or 0 for call in functions)
            self._onward = Onward(*pointers, calls.context, calls.stream.value)

    def begin(self, layer: int, missing: Sequence[int]) -> DirectLoad | None:
        """As many as there is unused memory for; the others are loaded in another way."""
        pool = self._pool
        if self._onward is None:
            return None
        with pool.lock:
            experts = [expert for expert in missing if pool.cache.is_on_disk_alone(layer, expert)]
        if not experts or (loads := pool.store.loads(self._onward)) is None:
            return None
        direct = DirectLoad(pool, self._reads, layer, loads)
        try:
            for expert in experts:
                if not direct.begin(expert):
                    break
        except BaseException:
            direct.drop()
            raise
        if not len(direct):
            direct.drop()
            return None
        return direct


class DirectLoad:
    """Of one request.

    slot_of:  of every expert of it, before it is opened.
    has_told: the word was called for.
    is_there: all of it, in whichever way; set by the code that waited for it.
    """

    def __init__(self, pool: SlotPool, reads: ExpertReads, layer: int, loads: CompiledLoads) -> None:
        self._pool, self._reads, self._layer, self._loads = pool, reads, layer, loads
        self._experts: list[int] = []
        self._blobs: list[Tensor] = []
        self.slot_of: dict[int, int] = {}
        self._has_word = self._has_ended = self.has_told = self.is_there = False

    def __len__(self) -> int:
        return len(self._experts)

    def __contains__(self, expert: object) -> bool:
        return expert in self._experts

    def __iter__(self) -> Iterator[int]:
        return iter(self._experts)

    @property
    def times(self) -> LoadTimes:
        return self._loads.times

    def begin(self, expert: int) -> bool:
        """Whether its read has begun."""
        store = self._pool.store
        try:
            place = store.place(self._layer, expert)
        except StoreError:  # its reader reports it
            return False
        if place is None or (blob := self._reads.take_passing()) is None:
            return False
        self._blobs.append(blob)
        self._experts.append(expert)
        self._loads.begin(*place, blob.data_ptr(), store.expert_bytes(self._layer))
        return True

    def open(self, place: int = 0, value: int = 0) -> None:
        """place, value: of the word; 0: the caller writes it, after `end`. Copies until now come ahead of both."""
        tiers = self._pool.tiers[self._layer]
        targets = [
            (number, *target)
            for number, each in enumerate(self._experts)
            for target in tiers.targets(self.slot_of[each])
        ]
        self._has_word = place != 0
        self._loads.open(targets, place, value % 2**32)

    def end(self) -> bool:
        """Whether all of it went on; the GPU may not have it yet. RuntimeError: a call failed."""
        self._has_ended = True
        try:
            is_whole = self._loads.end()
            self.has_told = is_whole and self._has_word
            return is_whole
        finally:
            while self._blobs:
                self._reads.give_back(self._blobs.pop())

    def drop(self) -> None:
        """Where it was not opened nothing goes on; else what went on is behind the streams' other copies."""
        if not self._has_ended:
            self.end()
