"""A budget of memory over a store: slots for each layer's experts, what is in them, and the reads that fill them.

    memory = ExpertMemory(store, slots=[12] * 48)
    with closing(memory.acquire(layer, ids, tokens)) as groups:
        for slot_of in groups:                  # {expert: slot}: whole, and there until the next turn
            compute(memory.layers[layer].slots, slot_of)

What is there comes first, and is computed while the rest is read. All slots are allocated here, once; nothing is
memory-mapped, so the system cannot fill other memory with experts behind the budget's back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from amoeba.core.errors import bad_value
from amoeba.stream.cache.expert_cache import ExpertCache
from amoeba.stream.cache.trace import LayerShape, Recorder
from amoeba.stream.experts import ExpertsInSlots, of_all
from amoeba.stream.sizes import show_size
from amoeba.stream.store.buffers import aligned_buffer
from amoeba.stream.store.store import Store

# Experts that are read at the same time. The store cuts each into reads of a megabyte for threads of its own: two keep
# them busy, since the last reads of one expert leave threads free for the next.
READS = 2


@dataclass(frozen=True, eq=False)
class StreamedExperts(ExpertsInSlots):
    """In an `ExpertMemory`."""

    memory: ExpertMemory = field(repr=False)

    placement = "streamed"

    def acquire(self, ids: Iterable[int], tokens: int) -> Generator[dict[int, int], None, None]:
        """Expert -> slot, a few at a time, until all of these have been there; see `ExpertMemory.acquire`."""
        return self.memory.acquire(self.layer, ids, tokens)


class ExpertMemory:
    """
    layers: the kind of weights of each layer, in the store's order.
    host_slots: none: there is no tier between the disk and the slots.
    cache:  what is where, and what that cost so far.
    waited_seconds: for reads, while there was nothing else to compute.
    """

    def __init__(self, store: Store, slots: Sequence[int]) -> None:
        self.store, self.slots = store, tuple(slots)
        shapes = [LayerShape(entry.experts, 1, entry.expert_bytes) for entry in store.layers]
        self.host_slots, self.miss = (0,) * len(shapes), "move"
        self.cache = ExpertCache(shapes, self.slots, host=self.host_slots)
        self._blobs = [
            aligned_buffer(count * entry.expert_bytes).view(count, -1)
            for count, entry in zip(self.slots, store.layers, strict=True)
        ]
        self.layers = tuple(
            StreamedExperts(self, layer, weights, of_all(weights, entry.experts))
            for layer, (entry, blobs) in enumerate(zip(store.layers, self._blobs, strict=True))
            for weights in [entry.weights(blobs)]
        )
        self.waited_seconds, self._closed = 0.0, False
        self.recorder: Recorder | None = None
        self._locks = [threading.Lock() for _ in shapes]  # of a layer: its passes take turns
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(READS, thread_name_prefix="amoeba-expert")

    @property
    def slot_bytes(self) -> int:
        return sum(blobs.nbytes for blobs in self._blobs)

    def __str__(self) -> str:
        experts = max(entry.experts for entry in self.store.layers)
        there = f"{show_range(self.slots)} of {experts} experts per layer in {show_size(self.slot_bytes)}"
        return there + self.store.as_codes

    def record(self, recorder: Recorder | None) -> None:
        """Hands every pass that begins from now on to the recorder."""
        self.recorder = recorder

    def acquire(self, layer: int, ids: Iterable[int], tokens: int) -> Generator[dict[int, int], None, None]:
        """The experts of a pass in groups, each held until the next is asked for; their slots do not change meanwhile.

        ids: those of the pass, K for each of its tokens; ids outside [0, E) are sentinels.
        StoreError where one cannot be read. Then, and when the caller stops half-way, its slots are free again.
        """
        if self._closed:
            raise bad_value("experts", "a store that is open", "a closed one", "attach the model again")
        ids = list(ids)
        experts = self.cache.top(layer).experts
        distinct = [each for each in dict.fromkeys(ids) if 0 <= each < experts]
        with self._locks[layer]:
            try:
                with self._counting:
                    if layer == 0:
                        self.cache.count_tokens(tokens)
                    waves = self.cache.waves(layer, distinct)
                for wave in waves:
                    yield from self._acquire_wave(layer, wave)
            except BaseException:
                if self.recorder is not None:
                    with self._counting:
                        self.recorder.abandon()
                raise
            if self.recorder is not None:
                with self._counting:
                    self.recorder.add(layer, ids, tokens)

    def _acquire_wave(self, layer: int, wave: list[int]) -> Generator[dict[int, int], None, None]:
        with self._counting:
            fetch = self.cache.request(layer, wave)
        if fetch.waiting:  # only where an interrupt came while a pass that had been broken off was ending
            raise RuntimeError(f"reads of experts {sorted(fetch.waiting)} were abandoned: attach the model again")
        blobs, held = self._blobs[layer], dict.fromkeys(wave)
        reads = {
            expert: self._pool.submit(self.store.read, layer, expert, blobs[slot])
            for expert, _, slot in fetch.from_disk
        }
        try:
            if fetch.hits:
                yield fetch.hits
            for expert, _, slot in fetch.from_disk:
                self._wait_for(reads[expert])
                self._ended(layer, expert, self.cache.loaded)
                del reads[expert]
                yield {expert: slot}
        finally:
            for expert in self._give_up(layer, reads):
                del held[expert]
            with self._counting:
                self.cache.release(layer, held)

    def _wait_for(self, read: Future[None]) -> None:
        began = time.perf_counter()
        try:
            read.result()
        finally:
            with self._counting:
                self.waited_seconds += time.perf_counter() - began

    def _give_up(self, layer: int, reads: dict[int, Future[None]]) -> list[int]:
        """Abandons reads: none of them writes into a slot after this."""
        if not reads:
            return []
        for read in reads.values():
            read.cancel()
        wait(reads.values())
        for expert in reads:
            self._ended(layer, expert, self.cache.failed)
        return list(reads)

    def _ended(self, layer: int, expert: int, how: Callable[[int, int], None]) -> None:
        with self._counting:
            how(layer, expert)

    def close(self) -> None:
        """Waits for reads that are under way. No pass may begin after it."""
        self._closed = True
        self._pool.shutdown()
        self.store.close()
        if self.recorder is not None:
            self.recorder.close()


def show_range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"
