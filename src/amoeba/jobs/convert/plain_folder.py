"""A Hugging Face folder with plain numbers, written from one with quantised experts or from a store, layer by layer.

with open_store("models/qwen3-fp8") as source:
    write_plain(source, Path("models/qwen3"), torch.bfloat16)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from amoeba.integrations.experts_module import experts_modules
from amoeba.integrations.model_folder import load_config, load_without_weights
from amoeba.integrations.quantised_models import unquantised
from amoeba.jobs.placed_model import read_layer
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.packing import copy_small_files
from amoeba.stream.store.store import Store
from amoeba.stream.store.tensor_files import SHARDS, checkpoint_tensors
from amoeba.system.files import write_whole

_CONFIG = "config.json"


def write_plain(source: Store, out: Path, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False) -> None:
    """dtype: of the experts; None for that which their numbers are computed in."""
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    names: dict[str, str] = {}
    total, count = 0, len(source.layers) + 1
    for number, tensors in enumerate(_shards(source, dtype, trust_remote_code)):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, out / file, {"format": "pt"})
        names |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    write_whole(out / SHARDS, json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1) + "\n")
    copy_small_files(source.files, out, but=(_CONFIG, SHARDS))
    config = json.loads((source.files / _CONFIG).read_bytes())
    config.pop("quantization_config", None)
    write_whole(out / _CONFIG, json.dumps(config, indent=2) + "\n")


def _shards(source: Store, dtype: torch.dtype | None, trust_remote_code: bool) -> Iterator[dict[str, Tensor]]:
    """Of each layer its experts, and then of all that is no expert."""
    from transformers.core_model_loading import revert_weight_conversion

    name = str(source.folder)
    config = unquantised(load_config(name, trust_remote_code=trust_remote_code))
    model = load_without_weights(config, name, trust_remote_code=trust_remote_code)
    modules = experts_modules(model)
    for number, entry in enumerate(source.layers):
        module = modules[entry.name]
        shapes = dict(module.named_parameters(recurse=False))
        for parameter, shape in shapes.items():
            numbers = torch.empty(shape.shape, dtype=dtype or entry.dtype, device="cpu")
            module.register_parameter(parameter, nn.Parameter(numbers, requires_grad=False))
        read_layer(source, number, module)
        own = {f"{entry.name}.{each}": parameter.data for each, parameter in module.named_parameters(recurse=False)}
        yield revert_weight_conversion(model, own)
        for parameter, shape in shapes.items():
            module.register_parameter(parameter, shape)
    rest = dict(source.rest_tensors())
    if isinstance(source, FolderStore) and source.rest_is_stored:  # parts that the text model has no place for
        from safetensors import safe_open

        entries = checkpoint_tensors(source.folder)
        for left in source.left_out:
            with safe_open(entries[left].file, framework="pt") as file:
                rest[left] = file.get_tensor(left)
    yield rest
