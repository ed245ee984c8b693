"""Experts that are asked for together: their slots, their reads and copies, and when they are there.

    group = loads.begin(layer, ids)       # reads and copies have begun
    loads.finish(layer, group)            # the host has waited for reads; the stream that computes waits for copies
    ...                                   # kernels read group.slot_of
    loads.end(layer, group)               # slots are free again once what is in the stream has read them

    loads.expect(layer, fetch)            # will be asked for soon: after all that is needed now

Each step leaves tables and slots as they are, or gives back what it took: `begin` that raises holds nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amoeba.stream.cache import Fetch
from amoeba.stream.gpu.device import Event
from amoeba.stream.gpu.direct_loads import DirectLoad
from amoeba.stream.gpu.loader import Job, Loader
from amoeba.stream.gpu.tiers import Load
from amoeba.stream.memory import READS
from amoeba.stream.slots import SlotsInUse

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory

_Load = tuple[int, int | None, int]  # expert, host slot, slot


@dataclass(eq=False)
class Group:
    """Experts that were asked for together: held, on their way or there."""

    slot_of: dict[int, int]
    copied: dict[int, Event] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    direct: DirectLoad | None = None


class GroupLoads:
    """
    expected: loads that nobody has asked for yet, by layer and expert.
    arrived:  copies of those that were not shown yet.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory, self.loader = memory, Loader(READS)
        self.expected: dict[tuple[int, int], Job] = {}
        self.arrived: dict[tuple[int, int], Event] = {}

    def begin(self, layer: int, part: list[int], stay: Collection[int] = (), direct: DirectLoad | None = None) -> Group:
        """stay: who reads them is not known to any event, so none of these leaves. direct: is read already, and belongs
        to the group once this returns."""
        tiers, fetch = self._memory._tiers[layer], self._request(layer, part, stay, direct or ())
        self._memory._changed[layer] = True
        loads = {expert: slot for expert, _, slot in (*fetch.from_host, *fetch.from_disk)}
        group = Group(fetch.hits | fetch.waiting | loads)
        try:
            written = threading.Event()  # or at least called: a read that is quicker than this may not be copied up yet
            try:
                for load in fetch.from_disk:  # they take the longest, so they begin first
                    if direct is None or load[0] not in direct:
                        group.jobs[load[0]] = self._submit(layer, load, written)
                self._write_back(layer, fetch)
            finally:
                written.set()
            staged, event = self._memory.staging.up(layer, fetch.from_host)
            if event is not None:
                self._copied(layer, group, staged, event)
            for some in tiers.by_what_they_wait_for([load for load in fetch.from_host if load not in staged]):
                event = tiers.up_all([(slot, host_slot) for _, host_slot, slot in some])
                self._copied(layer, group, some, event)
            if direct is not None:
                direct.slot_of = {expert: loads[expert] for expert in direct}
                tiers.wait_for_slots(list(direct.slot_of.values()))
        except BaseException:
            self.let_go(layer, group, {e for e in loads if e not in group.copied and e not in group.jobs})
            raise
        for expert in part:
            job = self.expected.pop((layer, expert), None)
            if job is not None and expert not in loads:
                self.loader.promote(job)
                group.jobs[expert] = job
        group.direct = direct
        return group

    def _copied(self, layer: int, group: Group, loads: Sequence[Load], event: Event) -> None:
        with self._memory._counting:
            for expert, _, _ in loads:
                self._memory.cache.loaded(layer, expert)
                group.copied[expert] = event

    def _request(self, layer: int, part: list[int], stay: Collection[int], passing: Collection[int]) -> Fetch:
        try:
            with self._memory._counting:
                return self._memory.cache.request(layer, part, stay=stay, passing=passing)
        except SlotsInUse:  # by loads that were only expected
            jobs = [job for (number, _), job in self.expected.items() if number == layer]
            for job in jobs:
                self.loader.promote(job)
            wait(jobs)
            with self._memory._counting:
                return self._memory.cache.request(layer, part, stay=stay, passing=passing)

    def finish(self, layer: int, group: Group) -> None:
        """The host waits for reads, the stream that computes for copies."""
        self.compute_waits_for((*group.copied.values(), *self.wait_for_reads(layer, group)))

    def compute_waits_for(self, copies: Iterable[Event]) -> None:
        for event in {id(event): event for event in copies}.values():  # one event is of many copies
            self._memory.device.wait(self._memory.device.compute, event)

    def wait_for_reads(self, layer: int, group: Group) -> list[Event]:
        """The copies behind them, and behind what was expected and is there."""
        if group.jobs or group.direct is not None:
            began = time.perf_counter()
            try:
                if group.direct is not None:  # first: it has memory that the others may want to pass through
                    self._end_direct(layer, group.direct)
                for job in group.jobs.values():
                    job.result()
            finally:
                with self._memory._counting:
                    self._memory.waited_seconds += time.perf_counter() - began
        with self._memory._counting:
            return [event for e in group.slot_of if (event := self.arrived.pop((layer, e), None)) is not None]

    def _end_direct(self, layer: int, direct: DirectLoad) -> None:
        if not direct.end():  # once more, by those who say what is wrong
            now = threading.Event()
            now.set()
            for expert, slot in direct.slot_of.items():
                self._memory.reads.read_and_copy(layer, expert, None, slot, False, now)
        with self._memory._counting:
            for expert in direct:
                self._memory.cache.loaded(layer, expert)
        direct.is_there = True

    def end(self, layer: int, group: Group) -> None:
        """Nothing of it is read or loaded after this, but by what is in the streams already."""
        held = self.let_go(layer, group)
        done = self._memory.device.record(self._memory.device.compute)
        self._memory._tiers[layer].read_by((group.slot_of[e] for e in held), done)

    def let_go(self, layer: int, group: Group, never_begun: Iterable[int] = ()) -> list[int]:
        """Those that are there."""
        for job in group.jobs.values():
            job.cancel()
        if group.jobs:
            wait(group.jobs.values())
        failed = {e for e, job in group.jobs.items() if job.cancelled() or job.exception() is not None}
        cancelled = [e for e in failed if group.jobs[e].cancelled()]
        if group.direct is not None and not group.direct.is_there:
            group.direct.drop()
            cancelled += group.direct
            failed.update(group.direct)
        with self._memory._counting:
            # a job that failed has said so itself; one that was cancelled never ran
            for expert in (*never_begun, *cancelled):
                self._memory.cache.failed(layer, expert)
            held = [e for e in group.slot_of if e not in failed and e not in never_begun]
            self._memory.cache.release(layer, held)
        return held

    def expect(self, layer: int, fetch: Fetch) -> None:
        loads: list[tuple[_Load, bool]] = [(load, True) for load in fetch.from_host]
        loads += [(load, False) for load in fetch.from_disk]
        written = threading.Event()
        try:
            self._write_back(layer, fetch)
            written.set()
            while loads:
                load, is_there = loads[0]
                job = self._submit(layer, load, written, is_there=is_there, predicted=True)
                self.expected[layer, load[0]] = job
                del loads[0]
        except BaseException:
            with self._memory._counting:
                for load, _ in loads:
                    self._memory.cache.failed(layer, load[0])
            raise

    def _write_back(self, layer: int, fetch: Fetch) -> None:
        left = list(fetch.writes)
        try:
            while left:
                expert, slot, host_slot = left[0]
                self._memory._tiers[layer].down(slot, host_slot)
                with self._memory._counting:
                    self._memory.cache.arrived(layer, expert)
                del left[0]
        except BaseException:
            with self._memory._counting:
                for expert, _, _ in left:
                    self._memory.cache.dropped(layer, expert)
            raise

    def _submit(
        self, layer: int, load: _Load, after: threading.Event, *, is_there: bool = False, predicted: bool = False
    ) -> Job:
        """is_there: in its host slot already. after: what the copy of a read to the device waits for."""
        expert, host_slot, slot = load

        def read_and_copy() -> None:
            try:
                event = self._memory.reads.read_and_copy(layer, expert, host_slot, slot, is_there, after)
            except BaseException:
                with self._memory._counting:
                    self._memory.cache.failed(layer, expert)
                raise
            with self._memory._counting:
                self._memory.cache.loaded(layer, expert)
                self.arrived[layer, expert] = event

        return self.loader.submit(read_and_copy, predicted=predicted)
