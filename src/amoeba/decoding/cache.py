"""Keys and values in memory of fixed addresses, filled by prompts of any length and then token by token.

    cache = FixedCache(model.config, length=1024, device=model.device)
    cache.filled = 0        # a prompt: what comes is written from this slot on, and what is there up to it is seen
    cache.filled = None     # steps: the tensor cache.slot says where, and all slots are seen, under a mask

While prompts are read it looks like a cache that grows; in steps nothing in it depends on a number that the host knows,
so that a step can be captured in a CUDA graph. Layers with a sliding window keep all slots: the mask hides the old
ones, and our attention does not read what is hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer


def why_not_fixed(config: Any) -> str | None:
    """Why a model's state between tokens is not keys and values of fixed addresses."""
    try:
        layers = StaticCache(config=config, max_cache_len=16).layers
    except Exception as error:  # whatever a config may lack
        return f"transformers makes no static cache for it ({type(error).__name__}: {error})"
    others = {type(layer).__name__ for layer in layers} - {StaticLayer.__name__, StaticSlidingWindowLayer.__name__}
    return f"its cache has other kinds of layers ({', '.join(sorted(others))})" if others else None


class FixedCache(Cache):
    def __init__(self, config: Any, length: int, device: torch.device) -> None:
        self.length = length
        self.filled: int | None = 0
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        layers = len(StaticCache(config=config, max_cache_len=16).layers)
        super().__init__(layers=[FixedLayer(self) for _ in range(layers)])


class FixedLayer(StaticLayer):
    keys: Tensor
    values: Tensor

    def __init__(self, cache: FixedCache) -> None:
        super().__init__(max_cache_len=cache.length)
        self.cache = cache
        self.slot = cache.slot

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        filled = self.cache.filled
        if filled is None:
            return self.write_at_slot(key_states, value_states)
        end = filled + key_states.shape[-2]
        self.keys[:, :, filled:end] = key_states
        self.values[:, :, filled:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def write_at_slot(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        slots, tokens = self.slot, key_states.shape[-2]
        if tokens > 1:
            slots = slots + torch.arange(tokens, dtype=torch.int64, device=slots.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # older versions of transformers give the positions
        tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        filled = self.cache.filled
        return (self.max_cache_len if filled is None else filled + tokens), 0

    def get_seq_length(self, *args: Any) -> Any:
        filled = self.cache.filled
        return self.slot[0] if filled is None else filled


class OneLayer:
    """What a compiled decoder layer sees of the cache: its own part, whatever number it asks for, so that one code
    serves all layers."""

    def __init__(self, layer: FixedLayer) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layer.write_at_slot(key_states, value_states)
