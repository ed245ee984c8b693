"""The attention of a step: an implementation that transformers dispatches to while a step is captured or run.

    with decoding_attention(attention_configs(model)):
        model(input_ids, past_key_values=cache, ...)     # cache.filled is None

One token per row goes to our kernel on a GPU (`kernels.decode.attention`), several tokens to torch's. Attention with
more to it (a soft cap, a position bias, sinks by token, a mask of numbers) is computed by the model's own function,
over all slots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from amoeba.core.operators import implementations
from amoeba.integrations import exact_mode
from amoeba.integrations.exact_mode import materialised_mask

NAME = "amoeba_decode"


@contextmanager
def decoding_attention(configs: Sequence[Any], name: str = NAME) -> Iterator[None]:
    """name: of another implementation that a step is to use."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        if config._attn_implementation_internal != exact_mode.NAME:
            config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query (B, Q, tokens, D), key and value (B, G, L, ·), mask bool (B, 1, tokens, L) -> (B, tokens, Q, ·)
    indices: (B, tokens, ·), the slots that an indexer chose; no others are attended to."""
    if attention_mask is None:
        raise NotImplementedError("its attention takes no mask")
    if indices is not None:
        chosen = torch.zeros_like(attention_mask, dtype=torch.bool).scatter(-1, indices.long()[:, None], True)
        attention_mask = _both(attention_mask, chosen)
    if attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1 or _has_more(more):
        return _by_the_model(module, query, key, value, attention_mask, scaling, s_aux, more), None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 and query.is_cuda:
        out = torch.ops.amoeba.decode_attention(query[:, :, 0], key, value, attention_mask[:, 0, 0], scaling, s_aux)
        return out[:, None], None
    return _by_torch(query, key, value, attention_mask, scaling, s_aux).transpose(1, 2).contiguous(), None


def _both(mask: Tensor, chosen: Tensor) -> Tensor:
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _has_more(given: dict[str, Any]) -> bool:
    return any(given.get(name) is not None for name in ("softcap", "position_bias", "sinks"))


def _by_the_model(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    sink_Q: Tensor | None,
    more: dict[str, Any],
) -> Tensor:
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise NotImplementedError("its attention has a soft cap, a position bias or a mask of its own")
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    if sink_Q is not None:
        more = {**more, "s_aux": sink_Q}
    return own(module, query, key, value, mask, scaling=scaling, **more)[0]


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, sink_Q: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if sink_Q is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, torch.finfo(query.dtype).min)
    sink = sink_Q.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    logits = torch.cat([logits, sink], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return torch.softmax(logits, dim=-1)[..., :-1].to(value.dtype) @ value


def _by_kernel(
    query_BQD: Tensor, key_BGLD: Tensor, value_BGLV: Tensor, live_BL: Tensor, scaling: float, sink_Q: Tensor | None
) -> Tensor:
    from amoeba.kernels.decode.attention import attention

    return attention(query_BQD, key_BGLD, value_BGLV, live_BL.view(torch.uint8), scaling, sink_Q)


_operator = torch.library.custom_op("amoeba::decode_attention", _by_kernel, mutates_args=())
implementations["amoeba::decode_attention"] = _by_kernel


@_operator.register_fake
def _(query_BQD, key_BGLD, value_BGLV, live_BL, scaling, sink_Q):
    return query_BQD.new_empty((*query_BQD.shape[:2], value_BGLV.shape[-1]))


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, materialised_mask)
