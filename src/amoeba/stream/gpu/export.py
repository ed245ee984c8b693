"""Which experts a pass asks for, told by the device to the host without a synchronisation.

E experts · S slots · T tokens · K experts per token · L layers

    slot_TK = export.launch(layer, expert_TK)       # behind the router, whoever's; an event is recorded behind it
    export.ready(layer), export.wait(layer)         # of that launch alone, not of what was enqueued after it
    asked = export.read(layer)                      # asked.missing, asked.there
    export.show(layer, {expert: slot}, ...)         # what launches from now on find

Rows are double-buffered: what the latest pass asked for can be read while the next one runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.stream.gpu.device import Device, Event

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


class IndexExport:
    """ids: the most of one launch, tokens times top_k."""

    def __init__(self, device: Device, experts: Sequence[int], slots: Sequence[int], ids: int) -> None:
        self._device = device
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
        """slot_TK, -1 for what is missing."""
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
        written = self._layers[layer].written
        return written is not None and written.done()

    def wait(self, layer: int) -> None:
        written = self._layers[layer].written
        if written is None:
            raise RuntimeError(f"nothing was exported by layer {layer} since it was read")
        written.wait()

    def read(self, layer: int) -> Asked:
        """Of the latest launch, once it is ready."""
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
        """In the order of the stream of the calling thread. What is not in `slot_of` is missing from now on."""
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
