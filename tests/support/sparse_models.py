"""Checkpoints of real sizes that take no room: files whose headers are whole, and whose weights are holes.

folder = sparse_model(tmp_path / "qwen3", qwen3_30b())
"""

import json
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def qwen3_30b(**other):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return AutoConfig.for_model("qwen3_moe", **sizes | other)


def sparse_model(folder: Path, config) -> Path:
    """In bfloat16, one tensor per expert and projection, as published checkpoints have them."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, shape in _tensors(model):
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def _tensors(model):
    for name, parameter in model.state_dict().items():
        shape = tuple(parameter.shape)
        if name.endswith("experts.gate_up_proj"):
            experts, width, hidden = shape
            base = name.removesuffix("gate_up_proj")
            for expert in range(experts):
                for projection in ("gate_proj", "up_proj"):
                    yield f"{base}{expert}.{projection}.weight", (width // 2, hidden)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert in range(shape[0]):
                yield f"{base}{expert}.down_proj.weight", shape[1:]
        else:
            yield name, shape
