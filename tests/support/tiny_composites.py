"""Builds tiny models of every transformers type that has experts and a vision or audio part.

    kinds()                                  # {"qwen3_5_moe": "qwen3_5_moe", ...}: type -> folder of its text model
    model = build_composite("qwen3_5_moe")   # the class that config.json would name, fp32, the same weights every time
    save_composite("qwen3_5_moe", folder)    # with a tokenizer: what a user downloads

The kinds come from transformers' own registry. A configuration is shrunk by the names of its fields, as in
`tiny_models`; TOWERS says what a name becomes in a vision or audio part.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from tiny_models import HIDDEN, byte_tokenizer, experts_classes, randomise, tiny_config

VOCABULARY = 300  # a byte tokenizer's 257, and the ids that stand for images and sounds
WIDTH, FEED_FORWARD = 16, 24
TOWERS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "d_model": WIDTH,
    "mlp_dim": FEED_FORWARD,
    "intermediate_size": FEED_FORWARD,
    "encoder_ffn_dim": FEED_FORWARD,
    "moe_intermediate_size": FEED_FORWARD,
    "depth": 2,
    "n_layers": 2,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "layer_types": None,
    "mlp_layer_types": ["dense", "sparse"],
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "feature_size": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "max_position_embeddings": 32,
    "max_source_positions": 32,
    "downsample_hidden_size": 8,
    "projector_hidden_size": HIDDEN,
    "projection_hidden_size": HIDDEN,
    "projection_hidden_dim": HIDDEN,
    "projection_intermediate_size": HIDDEN,
    "merged_hidden_size": 4 * HIDDEN,
    "vision_hidden_size": WIDTH,
    "audio_hidden_size": WIDTH,
    "deepstack_visual_indexes": [0, 1],
    "global_attn_indexes": [0, 1],
    "output_channels": 8,
    "downsample_channels": [12, WIDTH],
    # what is handed to the text model
    "out_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "adapter_in_dim": WIDTH,
    "adapter_input_size": WIDTH,
    "adapter_out_dim": HIDDEN,
    "output_dim": HIDDEN,
    "vocab_size": VOCABULARY,
}
# What one part of one kind needs beside that: model type of the part -> fields.
OVERRIDES: dict[str, dict[str, Any]] = {
    "dots3_note_vision_encoder": {"per_layer_config": None},
    "gemma4_audio": {"subsampling_conv_channels": [8, 4], "output_proj_dims": HIDDEN},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [4, 8, 12, WIDTH], "depths": [1, 1, 1, 1]},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": VOCABULARY - 1},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCABULARY - 2},  # in the files of the hub, not in the class
    "radio": {"max_img_size": 32},
}
HEADS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")


@functools.cache
def kinds() -> dict[str, str]:
    """Model type -> folder of its text model, of every type with experts and a part that takes no text."""
    found = {}
    for model_type in CONFIG_MAPPING_NAMES:
        if not _may_have_parts(model_type):
            continue
        config_class = _config_class(model_type)
        parts = getattr(config_class, "sub_configs", {})
        if not any("vision" in part or "audio" in part for part in parts) or _head(config_class) is None:
            continue
        try:
            folder = _text_folder(config_class())
        except StrictDataclassFieldValidationError:
            continue  # transformers gives it no default configuration
        if folder in experts_classes():
            found[model_type] = folder
    return found


def _may_have_parts(model_type: str) -> bool:
    """By the words in its files: importing all of them takes seconds."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    text = "".join(file.read_text("utf-8") for file in folder.glob("configuration_*.py"))
    return "sub_configs" in text and ("experts" in text or "AutoConfig" in text)


def _text_folder(config: Any) -> str:
    return model_type_to_module_name(config.get_text_config(decoder=True).model_type)


def _config_class(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type]


def _head(config_class: Any) -> type[PreTrainedModel] | None:
    """The class that is trained and saved: the one with every part in it."""
    for name in reversed(HEADS):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING", {})
        if config_class in mapping:
            return mapping[config_class]
    return None


def composite_config(model_type: str) -> PreTrainedConfig:
    config_class = _config_class(model_type)
    default = config_class()
    values = _shrunk(default)
    text = type(default.get_text_config(decoder=True))
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    sizes = {name: size for name, size in sizes.items() if hasattr(text, name)}
    values["text_config"] = tiny_config(text, _text_folder(default), **sizes).to_dict()
    for name in values:
        if name.endswith(("_token_id", "_token_index")):
            values[name] = VOCABULARY - 1
    return config_class(**values)


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    values = {name: TOWERS.get(name, value) for name, value in config.to_dict().items()}
    for name, part_class in config.sub_configs.items():
        part = getattr(config, name, None)
        if part is None and part_class is not AutoConfig:
            part = part_class()
        if name != "text_config" and part is not None:
            values[name] = _shrunk(part)
    return values | OVERRIDES.get(config.model_type, {})


def build_composite(model_type: str) -> PreTrainedModel:
    config = composite_config(model_type)
    model_class: Any = _head(type(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(model_class(config)).eval()


def save_composite(model_type: str, folder: Path) -> Path:
    build_composite(model_type).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
