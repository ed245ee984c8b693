"""Named models to train: an architecture of transformers, its sizes, and settings that suit it.

preset = find_preset("demo");  config = preset.build(vocab_size=4096)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value
from amoeba.integrations.model_folder import check_json, has_tokenizer


@dataclass(frozen=True)
class Preset:
    model_type: str
    summary: str
    model: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)  # defaults of TrainSettings that it changes

    def build(self, vocab_size: int, sequence_length: int) -> Any:
        from transformers import AutoConfig

        positions = max(sequence_length, self.model.get("max_position_embeddings", 0))
        sizes = self.model | {"vocab_size": vocab_size, "max_position_embeddings": positions}
        return AutoConfig.for_model(self.model_type, **sizes)


def _sizes(hidden: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": key_heads}


def _experts(count: int, of_a_token: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": of_a_token, "moe_intermediate_size": width}


_SMALL = _sizes(192, 4, 6, 2)
_QWEN = {"norm_topk_prob": True, "tie_word_embeddings": True}

PRESETS = {
    "demo": Preset(
        "qwen3_moe",
        "about 5M parameters, 2M of them at work on a token; minutes on two cores",
        _SMALL | _experts(16, 2, 96) | _QWEN | {"head_dim": 32, "intermediate_size": 384},
        # for the 350 kB of the built-in corpus (dev/log)
        {"vocab_size": 1024, "learning_rate": 3e-3, "steps": 450},
    ),
    "tiny": Preset(
        "qwen3_moe",
        "about 0.4M parameters; learns a few pages within two minutes on two cores",
        _sizes(96, 2, 4, 2)
        | _experts(8, 2, 64)
        | _QWEN
        | {"head_dim": 24, "intermediate_size": 192}
        # about 1 / sqrt(hidden_size): 0.02 suits larger models
        | {"initializer_range": 0.06},
        {"vocab_size": 768, "sequence_length": 128, "batch_size": 2, "learning_rate": 6e-3, "steps": 2500},
    ),
    "120m": Preset(
        "qwen3_moe",
        "about 120M parameters at work on a token (with its vocabulary of 32768); for a GPU",
        _sizes(768, 12, 12, 4) | _experts(32, 4, 704) | _QWEN | {"head_dim": 64, "intermediate_size": 2048},
        {"sequence_length": 1024, "batch_size": 16, "vocab_size": 32768, "learning_rate": 6e-4, "steps": 2000},
    ),
    "mixtral": Preset(
        "mixtral",
        "the demo's size with Mixtral's layers",
        _SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192, "head_dim": 32},
    ),
    "olmoe": Preset(
        "olmoe",
        "the demo's size with OLMoE's layers",
        _SMALL | {"num_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 96},
    ),
    "deepseek_v3": Preset(
        "deepseek_v3",
        "the demo's size with DeepSeek-V3's layers: shared expert, groups, selection bias",
        _sizes(192, 4, 6, 6)
        | {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "intermediate_size": 384}
        | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 32}
        | {"q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
        {"balance": "bias"},
    ),
    "gpt_oss": Preset(
        "gpt_oss",
        "the demo's size with gpt-oss's layers: biases, clamped SwiGLU, sliding attention",
        _SMALL
        | {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 96, "head_dim": 32}
        | {"sliding_window": 64},
    ),
}


def training_defaults(model: str) -> dict[str, Any]:
    """What a preset, or the config.json of a folder, changes in the defaults of TrainSettings."""
    if model in PRESETS:
        return PRESETS[model].training
    path = Path(model) / "config.json"
    if not path.is_file() or has_tokenizer(Path(model)):
        return {}
    check_json(path)
    size = json.loads(path.read_bytes()).get("vocab_size")
    # TrainSettings takes none below 300; the tokenizer is never larger than the model's vocabulary
    return {"vocab_size": size} if isinstance(size, int) and size >= 300 else {}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        wanted = f"one of {', '.join(PRESETS)}, or a folder with a config.json"
        raise bad_value("--model", wanted, repr(name), "check the spelling or the path")
    return PRESETS[name]
