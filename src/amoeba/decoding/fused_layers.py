"""Decoder layers with fewer launches while a step is captured: norms, sums and rotations by our kernels.

B rows · C tokens of a row at once · T = B·C · Q query heads · G key and value heads · D of a head

    join_projections(model)                 # before anything is captured: it moves weights
    with fused_layers(model) as all_attention:      # whether all attention layers were recognised
        model(...)                                  # a step, or, if so, a prompt step that is told the documents

A small step spends its time between kernels, and a layer of transformers launches some sixty of them. What a layer is
made of is recognised by evaluating it, as `integrations.fused_attention` does, or it stays as it is:

norms       one launch each; q_norm and k_norm too where their attention is not recognised
attention   one joined projection, one launch that norms, rotates and writes the cache, one for the output projection
gated attention (Qwen3-Next), one token a row: the same, and a product with the gates
gated delta networks, the same number: one joined projection, one for all up to the output projection (`delta_layers`)
layers      the sum after attention, and its norm, in one launch
shared experts that a token scales (Qwen2-MoE, Qwen3-Next), with their sum: two launches for few tokens

Numbers are rounded where transformers rounds them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.decoding.cache import FixedCache
from amoeba.decoding.cache_attention import decode_attention
from amoeba.decoding.delta_layers import DeltaForm, linears_of, states_of
from amoeba.decoding.delta_layers import recognise as recognise_delta
from amoeba.integrations import fused_attention, norms
from amoeba.integrations.compiled_layers import decoder_layers
from amoeba.ops.attention import document_attention

_MIXERS = ("self_attn", "linear_attn")
_TOKENS = 4


@contextmanager
def fused_layers(model: Any) -> Iterator[bool]:
    with ExitStack() as stack:
        forms = [_form_of(layer) for layer in decoder_layers(model)]
        for layer, form in zip(decoder_layers(model), forms, strict=True):
            if form is not None:
                stack.enter_context(_as(layer.self_attn, _StepAttention, form))
            elif (gated := _form_of(layer, gated=True)) is not None:
                stack.enter_context(_as(layer.self_attn, _StepGatedAttention, gated))
            if (delta := _delta_of(layer)) is not None:
                stack.enter_context(_as(layer.linear_attn, _StepDelta, delta))
        for module in model.modules():
            if not _why_not(getattr(module, "weight", None)) and (found := norms.recognise(module)) is not None:
                stack.enter_context(_as(module, _StepNorm, found))
        for layer in decoder_layers(model):
            if (block := _block_of(layer)) is not None:
                stack.enter_context(_as(block, _StepBlock, None))
            if (mixer := _adds_and_norms(layer)) is not None:
                stack.enter_context(_as(layer, _StepLayer, mixer))
        yield None not in forms


def reads_documents(model: Any) -> bool:
    """Whether all attention layers read prompts by our kernel, which needs no mask."""
    return all(_form_of(layer) is not None for layer in decoder_layers(model))


def _form_of(layer: Any, gated: bool = False) -> fused_attention.Form | None:
    """Of its attention, if it is recognised."""
    attention: Any = getattr(layer, "self_attn", None)
    if gated and (not hasattr(attention, "q_norm") or _why_not(attention.q_norm.weight)):
        return None
    form = fused_attention.recognise(attention, gated=gated)
    return None if isinstance(form, str) else form


def _delta_of(layer: Any) -> DeltaForm | None:
    module = getattr(layer, "linear_attn", None)
    weight = getattr(getattr(module, "norm", None), "weight", None)
    if not isinstance(weight, Tensor) or _why_not(weight):
        return None
    form = recognise_delta(module)
    return None if isinstance(form, str) else form


def join_projections(model: Any) -> None:
    """The weights that read the same rows, as those of queries, keys and values, of each recognised layer one below the
    other: its parameters become views of one tensor, once."""
    for layer in decoder_layers(model):
        found = []
        if _form_of(layer) is not None or _form_of(layer, gated=True) is not None:
            found.append(_projections(layer.self_attn))
        if (delta := _delta_of(layer)) is not None:
            found.append(linears_of(layer.linear_attn, delta))
        if (block := _block_of(layer)) is not None:
            found.append(_shared_projections(block))
        for linears, name in itertools.product(found, ("weight", "bias")):
            parts = [getattr(linear, name) for linear in linears]
            if all(part is not None for part in parts) and _joined(parts) is None:
                whole = torch.cat([part.detach() for part in parts])
                for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                    part.data = view


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are the parts, if they lie one behind the other."""
    first, *_ = parts
    ends = [part.storage_offset() + part.numel() for part in parts]  # not addresses: `kernels.launch.ahead` has none
    behind = all(end == part.storage_offset() for end, part in zip(ends, parts[1:], strict=False))
    one = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if not behind or not one or not all(part.is_contiguous() for part in parts):
        return None
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _projections(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


@contextmanager
def _as(module: Any, mixin: type, form: Any) -> Iterator[None]:
    own: Any = type(module)
    module.__class__ = _mixed(own, mixin, form)
    try:
        yield
    finally:
        module.__class__ = own


@functools.cache
def _mixed(own: type, mixin: type, form: Any) -> type:
    return type(own.__name__, (mixin, own), {"form": form, "__module__": own.__module__})


class _StepAttention:
    form: fused_attention.Form

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer: Any = self
        size = layer.q_norm.weight.shape[0]
        rows, tokens, _ = hidden_states.shape
        joined = _whole(_projections(layer))
        ends: Any = others.get("cu_seq_lens_q")
        steps = tokens == 1 and attention_mask is not None
        tables = [table.shape[1:] == (tokens, size) for table in position_embeddings]
        if (
            not isinstance(past_key_values, FixedCache)
            or joined is None
            or not all(tables)
            or not (steps or ends is not None)
        ):
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **others,
            )
        from amoeba.kernels.decode.linear import linear
        from amoeba.kernels.norm_rotate import norm_rotate_cached

        cos, sin = position_embeddings
        heads, groups = (linear.out_features // size for linear in (layer.q_proj, layer.k_proj))
        own: Any = past_key_values.layers[layer.layer_idx]
        if not own.is_initialized:
            like = hidden_states.new_empty(rows, groups, 1, size)
            own.lazy_initialization(like, like)
        qkv_TC = linear(hidden_states.flatten(0, 1), *joined)
        q_TQD, k_TGD = norm_rotate_cached(
            qkv_TC,
            layer.q_norm.weight,
            layer.k_norm.weight,
            cos.reshape(-1, size),
            sin.reshape(-1, size),
            own.keys,
            own.values,
            past_key_values.slot,
            query_heads=heads,
            eps=self.form.eps,
        )
        if steps:
            y, _ = decode_attention(layer, q_TQD[:, :, None], own.keys, own.values, attention_mask, self.form.scale)
        else:
            v_TGD = qkv_TC[:, -groups * size :].unflatten(1, (groups, size))
            window = fused_attention.window_of(self.form.window, tokens)
            y = document_attention(q_TQD, k_TGD, v_TGD, ends, longest=tokens, scale=self.form.scale, window=window)
        y_TC, out = y.reshape(rows * tokens, -1), layer.o_proj
        return (linear(y_TC, out.weight, out.bias) if _is_plain(out) else out(y_TC)).unflatten(0, (rows, tokens)), None


def _is_plain(module: Any) -> bool:
    """Whether calling it is its product and no more."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def _whole(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias of all, where `join_projections` has joined them."""
    weight, biases = _joined([linear.weight for linear in linears]), [linear.bias for linear in linears]
    bias = None if any(each is None for each in biases) else _joined(biases)
    kept = bias is not None or all(each is None for each in biases)
    return (weight, bias) if weight is not None and kept else None


class _StepGatedAttention:
    form: fused_attention.Form

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer: Any = self
        size, joined = layer.q_norm.weight.shape[0], _whole(_projections(layer))
        rows, tokens, _ = hidden_states.shape
        fixed = isinstance(past_key_values, FixedCache) and attention_mask is not None
        if tokens > 1 or not fixed or joined is None or any(table.shape[-1] > size for table in position_embeddings):
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **others,
            )
        from amoeba.kernels.decode.gated_attention import norm_rotate_gated
        from amoeba.kernels.decode.linear import linear

        own: Any = past_key_values.layers[layer.layer_idx]
        if not own.is_initialized:
            like = hidden_states.new_empty(rows, layer.k_proj.out_features // size, 1, size)
            own.lazy_initialization(like, like)
        cos_PR, sin_PR = (table.flatten(0, 1).contiguous() for table in position_embeddings)
        q_BQD, gate_BQD = norm_rotate_gated(
            linear(hidden_states[:, 0], *joined),
            layer.q_norm.weight,
            layer.k_norm.weight,
            cos_PR,
            sin_PR,
            own.keys,
            own.values,
            past_key_values.slot,
            query_heads=layer.q_proj.out_features // (2 * size),
            eps=self.form.eps,
        )
        y, _ = decode_attention(layer, q_BQD[:, :, None], own.keys, own.values, attention_mask, self.form.scale)
        y_BC, out = y.flatten(1) * gate_BQD.flatten(1), layer.o_proj
        return (linear(y_BC, out.weight, out.bias) if _is_plain(out) else out(y_BC))[:, None], None


class _StepDelta:
    form: DeltaForm

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        layer: Any = self
        states = states_of(cache_params.layers[layer.layer_idx]) if isinstance(cache_params, FixedCache) else None
        joined = _whole(linears_of(layer, self.form))
        if hidden_states.shape[1] > 1 or attention_mask is not None or states is None or joined is None:
            return super().forward(  # type: ignore[misc]
                hidden_states=hidden_states, cache_params=cache_params, attention_mask=attention_mask, **others
            )
        from amoeba.kernels.decode.gated_delta import gated_delta
        from amoeba.kernels.decode.linear import linear

        conv, out = layer.conv1d, layer.out_proj
        y_BQV = gated_delta(
            linear(hidden_states[:, 0], *joined), self.form.places, conv.weight[:, 0], conv.bias, layer.A_log,
            layer.dt_bias, layer.norm.weight, *states, eps=self.form.eps,
        )  # fmt: skip
        y_BC = y_BQV.flatten(1)
        return (linear(y_BC, out.weight, out.bias) if _is_plain(out) else out(y_BC))[:, None]


def _shared_projections(block: Any) -> list[nn.Linear]:
    return [block.shared_expert.gate_proj, block.shared_expert.up_proj, block.shared_expert_gate]


class _StepBlock:
    def forward(self, hidden_states: Tensor) -> Tensor:
        from amoeba.kernels.decode import shared_expert

        block: Any = self
        x_TH = hidden_states.flatten(0, -2)
        joined, down = _whole(_shared_projections(block)), block.shared_expert.down_proj.weight
        if joined is None or not shared_expert.serves(x_TH, joined[0], down):
            return super().forward(hidden_states)  # type: ignore[misc]
        _, weight_TK, expert_TK = block.gate(x_TH)
        routed_TH = block.experts(x_TH, expert_TK, weight_TK)
        return shared_expert.add_shared_expert(x_TH, joined[0], down, routed_TH).view_as(hidden_states)


@torch.no_grad()
def _block_of(layer: Any) -> Any | None:
    """Its experts with their router and a shared expert, if the latter is gated by silu, scaled by the sigmoid of one
    product, and added to what the routed ones return."""
    block: Any = getattr(layer, "mlp", None)
    shared: Any = getattr(block, "shared_expert", None)
    linears: list[Any] = [getattr(shared, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linears.append(getattr(block, "shared_expert_gate", None))
    if not all(_is_plain(linear) and linear.bias is None for linear in linears) or linears[3].out_features != 1:
        return None
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in (block, shared))
    if hooked or _why_not(linears[0].weight[0]):
        return None
    like, width = linears[0].weight, linears[0].in_features
    x, *factors = (norms.random_like(like, _TOKENS, width, seed=seed) for seed in range(7))
    routing, seen = [object() for _ in range(3)], list[Any]()

    def routed(x: Tensor, *given: Any) -> Tensor:
        seen.extend(given)
        return x * factors[0]

    def scaled(part: int) -> Callable:
        return lambda x: x * factors[part]

    functions: list[Callable] = [lambda x: routing, routed, scaled(1), scaled(2), scaled(3)]
    functions.append(lambda x: x[:, :1] * factors[4][:, :1])
    parts = [getattr(block, "gate", None), getattr(block, "experts", None), *linears]
    given = _with_functions(parts, functions, lambda: block(x[None]))
    gate = x * factors[1]
    expected = x * factors[0] + torch.sigmoid(x[:, :1] * factors[4][:, :1]) * (
        nn.functional.silu(gate) * (x * factors[2]) * factors[3]
    )
    handed = len(seen) == 2 and seen[0] is routing[2] and seen[1] is routing[1]
    return block if isinstance(given, Tensor) and torch.equal(given, expected[None]) and handed else None


def _with_functions(parts: list[Any], functions: list[Callable], run: Callable[[], Any]) -> Any:
    """What `run` returns while functions stand in for these modules; None if it fails."""
    if not all(isinstance(part, nn.Module) for part in parts):
        return None
    own = [part.__dict__.get("forward") for part in parts]  # as placed experts have
    try:
        for part, function in zip(parts, functions, strict=True):
            part.forward = function
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it wants other arguments
        return None
    finally:
        for part, forward in zip(parts, own, strict=True):
            if forward is None:
                del part.forward
            else:
                part.forward = forward


class _StepNorm:
    form: norms.Norm

    def forward(self, hidden_states: Tensor, *more: Any, **others: Any) -> Tensor:
        from amoeba.kernels.rms_norm import rms_norm

        norm: Any = self
        if hidden_states.dtype != norm.weight.dtype or more or others:  # norms of Mamba layers take a gate
            return super().forward(hidden_states, *more, **others)  # type: ignore[misc]
        return rms_norm(hidden_states.contiguous(), norm.weight, **self.form._asdict())

    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """x + added, and its norm."""
        from amoeba.kernels.rms_norm import add_rms_norm

        norm: Any = self
        return add_rms_norm(x.contiguous(), added.contiguous(), norm.weight, **self.form._asdict())


def _why_not(weight: Any) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type != "cuda" or weight.shape[-1:] > (norms.MOST,)


class _StepLayer:
    form: str  # how it names what mixes tokens

    def forward(self, hidden_states: Tensor, *more: Any, **others: Any) -> Any:
        layer: Any = self
        norm = layer.post_attention_layernorm
        same = hidden_states.dtype == getattr(norm, "weight", hidden_states).dtype
        if more or not isinstance(norm, _StepNorm) or not same:
            return super().forward(hidden_states, *more, **others)  # type: ignore[misc]
        x = layer.input_layernorm(hidden_states)
        if self.form == "self_attn":
            attended, _ = layer.self_attn(hidden_states=x, **others)
        else:
            mask, cache = others.get("attention_mask"), others.get("past_key_values")
            attended = layer.linear_attn(hidden_states=x, cache_params=cache, attention_mask=mask)
        total, normed = norm.of_sum(hidden_states, attended)
        out = layer.mlp(normed)
        return total + (out[0] if isinstance(out, tuple) else out)


@torch.no_grad()
def _adds_and_norms(layer: Any) -> str | None:
    """How it names what mixes its tokens, if it is x + mixed(norm(x)), then the same with its experts, and hands its
    arguments to what mixes."""
    mixer = next((name for name in _MIXERS if isinstance(getattr(layer, name, None), nn.Module)), "self_attn")
    parts: list[Any] = [
        getattr(layer, name, None) for name in ("input_layernorm", mixer, "post_attention_layernorm", "mlp")
    ]
    if not all(isinstance(part, nn.Module) for part in parts) or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    weight = next(iter(parts[0].parameters()), None)
    if weight is None or weight.dim() != 1:
        return None
    x, *factors = (norms.random_like(weight, 1, _TOKENS, len(weight), seed=seed) for seed in range(5))
    others = {name: object() for name in ("attention_mask", "position_ids", "past_key_values", "position_embeddings")}
    seen: dict[str, Any] = {}

    def mix(hidden_states: Tensor, **given: Any) -> Any:
        seen.update(given)
        mixed = hidden_states * factors[1]
        return (mixed, None) if mixer == "self_attn" else mixed

    functions: list[Callable] = [lambda x: x * factors[0], mix, lambda x: x * factors[2], lambda x: x * factors[3]]
    given = _with_functions(parts, functions, lambda: layer(x, **others, use_cache=True))
    total = x + x * factors[0] * factors[1]
    expected = total + total * factors[2] * factors[3]
    if mixer == "linear_attn":
        others = {"attention_mask": others["attention_mask"], "cache_params": others["past_key_values"]}
    handed = all(seen.get(name) is value for name, value in others.items())
    return mixer if isinstance(given, Tensor) and torch.equal(given, expected) and handed else None
