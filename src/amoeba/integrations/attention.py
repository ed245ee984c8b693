"""Attention for training in Hugging Face models: the implementation "amoeba", which keeps packed documents apart.

    model.set_attn_implementation(NAME)
    model(input_ids=ids_BS, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=S, max_length_k=S, ...)

The names are those by which transformers hands documents to flash attention; rows of a batch are documents of their
own. What an architecture wants beyond causal attention (sinks, capped scores, masks) is refused with a sentence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from amoeba.core.errors import bad_value
from amoeba.ops.attention import document_attention, why_not

NAME = "amoeba"

# Arguments that say nothing about which numbers come out
_OF_NO_CONSEQUENCE = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "num_items_in_batch"}
_OURS = {"cu_seq_lens_k", "max_length_k"}  # equal to those of the queries


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(B, heads, S, D) of query, key and value -> (B, S, heads, D)."""
    beyond = arguments_beyond(module, attention_mask, dropout, is_causal, others)
    window = window_of(sliding_window, max_length_q)
    reason = f"has no {', '.join(beyond)}" if beyond else why_not(query, key, value, window)
    if cu_seq_lens_q is None or max_length_q is None:
        reason = reason or "is not told the documents (cu_seq_lens_q, max_length_q)"
    if reason is not None or cu_seq_lens_q is None or max_length_q is None:
        raise bad_value("attention", "causal attention", f"a layer for which ours {reason}", "use sdpa")
    rows, length = query.shape[0], query.shape[2]
    q, k, v = (states.transpose(1, 2).reshape(rows * length, -1, states.shape[3]) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    y = document_attention(q, k, v, cu_seq_lens_q, longest=max_length_q, scale=scale, window=window)
    return y.view(rows, length, *y.shape[1:]), None


def arguments_beyond(
    module: Any, attention_mask: Any, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> list[str]:
    """Which of a layer's arguments ask for more than causal attention of documents."""
    beyond = {name for name, value in others.items() if value is not None} - _OF_NO_CONSEQUENCE - _OURS
    if attention_mask is not None:
        beyond.add("attention_mask")
    if dropout:
        beyond.add("dropout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        beyond.add("is_causal=False")
    return sorted(beyond)


def window_of(sliding_window: int | None, longest: int | None) -> int | None:
    """How many tokens before its own a query sees. transformers counts its own; a window that holds the longest
    document hides nothing."""
    return None if sliding_window is None or sliding_window >= (longest or 0) else sliding_window - 1


# There is no mask of this name: transformers then makes none, and reads nothing back from the device to find out.
AttentionInterface.register(NAME, attend)
