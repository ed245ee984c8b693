"""How a tier's bytes are shared among the layers: slots for each.

share_budget(8 << 30, layers, least=[1] * len(layers))         # the same bytes for every layer, at least one slot

A quota per layer, not one pool for all: layers take turns, so in a pool the least recently used expert is always of the
layer that comes next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from amoeba.core.errors import bad_value
from amoeba.stream.cache.trace import LayerShape
from amoeba.stream.sizes import show_size


def least_budget(layers: Sequence[LayerShape], least: Sequence[int]) -> int:
    """Bytes below which `share_budget` refuses."""
    return sum(count * layer.expert_bytes for count, layer in zip(least, layers, strict=True))


def share_budget(budget: int, layers: Sequence[LayerShape], *, least: Sequence[int], name: str = "budget") -> list[int]:
    """Slots of each layer, no more than it has experts. Slots are given one by one to the layer that has the fewest
    bytes, until none fits.

    least: slots that a layer must have.
    name:  of the budget, for the error.
    """
    wanted = least_budget(layers, least)
    if budget < wanted:
        remedy = f"raise it to {show_size(wanted)} or more"
        raise bad_value(name, f"at least {show_size(wanted)} for {len(layers)} layers", show_size(budget), remedy)
    for index, layer in enumerate(layers):
        if layer.expert_bytes < 1:
            raise bad_value(f"layer {index}", "a known size of an expert", layer.expert_bytes, "give expert_bytes")
    slots, left = list(least), budget - wanted
    queue = [(count * layers[i].expert_bytes, i) for i, count in enumerate(slots)]
    heapq.heapify(queue)
    while queue:
        _, index = heapq.heappop(queue)
        size = layers[index].expert_bytes
        if slots[index] < layers[index].experts and size <= left:
            slots[index] += 1
            left -= size
            heapq.heappush(queue, (slots[index] * size, index))
    return slots
