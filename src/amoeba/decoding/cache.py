"""Keys and values in memory of fixed addresses, filled by prompts of any length and then token by token.

    cache = FixedCache(model.config, length=1024, device=model.device)
    cache.filled = 0        # a prompt: what comes is written from this slot on, and what is there up to it is seen
    cache.filled = None     # steps: the tensor cache.slot says where, and all slots are seen, under a mask

While prompts are read it looks like a cache that grows; in steps nothing in it depends on a number that the host knows,
so that a step can be captured in a CUDA graph. Layers with a sliding window keep all slots: the mask hides the old
ones, and our attention does not read what is hidden.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import StaticCache, StaticLayer

# By the static layer that transformers would make. Those of a fixed size are kept: linear attention, Mamba,
# convolutions, and layers that keep nothing.
_KEYS_AND_VALUES = ("StaticLayer", "StaticSlidingWindowLayer")
_INDEXED = ("StaticIndexedLayer",)
_STATES_AND_KEYS = (
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)
_STATES, _NOTHING = ("LinearAttentionLayer",), ("DummyLayer",)
_KNOWN = {*_KEYS_AND_VALUES, *_INDEXED, *_STATES_AND_KEYS, *_STATES, *_NOTHING}


def why_not_fixed(config: Any) -> str | None:
    """Why a model's state between tokens has no fixed addresses."""
    try:
        layers = StaticCache(config=config, max_cache_len=16).layers
    except Exception as error:  # whatever a config may lack
        return f"transformers makes no static cache for it ({type(error).__name__}: {error})"
    return _others(layers, _KNOWN)


def why_more_than_keys(config: Any) -> str | None:
    """Why a model's state between tokens is more than keys and values of fixed addresses."""
    return why_not_fixed(config) or _others(StaticCache(config=config, max_cache_len=16).layers, {*_KEYS_AND_VALUES})


def _others(layers: Any, known: set[str]) -> str | None:
    others = {type(layer).__name__ for layer in layers} - known
    return f"its cache has other kinds of layers ({', '.join(sorted(others))})" if others else None


class FixedCache(Cache):
    def __init__(self, config: Any, length: int, device: torch.device) -> None:
        self.length = length
        self.filled: int | None = 0
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        layers = StaticCache(config=config, max_cache_len=16).layers
        Cache.__init__(self, layers=[self._fixed(layer) for layer in layers])
        self.states = [layer for layer in self.layers if hasattr(layer, "update_recurrent_state")]

    def _fixed(self, layer: Any) -> Any:
        name = type(layer).__name__
        if name in _KEYS_AND_VALUES:
            return FixedLayer(self)
        if name in _INDEXED:
            return FixedIndexedLayer(self)
        if name in _STATES_AND_KEYS:
            return FixedHybridLayer(self, getattr(layer, "number_of_states", 1))
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.slot[0] if self.filled is None else self.filled

    def begin(self) -> None:
        """Before a prompt: nothing has been read. Addresses stay."""
        self.slot.zero_()
        for layer in self.states:
            layer.reset()


def cache_of(model: Any, length: int, device: torch.device) -> FixedCache:
    own = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    kind: Any = FixedCache if own is None else type("FixedMiniMaxCache", (_LinearCaches, FixedCache, own), {})
    return kind(model.config, length, device)


class _LinearCaches:
    """MiniMax names the states of its linear attention otherwise, and insists on a class of its own."""

    layers: list[Any]
    __len__ = Cache.__len__

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.layers[layer_idx].update_recurrent_state(linear_cache)
        self.layers[layer_idx].has_previous_state[0] = True

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None


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
        return self.cache.get_seq_length()


class FixedIndexedLayer(FixedLayer):
    """With keys of an indexer, which chooses the slots to attend to."""

    indexer_keys: Tensor | None = None  # (B, L, D)
    indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if self.indexer_keys is None:
            rows, tokens, size = indexer_key_states.shape
            self.indexer_keys = indexer_key_states.new_zeros(rows, self.max_cache_len, size)
        tokens, filled = indexer_key_states.shape[1], self.cache.filled
        if filled is None:
            slots = self.slot + torch.arange(tokens, dtype=torch.int64, device=self.slot.device)
            return self.indexer_keys.index_copy_(1, slots, indexer_key_states)
        self.indexer_keys[:, filled : filled + tokens] = indexer_key_states
        return self.indexer_keys[:, : filled + tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._written = key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, *args: Any) -> Any:
        """Of the layer itself it is asked once its keys are written (GLM-5), and counts them."""
        return self.cache.get_seq_length() + self._written


class FixedHybridLayer(cache_utils.LinearAttentionLayer, FixedLayer):
    """Keys and values, and states of a fixed size."""

    def __init__(self, cache: FixedCache, number_of_states: int) -> None:
        FixedLayer.__init__(self, cache)
        cache_utils.LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        own: Any = FixedLayer if args else cache_utils.LinearAttentionLayer
        own.lazy_initialization(self, *args, **kwargs)

    if hasattr(FixedLayer, "get_max_length"):  # which older versions of transformers do not ask for
        get_max_length = FixedLayer.get_max_length


class OneLayer:
    """What a compiled decoder layer sees of the cache: its own part, whatever number it asks for, so that one code
    serves all layers."""

    def __init__(self, layer: FixedLayer) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layer.write_at_slot(key_states, value_states)
