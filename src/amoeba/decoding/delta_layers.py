"""Gated delta networks of a captured step (Qwen3-Next, Qwen3.5): one joined projection, one launch for all between it
and the output projection.

B rows · Q heads of values, V wide · D of a head of queries and keys · P of a row of the joined projection

    form = recognise(layer.linear_attn)     # or why it is left as it is
    linears_of(layer.linear_attn, form)     # what is joined, in this order

A layer is recognised by evaluating it: what it returns for a random token and random states, and the states afterwards,
are what the formula of `kernels.decode.gated_delta` gives. Prompts are read by transformers' own code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, cache_utils

from amoeba.kernels.decode.gated_delta import Places, why_not

_GROUPED = ("in_proj_qkvz", "in_proj_ba")  # q, k, v, z of a head of keys, then of the next; b and a so, too
_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_TOLERANCE = 2e-2  # relative L2; bf16 rounds a few times


class DeltaForm(NamedTuple):
    linears: tuple[str, ...]
    places: Places
    eps: float


def linears_of(module: Any, form: DeltaForm) -> list[nn.Linear]:
    return [getattr(module, name) for name in form.linears]


def states_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Of a layer of transformers' cache, the convolution's and the recurrent one, if it has read something."""
    has, *states = layer.has_previous_state, layer.conv_states, layer.recurrent_states
    if isinstance(has, dict):  # which older versions of transformers do not have
        has, *states = has[0], *(each[0] for each in states)
    return (states[0], states[1]) if has else None


def recognise(module: Any) -> DeltaForm | str:
    names = next((each for each in (_GROUPED, _APART) if all(hasattr(module, name) for name in each)), None)
    if names is None or not all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "norm", "out_proj")):
        return "it is no gated delta network"
    linears = [getattr(module, name) for name in names]
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in (module, module.norm, *linears))
    if hooked or not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return "its projections are not plain linear layers"
    eps = getattr(module.norm, "variance_epsilon", getattr(module.norm, "eps", None))
    key_heads, value_heads = getattr(module, "num_k_heads", None), len(module.A_log)
    if not isinstance(eps, float) or not isinstance(key_heads, int):
        return "it does not tell its heads, or the epsilon of its norm"
    value_width = len(module.norm.weight)
    key_width = (len(module.conv1d.weight) - value_heads * value_width) // (2 * key_heads)
    if (reason := why_not(key_width, value_width, key_heads, value_heads)) is not None:
        return f"our kernel {reason}"
    places = (_grouped if names is _GROUPED else _apart)(key_heads, value_heads // key_heads, key_width, value_width)
    form = DeltaForm(names, places, eps)
    try:
        return form if _computes(module, form) else "it computes something else"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it wants other arguments
        return f"it could not be tried: {type(error).__name__}: {error}"


def _grouped(heads: int, group: int, key: int, value: int) -> Places:
    stride = 2 * key + 2 * group * value
    beta = heads * stride
    return Places(0, key, 2 * key, 2 * key + group * value, beta, beta + group, stride, stride, 2 * group)


def _apart(heads: int, group: int, key: int, value: int) -> Places:
    values, gate = 2 * heads * key, 2 * heads * key + heads * group * value
    beta = gate + heads * group * value
    return Places(0, heads * key, values, gate, beta, beta + heads * group, key, group * value, group)


@torch.no_grad()
def _computes(module: Any, form: DeltaForm) -> bool:
    """Two rows, a token each."""
    own, conv = linears_of(module, form)[0].weight, module.conv1d.weight
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = own.dtype) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(own.device, dtype)

    heads, width = len(module.A_log), len(module.norm.weight)
    key_width = (len(conv) - heads * width) // (2 * module.num_k_heads)
    layer: Any = cache_utils.LinearAttentionLayer()
    layer.update_conv_state(random(2, len(conv), conv.shape[-1]))
    layer.update_recurrent_state(random(2, heads, key_width, width, dtype=torch.float32))
    states = states_of(layer)
    assert states is not None
    before = [each.clone() for each in states]
    others = {"norm.weight": random(width), "A_log": random(heads), "dt_bias": random(heads)}
    others["conv1d.weight"] = random(*conv.shape)
    hidden, cache = random(2, 1, own.shape[1]), Cache(layers=[layer] * (module.layer_idx + 1))
    given = {"hidden_states": hidden, "cache_params": cache, "attention_mask": None}
    returned = functional_call(module, others, kwargs=given)
    x_BP = torch.cat([linear(hidden[:, 0]) for linear in linears_of(module, form)], 1)
    y_BQV, *after = expected(
        x_BP, form.places, others["conv1d.weight"][:, 0], module.conv1d.bias, others["A_log"], others["dt_bias"],
        others["norm.weight"], *before, key_heads=module.num_k_heads, eps=form.eps,
    )  # fmt: skip
    out = module.out_proj(y_BQV.flatten(1).to(own.dtype))[:, None]
    pairs = zip((returned, *states), (out, *after), strict=True)
    return all(got.shape == wanted.shape and _distance(got, wanted) <= _TOLERANCE for got, wanted in pairs)


def expected(
    x_BP: Tensor,
    places: Places,
    conv_CN: Tensor,
    bias_C: Tensor | None,
    decay_Q: Tensor,
    time_Q: Tensor,
    norm_V: Tensor,
    conv_BCL: Tensor,
    state_BQDV: Tensor,
    *,
    key_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula of `kernels.decode.gated_delta` in fp32, and the states afterwards."""
    x, conv, decay, time, norm = (each.float() for each in (x_BP, conv_CN, decay_Q, time_Q, norm_V))
    heads, key_width, width = state_BQDV.shape[1:]
    group = heads // key_heads

    def part(first: int, stride: int, size: int) -> Tensor:
        """(B, G·size)"""
        return torch.cat([x[:, at : at + size] for at in range(first, first + key_heads * stride, stride)], 1)

    of_keys, of_values = (places.query_stride, key_width), (places.value_stride, group * width)
    parts = [part(places.query, *of_keys), part(places.key, *of_keys), part(places.value, *of_values)]
    full_BCN = torch.cat([conv_BCL.float(), torch.cat(parts, 1)[:, :, None]], 2)
    mixed = (full_BCN[:, :, -conv.shape[1] :] * conv).sum(2) + (0 if bias_C is None else bias_C.float())
    q, k, v = nn.functional.silu(mixed).split([each.shape[1] for each in parts], 1)
    q, k = (nn.functional.normalize(each.unflatten(1, (key_heads, -1)), dim=2) for each in (q, k))
    q, k = (each.repeat_interleave(group, 1)[..., None] for each in (q * key_width**-0.5, k))
    b, a = (part(first, places.beta_stride, group) for first in (places.beta, places.time))
    state = state_BQDV.float() * torch.exp(-decay.exp() * nn.functional.softplus(a + time))[:, :, None, None]
    change = (v.unflatten(1, (heads, width)) - (state * k).sum(2)) * b.sigmoid()[:, :, None]
    state = state + k * change[:, :, None]
    out = (state * q).sum(2)
    z = part(places.gate, *of_values).unflatten(1, (heads, width))
    y = norm * out * torch.rsqrt(out.square().mean(2, keepdim=True) + eps) * nn.functional.silu(z)
    return y, full_BCN[:, :, -conv_BCL.shape[2] :].to(conv_BCL.dtype), state


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))
