"""Models in GGUF files: the configuration that config.json would give, and what each of their parameters is made of.

    config = config_of(header)
    sources_of(header, config, model_on_meta)             # of each parameter that is no expert's

llama.cpp's converter renames tensors, and changes some: rows of keys and queries take turns, a norm has 1 added. `make`
of a source undoes that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.gguf_files import AGAIN, TOKENS, GgufHeader, GgufTensor, parts_of
from amoeba.system.files import sampled_hash


def facts_of(header: GgufHeader) -> _Facts:
    if header.architecture not in _FAMILIES:
        got = f"{header.architecture} in {str(header.path)!r}{_REFUSED.get(header.architecture, '')}"
        remedy = "take the model's safetensors folder"
        raise bad_value("MODEL", f"a GGUF file of one of {', '.join(_FAMILIES)}", got, remedy)
    return _Facts(header)


class _Facts:
    """The values of an architecture. ValueError that names one that is missing or of another type."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def number(self, key: str, default: int | float | None = None) -> Any:
        found = self.get(key, default)
        if isinstance(found, list) and found and len({*map(str, found)}) == 1:
            found = found[0]  # of each layer, all the same
        if isinstance(found, bool) or not isinstance(found, int | float) or found < 0:
            name = f"{self.header.architecture}.{key}"
            raise bad_value(str(self.header.path), f"a number {name}", repr(found), AGAIN)
        return float(f"{found:.7g}") if isinstance(found, float) else found  # 1e-6, not the fp32 number next to it

    def numbers(self, **keys: str) -> dict[str, Any]:
        return {field: self.number(key) for field, key in keys.items()}

    def has(self, *names: str) -> bool:
        return any(name.partition(".")[2].partition(".")[2] in names for name in self.header.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.header.tensors:
            raise bad_value(str(self.header.path), f"a tensor {name}", "none", AGAIN)
        return self.header.tensors[name].shape


def config_of(header: GgufHeader) -> Any:
    """The configuration that the model's config.json would give."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    facts = facts_of(header)
    model_type, own = _FAMILIES[header.architecture](facts)
    tokens = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{long}_token_id") for name, long in TOKENS}
    common = facts.numbers(max_position_embeddings="context_length", hidden_size="embedding_length")
    common |= facts.numbers(num_attention_heads="attention.head_count", num_experts_per_tok="expert_used_count")
    common |= {
        "num_hidden_layers": facts.number("block_count") - facts.number("nextn_predict_layers", 0),
        "num_key_value_heads": _key_heads(facts),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(facts),
        "vocab_size": facts.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": header.dtype,
    }
    config = AutoConfig.for_model(model_type, **common | tokens | own)
    config.architectures = [str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])]
    fingerprint = hashlib.blake2b(digest_size=16)
    for path in parts_of(header.path):
        fingerprint.update(repr(sampled_hash(path)).encode())
    config.gguf_fingerprint = fingerprint.hexdigest()  # which an adapter records of its base model
    return config


def _rope(facts: _Facts) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(facts.number("rope.freq_base", 10000.0))}
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return found
    if kind not in ("yarn", "linear"):
        remedy = "take another file"
        raise bad_value(str(facts.header.path), "rope.scaling.type yarn, linear or none", repr(kind), remedy)
    found |= {"rope_type": kind, "factor": float(facts.number("rope.scaling.factor"))}
    if kind == "yarn":
        original = facts.number("rope.scaling.original_context_length", facts.number("context_length"))
        found |= {"original_max_position_embeddings": original}
        found |= {f"beta_{name}": float(facts.number(f"rope.scaling.yarn_beta_{name}", default))
                  for name, default in (("fast", 32.0), ("slow", 1.0))}  # fmt: skip
    return found


def _key_heads(facts: _Facts) -> int:
    found = facts.get("attention.head_count_kv")
    if isinstance(found, list) and found and all(isinstance(each, int) for each in found):
        return max(found)
    return int(facts.number("attention.head_count_kv"))


def _expert_width(facts: _Facts) -> dict[str, Any]:
    return {"moe_intermediate_size": facts.number("expert_feed_forward_length")}


def _head_width(facts: _Facts) -> dict[str, Any]:
    heads = facts.number("attention.head_count")
    return {"head_dim": facts.number("attention.key_length", facts.number("embedding_length") // max(heads, 1))}


def _qwen2moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    shared = {"shared_expert_intermediate_size": facts.shape("blk.0.ffn_up_shexp.weight")[0]}
    return "qwen2_moe", {"num_experts": facts.number("expert_count")} | _expert_width(facts) | shared


def _qwen3moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    # llama.cpp always normalises the chosen weights of this family
    own = {"num_experts": facts.number("expert_count"), "norm_topk_prob": True}
    return "qwen3_moe", own | _expert_width(facts) | _head_width(facts)


def _olmoe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = facts.numbers(num_experts="expert_count", intermediate_size="feed_forward_length")
    return "olmoe", own | {"norm_topk_prob": False}


def _gpt_oss(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = facts.numbers(num_local_experts="expert_count", intermediate_size="expert_feed_forward_length")
    own |= facts.numbers(sliding_window="attention.sliding_window") | _head_width(facts)
    return "gpt_oss", own | {"rope_parameters": _rope(facts) | {"truncate": False}}


def _router_of_groups(facts: _Facts) -> dict[str, Any]:
    return facts.numbers(n_routed_experts="expert_count", intermediate_size="feed_forward_length") | {
        "n_shared_experts": facts.number("expert_shared_count", 0),
        "routed_scaling_factor": float(facts.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": max(1, facts.number("expert_group_count", 1)),
        "topk_group": max(1, facts.number("expert_group_used_count", 1)),
        "first_k_dense_replace": facts.number("leading_dense_block_count", 0),
    }


def _deepseek2(facts: _Facts) -> tuple[str, dict[str, Any]]:
    rotary = facts.number("rope.dimension_count")
    own = facts.numbers(kv_lora_rank="attention.kv_lora_rank", num_key_value_heads="attention.head_count") | {
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": facts.number("attention.key_length_mla", facts.get("attention.key_length")) - rotary,
        "v_head_dim": facts.number("attention.value_length_mla", facts.get("attention.value_length")),
        "rope_parameters": _rope(facts),
    }
    if (scale := facts.get("rope.scaling.yarn_log_multiplier")) is not None:
        own["rope_parameters"] |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    router = _router_of_groups(facts)
    if facts.get("expert_gating_func") == _SIGMOID or facts.has("exp_probs_b.bias"):
        return "deepseek_v3", own | router | _expert_width(facts)
    router["topk_method"] = "group_limited_greedy" if router["n_group"] > 1 else "greedy"
    return "deepseek_v2", own | router | _expert_width(facts)


_SIGMOID = 2  # as expert_gating_func


def _glm4moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    width = _head_width(facts)
    factor = facts.number("rope.dimension_count") / max(1, width["head_dim"])
    own: dict[str, Any] = {"rope_parameters": _rope(facts) | {"partial_rotary_factor": factor}}
    own |= {"use_qk_norm": facts.has("attn_q_norm.weight"), "attention_bias": facts.has("attn_q.bias")}
    return "glm4_moe", own | _router_of_groups(facts) | _expert_width(facts) | width


def _partial_rotary(facts: _Facts) -> dict[str, Any]:
    width = facts.number("attention.key_length", facts.number("rope.dimension_count"))
    factor = facts.number("rope.dimension_count", width) / max(1, width)
    return {"rope_parameters": _rope(facts) | {"partial_rotary_factor": factor}}


def _qwen3next(facts: _Facts) -> tuple[str, dict[str, Any]]:
    values = max(1, facts.number("ssm.time_step_rank"))
    layers = range(facts.number("block_count"))
    kinds = ["linear" if f"blk.{layer}.ssm_a" in facts.header.tensors else "full" for layer in layers]
    linear = facts.numbers(linear_conv_kernel_dim="ssm.conv_kernel", linear_key_head_dim="ssm.state_size")
    linear |= {"linear_num_value_heads": values, "linear_value_head_dim": facts.number("ssm.inner_size") // values}
    linear |= facts.numbers(linear_num_key_heads="ssm.group_count")
    linear["layer_types"] = [f"{kind}_attention" for kind in kinds]
    return "qwen3_next", _qwen2moe(facts)[1] | _qwen3moe(facts)[1] | linear | _partial_rotary(facts)


def _dots1(facts: _Facts) -> tuple[str, dict[str, Any]]:
    return "dots1", _router_of_groups(facts) | _expert_width(facts) | _head_width(facts) | {"sliding_window": None}


def _minimax_m2(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = {"num_local_experts": facts.number("expert_count"), "intermediate_size": _any_expert_width(facts)}
    return "minimax_m2", own | _head_width(facts) | _partial_rotary(facts)


def _llama(facts: _Facts) -> tuple[str, dict[str, Any]]:
    if not facts.get("expert_count"):
        expected, got = "a model with experts", f"a dense one (llama) in {str(facts.header.path)!r}"
        raise bad_value("MODEL", expected, got, "take a mixture of experts")
    own = {"num_local_experts": facts.number("expert_count"), "intermediate_size": _any_expert_width(facts)}
    return "mixtral", own | _head_width(facts) | {"sliding_window": None}


def _granitemoe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    if facts.has("ffn_up_shexp.weight"):
        expected, got = "granitemoe without shared experts", f"one with some in {str(facts.header.path)!r}"
        raise bad_value("MODEL", expected, got, "take the model's safetensors folder")
    scales = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    scales |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    own = {"num_local_experts": facts.number("expert_count"), "intermediate_size": _any_expert_width(facts)}
    return "granitemoe", own | {name: float(facts.number(key, 1.0)) for name, key in scales.items()}


def _lfm2moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    heads = facts.get("attention.head_count_kv")
    per_layer = heads if isinstance(heads, list) else [heads] * facts.number("block_count")
    own = facts.numbers(num_experts="expert_count", intermediate_size="feed_forward_length")
    own |= facts.numbers(norm_eps="attention.layer_norm_rms_epsilon", conv_L_cache="shortconv.l_cache")
    own |= {
        "num_dense_layers": facts.number("leading_dense_block_count", 0),
        "conv_bias": facts.has("shortconv.conv.bias"),
        "use_expert_bias": facts.has("exp_probs_b.bias"),
        "layer_types": ["full_attention" if each else "conv" for each in per_layer],
    }
    return "lfm2_moe", own | _expert_width(facts)


def _ernie4_5(facts: _Facts) -> tuple[str, dict[str, Any]]:
    width, first = facts.number("expert_feed_forward_length"), facts.number("leading_dense_block_count", 0)
    shared = [each for each in facts.header.tensors if each.endswith(".ffn_up_shexp.weight")]
    own = facts.numbers(moe_num_experts="expert_count", moe_k="expert_used_count")
    own |= facts.numbers(intermediate_size="feed_forward_length") | {
        "moe_num_shared_experts": facts.shape(shared[0])[0] // max(1, width) if shared else 0,
        "moe_layer_start_index": first,
        "moe_layer_end_index": facts.number("block_count") - 1,
        "moe_layer_interval": facts.number("interleave_moe_layer_step", 1),
    }
    return "ernie4_5_moe", own | _expert_width(facts)


def _hunyuan(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = facts.numbers(num_experts="expert_count", moe_topk="expert_used_count") | _head_width(facts)
    own |= {"intermediate_size": _any_expert_width(facts), "attention_bias": facts.has("attn_q.bias")}
    return "hunyuan_v1_moe", own


def _any_expert_width(facts: _Facts) -> int:
    """Older files have one width for all that is no attention."""
    return int(facts.number("expert_feed_forward_length", facts.get("feed_forward_length")))


# By general.architecture: transformers' model type, and the fields that are this family's own.
_FAMILIES: dict[str, Callable[[_Facts], tuple[str, dict[str, Any]]]] = {
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
    "qwen3next": _qwen3next,
    "qwen3vlmoe": _qwen3moe,  # without its images: the places of text are those of an ordinary rotary embedding
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
    "llama": _llama,
    "granitemoe": _granitemoe,
    "lfm2moe": _lfm2moe,
    "ernie4_5-moe": _ernie4_5,
    "hunyuan-moe": _hunyuan,
}
_REFUSED = {"llama4": ", whose experts take rows times their routing weights, which aMoEba does not compute"}


class Source(NamedTuple):
    """make: of the numbers of these tensors and the configuration, a parameter; None where the one tensor is it."""

    tensors: list[GgufTensor]
    make: Callable[[list[Tensor], Any], Tensor] | None = None


def sources_of(header: GgufHeader, config: Any, model: Any) -> dict[str, Source]:
    """Of each tensor in the model's state dict that is no expert's. model: on meta."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from amoeba.integrations.experts_module import experts_modules

    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(architecture, int(facts_of(header).number("block_count")))
    inside = tuple(f"{name}." for name in experts_modules(model))
    tied = config.tie_word_embeddings
    found: dict[str, Source] = {}
    for name in model.state_dict():
        if name.startswith(inside) or (tied and name == "lm_head.weight"):
            continue
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            layer = name.split(".layers.")[1].partition(".")[0]
            found[name] = Source(_tensors(header, f"blk.{layer}.exp_probs_b.bias"))
            continue
        stem, _, suffix = name.rpartition(".")
        stem, suffix = (stem, suffix) if suffix in ("weight", "bias") else (name, "weight")
        if suffix == "weight" and stem.endswith(".dt_bias"):
            stem, suffix = f"{stem.removesuffix('.dt_bias')}.dt_proj", "bias"
        own = names.get_name(stem) or names.get_name(stem.replace("moe.router", "moe.router.layer"))
        if own is None:
            raise bad_value(str(header.path), f"a name of {name} in GGUF files", "none known to the package gguf",
                            "upgrade it: pip install --upgrade gguf")  # fmt: skip
        whole = own if own in header.tensors else f"{own}.{suffix}"
        found[name] = Source(_tensors(header, whole), _CHANGED.get(header.architecture, lambda name: None)(name))
    for name, source in found.items():
        if len(source.tensors) == 2 and source.make is None:
            found[name] = source._replace(make=_latent_heads)
    return found


def _tensors(header: GgufHeader, name: str) -> list[GgufTensor]:
    """Of one that older files have whole, the parts of newer ones."""
    if name in header.tensors:
        return [header.tensors[name]]
    for whole, parts in (("attn_kv_b", ("attn_k_b", "attn_v_b")), ("ssm_in", ("attn_qkv", "attn_gate"))):
        if name.endswith(f"{whole}.weight"):
            return [tensor for part in parts for tensor in _tensors(header, name.replace(whole, part))]
    facts_of(header).shape(name)  # which says that it is missing
    raise AssertionError(name)


def _latent_heads(tensors: list[Tensor], config: Any) -> Tensor:
    """Keys and values of latent attention, by heads; keys are transposed."""
    key, value = tensors
    return torch.cat((key.mT, value), 1)


def _in_halves(name: str) -> Callable[[list[Tensor], Any], Tensor] | None:
    """Rows of a head that the rotary embedding pairs lie side by side in files, and half a head apart here."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])

    def make(tensors: list[Tensor], config: Any) -> Tensor:
        rows = tensors[0].unflatten(0, (getattr(config, str(heads)), -1, 2))
        return rows.transpose(1, 2).flatten(0, 2)

    return make if heads else None


def _of_qwen3next(name: str) -> Callable[[list[Tensor], Any], Tensor] | None:
    if name.endswith("A_log"):
        return lambda tensors, config: (-tensors[0]).log()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return lambda tensors, config: tensors[0] - 1
    return _by_heads if name.endswith("in_proj_qkvz.weight") else None


def _by_heads(tensors: list[Tensor], config: Any) -> Tensor:
    """Queries, keys, values and gates of one head of keys follow each other."""
    if len(tensors) == 1:  # as older files have it
        return tensors[0]
    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    query, key, value = tensors[0].split([keys, keys, len(tensors[0]) - 2 * keys])
    return torch.cat([each.unflatten(0, (heads, -1)) for each in (query, key, value, tensors[1])], 1).flatten(0, 1)


_CHANGED: dict[str, Callable[[str], Callable[[list[Tensor], Any], Tensor] | None]] = {
    "qwen3next": _of_qwen3next,
    "llama": _in_halves,
    "granitemoe": _in_halves,
}
