"""The attention layers of a Hugging Face model from one joined projection, with norms and rotations by our kernels.

Q query heads · G key and value heads · D of a head

    with fused_attention(model) as found:       # Found: how many layers, of how many, and why not the others
        model(...)                              # with our attention, and told the documents

Taken are layers that norm queries and keys head by head and rotate all of a head, as Qwen3 does. A layer is recognised by
evaluating it: what it hands to attention, for a few random tokens, norm weights and rotations, is what these formulas
give, and what it returns is its output projection of attention's result. Parameters stay where they are, so a model is
saved as ever. Wherever a call wants something else (a mask, a cache, another attention) the layer's own code runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface

from amoeba import rotary_attention
from amoeba.integrations.attention import NAME, arguments_beyond, attend, window_of

logger = logging.getLogger("amoeba")

_LINEARS = "q_proj", "k_proj", "v_proj", "o_proj"
_NORMS = "q_norm", "k_norm"
_TOKENS = 16
_TOLERANCE = 2e-2  # relative L2; bf16 rounds a few times


class Found(NamedTuple):
    count: int
    of: int
    reasons: tuple[str, ...]  # each once


class _Form(NamedTuple):
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
        if isinstance(form, _Form):
            own: Any = type(module)
            changed.append((module, own))
            module.__class__ = _fused(own, form)
        else:
            reasons.append(form)
    found = Found(len(changed), len(candidates), tuple(dict.fromkeys(reasons)))
    logger.info("%d of %d attention layers with norms and rotations by our kernels", found.count, found.of)
    for reason in found.reasons:
        logger.info("an attention layer stays as it is: %s", reason)
    try:
        yield found
    finally:
        for module, own in changed:
            module.__class__ = own


def recognise(module: Any) -> _Form | str:
    """Its form, or why it is left as it is."""
    if isinstance(module, _FusedAttention):
        return "it is fused already"
    norms = [getattr(module, name, None) for name in _NORMS]
    linears = [getattr(module, name) for name in _LINEARS]
    if not all(isinstance(getattr(norm, "weight", None), Tensor) for norm in norms):
        return f"it has no {' and '.join(_NORMS)}"
    if not all(type(linear) is nn.Linear for linear in linears) or any(_hooks(each) for each in (*linears, *norms)):
        return "its projections are not plain linear layers"
    size = norms[0].weight.numel()
    if norms[0].weight.shape != norms[1].weight.shape or any(linear.out_features % size for linear in linears[:3]):
        return "its norms are not those of a head"
    eps = getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", None))
    if not isinstance(eps, float) or any(linear.weight.is_meta for linear in linears):
        return "its norms are not known" if not isinstance(eps, float) else "it has no numbers yet"
    training = module.training
    try:
        return _evaluated(module.train(), linears, size, eps)
    except Exception as error:  # it wants other arguments
        return f"it could not be tried: {type(error).__name__}: {error}"
    finally:
        module.train(training)


@torch.no_grad()
def _evaluated(module: Any, linears: list[nn.Linear], size: int, eps: float) -> _Form | str:
    weight = linears[0].weight
    heads, key_heads = linears[0].out_features // size, linears[1].out_features // size
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(weight.device, weight.dtype)

    hidden, attended = random(1, _TOKENS, weight.shape[1]), random(1, _TOKENS, heads, size)
    cos, sin, q_weight, k_weight = random(1, _TOKENS, size), random(1, _TOKENS, size), random(size), random(size)
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
    expected = _normed_and_rotated(q, q_weight, cos, sin, eps), _normed_and_rotated(k, k_weight, cos, sin, eps), v
    pairs = [*zip(given, expected, strict=True), (returned[0], linears[3](attended.flatten(2)))]
    if any(got.shape != wanted.shape or _distance(got, wanted) > _TOLERANCE for got, wanted in pairs):
        return "it computes something else"
    return _Form(eps, scale, window)


@contextmanager
def _attention(config: Any, function: Any) -> Iterator[None]:
    """`function` in place of ours."""
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
    first, second = m.chunk(2, -1)
    return m * cos + torch.cat([-second, first], -1) * sin


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _FusedAttention:
    """Mixed in before the layer's own class."""

    form: _Form

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        ends, longest = others.get("cu_seq_lens_q"), others.get("max_length_q")
        parameters = [
            parameter for name in (*_LINEARS[:3], *_NORMS) for parameter in getattr(module, name).parameters()
        ]
        ours = {"cu_seq_lens_q", "max_length_q"}
        beyond = {name: value for name, value in others.items() if name not in ours}
        cos, sin = position_embeddings
        size, heads = module.q_norm.weight.shape[0], module.q_proj.out_features // module.q_norm.weight.shape[0]
        if (
            module.config._attn_implementation != NAME
            or past_key_values is not None
            or ends is None
            or longest is None
            or arguments_beyond(module, attention_mask, 0.0, None, beyond)
            or torch.is_autocast_enabled(hidden_states.device.type)
            or any(each.dtype != hidden_states.dtype for each in (*parameters, cos, sin))
            or cos.shape[-1] != size
            or hidden_states.dim() != 3
            or cos.shape[:-1].numel() not in (hidden_states.shape[1], hidden_states.shape[:-1].numel())
            or len({parameter.requires_grad for parameter in parameters[:-2]}) > 1
        ):
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **others,
            )
        linears = [getattr(module, name) for name in _LINEARS[:3]]
        biases = [linear.bias for linear in linears]
