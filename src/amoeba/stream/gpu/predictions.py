"""Prefetching: which experts the next layer will probably request: its router, applied to what goes into this layer's
experts.

    predictions = Predictions(pool, routers)                # of each layer a matrix (E, H), or None
    predictions.launch(layer, x_TH, top_k)                  # behind this layer's router, aside
    predictions.read(layer + 1)                             # on the host: experts that will be missing; [] if not there

A token changes little from one layer to the next, so most of what the next router says of it is known a layer early.
The product, the choice and the kernel that writes ids where the host can read them run concurrently with the layer's
own kernels; nothing waits for them, and their result is a guess: reading only half of it makes the guess worse, nothing
else.

**It has to pay.** A load that began early and is used saves its own time at best, one that is not takes as much of the
link or the disk. If fewer than half are used, or if they are few compared with all misses, prefetching stops.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from amoeba.stream.cache.expert_cache import Counters
from amoeba.stream.gpu.pool import SlotPool

logger = logging.getLogger("amoeba")

# Early loads after which it is judged, again and again; and of all that would have missed meanwhile, the share that has
# to have come early.
JUDGED, LEAST_RECALL = 256, 0.1


class Predictions:
    def __init__(self, pool: SlotPool, routers: Sequence[Tensor | None]) -> None:
        from amoeba.kernels.index_export import HEADER, row_length

        self._pool, self._routers, self._header = pool, routers, HEADER
        self._rows = [pool.device.mapped(row_length(entry.experts, pool.ids)) for entry in pool.store.layers]
        self._words = [row.numpy().data for row in self._rows]
        self.pays = True
        self._judged: tuple[Counters | None, int, int, int] = None, 0, 0, 0  # what it was judged by until now
        self._kept: list[Tensor] = []  # read aside: their memory is not to be used again until then

    def launch(self, layer: int, x_TH: Tensor, top_k: int) -> None:
        """Called by passes of the last layer too."""
        from amoeba.kernels.index_export import MOST_IDS, export_indices

        pool, device, after = self._pool, self._pool.device, layer + 1
        device.join()
        self._kept.clear()
        router = self._routers[after] if after < len(self._routers) else None
        if router is None or pool.is_complete(after) or x_TH.shape[0] * top_k > min(MOST_IDS, pool.ids):
            return
        with device.aside():
            logits_TE = x_TH.to(router.dtype) @ router.mT
            expert_TK = logits_TE.topk(top_k, dim=1).indices
            slot_TK, row, slot_E = torch.empty_like(expert_TK), self._rows[after], pool.map.slot_E(after)
            device.launch(lambda: export_indices(expert_TK, slot_E, slot_TK, row, 1))
        self._kept += (x_TH, logits_TE, expert_TK, slot_TK)

    def read(self, layer: int) -> list[int]:
        """Once for each launch."""
        words, header = self._words[layer], self._header
        if not words[2]:
            return []
        words[2] = 0
        missing = min(words[0], len(words) - header)
        experts = self._pool.store.layers[layer].experts
        return [expert for expert in words[header : header + missing] if 0 <= expert < experts]

    def judge(self) -> None:
        """Whether it pays, by what happened since it was judged before."""
        counters = self._pool.cache.counters
        now = counters.prefetched, counters.prefetched_used, counters.from_host + counters.from_disk
        of, *before = self._judged
        if of is not counters:  # they were restarted
            before = [0, 0, 0]
        begun, used, missed = (after - until for after, until in zip(now, before, strict=True))
        if begun < JUDGED or not self.pays:
            return
        self._judged = counters, *now
        self.pays = used > begun - used and used >= LEAST_RECALL * (used + missed)
        if not self.pays:
            found = f"{used} of {used + missed} that would have missed came early, {begun - used} came for nothing"
            logger.info("prefetching stops, since it saves no time: %s", found)
