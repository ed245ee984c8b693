"""The slots of all layers on the device and on the host: their content, their readers, and the maps that kernels read.

E experts · S slots · T tokens · K experts per token · L layers

    pool = SlotPool(store, device, slots=[32] * 48, host_slots=[64] * 48, ids=64 * 8)
    with pool.turn(layer):                          # one pass at a time uses a layer's slots
        slot_TK = pool.map.launch(layer, expert_TK) # behind any router; an event is recorded behind it
        pool.wait_for_ids(layer)                    # of that launch alone, not of what was enqueued after it
        asked = pool.map.read(layer)                # asked.missing, asked.there
        pool.show(layer, {expert: slot})            # what launches from now on find

Nothing is loaded here: that is `loader.GroupLoads`. Rows of the map are double-buffered: what the latest pass asked for
can be read while the next one runs.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.stream.cache.expert_cache import ExpertCache
from amoeba.stream.cache.trace import LayerShape, Recorder
from amoeba.stream.gpu.device import CudaDevice, Device, Event, Stream
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.store.store import Store

BUFFERS = 2
# Maps on their way to the device: while one is waited for, passes are launched ahead, a group of experts with each.
STAGED = 4


class Asked(NamedTuple):
    """Distinct experts, ascending."""

    missing: list[int]
    there: list[int]


class _Layer:
    def __init__(self, device: Device, experts: int, slots: int, ids: int) -> None:
        from amoeba.kernels.index_export import row_length

        self.experts = experts
        # slot of each expert, then the expert in each slot (0 where it is empty): shown by one copy
        self.shown = torch.empty(experts + slots, dtype=torch.int32, device=device.device)
        self.staged = [device.mapped(experts + slots) for _ in range(STAGED)]
        self.words = [row.numpy().data for row in self.staged]  # written without torch, in a tenth of the time
        self.empty = array("i", [-1] * experts + [0] * slots)
        self.shown_at: list[Event | None] = [None] * STAGED
        self.rows = [device.mapped(row_length(experts, ids)) for _ in range(BUFFERS)]
        self.written: Event | None = None
        self.launches = self.shows = 0


class SlotMap:
    """For each layer, which expert is in which slot, as kernels see it; and which experts a pass asks for, as the host
    reads it without synchronising the device.

    device:  of the slots.
    experts: of each layer.
    slots:   of each layer.
    ids:     the most of one launch, tokens times experts per token; at most 2,048.
    """

    def __init__(self, device: Device | torch.device, experts: Sequence[int], slots: Sequence[int], ids: int) -> None:
        self._device = device = CudaDevice(device) if isinstance(device, torch.device) else device
        self._layers = [_Layer(device, *sizes, ids) for sizes in zip(experts, slots, strict=True)]
        for layer in range(len(self._layers)):
            self.show(layer, {})

    def shown(self, layer: int) -> Tensor:
        """The two below, one after the other: always at this place, for kernels that are captured."""
        return self._layers[layer].shown

    def slot_E(self, layer: int) -> Tensor:
        return self._layers[layer].shown[: self._layers[layer].experts]

    def expert_S(self, layer: int) -> Tensor:
        """Which expert is in each slot, for what is stacked by expert, as LoRA factors are."""
        return self._layers[layer].shown[self._layers[layer].experts :]

    def launch(self, layer: int, expert_TK: Tensor) -> Tensor:
        """Enqueues the kernel that maps ids to slots and exports them, after the router. Returns slot_TK, with -1 for
        missing experts and for ids that are no expert."""
        from amoeba.kernels.index_export import export_indices

        here = self._layers[layer]
        here.launches += 1
        expert_TK, slot_TK = expert_TK.contiguous(), torch.empty_like(expert_TK, memory_format=torch.contiguous_format)
        row, serial, slot_E = here.rows[here.launches % BUFFERS], here.launches, self.slot_E(layer)
        self._device.launch(lambda: export_indices(expert_TK, slot_E, slot_TK, row, serial))
        here.written = self._device.record(self._device.compute)
        return slot_TK

    def to_slots(self, layer: int, expert_TK: Tensor) -> Tensor:
        """The same for any number of tokens, and the host is told nothing."""
        from amoeba.kernels.index_export import to_slots

        expert_TK, slot_TK = expert_TK.contiguous(), torch.empty_like(expert_TK, memory_format=torch.contiguous_format)
        slot_E = self.slot_E(layer)
        self._device.launch(lambda: to_slots(expert_TK, slot_E, slot_TK))
        return slot_TK

    def launched(self, layer: int) -> bool:
        """Whether there is a launch that was not read yet."""
        return self._layers[layer].written is not None

    def ready(self, layer: int) -> bool:
        """Whether the ids of the latest launch can be read. Never waits."""
        written = self._layers[layer].written
        return written is not None and written.done()

    def wait(self, layer: int) -> None:
        """The host waits for the latest launch of the layer, not for what was enqueued after it."""
        written = self._layers[layer].written
        if written is None:
            raise RuntimeError(f"nothing was exported by layer {layer} since it was read")
        written.wait()

    def read(self, layer: int) -> Asked:
        """The distinct experts of the latest launch, once it is ready: `missing` and `there`, ascending."""
        from amoeba.kernels.index_export import HEADER

        here = self._layers[layer]
        row = here.rows[here.launches % BUFFERS]
        missing, asked, serial = row[:HEADER].tolist()
        if serial != here.launches:
            raise RuntimeError(f"layer {layer} was read before its ids were there: wait for it first")
        here.written = None
        ids = row[HEADER : HEADER + asked].tolist()
        return Asked(ids[:missing], ids[missing:])

    def show(self, layer: int, slot_of: Mapping[int, int]) -> None:
        """From the next launch on, these experts are in these slots and all others are missing. In the order of the
        calling thread's stream."""
        here = self._layers[layer]
        here.shows += 1
        turn = here.shows % STAGED
        before = here.shown_at[turn]
        if before is not None:
            before.wait()  # four shows ago: a host that is so far ahead has nothing to do yet
        words = here.empty[:]
        for expert, slot in slot_of.items():
            words[expert], words[here.experts + slot] = slot, expert
        here.words[turn][:] = words
        compute = self._device.compute
        self._device.copy(compute, here.shown, here.staged[turn])
        here.shown_at[turn] = self._device.record(compute)


class Watcher(Protocol):
    """Has prepared something for a layer that holds until the layer changes."""

    def forget(self, layer: int) -> None:
        """The layer is about to change."""

    def forget_who_leaves(self, layer: int) -> None:
        """A pass used the layer; what is in host memory stays there."""


class SlotPool:
    """
    slots, host_slots: of each layer.
    cache:    what is where, and what that cost so far; `lock` is around it.
    tiers:    the memory of each layer, and copies between device and host.
    map:      of experts to slots, for kernels; shown: of each layer, what it says.
    changed:  of each layer, since all that is there was shown.
    expected: loads that were not requested yet, by layer and expert; arrived: their copies that were not shown yet.
    last, replayed: the latest pass over each layer, and the latest replay, which passes over all of them.
    promoted: copies of the latest replay that were not waited for.
    waited_seconds: on the host, for reads and for ids.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        slots: Sequence[int],
        host_slots: Sequence[int],
        ids: int,
    ) -> None:
        """ids: the most of one launch, tokens times top_k."""
        self.store, self.device, self.ids = store, device, ids
        self.slots, self.host_slots = tuple(slots), tuple(host_slots)
        shapes = [LayerShape(entry.experts, 1, entry.expert_bytes) for entry in store.layers]
        self.cache = ExpertCache(shapes, self.slots, host=self.host_slots)
        self.lock = threading.Lock()
        self.tiers = [LayerTiers(device, *sizes) for sizes in zip(store.layers, slots, self.host_slots, strict=True)]
        self.map = SlotMap(device, [entry.experts for entry in store.layers], slots, ids)
        self.shown: list[dict[int, int]] = [{} for _ in shapes]
        self.changed = [False] * len(shapes)
        self.expected: dict[tuple[int, int], Future[None]] = {}
        self.arrived: dict[tuple[int, int], Event] = {}
        self.last: list[Event | None] = [None] * len(shapes)
        self.replayed: Event | None = None
        self.promoted: Event | None = None
        self._turns = [threading.RLock() for _ in shapes]
        self.watchers: list[Watcher] = []
        self.recorder: Recorder | None = None
        self.waited_seconds, self.is_closed = 0.0, False

    @property
    def slot_bytes(self) -> int:
        return sum(tiers.nbytes for tiers in self.tiers)

    @property
    def host_bytes(self) -> int:
        return sum(0 if tiers.blobs is None else tiers.blobs.nbytes for tiers in self.tiers)

    def check_open(self) -> None:
        if self.is_closed:
            raise bad_value("experts", "a store that is open", "a closed one", "attach the model again")

    # --- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, layer: int) -> Iterator[None]:
        """A pass over a layer: passes come one after the other, in whatever streams they run."""
        self.check_open()
        with self._turns[layer]:
            self.forget(layer)
            device, last = self.device, self.last[layer]
            if last is not None:
                device.wait(device.compute, last)
                if last is self.replayed:
                    if self.promoted is not None:
                        device.wait(device.compute, self.promoted)
                    self.tiers[layer].read_by(range(self.slots[layer]), last)
            try:
                yield
            finally:
                if self.changed[layer]:
                    self._show_all(layer)
                done = self.last[layer] = device.record(device.compute)
                self.tiers[layer].read_by(self.shown[layer].values(), done)

    @contextmanager
    def all_turns(self) -> Iterator[None]:
        """A replay, which passes over all layers."""
        with ExitStack() as stack:
            for turn in self._turns:
                stack.enter_context(turn)
            yield

    def wait_for_passes(self, stream: Stream) -> None:
        """What comes after in the stream waits for all passes until now."""
        for last in {id(event): event for event in self.last if event is not None}.values():
            self.device.wait(stream, last)

    def note_replay(self) -> None:
        """A replay is in the stream that computes."""
        self.replayed = self.device.record(self.device.compute)
        self.last = [self.replayed] * len(self.last)

    def forget(self, layer: int) -> None:
        """What was prepared for it: the layer is about to change."""
        for watcher in self.watchers:
            watcher.forget(layer)

    def count(self, layer: int, tokens: int) -> None:
        if layer == 0:
            with self.lock:
                self.cache.count_tokens(tokens)

    def used(self, layer: int, ids: Iterable[int]) -> None:
        """A pass found these in their slots."""
        ids = list(ids)
        for watcher in self.watchers:
            watcher.forget_who_leaves(layer)
        with self.lock:
            self.cache.use(layer, ids)

    def wait_for_ids(self, layer: int) -> None:
        began = time.perf_counter()
        self.map.wait(layer)
        self.count_wait(began)

    def count_wait(self, began: float) -> None:
        with self.lock:
            self.waited_seconds += time.perf_counter() - began

    # --- what kernels are shown ---------------------------------------------------------------------------------------

    def is_complete(self, layer: int) -> bool:
        """All experts are there and shown: nothing of the layer is ever evicted or missing."""
        return len(self.shown[layer]) == self.store.layers[layer].experts

    def show(self, layer: int, slot_of: dict[int, int]) -> None:
        if slot_of != self.shown[layer]:
            self.map.show(layer, slot_of)
            self.shown[layer] = dict(slot_of)

    def note_shown(self, layer: int, answer: Mapping[int, int]) -> None:
        """The kernel that got this answer puts it into the map."""
        shown = self.shown[layer]
        for expert, slot in answer.items():
            if slot < 0:
                del shown[expert]
            else:
                shown[expert] = slot

    def show_anew(self, layer: int) -> None:
        """The content of the layer's map is unknown."""
        with self.turn(layer):
            self.shown[layer] = {-1: -1}
            self.changed[layer] = True

    def _show_all(self, layer: int) -> None:
        """Everything that is there, or whose copy has come to pass unasked."""
        with self.lock:
            table = self.cache.top(layer)
            slot_of = {expert: slot for expert, slot in table.slot_of.items() if not table.is_loading(expert)}
            for expert in list(slot_of):
                event = self.arrived.get((layer, expert))
                if event is None:
                    continue
                if event.done():
                    del self.arrived[layer, expert]
                    self.expected.pop((layer, expert), None)
                else:
                    del slot_of[expert]
            self.changed[layer] = len(slot_of) < len(table.slot_of)
        self.show(layer, slot_of)
