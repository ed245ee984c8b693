"""Which experts the next layer will probably ask for: its router, applied to what goes into this layer's experts.

    predictions = Predictions(memory, routers)              # of each layer a matrix (E, H), or None
    predictions.launch(layer, x_TH, top_k)                  # behind this layer's router, aside
    predictions.read(layer + 1)                             # on the host: experts that will be missing; [] if not there

A token changes little from one layer to the next, so most of what the next router says of it is known a layer early.
The product, the choice and the kernel that writes ids where the host can read them run beside the layer's own kernels;
nobody waits for them, and what they say is a guess: whoever reads half of it guesses worse, and that is all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory


class Predictions:
    def __init__(self, memory: DeviceMemory, routers: Sequence[Tensor | None], ids: int) -> None:
        from amoeba.kernels.index_export import HEADER, row_length

        self._memory, self._routers, self._ids, self._header = memory, routers, ids, HEADER
        self._rows = [memory.device.mapped(row_length(entry.experts, ids)) for entry in memory.store.layers]
        self._words = [row.numpy().data for row in self._rows]
        self._kept: list[Tensor] = []  # read aside: their memory is not to be used again until then

    def launch(self, layer: int, x_TH: Tensor, top_k: int) -> None:
        """Called by every pass that is captured or rehearsed, of the last layer too."""
        from amoeba.kernels.index_export import MOST_IDS, export_indices

        memory, device, after = self._memory, self._memory.device, layer + 1
        device.join()
        self._kept.clear()
        router = self._routers[after] if after < len(self._routers) else None
        if router is None or memory.is_complete(after) or x_TH.shape[0] * top_k > min(MOST_IDS, self._ids):
            return
        with device.aside():
            logits_TE = x_TH.to(router.dtype) @ router.mT
            expert_TK = logits_TE.topk(top_k, dim=1).indices
            slot_TK, row, slot_E = torch.empty_like(expert_TK), self._rows[after], memory.export.slot_E(after)
            device.launch(lambda: export_indices(expert_TK, slot_E, slot_TK, row, 1))
        self._kept += (x_TH, logits_TE, expert_TK, slot_TK)

    def read(self, layer: int) -> list[int]:
        """Once for each launch."""
        words, header = self._words[layer], self._header
        if not words[2]:
            return []
        words[2] = 0
        missing = min(words[0], len(words) - header)
        experts = self._memory.store.layers[layer].experts
        return [expert for expert in words[header : header + missing] if 0 <= expert < experts]
