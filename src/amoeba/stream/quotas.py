"""How a tier's bytes are shared among the layers: slots for each.

share_budget(8 << 30, layers)                                  # the same bytes for every layer, at least top_k slots
share_budget(8 << 30, layers, least=[1] * len(layers))         # where a pass may take several waves
share_budget(8 << 30, layers, need=counters.misses_of_layer)   # more for layers that missed more

A quota per layer, not one pool for all: layers take turns, so in a pool the least recently used expert is always of the
layer that comes next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from amoeba.core.errors import bad_value
from amoeba.stream.sizes import show_size
from amoeba.stream.trace import LayerShape


def least_budget(layers: Sequence[LayerShape], least: Sequence[int] | None = None) -> int:
    """Bytes below which `share_budget` refuses."""
    slots = [layer.top_k for layer in layers] if least is None else least
    return sum(count * layer.expert_bytes for count, layer in zip(slots, layers, strict=True))


def share_budget(
    budget: int,
    layers: Sequence[LayerShape],
    *,
    least: Sequence[int] | None = None,
    need: Sequence[int] | None = None,
    name: str = "budget",
) -> list[int]:
    """Slots of each layer, no more than it has experts. Slots are given one by one to whoever has the fewest bytes for
    its need, until none fits.

    least: slots that a layer must have; default top_k, for a pass of one token.
    need:  misses of each layer, from the counters of an earlier run or pass. Half of the budget stays equal: a layer
           that misses more gets more, and one that missed nothing keeps what made that so.
    name:  of the budget, for the error.
    """
    wanted = least_budget(layers, least)
    if budget < wanted:
        remedy = f"raise it to {show_size(wanted)} or more"
        raise bad_value(name, f"at least {show_size(wanted)} for {len(layers)} layers", show_size(budget), remedy)
    for index, layer in enumerate(layers):
        if layer.expert_bytes < 1:
            raise bad_value(f"layer {index}", "a known size of an expert", layer.expert_bytes, "give expert_bytes")
    weights = _weights(len(layers), need)
    slots = [layer.top_k for layer in layers] if least is None else list(least)
    left = budget - wanted
    queue = [(count * layers[i].expert_bytes / weights[i], i) for i, count in enumerate(slots)]
    heapq.heapify(queue)
    while queue:
        _, index = heapq.heappop(queue)
        size = layers[index].expert_bytes
        if slots[index] < layers[index].experts and size <= left:
            slots[index] += 1
            left -= size
            heapq.heappush(queue, (slots[index] * size / weights[index], index))
    return slots


def _weights(layers: int, need: Sequence[int] | None) -> list[float]:
    total = sum(need) if need is not None else 0
    if need is None or not total:
        return [1.0] * layers
    return [1 + layers * count / total for count in need]
