"""Exact mode: a token's numbers depend on that token and those before it alone.

    with amoeba.exact(model):
        tokens = model.generate(...)                        # or a Decoder
        model(input_ids=..., attention_mask=...).logits     # the same numbers, to the last bit
    exact = amoeba.exact(model)     # until exact.undo()

Not on the batch, the padding or the length of the prompt, nor on whether a token was read in a prompt, generated or
trained on. What torch is asked for in a pass of the model, and of a decoder layer's parts (activation checkpointing
repeats those in backward), is computed by `ops.exact`.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from amoeba.backends import triton
from amoeba.backends.registry import all_backends_of
from amoeba.core.errors import bad_value
from amoeba.cpu.core import why_no_core
from amoeba.integrations import norms
from amoeba.integrations.compiled_layers import decoder_layers
from amoeba.integrations.coverage import check_coverage, one_token
from amoeba.integrations.exact_linears import few_launches
from amoeba.integrations.exact_rotations import fused_rotations
from amoeba.integrations.experts_module import BACKEND, experts_modules
from amoeba.integrations.fused_routers import fused_routers
from amoeba.integrations.text_model import text_config
from amoeba.ops import exact as ops

NAME = "amoeba_exact"
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def exact(model: nn.Module) -> Exact:
    """Until the end of a `with`, or until its `undo`. ValueError where the model cannot be exact."""
    return Exact(model)


def log_probabilities(logits_V: Tensor, token: Tensor) -> Tensor:
    """Of the tokens (...) by logits (..., V), in fp32: the same bits for a row alone and among others."""
    with ops.ExactOperators():
        return logits_V.float().log_softmax(-1).gather(-1, token[..., None])[..., 0]


def is_exact(model: nn.Module) -> bool:
    return any(config._attn_implementation_internal == NAME for config in attention_configs(model))


class Exact:
    def __init__(self, model: nn.Module) -> None:
        models = _checked(model)
        self._thread = threading.local()
        self._configs = [(config, config._attn_implementation_internal) for config in attention_configs(model)]
        for config, _ in self._configs:
            config._attn_implementation_internal = NAME
        self._experts = list(experts_modules(model).values())
        for module in self._experts:
            module.__dict__[BACKEND] = "exact"
        self._fused = ExitStack()
        if ops.kernels_on(models[0].device) is not None:
            self._fused.enter_context(norms.one_launch(model))  # before they have our hooks
            self._fused.enter_context(few_launches(model))
            self._fused.enter_context(fused_routers(model))
            self._fused.enter_context(fused_rotations(model))
        # Activation checkpointing calls the parts of a layer again in backward, and not the layer.
        parts = (part for layer in decoder_layers(models[0]) for part in layer.children())
        passes = dict.fromkeys((model, *models, *parts))
        self._hooks = []
        for module in passes:
            self._hooks.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._fused.close()
        _masks.clear()
        for module in self._experts:
            module.__dict__.pop(BACKEND, None)
        for config, own in self._configs:
            config._attn_implementation_internal = own
        self._hooks, self._experts, self._configs = [], [], []

    def __enter__(self) -> Exact:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        inside = self._inside()
        if inside:  # parts of layers, checked with the whole
            inside.append(module)
            return args, kwargs
        autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        if torch.compiler.is_compiling() or autocast:
            got = "torch.compile" if torch.compiler.is_compiling() else "autocast"
            raise bad_value("exact mode", "passes in the dtype of the model, not compiled", got, "leave it off")
        self._thread.mode = ops.ExactOperators()
        self._thread.mode.__enter__()
        inside.append(module)
        return args, _with_positions(args, kwargs)

    def _end(self, module: nn.Module, *_: Any) -> None:
        inside = self._inside()
        if not inside or inside[-1] is not module:  # something refused the pass before it began
            return
        inside.pop()
        if not inside:
            self._thread.mode.__exit__(None, None, None)

    def _inside(self) -> list[nn.Module]:
        if not hasattr(self._thread, "inside"):
            self._thread.inside = []
        return self._thread.inside


def _checked(model: nn.Module) -> list[PreTrainedModel]:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise bad_value("exact mode", "a model of transformers", type(model).__name__, "load it with transformers")
    check_coverage(models[0], "exact mode", "leave exact mode off")
    if is_exact(model):
        raise bad_value("exact mode", "a model that is not exact yet", "one that is", "undo the other `exact` first")
    devices = {parameter.device for parameter in model.parameters()}
    device = min(devices, key=str)
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        got = f"one on {', '.join(sorted(map(str, devices)))}"
        raise bad_value("exact mode", "a model on the CPU or on one GPU", got, "move it: model.cpu()")
    if device.type == "cpu" and (reason := why_no_core()) is not None:
        raise bad_value("exact mode", "the C++ core", reason, "install a compiler, or leave exact mode off")
    if device.type == "cuda" and (reason := triton.why_not_on(device, torch.float32)) is not None:
        raise bad_value("exact mode", "a GPU for our kernels", f"one that {reason}", "move the model: model.cpu()")
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {*ops.DTYPES}
    if dtypes - {torch.float8_e4m3fn}:
        raise bad_value("exact mode", "fp32 or bf16", f"a model in {dtypes}", "convert it: model.float()")
    implementation = getattr(models[0].config, "_experts_implementation", None)
    if implementation != "amoeba":
        remedy = 'model.set_experts_implementation("amoeba")'
        raise bad_value("exact mode", 'experts_implementation="amoeba"', repr(implementation), f"call {remedy}")
    if not all(getattr(each, "_supports_attention_backend", False) for each in models):
        got = f"{type(models[0]).__name__}, whose attention cannot be replaced"
        raise bad_value("exact mode", "a model with an attention interface", got, "leave exact mode off")
    if others := set(getattr(text_config(models[0].config), "layer_types", None) or ()) - ATTENTION:
        got = f"{type(models[0]).__name__}, with layers of {', '.join(sorted(others))}"
        raise bad_value("exact mode", "layers of attention alone", got, "leave exact mode off")
    for name, module in experts_modules(model).items():
        request = one_token(module)
        if request is None:
            expected, got = "an activation that aMoEba computes itself", f"that of {type(module).__name__}"
            raise bad_value(f"exact mode of {name}", expected, got, "leave exact mode off")
        weights = request.weights
        serving = [each for each in all_backends_of(type(weights), weights.device) if each.name == "exact"]
        reason = serving[0].why_not(request) if serving else f"{weights.placement} experts"
        if reason is not None:
            expected = "resident experts in fp32 or bf16, or quantised ones such as mxfp4-weights"
            raise bad_value(f"exact mode of {name}", expected, reason, "load the model with --experts resident")
    return models


def _with_positions(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Behind padding on the left, transformers counts positions from the padding in training, and from the first token
    in generation."""
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
    if not isinstance(mask, Tensor) or mask.dim() != 2 or ids is None or kwargs.get("position_ids") is not None:
        return kwargs
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()  # which may not ask for a number
    if not captured and bool(mask[:, 0].all()):
        return kwargs
    position_BT = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return {**kwargs, "position_ids": position_BT}


# --- attention


def attention_configs(model: nn.Module) -> list[Any]:
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """query (B, Q, tokens, D), key and value (B, G, L, ·), mask bool (B, 1, tokens, L) -> (B, tokens, Q, ·)"""
    others = [name for name in ("indices", "position_bias", "sinks") if more.get(name) is not None]
    if attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1 or others:
        got = f"{type(module).__name__} with {', '.join(others) or 'a mask of its own'}"
        raise bad_value("exact mode", "attention by a mask over keys", got, "this model cannot be exact")
    if dropout and module.training:
        raise bad_value("exact mode", "no dropout", f"{dropout} in attention", "set attention_dropout to 0")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    y = ops.attention(query, key, value, attention_mask, scale=scale, sink_Q=s_aux, softcap=softcap)
    return y.transpose(1, 2).contiguous(), None


def materialised_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    kwargs["allow_is_causal_skip"] = False
    offset = kwargs.get("q_offset")
    if not isinstance(offset, Tensor) or offset.dim() == 0:
        return sdpa_mask(*args, **kwargs)
    # Rows with a slot each: which of the others each of them sees is the same function of the two places
    slot, device = torch.arange(kwargs["kv_length"], dtype=torch.int64, device=offset.device), offset.device
    row = torch.arange(len(offset), dtype=torch.int64, device=device)
    mask = kwargs["mask_function"](row[:, None, None, None], 0, offset[:, None, None, None], slot[None, None, None])
    return mask.expand(len(offset), 1, 1, len(slot))


def exact_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The same; that of texts without padding is kept, with its bounds, for the next pass over as many tokens."""
    given = [*args, *kwargs.values()]
    on_gpu = torch.device(kwargs.get("device", "cpu")).type == "cuda"
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    causal = kwargs.get("mask_function") is causal_mask_function and not any(isinstance(e, Tensor) for e in given)
    if not causal or captured or torch.is_inference_mode_enabled():
        return materialised_mask(*args, **kwargs)
    numbers = {name: each for name, each in kwargs.items() if name != "config"}  # of which a causal mask is made
    key = args, frozenset(numbers.items())
    mask, version = _masks.get(key, (None, 0))
    if mask is None or mask._version != version:
        mask = materialised_mask(*args, **kwargs)
        if mask is None or mask.numel() > LARGEST_KEPT:
            return mask
        _masks.clear()
        _masks[key] = mask, mask._version
    return mask


LARGEST_KEPT = 1 << 24  # bytes
_masks: dict[Any, tuple[Tensor, int]] = {}

AttentionInterface.register(NAME, exact_attention)
AttentionMaskInterface.register(NAME, exact_mask)
