"""Experts of a question that are on the disk alone: read, copied into their slots and told to the GPU without Python.

    direct = loads.begin(layer, missing)    # reads begin, before it is known who leaves; None: there are none such
    direct.slot_of = {17: 4, 90: 11}        # of those in `direct`; the stream of copies waits for whoever uses these
    direct.open(place, value)               # where they go, and the word for which the GPU waits
    direct.end()                            # waits; whether all are there and the word is called
    direct.drop()                           # nothing more goes on

A read of a few milliseconds has a beginning and an end in which the disk rests. Here the first read is enqueued as soon
as a question was read, ahead of all tables, into memory that is nobody's slot; the threads that read copy each piece to
the GPU, and the last of them calls for the word: no thread has to wake up for that, and none needs Python's lock
(store/csrc/onward.h).

What passed by without a host slot is on the GPU alone. That costs nothing: a host slot would have been the first to be
taken again (cache.py), and in replayed traces 1 to 5 % fewer experts are read from the disk without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_void_p
from typing import TYPE_CHECKING

from torch import Tensor

from amoeba.stream.store.compiled_reads import CompiledLoads, LoadTimes, Onward
from amoeba.stream.store.error import StoreError

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory


class DirectLoads:
    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._calls = memory.device.calls()
        self._onward: Onward | None = None
        if (calls := self._calls) is not None:
            functions = calls.enter, calls.to_device, calls.write_word
            pointers = (0 if call is None else ctypes.cast(call, c_void_p).value or 0 for call in functions)
            self._onward = Onward(*pointers, calls.context, calls.stream.value)

    def begin(self, layer: int, missing: Sequence[int]) -> DirectLoad | None:
        """As many as there is memory for that nobody uses; the others are loaded in another way."""
        memory = self._memory
        if self._onward is None:
            return None
        with memory._counting:
            experts = [expert for expert in missing if memory.cache.is_on_disk_alone(layer, expert)]
        if not experts or (loads := memory.store.loads(self._onward)) is None:
            return None
        direct = DirectLoad(memory, layer, loads)
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
    """Of one question.

    slot_of:  of every expert of it, before it is opened.
    has_told: the word was called for.
    is_there: all of it, in whichever way; for whoever waited for it to say.
    """

    def __init__(self, memory: DeviceMemory, layer: int, loads: CompiledLoads) -> None:
        self._memory, self._layer, self._loads = memory, layer, loads
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
        memory, size = self._memory, self._memory.store.expert_bytes(self._layer)
        try:
            place = memory.store.place(self._layer, expert)
        except StoreError:  # whoever reads it says so
            return False
        if place is None or (blob := memory.reads.take_passing()) is None:
            return False
        self._blobs.append(blob)
        self._experts.append(expert)
        self._loads.begin(*place, blob.data_ptr(), size)
        return True

    def open(self, place: int = 0, value: int = 0) -> None:
        """place, value: of the word; 0: the caller writes it, after `end`. Copies until now come ahead of both."""
        tiers = self._memory._tiers[self._layer]
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
                self._memory.reads.give_back(self._blobs.pop())

    def drop(self) -> None:
        """Where it was not opened nothing goes on; else what went on is behind the streams' other copies."""
        if not self._has_ended:
            self.end()
