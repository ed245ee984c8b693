"""Tiny GGUF files of tiny models, written with the package `gguf` as llama.cpp's converter would.

write_gguf(path, build("qwen3_moe"), {"gate": "Q4_K", "down": "Q6_K"})
call("generate", path, "Once")
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amoeba.integrations.experts_module import described, experts_modules, stored
from amoeba.precision.blocks import quantise_blocks
from tiny_models import END, byte_tokenizer

NEWER = "transformers 5.18 or newer reads tokenizers of GGUF files"
gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'amoeba-moe[gguf]'")
mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping", reason=NEWER)
if not hasattr(mapping, "convert_gguf_tokenizer"):
    pytest.skip(NEWER, allow_module_level=True)

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "qwen3_next": "qwen3next",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "granitemoe": "granitemoe",
    "lfm2_moe": "lfm2moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
}
# Of these kinds what a file does not say, and llama.cpp therefore takes as given.
UNLIKE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "dots1": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
}
OURS = ("Q4_K", "Q5_K", "Q6_K")  # which the package does not quantise to
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


def write_gguf(path: Path, model: Any, kinds: dict[str, str] | None = None, *, parts: int = 1, **changes: Any) -> Path:
    """kinds: of the experts' gate, up and down, and of the "rest"; BF16 where none is given; or of one tensor.
    changes: of metadata, None for a key that is left out."""
    kinds = {"gate": "BF16", "up": "BF16", "down": "BF16", "rest": "BF16"} | (kinds or {})
    architecture = str(changes.pop("general.architecture", ARCHITECTURES[model.config.model_type]))
    config = model.config
    split = {} if parts == 1 else {"split_max_tensors": -(-len(list(_tensors(model, architecture))) // parts)}
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in (_metadata(config, architecture) | changes).items():
        _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}", value)
    _add_tokenizer(writer, "tokenizer.ggml.pre" not in changes)
    for name, tensor in _tensors(model, architecture):
        part = next((each for each in ("gate", "up", "down") if f"ffn_{each}_exps.weight" in name), "rest")
        kind = (
            kinds.get(name, kinds[part])
            if tensor.dim() > 1 and name.endswith(".weight") and "gate_inp" not in name
            else "F32"
        )
        same = tensor.dim() == 3 and tensor.stride(0) == 0  # experts that are one and the same are made once
        data = _data((tensor[:1] if same else tensor).detach().float().contiguous(), kind)
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data.repeat(len(tensor), 0) if same else data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def _data(tensor: Tensor, kind: str) -> np.ndarray:
    if kind in OURS:
        return np.ascontiguousarray(quantise_blocks(tensor, kind.lower()).numpy())
    if kind == "BF16":
        return tensor.to(torch.bfloat16).view(torch.uint8).numpy()
    return np.ascontiguousarray(gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind]))


def _tensors(model: Any, architecture: str) -> Any:
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, module in experts_modules(model).items():
        found = described(module)
        gate_up, down, gate_up_bias, down_bias = stored(module, found)
        layer = f"blk.{name.split('.layers.')[1].partition('.')[0]}.ffn_"
        halves = (lambda t: (t[:, ::2], t[:, 1::2])) if found.interleaved else (lambda t: t.chunk(2, 1))
        for part, half in zip(("gate", "up"), halves(gate_up), strict=True):
            yield f"{layer}{part}_exps.weight", half
        yield f"{layer}down_exps.weight", down
        if found.has_bias:
            for part, half in zip(("gate", "up"), halves(gate_up_bias), strict=True):
                yield f"{layer}{part}_exps.bias", half
            yield f"{layer}down_exps.bias", down_bias
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if ".experts." in name or (model.config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if suffix in ("e_score_correction_bias", "expert_bias"):
            yield f"blk.{name.split('.layers.')[1].partition('.')[0]}.exp_probs_b.bias", tensor.flatten()
            continue
        if architecture == "qwen3next" and (changed := dict(_of_qwen3next(name, tensor, model.config))):
            yield from changed.items()
            continue
        if architecture in ("llama", "granitemoe") and name.endswith(("q_proj.weight", "k_proj.weight")):
            config = model.config
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        stem = stem.replace("moe.router", "moe.router.layer")
        stem, suffix = (stem, suffix) if suffix in ("weight", "bias") else (name, "weight")
        own = f"{names.get_name(stem)}.{suffix}"
        if "attn_kv_b" in own:
            config = model.config
            heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            key, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            yield own.replace("kv_b", "k_b"), key.mT
            yield own.replace("kv_b", "v_b"), value
        else:
            if own.endswith("gate_inp_shexp.weight") or tensor.dim() == 3:  # one row, or a convolution's channels
                tensor = tensor.squeeze(0 if tensor.dim() == 2 else 1)
            yield own, tensor


def _of_qwen3next(name: str, tensor: Tensor, config: Any) -> Any:
    """What llama.cpp's converter makes of parameters that it does not only rename."""
    if ".layers." not in name:
        if name.endswith("norm.weight"):
            yield "output_norm.weight", tensor.float() + 1
        return
    layer = f"blk.{name.split('.layers.')[1].partition('.')[0]}."
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
    norms |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    if norm := next((own for end, own in norms.items() if name.endswith(f".{end}.weight")), None):
        yield f"{layer}{norm}.weight", tensor.float() + 1
    elif name.endswith("A_log"):
        yield f"{layer}ssm_a", -tensor.float().exp()
    elif name.endswith("dt_bias"):
        yield f"{layer}ssm_dt.bias", tensor
    elif name.endswith("in_proj_qkvz.weight"):
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        ratio = config.linear_num_value_heads // config.linear_num_key_heads
        heads = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
        query, keys, values, gate = heads.split([key, key, ratio * value, ratio * value], 1)
        yield f"{layer}attn_qkv.weight", torch.cat([each.flatten(0, 1) for each in (query, keys, values)])
        yield f"{layer}attn_gate.weight", gate.flatten(0, 1)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next(getattr(config, name) for name in names if hasattr(config, name))
    found = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.norm_eps),
        "attention.key_length": _head_dim(config),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size),
    }
    if config.rope_parameters["rope_type"] == "yarn":
        rope = config.rope_parameters
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        found |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    found |= _own_metadata(config, architecture)
    if architecture == "gpt-oss":
        found |= {"attention.sliding_window": config.sliding_window}
    if architecture in ("deepseek2", "glm4moe", "dots1"):
        found |= {
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": bool(config.norm_topk_prob),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "rope.dimension_count": int(_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1)),
        }
    if architecture == "deepseek2":
        found |= {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.head_count_kv": 1,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "rope.dimension_count": config.qk_rope_head_dim,
            "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
        }
    return found


def _own_metadata(config: Any, architecture: str) -> dict[str, Any]:
    partial = config.rope_parameters.get("partial_rotary_factor", 1)
    match architecture:
        case "qwen3next":
            return {
                "ssm.conv_kernel": config.linear_conv_kernel_dim,
                "ssm.state_size": config.linear_key_head_dim,
                "ssm.group_count": config.linear_num_key_heads,
                "ssm.time_step_rank": config.linear_num_value_heads,
                "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
                "full_attention_interval": 2,
                "rope.dimension_count": int(config.head_dim * partial),
            }
        case "minimax-m2":
            return {"rope.dimension_count": int(config.head_dim * partial), "expert_gating_func": 2}
        case "granitemoe":
            scales = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
            scales |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
            return {key: float(getattr(config, name)) for key, name in scales.items()}
        case "lfm2moe":
            heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
            dense = {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
            return {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache} | dense
        case "ernie4_5-moe":
            return {
                "expert_count": config.moe_num_experts,
                "expert_used_count": config.moe_k,
                "interleave_moe_layer_step": config.moe_layer_interval,
                "leading_dense_block_count": config.moe_layer_start_index,
                "expert_shared_count": config.moe_num_shared_experts,
            }
    return {}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_tokenizer(writer: Any, says_how_it_splits: bool) -> None:
    tokenizer = byte_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    if says_how_it_splits:
        writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == END else 1 for token in tokens])
    writer.add_token_scores([0.0] * len(tokens))  # of which merges follow: none
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT)


def _add(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
              list: writer.add_array}  # fmt: skip
    if value is not None:
        adders[type(value)](key, value)
