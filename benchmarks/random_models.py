"""Sizes of models, and checkpoints of such sizes with random weights, written as fast as the file system takes them.

    write_checkpoint(folder, qwen3_moe(QWEN3_30B | {"num_hidden_layers": 4}, vocabulary=151_936))

One tensor per expert and projection in one file, as published checkpoints have them. All numbers come from one pool,
from another place for each tensor: drawing tens of gigabytes would take longer than a benchmark.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
QWEN3_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128,
}  # fmt: skip

# Words that made-up texts are of.
KNOWN = ["expert", "router", "token", "gate", "layer", "sum", "row", "weight", "slot", "rank", "one", "many", "no"]

_POOL, _DEVIATION, _THREADS = 1 << 25, 0.02, 12
# Of the embedding. As small as the other weights it would vanish behind what the first layer adds, which is much the
# same for all tokens, and all would ask for the same experts.
_OF_TOKENS = 1.0


def qwen3_moe(sizes: Mapping[str, int], vocabulary: int) -> Any:
    """A configuration without tokens that end a text, so that every text gets all of its tokens."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **sizes,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def write_checkpoint(folder: Path, config: Any) -> None:
    """In bfloat16. Norms are ones, everything else is normally distributed; tokens ask for experts evenly."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config.dtype, config.architectures = torch.bfloat16, ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = [*_tensors(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes:
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(_POOL, generator=generator, device="cpu")
    pool, tokens = (_bytes(numbers * deviation) for deviation in (_DEVIATION, _OF_TOKENS))
    ones = _bytes(torch.ones(1 << 16, device="cpu"))
    drawn = random.Random(0)
    starts = {name: 2 * drawn.randrange(_POOL // 2) for name in header}
    with (folder / "model.safetensors").open("wb") as file, ThreadPoolExecutor(_THREADS) as workers:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

        def write(name: str) -> None:
            begin, last = (8 + len(text) + place for place in header[name]["data_offsets"])
            source, start = (ones, 0) if name.endswith("norm.weight") else (pool, starts[name])
            source = tokens if name.endswith("embed_tokens.weight") else source
            while begin < last:
                begin += os.pwrite(file.fileno(), source[start : start + last - begin], begin)
                start = 0  # a tensor larger than what is left of the pool goes on at its beginning

        file.flush()
        list(workers.map(write, header))
        os.fsync(file.fileno())  # else the first reads past the page cache would wait for these writes


def _bytes(numbers: torch.Tensor) -> memoryview:
    return memoryview(numbers.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())


def _tensors(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in model.state_dict().items():
        shape = tuple(parameter.shape)
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for expert in range(shape[0]):
                for projection in ("gate_proj", "up_proj"):
                    yield f"{base}{expert}.{projection}.weight", (shape[1] // 2, shape[2])
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert in range(shape[0]):
                yield f"{base}{expert}.down_proj.weight", shape[1:]
        else:
            yield name, shape
