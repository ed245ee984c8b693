"""Tiny models that read images, with their real processors and images to read.

    folder = save_vision("glm4v_moe", tmp_path)      # config, weights, tokenizer with a chat template, processor
    path = save_image(tmp_path / "cat.png")

The processors are those of transformers that need Pillow and NumPy alone. Of their classes some need torchvision for
videos: a folder of the hub has the same files and names.
"""

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from tiny_composites import VOCABULARY, _head, composite_config
from tiny_models import byte_tokenizer, randomise

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
IMAGE, BEGIN, END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
# Of each kind: the class of its processor, of that for images and its options.
_PIXELS = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
_QWEN = "Qwen2VLImageProcessorPil", _PIXELS | {"min_pixels": 256, "max_pixels": 1024}
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_moe": ("Qwen3VLProcessor", *_QWEN),
    "qwen3_vl_moe": ("Qwen3VLProcessor", *_QWEN),
    "glm4v_moe": (
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        _PIXELS | {"size": {"shortest_edge": 256, "longest_edge": 2048}},
    ),
}
# What a configuration calls them.
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
}


def vision_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, BEGIN, END, VIDEO]})
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", BEGIN + IMAGE + END)
    return tokenizer


def save_vision(kind: str, folder: Path) -> Path:
    import transformers

    tokenizer, config = vision_tokenizer(), composite_config(kind)
    for name, token in _IDS.items():
        if hasattr(config, name):
            setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    config.get_text_config().max_position_embeddings = 256
    assert len(tokenizer) <= VOCABULARY
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        randomise(_head(type(config))(config)).save_pretrained(folder)
    processor, for_images, options = PROCESSORS[kind]
    tokenizer.image_token, tokenizer.video_token = IMAGE, VIDEO
    tokenizer.save_pretrained(folder)
    getattr(transformers, for_images)(**options).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    facts = json.loads(path.read_bytes()) | {"processor_class": processor}
    path.write_text(json.dumps(facts))
    for_tokenizer = folder / "tokenizer_config.json"
    facts = json.loads(for_tokenizer.read_bytes()) | {"image_token": IMAGE, "video_token": VIDEO}
    for_tokenizer.write_text(json.dumps(facts))
    return folder


def save_image(path: Path, seed: int = 0, size: tuple[int, int] = (24, 32)) -> Path:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)
    return path
