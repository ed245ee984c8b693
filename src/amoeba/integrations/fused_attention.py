"""Fused attention layers of a Hugging Face model: one joined projection, with norms and rotations by our kernels.

Q query heads · G key and value heads · D of a head

    with fused_attention(model) as found:       # how many layers, of how many, and why not the others
        model(...)                              # with our attention, and told the documents

Taken are layers that norm queries and keys head by head and rotate all of a head, as Qwen3's do, recognised by
evaluating them. Where a call wants something else (a mask, a cache, another attention) the layer's own code runs. Other
layers train with the implementation "amoeba" of attention, which keeps packed documents apart:

    model.set_attn_implementation(NAME)
    model(input_ids=ids_BS, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=S, max_length_k=S, ...)

The names are those by which transformers hands documents to flash attention. What an architecture wants beyond causal
attention (sinks, capped scores, masks) is refused with a sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.ops import rotary_attention
from amoeba.ops.attention import document_attention, why_not

_LINEARS = "q_proj", "k_proj", "v_proj", "o_proj"
_NORMS = "q_norm", "k_norm"
_TOKENS = 16
_TOLERANCE = 2e-2  # relative L2; bf16 rounds a few times


class Found(NamedTuple):
    layers: int
    of: int
    reasons: tuple[str, ...]  # each once


class Form(NamedTuple):
    """What the layer's parameters do not say."""

    eps: float
    scale: float
    window: int | None


@contextmanager
def fused_attention(model: nn.Module) -> Iterator[Found]:
    candidates = [module for module in model.modules() if all(hasattr(module, name) for name in _LINEARS)]
    changed, reasons = [], []
    for module in candidates:
        form = recognise(module)
        if isinstance(form, Form):
            own: Any = type(module)
            changed.append((module, own))
            module.__class__ = _fused(own, form)
        else:
            reasons.append(form)
    found = Found(len(changed), len(candidates), tuple(dict.fromkeys(reasons)))
    logger.info("our kernels compute norms and rotations of %d of %d attention layers", found.layers, found.of)
    for reason in found.reasons:
        logger.info("an attention layer is left unchanged: %s", reason)
    try:
        yield found
    finally:
        for module, own in changed:
            module.__class__ = own


def recognise(module: Any, *, gated: bool = False) -> Form | str:
    """Its form, or why it is left as it is. gated: as Qwen3-Next's, where each head of queries comes with a gate that
    multiplies the result, norms add one to their weights, and rotations turn as much of a head as they are wide."""
    if isinstance(module, _FusedAttention):
        return "it is fused already"
    if not all(hasattr(module, name) for name in _LINEARS):
        return f"it has no {', '.join(_LINEARS)}"
    norms: list[Any] = [getattr(module, name, None) for name in _NORMS]
    linears = [getattr(module, name) for name in _LINEARS]
    if not all(isinstance(getattr(norm, "weight", None), Tensor) for norm in norms):
        return f"it has no {' and '.join(_NORMS)}"
    if not all(type(linear) is nn.Linear for linear in linears) or any(_hooks(each) for each in (*linears, *norms)):
        return "its projections are not plain linear layers"
    size = norms[0].weight.numel()
    if norms[0].weight.shape != norms[1].weight.shape or any(linear.out_features % size for linear in linears[:3]):
        return "its norms are not those of a head"
    eps, of_keys = (getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms)
    if not isinstance(eps, float) or eps != of_keys:
        return "its norms do not have one epsilon that they tell"
    training = module.training
    try:
        return _evaluated(module.train(), linears, size, eps, gated)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it wants other arguments
        return f"it could not be tried: {type(error).__name__}: {error}"
    finally:
        module.train(training)


@torch.no_grad()
def _evaluated(module: Any, linears: list[nn.Linear], size: int, eps: float, gated: bool) -> Form | str:
    weight = linears[0].weight
    heads, rotated = linears[0].out_features // size, size
    if gated:
        heads, rotated = heads // 2, size // 2
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(weight.device, weight.dtype)

    hidden, attended = random(1, _TOKENS, weight.shape[1]), random(1, _TOKENS, heads, size)
    cos, sin, q_weight, k_weight = *(random(1, _TOKENS, rotated) for _ in "12"), random(size), random(size)
    seen: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = []

    def note(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        seen.append((q, k, v, options))
        return attended, None

    with _attention(module.config, note):
        own_weights = {"q_norm.weight": q_weight, "k_norm.weight": k_weight}
        arguments = {"hidden_states": hidden, "position_embeddings": (cos, sin), "attention_mask": None}
        returned = functional_call(module, own_weights, kwargs=arguments)
    if len(seen) != 1 or not isinstance(returned, tuple):
        return "it does not attend once"
    *given, options = seen[0]
    scale, window = options.pop("scaling", None), options.pop("sliding_window", None)
    beyond = arguments_beyond(module, None, options.pop("dropout", 0.0), options.pop("is_causal", None), options)
    if beyond or not isinstance(scale, float):
        return f"it wants more of attention: {', '.join(beyond) or 'a scale of its own'}"
    q, k, v = (linear(hidden).view(1, _TOKENS, -1, size).transpose(1, 2) for linear in linears[:3])
    if gated:
        q, gate = q.unflatten(1, (heads, 2)).unbind(2)
        q_weight, k_weight, attended = 1 + q_weight, 1 + k_weight, attended * torch.sigmoid(gate.transpose(1, 2))
    expected = _normed_and_rotated(q, q_weight, cos, sin, eps), _normed_and_rotated(k, k_weight, cos, sin, eps), v
    pairs = [*zip(given, expected, strict=True), (returned[0], linears[3](attended.flatten(2)))]
    if not all(got.shape == wanted.shape and _distance(got, wanted) <= _TOLERANCE for got, wanted in pairs):
        return "it computes something else"
    reason = None if gated else rotary_attention.why_not(weight, heads, k.shape[1], size, scale)
    return Form(eps, scale, window) if reason is None else f"our kernel {reason}"


@contextmanager
def _attention(config: Any, function: Any) -> Iterator[None]:
    own = config._attn_implementation
    AttentionInterface.register(NAME, function)
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = own
        AttentionInterface.register(NAME, attend)


def _normed_and_rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    x, weight, cos, sin = x.float(), weight.float(), cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    m = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    m, rest = m.split([cos.shape[-1], m.shape[-1] - cos.shape[-1]], -1)
    first, second = m.chunk(2, -1)
    return torch.cat([m * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _FusedAttention:
    form: Form

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer: Any = self
        plain = attention_mask is None and past_key_values is None and layer.config._attn_implementation == NAME
        if not plain or not _serves(layer, hidden_states, position_embeddings, others):
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **others,
            )
        form, size = self.form, layer.q_norm.weight.shape[0]
        cos, sin = (table.reshape(-1, size) for table in position_embeddings)
        weights, biases = zip(*((linear.weight, linear.bias) for linear in _projections(layer)), strict=True)
        bias = None if biases[0] is None else torch.cat(biases)
        qkv = nn.functional.linear(hidden_states, torch.cat(weights), bias)
        y_TQD = rotary_attention.rotary_attention(
            qkv.flatten(0, 1),
            layer.q_norm.weight,
            layer.k_norm.weight,
            cos,
            sin,
            others["cu_seq_lens_q"],
            query_heads=layer.q_proj.out_features // size,
            eps=form.eps,
            scale=form.scale,
            window=window_of(form.window, others["max_length_q"]),
        )
        return layer.o_proj(y_TQD.view(*hidden_states.shape[:-1], -1)), None


def _serves(layer: Any, hidden: Tensor, tables: tuple[Tensor, Tensor], others: dict[str, Any]) -> bool:
    linears, norms = _projections(layer), [layer.q_norm, layer.k_norm]
    size = layer.q_norm.weight.shape[0]
    beyond = {name: value for name, value in others.items() if name not in ("cu_seq_lens_q", "max_length_q")}
    documents = others.get("cu_seq_lens_q") is not None and others.get("max_length_q") is not None
    if not documents or arguments_beyond(layer, None, 0.0, None, beyond):
        return False
    rows, length = hidden.shape[0], hidden.shape[1]
    if any(table.shape[1:] != (length, size) or table.shape[0] not in (1, rows) for table in tables):
        return False  # rotates a part of a head
    if torch.is_autocast_enabled(hidden.device.type):
        return False
    of_layer = [module.weight for module in (*linears, *norms)]
    if any(tensor.dtype != hidden.dtype for tensor in (*of_layer, *tables)):
        return False
    # weights of which some are trained and some not: a joined gradient would be computed for all
    if len({linear.weight.requires_grad for linear in linears}) > 1 or len({x.bias is None for x in linears}) > 1:
        return False
    heads, key_heads = (linear.out_features // size for linear in linears[:2])
    return rotary_attention.why_not(hidden, heads, key_heads, size, layer.form.scale) is None


def _projections(layer: Any) -> list[nn.Linear]:
    return [layer.q_proj, layer.k_proj, layer.v_proj]


@functools.cache
def _fused(own: type, form: Form) -> type:
    return type(own.__name__, (_FusedAttention, own), {"form": form, "__module__": own.__module__})


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
