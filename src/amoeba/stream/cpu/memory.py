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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    # What compiled steps need of a layer: `amoeba.cpu.step.StreamedLayer`.

    @property
    def slot_of_E(self) -> Tensor:
        return self.memory.slot_of[self.layer]

    def alone(self) -> AbstractContextManager[None]:
        return self.memory.alone(self.layer)

    def note_use(self, ids: Sequence[int], tokens: int) -> None:
        self.memory.note_use(self.layer, ids, tokens)


class ExpertMemory:
    """
    layers: the kind of weights of each layer, in the store's order.
    host_slots: none: there is no tier between the disk and the slots.
    cache:  what is where, and what that cost so far.
    waited_seconds: for reads, while there was nothing else to compute.
    slot_of: of each layer (E), as of its last `alone`; -1: in none, or not whole yet.
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
        self.slot_of = [torch.full((shape.experts,), -1, dtype=torch.int64, device="cpu") for shape in shapes]
        self._changed: set[int] = set()  # layers whose slots have other experts than `slot_of` says
        self._locks = [threading.RLock() for _ in shapes]  # of a layer: its passes take turns
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
        ids = list(ids)
        with self._pass(layer, ids, tokens):
            for wave in self.cache.waves(layer, self._distinct(layer, ids)):
                yield from self._acquire_wave(layer, wave)

    @contextmanager
    def alone(self, layer: int) -> Iterator[None]:
        """No pass of another thread changes the slots of this layer meanwhile, and `slot_of` tells what is in them."""
        with self._locks[layer]:
            self._check_open()
            if layer in self._changed:
                self._update_slot_of(layer)
            yield

    def note_use(self, layer: int, ids: Sequence[int], tokens: int) -> None:
        """A pass, `alone`, that found all of these there."""
        with self._pass(layer, ids, tokens), self._counting:
            self.cache.use(layer, self._distinct(layer, ids))

    @contextmanager
    def _pass(self, layer: int, ids: Sequence[int], tokens: int) -> Iterator[None]:
        self._check_open()
        with self._locks[layer]:
            try:
                if layer == 0:
                    with self._counting:
                        self.cache.count_tokens(tokens)
                yield
            except BaseException:
                if self.recorder is not None:
                    with self._counting:
                        self.recorder.abandon()
                raise
            if self.recorder is not None:
                with self._counting:
                    self.recorder.add(layer, list(ids), tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise bad_value("experts", "a store that is open", "a closed one", "attach the model again")

    def _distinct(self, layer: int, ids: Iterable[int]) -> list[int]:
        experts = self.cache.top(layer).experts
        return [each for each in dict.fromkeys(ids) if 0 <= each < experts]

    def _update_slot_of(self, layer: int) -> None:
        table = self.cache.top(layer)
        there = {expert: slot for expert, slot in table.slot_of.items() if not table.is_loading(expert)}
        experts, slots = torch.tensor([[*there], [*there.values()]], dtype=torch.int64, device="cpu")
        self.slot_of[layer].fill_(-1)[experts] = slots
        self._changed.discard(layer)

    def _acquire_wave(self, layer: int, wave: list[int]) -> Generator[dict[int, int], None, None]:
        with self._counting:
            fetch = self.cache.request(layer, wave)
        if fetch.from_disk:
            self._changed.add(layer)
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
