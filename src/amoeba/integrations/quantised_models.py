"""Loads quantised checkpoints without dequantising their experts.

    take_over_quantised("amoeba")        # once: from_pretrained(..., experts_implementation="amoeba") then does so

The rest of the model is loaded as an unquantised one, and its experts are handed quantised ones, frozen. The model
counts as unquantised afterwards: any trainer takes it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from amoeba.core.log import logger
from amoeba.integrations.experts_module import described, experts_left_out, experts_modules, hand_over
from amoeba.integrations.quantised_files import (
    BITSANDBYTES,
    QuantisedFiles,
    check_no_codes,
    check_readable,
    format_of,
    products_for,
)
from amoeba.precision.formats import E8M0, fp8_blocks
from amoeba.precision.placements import placement_of
from amoeba.precision.quantised import QuantisedMatrix, block_counts
from amoeba.precision.quantised_experts import QuantisedExperts

# What from_pretrained takes to find files, which are found by then.
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "use_safetensors")


def take_over_quantised(name: str) -> None:
    """name: the experts implementation for which checkpoints are loaded so. Calling it again changes nothing."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.from_pretrained.__func__
    if hasattr(original, "_takes_over_quantised"):
        return

    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        found = None if model is None or arguments else _quantised(cls, model, options, name)
        loaded = None if found is None else _load(cls, *found, options, name)
        return original(cls, model, *arguments, **options) if loaded is None else loaded

    from_pretrained._takes_over_quantised = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _quantised(kind: Any, model: Any, options: dict[str, Any], implementation: str) -> tuple[Path, Any, dict] | None:
    """The folder, the configuration without its quantisation, and that; None where transformers is to load it."""
    config = options.get("config")
    asked = options.get("experts_implementation", getattr(config, "_experts_implementation", None))
    if asked != implementation:
        return None
    if config is None or isinstance(config, str | Path):
        files = {option: options[option] for option in _OF_FILES if option in options and option != "use_safetensors"}
        config = kind.config_class.from_pretrained(config or model, trust_remote_code=False, **files)
    facts = facts_of(config)
    if getattr(options.get("quantization_config"), "dequantize", False) or "state_dict" in options:
        return None
    if facts is None:
        if Path(model).expanduser().is_dir():
            check_no_codes(_folder(model, options))
        return None
    if format_of(facts) is None:
        with torch.device("meta"):
            empty = kind(unquantised(config))
        check_readable(_folder(model, options), empty, facts)
        return None
    return _folder(model, options), unquantised(config), facts


def facts_of(config: Any) -> dict[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else dict(found.to_dict())


def unquantised(config: Any) -> Any:
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def dtype_of(config: Any) -> torch.dtype:
    """Of all that is not quantised, of x and of y."""
    found = getattr(config, "dtype", None) or torch.bfloat16
    return getattr(torch, found) if isinstance(found, str) else found


def _folder(model: Any, options: Mapping[str, Any]) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / options.get("subfolder", "")
    from huggingface_hub import snapshot_download

    names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
    files = {name: options[name] for name in names if options.get(name) is not None}
    return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json"], **files))


def _load(kind: Any, folder: Path, config: Any, facts: dict, options: dict[str, Any], implementation: str) -> Any:
    """None where the experts are not quantised, but other parts of the model are, which transformers dequantises."""
    from transformers import GenerationConfig

    told = {*_OF_FILES, "config", "quantization_config"}
    options = {name: value for name, value in options.items() if name not in told}
    wants_info = options.pop("output_loading_info", False)
    options["experts_implementation"] = implementation
    asked = options.pop("torch_dtype", None) or options.pop("dtype", None)
    options.pop("trust_remote_code", None)
    if asked is not None and asked != "auto":
        config.dtype = asked
    dtype = dtype_of(config)
    with torch.device("meta"):
        empty = kind(copy.deepcopy(config))
    with QuantisedFiles(folder, empty, facts) as files:
        quantised = files.has_quantised_experts()
        if not quantised and facts["quant_method"] != BITSANDBYTES:
            return None
        with experts_left_out() if quantised else contextlib.nullcontext():
            model, told = kind.from_pretrained(
                None,
                config=config,
                state_dict=files.rest(dtype) if quantised else files.rest(dtype) | files.plain_experts(),
                dtype=dtype,
                trust_remote_code=False,  # its class is there already
                output_loading_info=True,
                **options,
            )
        for name, module in experts_modules(model).items() if quantised else ():
            experts = files.experts(name, module, dtype)
            hand_over(module, experts, placement_of(experts.format))
            others = model.get_submodule(name.rpartition(".")[0]).parameters()  # where device_map put the layer's rest
            module.to(next((each.device for each in others if each.is_floating_point()), model.device))
    kept = files.format.name if quantised else "numbers"
    logger.info("experts: %s, as in the checkpoint; the rest in %s", kept, dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    model.name_or_path = str(folder)
    return (model, told) if wants_info else model


def experts_of_fp8_module(module: Any, dtype: torch.dtype) -> QuantisedExperts:
    """The weights of transformers' own FP8Experts, where a model was loaded with another implementation."""
    found = described(module)
    stored = [(getattr(module, name), getattr(module, f"{name}_scale_inv")) for name in (found.up_name, "down_proj")]
    matrices: list[QuantisedMatrix] = []
    for weight, scales in stored:
        format = fp8_blocks(*(module.block_size or weight.shape[1:]))
        values = scales.detach()
        values = values.float() if values.dtype.itemsize > 1 else E8M0.decode(values.view(torch.uint8))
        rows, columns = weight.shape[1:]
        whole = values.shape[1:] == block_counts(rows, columns, format)
        matrices.append(QuantisedMatrix(weight.detach().view(torch.uint8), values, format, columns, 1 if whole else 2))
    gate_up, down = matrices
    products = products_for(gate_up.format, {"activation_scheme": getattr(module, "activation_scheme", None)})
    return QuantisedExperts.holding(gate_up, down, activation=found.fused, dtype=dtype, products=products)
