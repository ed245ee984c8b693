"""A decoder as the C++ core computes its steps (`cpu_step`, and `exact_step` in exact mode).

B rows · C tokens · H hidden · Q query heads · G key and value heads · D of a head · L slots · V vocabulary

    native = ModelReader(model, dense="auto").read()     # Unknown where a part is of no known kind
    stepper = native.stepper(keys, values)               # for one cache

Its modules have to be root mean square norms, linear projections, rotary embeddings, latent attention, one of our
routers, experts that the core reads, shared experts; nothing else may have parameters. Whether the core computes what
they do is tried by who reads them, with `hidden_states` and `keys_and_values`.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amoeba.backends import read_quantised
from amoeba.core.config import Activation, RouterConfig
from amoeba.core.weights import AnyExperts, ExpertWeights, LoraFactors
from amoeba.cpu import step as core
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.pointers import address, place_of
from amoeba.cpu.weights import PackedWeights, ScaledCodes
from amoeba.decoding.cache_attention import decoding_attention
from amoeba.integrations.block_linear import BlockEmbedding, BlockLinear
from amoeba.integrations.compiled_layers import decoder_layers, final_norm
from amoeba.integrations.exact_mode import attention_configs, is_exact
from amoeba.integrations.experts_module import LORA, is_experts, routers_in, weights_of
from amoeba.integrations.fused_routers import recognise as recognise_router
from amoeba.integrations.text_model import text_config, text_decoder
from amoeba.lora.factors import from_peft, to_peft
from amoeba.ops.exact import ExactOperators
from amoeba.precision.blocks import dequantise_blocks
from amoeba.precision.quantised_experts import QuantisedExperts

DTYPES = torch.float32, torch.bfloat16
_WATCHED = 1024  # numbers of each parameter
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


class Unknown(Exception):
    """Why a model is not recognised."""


@dataclass(eq=False)
class NativeModel:
    """What the core knows of a model, but for the rows and the cache. kept: what the structures point to."""

    layers: list[core.CStepLayer]
    query_heads: int
    key_heads: int
    head_size: int
    cache_sizes: tuple[int, int]  # of a key and a value of the cache; latent attention: of a latent and its rotated key
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    embedding: Tensor | ScaledCodes
    norm: core.CStepNorm
    head: core.CStepMatrix
    rotary: Any
    rotary_kinds: list[str | None]  # of each layer, where its rotary embedding has several
    embedding_scale: float
    logits_scale: float
    streamed: dict[int, core.StreamedLayer]
    rotation: str = "halves"
    quantised: bool = False
    exact: dict[str, bool] | None = None  # of exact steps, `EXACT_FLAGS`
    kept: list[Any] = field(default_factory=list)

    @property
    def is_latent(self) -> bool:
        return bool(self.layers[0].to_latents.data)

    def embedded(self, ids: Tensor) -> Tensor:
        if isinstance(self.embedding, Tensor):
            return self.embedding[ids]
        return dequantise_blocks(self.embedding.code_EOI[0][ids], self.embedding.element, self.embedding.columns)

    def stepper(self, keys: list[Tensor], values: list[Tensor]) -> core.Stepper:
        """For these caches, each (B, G, L, D)."""
        (rows, _, length, _), (key_size, value_size) = keys[0].shape, self.cache_sizes
        layers, kept = (core.CStepLayer * len(self.layers))(), [self, keys, values]
        streamed = {}
        for c, form, key, value in zip(layers, self.layers, keys, values, strict=True):
            ctypes.memmove(ctypes.byref(c), ctypes.byref(form), ctypes.sizeof(c))
            shape = rows, self.key_heads, length
            c.key_cache = address("keys", key, self.dtype, (*shape, key_size))
            c.value_cache = address("values", value, self.dtype, (*shape, value_size))
            c.cache_bf16, c.cache_row, c.cache_head = self.dtype == torch.bfloat16, *key.stride()[:2]
        for index, layer in self.streamed.items():
            c, slot_of_E = layers[index], layer.slot_of_E
            chosen = torch.zeros(rows * c.router.top_k, dtype=torch.int64, device="cpu")
            c.slot_of = address("slot_of_E", slot_of_E, torch.int64, (c.router.weight.out,))
            c.chosen = address("chosen", chosen, torch.int64, (len(chosen),))
            streamed[index] = layer, chosen
        with nullcontext() if self.exact is None else ExactOperators():
            tables = {kind: _rotations(self.rotary, length, self.dtype, kind) for kind in {*self.rotary_kinds}}
        for c, kind in zip(layers, self.rotary_kinds, strict=True):
            cos, sin = tables[kind]
            c.cos, c.sin = (
                address(name, each, torch.float32, tuple(cos.shape)) for name, each in (("cos", cos), ("sin", sin))
            )
            c.rotated, of = 2 * cos.shape[1], value_size if self.is_latent else self.head_size
            if c.rotated > of or (self.is_latent and c.rotated < of):
                raise Unknown(f"it rotates {c.rotated} of {of} numbers")
        model = core.CStepModel(
            rows, self.hidden, self.vocabulary, self.query_heads, self.key_heads, self.head_size, length,
            len(layers), ctypes.addressof(layers),
            core.matrix("embedding", self.embedding, None, kept),
            core.ROTATIONS[self.rotation], self.norm, self.head,
            self.embedding_scale, self.logits_scale, **(self.exact or {}),
        )  # fmt: skip
        return core.Stepper(model, [*kept, layers, tables], streamed, exact=self.exact is not None)


# What projections are read from, by the first one's weight: adapters of a model share it.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def state_of(tensor: Tensor) -> tuple[float, ...]:
    """Other numbers when it has changed. torch's fused optimizers count no version: some of its numbers are added up,
    too."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.is_meta or not tensor.is_contiguous():
        return place_of(tensor), version
    some = tensor.detach().view(-1)[:: max(1, tensor.numel() // _WATCHED)].double()
    return place_of(tensor), version, float(some.sum()), float(some.norm())


def is_adapted(module: Any) -> bool:
    """Whether it is one of PEFT's layers, around the module that it adapts."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


class ModelReader:
    def __init__(self, model: Any, dense: str) -> None:
        self.model, self.config, self.dense = model, text_config(model.config), dense
        self.kept: list[Any] = []
        self.read_parameters: set[int] = set()
        self.quantised = dense == "int8"
        self.size = 0
        self.cache_sizes = (0, 0)
        self.streamed: dict[int, core.StreamedLayer] = {}

    @torch.no_grad()
    def read(self) -> NativeModel:
        model = self.model
        if model.device.type != "cpu" or model.dtype not in DTYPES:
            raise Unknown(f"it is in {model.dtype} on {model.device}")
        layers, norms = decoder_layers(model), final_norm(model)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        if type(embedding) not in (nn.Embedding, BlockEmbedding) or len(norms) != 1 or head is None:
            raise Unknown("it has no plain embedding, final norm and output head")
        rotary = getattr(text_decoder(model).get_submodule(""), "rotary_emb", None) or _rotary(model)
        forms = [self._layer(layer, index) for index, layer in enumerate(layers)]
        native = NativeModel(
            layers=forms,
            query_heads=forms[0].queries.out // self.size,
            key_heads=1 if forms[0].to_latents.data else forms[0].keys.out // self.size,
            head_size=self.size,
            cache_sizes=self.cache_sizes,
            hidden=embedding.embedding_dim,
            vocabulary=self._plain_linear(head)[0].out_features,
            dtype=model.dtype,
            embedding=self._table(embedding),
            norm=self._norm(norms[0]),
            head=self._linear(head),
            rotary=rotary,
            rotary_kinds=self._rotary_kinds(rotary, len(forms)),
            embedding_scale=float(getattr(self.config, "embedding_multiplier", None) or 1.0),
            logits_scale=1.0 / (getattr(self.config, "logits_scaling", None) or 1.0),
            streamed=self.streamed,
            quantised=self.quantised,
            kept=self.kept,
        )
        self.kept.append(native.embedding)
        within = text_decoder(model)
        others = [name for name, each in within.named_parameters() if id(each) not in self.read_parameters]
        if others:
            raise Unknown(f"it has parameters of an unknown kind ({others[0]})")
        return native

    def _table(self, embedding: Any) -> Tensor | ScaledCodes:
        if isinstance(embedding, BlockEmbedding):
            return embedding.codes
        return self._parameter(embedding.weight).contiguous()

    def _rotary_kinds(self, rotary: Any, layers: int) -> list[str | None]:
        if "layer_type" not in inspect.signature(rotary.forward).parameters:
            return [None] * layers
        return list(self.config.layer_types)

    def _layer(self, layer: Any, index: int) -> core.CStepLayer:
        c, attention = core.CStepLayer(), getattr(layer, "self_attn", None)
        block = getattr(layer, "mlp", getattr(layer, "block_sparse_moe", None))
        norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        if attention is None or block is None or None in norms:
            raise Unknown(f"{type(layer).__name__} is not made of two norms, self_attn and mlp")
        c.before_attention, c.before_experts = (self._norm(each) for each in norms)
        c.residual = float(getattr(layer, "residual_multiplier", 1.0))
        self._attention(c, attention, index)
        self._block(c, block, index)
        if (shared := getattr(layer, "shared_mlp", None)) is not None:
            c.shared = self._mlp(shared)
        return c

    def _attention(self, c: core.CStepLayer, attention: Any, index: int) -> None:
        if getattr(attention, "kv_a_proj_with_mqa", None) is not None:
            self._latent_attention(c, attention, index)
            return
        names = "q_proj", "k_proj", "v_proj", "o_proj"
        if not all(isinstance(getattr(attention, name, None), nn.Module) for name in names):
            raise Unknown(f"{type(attention).__name__} has no {', '.join(names)}")
        c.queries, c.keys, c.values, c.output = (self._linear(getattr(attention, name)) for name in names)
        size = getattr(attention, "head_dim", None)
        sizes = self.size, self.cache_sizes
        if not isinstance(size, int) or sizes not in ((0, (0, 0)), (size, (size, size))) or c.keys.out != c.values.out:
            raise Unknown(f"{type(attention).__name__} does not have one size of heads")
        self.size, self.cache_sizes = size, (size, size)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        if norms[0] is not None and norms[1] is not None:
            c.query_norm, c.key_norm = (self._norm(each) for each in norms)
            width = len(norms[0].weight)
            if width not in (size, c.queries.out):
                raise Unknown("its norms of queries are neither those of a head nor of all heads")
            c.head_norm = core.HEAD_NORMS["heads" if width == size else "rows"]
        sinks = getattr(attention, "sinks", None)
        if isinstance(sinks, Tensor):
            c.sinks = self._vector("sinks", sinks)
        c.clip = getattr(self.config, "clip_qkv", None) or math.inf
        c.scale, c.window = self._scale(attention), self._window(index)

    def _scale(self, attention: Any) -> float:
        scale = getattr(attention, "scaling", None)
        if not isinstance(scale, float):
            raise Unknown(f"{type(attention).__name__} does not tell its scale")
        return scale

    def _latent_attention(self, c: core.CStepLayer, attention: Any, index: int) -> None:
        names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
        sizes: list[Any] = [getattr(attention, name, None) for name in names]
        parts = "kv_a_layernorm", "kv_b_proj", "o_proj"
        if not all(isinstance(size, int) for size in sizes) or not all(hasattr(attention, part) for part in parts):
            raise Unknown(f"{type(attention).__name__} has no {', '.join((*names, *parts))}")
        rank, turned, plain, of_value = sizes
        found = plain + turned, (rank, turned)
        if self.size and found != (self.size, self.cache_sizes):
            raise Unknown(f"{type(attention).__name__} does not have one size of heads")
        if (getattr(self.config, "rope_parameters", None) or {}).get("llama_4_scaling_beta"):
            raise Unknown("its queries are scaled by their position")  # which a short evaluation would not show
        self.size, self.cache_sizes = found
        if (first := getattr(attention, "q_a_proj", None)) is not None:
            c.low_queries, c.query_norm = self._linear(first), self._norm(attention.q_a_layernorm)
        c.queries = self._linear(attention.q_proj if first is None else attention.q_b_proj)
        c.keys, c.key_norm = self._linear(attention.kv_a_proj_with_mqa), self._norm(attention.kv_a_layernorm)
        c.output, c.clip = self._linear(attention.o_proj), math.inf
        if c.keys.out != rank + turned or of_value > plain + turned:
            raise Unknown(f"{type(attention).__name__} has other sizes than its names say")
        to_latents, from_latents = self._expanding(attention.kv_b_proj, plain, of_value)
        c.to_latents = core.matrix("to_latents", to_latents, None, self.kept)
        c.from_latents = core.matrix("from_latents", from_latents, None, self.kept)
        c.scale, c.window = self._scale(attention), self._window(index)

    def _expanding(self, linear: Any, plain: int, of_value: int) -> Any:
        """For each head (R, plain) and (of_value, R). LoRA factors are added to them, in fp32."""
        base, factors = self._plain_linear(linear)
        if base.bias is not None:
            raise Unknown("its kv_b_proj has a bias")
        state, found = (self.dense, state_of(base.weight), *getattr(linear, "merged_adapters", ())), None
        if factors is None:
            found = _packed.get(base.weight)
        if found is None or found[0] != state:
            weight = self._parameter(base.weight) if factors is None else self._merged(base, factors)
            both = weight.unflatten(0, (-1, plain + of_value)).split((plain, of_value), 1)
            pair = [self._stored(each.contiguous()) for each in (both[0].transpose(1, 2), both[1])]
            if self.dense == "int8":
                pair = [PackedWeights.pack(each, "int8") for each in pair]
            found = state, pair
            if factors is None:
                _packed[base.weight] = found
        self._parameter(base.weight)
        return found[1]

    def _window(self, index: int) -> int:
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None) or 0
        if kinds is None:
            return window
        if kinds[index] not in ("full_attention", "sliding_attention"):
            raise Unknown(f"it has layers of the kind {kinds[index]}")
        return window if kinds[index] == "sliding_attention" else 0

    def _block(self, c: core.CStepLayer, block: Any, index: int) -> None:
        experts = [child for child in block.children() if is_experts(child)]
        if not experts:
            c.shared = self._mlp(block)
            return
        if len(experts) > 1:
            raise Unknown(f"{type(block).__name__} has several kinds of experts")
        c.experts = self._experts(experts[0], index)
        c.router = self._router(block)
        for name in _SHARED:
            if (shared := getattr(block, name, None)) is not None:
                c.shared = self._mlp(shared)
        gate = getattr(block, "shared_expert_gate", None)
        if gate is not None:
            plain, factors = self._plain_linear(gate)
            c.shared_gate = self._vector("shared_expert_gate", self._merged(plain, factors)[0])
            if plain.bias is not None:
                raise Unknown("the gate of its shared expert has a bias")

    def _router(self, block: Any) -> core.CStepRouter:
        routers = routers_in(block)
        if len(routers) != 1:
            raise Unknown(f"{type(block).__name__} has no router of its own")
        router, factors = self._unwrapped(routers[0])
        bias = _selection_bias(router, block)
        linear = next((each for each in (getattr(router, name, None) for name in ("gate", "wg")) if each), router)
        found = recognise_router(router) if bias is None else None
        if found is not None:
            config = found.config
        elif bias is not None or hasattr(router, "routed_scaling_factor"):
            config = _config_by_names(router, len(linear.weight), bias is not None)
        else:
            config = None
        if config is None or config.score not in core.SCORES:
            raise Unknown(f"{type(router).__name__} is none of our routers")
        selection = None if bias is None else self._parameter(bias).float().flatten().contiguous()
        of_logits = getattr(linear, "bias", None)
        merged = self._merged(linear, factors).to(linear.weight.dtype)
        weight = core.matrix("router", self._stored(merged), self._bias(of_logits), self.kept)
        return core.router(weight, config, selection, self.kept)

    def _experts(self, module: Any, index: int) -> core.CStepExperts:
        weights: AnyExperts | None = weights_of(module)
        streamed: Any = weights if getattr(weights, "placement", None) == "streamed" else None
        if streamed is not None:
            self.streamed[index], weights = streamed, streamed.slots
        for parameter in module.parameters():
            self._parameter(parameter)
        stored: list[Any]
        if isinstance(weights, PackedExperts) and weights.nodes == 1:
            share = weights.shares[0]
            stored, biases = [share.gate_up, share.down], [share.gate_up_bias_EJ, share.down_bias_EH]
            self.quantised = True  # as bf16, too, where the loop's products round rows of fp32
        elif isinstance(weights, QuantisedExperts) and read_quantised.why_not(weights) is None:
            stored = [read_quantised.scaled_codes(each) for each in (weights.gate_up_EJH, weights.down_EHI)]
            biases = [weights.gate_up_bias_EJ, weights.down_bias_EH]
            self.quantised = True
        elif isinstance(weights, ExpertWeights) and weights.placement == "resident":
            stored = [each.detach() for each in (weights.gate_up_EJH, weights.down_EHI)]
            stored = [each if each.stride(2) == 1 else each.contiguous() for each in stored]
            biases = [weights.gate_up_bias_EJ, weights.down_bias_EH]
            self.quantised |= weights.dtype != self.model.dtype  # streamed in bf16: the loop rounds rows of fp32
        else:
            raise Unknown(f"its experts are {getattr(weights, 'placement', 'computed by their own functions')}")
        return self._expert_matrices(module, weights, stored, biases, in_slots=streamed is not None)

    def _expert_matrices(
        self, module: Any, weights: Any, stored: list[Any], biases: list[Any], in_slots: bool = False
    ) -> core.CStepExperts:
        """stored, biases: of gate_up and down. in_slots: what they hold changes."""
        self.kept.append(weights)
        if not in_slots:
            biases = [None if bias is None else bias.detach().float().contiguous() for bias in biases]
        gate_up, down = (core.matrix("experts", *each, self.kept) for each in zip(stored, biases, strict=True))
        if LORA in module._modules:
            self._adapt(gate_up, down, module._modules[LORA].factors(), weights.activation)
        return core.experts(gate_up, down, weights.activation)

    def _adapt(
        self, gate_up: core.CStepMatrix, down: core.CStepMatrix, factors: LoraFactors, activation: Activation
    ) -> None:
        """By the factors of gate and up as one matrix has them."""
        form = to_peft(factors, gated=activation.gated, interleaved=activation.interleaved)
        experts = next(iter(factors.tensors().values())).shape[0]
        whole = from_peft(form.gate_up, form.down, experts, gated=False)
        pairs = (gate_up, whole.up_lora_a, whole.up_lora_b), (down, whole.down_lora_a, whole.down_lora_b)
        for matrix, a_ERI, b_EOR in pairs:
            if a_ERI is not None and b_EOR is not None:
                core.adapt(matrix, a_ERI, whole.scaling * b_EOR, self.kept)

    def _mlp(self, mlp: Any) -> core.CStepExperts:
        names, fused = ("gate_proj", "up_proj", "down_proj"), ("input_linear", "output_linear")
        linears: list[Any] = [getattr(mlp, name, None) for name in (fused if hasattr(mlp, fused[0]) else names)]
        activation = getattr(mlp, "act_fn", getattr(mlp, "activation", None))
        if None in linears or activation is None:
            raise Unknown(f"{type(mlp).__name__} is not made of {', '.join(names)} and act_fn")
        kind = Activation(_activation_kind(activation))
        plain, factors = zip(*(self._plain_linear(each) for each in linears), strict=True)
        if any(each.bias is not None for each in plain):
            raise Unknown(f"{type(mlp).__name__} has biases")
        gate_up = core.matrix("gate_up", self._dense(linears[:-1]), None, self.kept)
        down = core.matrix("down", self._dense(linears[-1:]), None, self.kept)
        named = ("gate", "up", "down") if len(linears) == 3 else ("up", "down")
        tensors = {
            f"{name}_lora_{letter}": factor
            for name, pair in zip(named, factors, strict=True)
            if pair is not None
            for letter, factor in zip("ab", pair, strict=True)
        }
        if tensors:
            of_one = Activation(kind.kind, gated=len(linears) == 3)
            self._adapt(gate_up, down, LoraFactors(**tensors), of_one)
        return core.experts(gate_up, down, kind)

    def _linear(self, linear: Any) -> core.CStepMatrix:
        plain, factors = self._plain_linear(linear)
        c = core.matrix("linear", self._dense([linear]), self._bias(plain.bias), self.kept)
        if factors is not None:
            core.adapt(c, *factors, self.kept)
        return c

    def _plain_linear(self, linear: Any) -> tuple[nn.Linear, tuple[Tensor, Tensor] | None]:
        plain, factors = self._unwrapped(linear)
        if type(plain) not in (nn.Linear, BlockLinear) or plain._forward_hooks or plain._forward_pre_hooks:
            raise Unknown(f"it has a {type(plain).__name__} where a plain linear layer is expected")
        return plain, factors

    def _unwrapped(self, layer: Any) -> tuple[Any, tuple[Tensor, Tensor] | None]:
        """What PEFT's layer adapts, and its factors as those of one expert, B with the scaling in it."""
        if not is_adapted(layer):
            return layer, None
        names = self._adapters(layer)
        if not names:
            return layer.base_layer, None
        a_RI = torch.cat([layer.lora_A[name].weight.float() for name in names])
        b_OR = torch.cat([layer.scaling[name] * layer.lora_B[name].weight.float() for name in names], 1)
        return layer.base_layer, (a_RI[None], b_OR[None])

    def _adapters(self, layer: Any) -> list[str]:
        """The names of those that one of PEFT's layers adds to what its module gives."""
        for parameter in layer.parameters():
            self._parameter(parameter)
        if layer.disable_adapters and layer.merged:
            raise Unknown("its LoRA factors are merged and switched off")
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        return [] if layer.disable_adapters or layer.merged else names

    def _merged(self, linear: Any, factors: tuple[Tensor, Tensor] | None) -> Tensor:
        """Its weight in fp32."""
        weight = self._parameter(linear.weight).float()
        return weight if factors is None else weight + factors[1][0] @ factors[0][0]

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self._parameter(bias).float().contiguous()[None]

    def _norm(self, norm: Any) -> core.CStepNorm:
        weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            raise Unknown(f"{type(norm).__name__} is not a root mean square norm")
        return core.norm("norm", self._parameter(weight).float().contiguous(), eps, self.kept)

    def _vector(self, name: str, vector: Tensor) -> int:
        wide = self._parameter(vector).float().contiguous()
        self.kept.append(wide)
        return address(name, wide, torch.float32, tuple(wide.shape))

    def _parameter(self, parameter: Tensor) -> Tensor:
        self.read_parameters.add(id(parameter))
        return parameter.detach()

    def _dense(self, linears: list[Any]) -> Tensor | PackedWeights | ScaledCodes:
        """Their weights, one below the other. Once for all adapters of a model. Blocks stay blocks, which have no more
        than 8.5 bits a number."""
        plain = [getattr(each, "base_layer", each) for each in linears]
        if len({getattr(each, "kind", None) for each in plain}) == 1 and isinstance(plain[0], BlockLinear):
            self.quantised = True
            codes = plain[0].codes
            rows = torch.cat([each.rows for each in plain])[None] if len(plain) > 1 else codes.code_EOI
            return replace(codes, code_EOI=rows, scale=rows)
        weights = [each.weight for each in plain]
        merged = [tuple(getattr(each, "merged_adapters", ())) for each in linears]
        state = self.dense, *map(state_of, weights), *merged
        found = _packed.get(weights[0])
        if found is None or found[0] != state:
            both = torch.cat([each.detach() for each in weights]) if len(weights) > 1 else weights[0].detach()
            packed = PackedWeights.pack(both[None], "int8") if self.dense == "int8" else self._stored(both)
            _packed[weights[0]] = found = state, packed
        for each in weights:
            self._parameter(each)
        return found[1]

    def _stored(self, weight: Tensor) -> Tensor:
        """As the core reads it: in bf16 where that has the same numbers."""
        if weight.dtype == torch.float32:
            half = weight.bfloat16()
            if torch.equal(half.float(), weight):
                return half.contiguous()
        return weight.contiguous()


def _rotary(model: Any) -> Any:
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if len(found) != 1:
        raise Unknown("it does not have one rotary embedding")
    return found[0]


@torch.no_grad()
def _rotations(rotary: Any, length: int, dtype: torch.dtype, kind: str | None) -> tuple[Tensor, Tensor]:
    """cos and sin (L, half of what is rotated), in fp32, as the model has them."""
    position = torch.arange(length, dtype=torch.int64, device="cpu")[None]
    try:
        tables = rotary(torch.zeros(1, 1, 1, dtype=dtype, device="cpu"), position, *([kind] if kind else []))
    except TypeError as error:
        raise Unknown(f"its rotary embedding takes other arguments ({error})") from error
    if isinstance(tables, Tensor) and tables.is_complex():
        tables = tables.real, tables.imag
        return tables[0][0].float().contiguous(), tables[1][0].float().contiguous()
    if not isinstance(tables, tuple) or not all(isinstance(each, Tensor) and each.dim() == 3 for each in tables):
        raise Unknown("its rotary embedding gives no tables of cosines and sines")
    found = []
    for table in tables:
        wide = table[0].float()
        first, second = wide.chunk(2, -1)
        found.append((first if torch.equal(first, second) else wide).contiguous())
    return found[0], found[1]


def _selection_bias(router: Any, block: Any) -> Tensor | None:
    """Which only the choice of experts sees."""
    statics = getattr(router, "moe_statics", None)
    for owner, name in itertools.product((router, block, statics), ("e_score_correction_bias", "expert_bias")):
        if isinstance(found := getattr(owner, name, None), Tensor):
            return found
    return None


def _config_by_names(router: Any, experts: int, biased: bool) -> RouterConfig:
    """As DeepSeek-V3's, or ERNIE's; DeepSeek-V2's without a bias. Whether it is that shows when the model is
    evaluated."""

    def given(default: Any, *names: str) -> Any:
        return next((getattr(router, name) for name in names if hasattr(router, name)), default)

    return RouterConfig(
        experts,
        router.top_k,
        score="sigmoid" if biased and not hasattr(router, "moe_statics") else "softmax",
        renormalize=bool(given(biased, "norm_topk_prob")),
        scaling_factor=float(given(1.0, "routed_scaling_factor", "router_scaling_factor", "route_scale")),
        n_group=1 if (greedy := given("", "topk_method") == "greedy") else given(1, "num_group", "n_group"),
        topk_group=1 if greedy else given(1, "topk_group"),
        group_score="top2_sum" if biased else "max",
        selection_bias=biased,
    )


def _activation_kind(function: Any) -> Any:
    x = torch.linspace(-6, 6, 193, dtype=torch.float64, device="cpu")
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "relu": nn.functional.relu,
        "relu2": lambda x: nn.functional.relu(x).square(),
    }
    given = function(x)
    for kind, expected in kinds.items():
        if torch.allclose(given, expected(x), rtol=1e-9, atol=1e-9):
            return kind
    raise Unknown(f"{type(function).__name__} is not an activation that the core computes")


def keys_and_values(model: Any, ids_BC: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer (B, G, C, D), as its cache has them after a prompt."""
    cache = model.eval()(input_ids=ids_BC, use_cache=True).past_key_values
    layers = getattr(cache, "layers", [])
    keys = [layer.keys for layer in layers]
    if len(keys) != len(decoder_layers(model)) or any(each.shape[2] != ids_BC.shape[1] for each in keys):
        raise Unknown("its cache is not one of keys and values")
    return keys, [layer.values for layer in layers]


def hidden_states(model: Any, ids_BC: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """What enters and leaves each layer, and the logits."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(layer: Any, args: Any, kwargs: Any, out: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        seen.append((before.detach().clone(), (out[0] if isinstance(out, tuple) else out).detach().clone()))

    layers, training = decoder_layers(model), model.training
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with nullcontext() if is_exact(model) else decoding_attention(attention_configs(model)):
            logits = model.eval()(input_ids=ids_BC, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its code may raise
        raise Unknown(f"it could not be tried: {type(error).__name__}: {error}") from error
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if len(seen) != len(layers):
        raise Unknown("its layers do not run once each")
    return seen, logits
