"""Loading missing experts: their slots, their reads and copies, and when they have arrived.

    for slot_of in closing(loads.acquire(layer, ids)): ...      # {expert: slot}, shown to the device, group by group

    group = loads.begin(layer, ids)       # reads and copies have begun
    loads.finish(layer, group)            # the host has waited for reads; the stream that computes waits for copies
    ...                                   # kernels read group.slot_of
    loads.end(layer, group)               # slots are free again once what is in the stream has read them

    loads.prefetch(layer, ids)            # will be asked for soon: after all that is needed now

Each step leaves tables and slots as they are, or gives back what it took: `begin` that raises holds nothing. Reads are
done by threads, what is needed now before what is only expected.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.stream.cache.expert_cache import Fetch
from amoeba.stream.cache.slot_table import SlotsInUse
from amoeba.stream.cpu.memory import READS
from amoeba.stream.gpu.device import Event
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.reads import DirectLoad, ExpertReads
from amoeba.stream.gpu.tiers import Load

Job = Future  # of nothing: it is done, or it failed
_Load = tuple[int, int | None, int]  # expert, host slot, slot

# 16 experts of Qwen3-30B's sizes are 151 MB and take 3 ms over the link. Between two layers of a training step with
# 4096 tokens it would rest for one to three, as estimated; not measured yet.
MOST_STAGED, MOST_BYTES = 16, 160 * 2**20


class Loader:
    """Threads that load. `promote`: somebody waits for that job now."""

    def __init__(self, threads: int) -> None:
        self._queues: tuple[deque, deque] = deque(), deque()  # needed now, predicted
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"amoeba-load-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Callable[[], None], *, predicted: bool = False) -> Job:
        job: Job = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader was closed")
            self._queues[predicted].append((job, load))
            self._changed.notify()
        return job

    def promote(self, job: Job) -> None:
        """Ahead of all that is only expected; nothing where it has begun."""
        needed, predicted = self._queues
        with self._changed:
            for entry in predicted:
                if entry[0] is job:
                    predicted.remove(entry)
                    needed.append(entry)
                    return

    def close(self) -> None:
        """What has not begun is cancelled; waits for the rest."""
        with self._changed:
            self._closed = True
            for queue in self._queues:
                while queue:
                    queue.popleft()[0].cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._queues))
                if self._closed and not any(self._queues):
                    return
                job, load = (self._queues[0] or self._queues[1]).popleft()
            if job.set_running_or_notify_cancel():
                try:
                    load()
                except BaseException as error:
                    job.set_exception(error)
                else:
                    job.set_result(None)
                del load


class Staging:
    """A few experts of the layer that comes next, on the device before there are slots for them.

    Where all experts of a layer pass through its slots, each pass begins with those that are there, and the first that
    are not cannot come before these have been computed with: until then the link would have nothing to do, from the
    last copy of the layer before on. So the first that will come are copied here, and on to their slots when these are
    free, which takes a fiftieth of the time.

    All of it is in the stream of copies, in the order of the calls: what is filled again was read before. Weights do
    not change, so what is here stays right for as long as it is not written over.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._blobs: Tensor | None = None  # allocated when needed; like activations, not part of the budget
        self._place_of: dict[tuple[int, int], int] = {}  # of a layer's expert
        self._lock = threading.Lock()
        largest = max(entry.expert_bytes for entry in pool.store.layers)
        self._count = max(1, min(MOST_STAGED, MOST_BYTES // largest))
        self._bytes = self._count * largest

    def fill(self, layer: int) -> None:
        """With the first that the layer's next pass will not find, where they are in host memory."""
        pool, entry = self._pool, self._pool.store.layers[layer]
        if pool.host_slots[layer] == 0 or pool.slots[layer] == entry.experts:
            return
        with pool.lock:
            table = pool.cache.top(layer)
            missing = [expert for expert in range(entry.experts) if expert not in table][: self._count]
            slots = [(expert, pool.cache.host_slot(layer, expert)) for expert in missing]
        tiers = pool.tiers[layer]
        found = [(expert, slot) for expert, slot in slots if slot is not None and tiers.blob_address(slot)]
        if not found:
            return
        with self._lock:
            if self._blobs is None:
                device = pool.device
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
            return staged, self._pool.tiers[layer].up_staged(self._blobs, places)


@dataclass(eq=False)
class Group:
    """Experts that were asked for together: held, on their way or there."""

    slot_of: dict[int, int]
    copied: dict[int, Event] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    direct: DirectLoad | None = None


class GroupLoads:
    def __init__(self, pool: SlotPool, reads: ExpertReads) -> None:
        self._pool, self._reads, self._staging, self.loader = pool, reads, Staging(pool), Loader(READS)

    def acquire(self, layer: int, ids: Iterable[int]) -> Generator[dict[int, int], None, None]:
        """Distinct experts in groups, each there until the next is asked for. In one group if all have slots; else in
        as many as it takes, those that are there first. Inside a `turn`. The host waits for reads from the disk alone:
        copies are waited for by the stream that computes, and a slot is loaded again once the last pass that reads it
        is done. What comes next is copied while a group computes, where there are slots for both.

        StoreError where one cannot be read. Then, and when the caller stops half-way, its slots are free again.
        """
        there = self._pool.cache.top(layer).slot_of
        distinct = sorted(ids, key=lambda expert: expert not in there)
        slots = self._pool.slots[layer]
        size = slots if len(distinct) <= slots else max(1, slots // 2)
        parts = [distinct[first : first + size] for first in range(0, len(distinct), size)]
        ahead = len(parts) > 1 and slots > 1
        groups: list[Group] = []
        try:
            for number, part in enumerate(parts):
                if not groups:
                    groups.append(self.begin(layer, part))
                if ahead and number + 1 < len(parts):
                    groups.append(self.begin(layer, parts[number + 1]))
                self.finish(layer, groups[0])
                self._pool.show(layer, groups[0].slot_of)
                yield groups[0].slot_of
                self.end(layer, groups.pop(0))
        finally:
            for group in groups:  # their copies were not waited for, and they are visible from now on
                self.compute_waits_for(group.copied.values())
                self.end(layer, group)

    def prefetch(self, layer: int, ids: Iterable[int]) -> None:
        """Has experts loaded that will be asked for soon, where the layer has room, after all that is needed now. Those
        that leave for it are hidden from kernels when this returns."""
        with self._pool.turn(layer):
            with self._pool.lock:
                fetch = self._pool.cache.prefetch(layer, ids)
            if not (fetch.from_host or fetch.from_disk):
                return  # there is no room: no expert is evicted
            self._pool.changed[layer] = True
            self._expect(layer, fetch)

    def expect_all(self, layer: int) -> None:
        """All experts of the layer will be asked for next."""
        self.prefetch(layer, range(self._pool.store.layers[layer].experts))
        with self._pool.turn(layer):
            self._staging.fill(layer)

    def begin(self, layer: int, part: list[int], direct: DirectLoad | None = None) -> Group:
        """direct: is read already, and belongs to the group once this returns."""
        tiers, fetch = self._pool.tiers[layer], self._request(layer, part, direct or ())
        self._pool.changed[layer] = True
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
            staged, event = self._staging.up(layer, fetch.from_host)
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
            job = self._pool.expected.pop((layer, expert), None)
            if job is not None and expert not in loads:
                self.loader.promote(job)
                group.jobs[expert] = job
        group.direct = direct
        return group

    def _copied(self, layer: int, group: Group, loads: Sequence[Load], event: Event) -> None:
        with self._pool.lock:
            for expert, _, _ in loads:
                self._pool.cache.loaded(layer, expert)
                group.copied[expert] = event

    def _request(self, layer: int, part: list[int], passing: Collection[int]) -> Fetch:
        try:
            with self._pool.lock:
                return self._pool.cache.request(layer, part, passing=passing)
        except SlotsInUse:  # by loads that were only expected
            jobs = [job for (number, _), job in self._pool.expected.items() if number == layer]
            for job in jobs:
                self.loader.promote(job)
            wait(jobs)
            with self._pool.lock:
                return self._pool.cache.request(layer, part, passing=passing)

    def finish(self, layer: int, group: Group) -> None:
        """The host waits for reads, the stream that computes for copies."""
        self.compute_waits_for((*group.copied.values(), *self.wait_for_reads(layer, group)))

    def compute_waits_for(self, copies: Iterable[Event]) -> None:
        for event in {id(event): event for event in copies}.values():  # one event is of many copies
            self._pool.device.wait(self._pool.device.compute, event)

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
                self._pool.count_wait(began)
        with self._pool.lock:
            return [event for e in group.slot_of if (event := self._pool.arrived.pop((layer, e), None)) is not None]

    def _end_direct(self, layer: int, direct: DirectLoad) -> None:
        if not direct.end():  # once more, by those who say what is wrong
            now = threading.Event()
            now.set()
            for expert, slot in direct.slot_of.items():
                self._reads.read_and_copy(layer, expert, None, slot, False, now)
        with self._pool.lock:
            for expert in direct:
                self._pool.cache.loaded(layer, expert)
        direct.is_there = True

    def end(self, layer: int, group: Group) -> None:
        """Nothing of it is read or loaded after this, but by what is in the streams already."""
        held = self.let_go(layer, group)
        done = self._pool.device.record(self._pool.device.compute)
        self._pool.tiers[layer].read_by((group.slot_of[e] for e in held), done)

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
        with self._pool.lock:
            # a job that failed has said so itself; one that was cancelled never ran
            for expert in (*never_begun, *cancelled):
                self._pool.cache.failed(layer, expert)
            held = [e for e in group.slot_of if e not in failed and e not in never_begun]
            self._pool.cache.release(layer, held)
        return held

    def _expect(self, layer: int, fetch: Fetch) -> None:
        loads: list[tuple[_Load, bool]] = [(load, True) for load in fetch.from_host]
        loads += [(load, False) for load in fetch.from_disk]
        written = threading.Event()
        try:
            self._write_back(layer, fetch)
            written.set()
            while loads:
                load, is_there = loads[0]
                job = self._submit(layer, load, written, is_there=is_there, predicted=True)
                self._pool.expected[layer, load[0]] = job
                del loads[0]
        except BaseException:
            with self._pool.lock:
                for load, _ in loads:
                    self._pool.cache.failed(layer, load[0])
            raise

    def _write_back(self, layer: int, fetch: Fetch) -> None:
        left = list(fetch.writes)
        try:
            while left:
                expert, slot, host_slot = left[0]
                self._pool.tiers[layer].down(slot, host_slot)
                with self._pool.lock:
                    self._pool.cache.arrived(layer, expert)
                del left[0]
        except BaseException:
            with self._pool.lock:
                for expert, _, _ in left:
                    self._pool.cache.dropped(layer, expert)
            raise

    def _submit(
        self, layer: int, load: _Load, after: threading.Event, *, is_there: bool = False, predicted: bool = False
    ) -> Job:
        """is_there: in its host slot already. after: what the copy of a read to the device waits for."""
        expert, host_slot, slot = load

        def read_and_copy() -> None:
            try:
                event = self._reads.read_and_copy(layer, expert, host_slot, slot, is_there, after)
            except BaseException:
                with self._pool.lock:
                    self._pool.cache.failed(layer, expert)
                raise
            with self._pool.lock:
                self._pool.cache.loaded(layer, expert)
                self._pool.arrived[layer, expert] = event

        return self.loader.submit(read_and_copy, predicted=predicted)
