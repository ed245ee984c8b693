"""Saves and loads the adapter of a model as a PEFT folder.

save(model, "adapter")
load(model, "adapter")                    # onto a plain model, frozen, for inference
load(model, "adapter", trainable=True)    # to go on training
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.weights import LoraFactors
from amoeba.integrations.experts_module import layouts_of, placed_in
from amoeba.integrations.text_model import decoder_name, text_config
from amoeba.lora import attaching
from amoeba.lora import targets as linears
from amoeba.lora.adapter_config import UP_PARAMETERS, another_model, is_targeted, scalings_of_others
from amoeba.lora.factors import SHARED_A, ExpertsLora, stored_tensors
from amoeba.lora.peft_files import PROJECTIONS, Adapter, read_adapter, write_adapter
from amoeba.lora.targets import routers_of
from amoeba.parallel.sharded import ShardedExperts, gather_share
from amoeba.parallel.shards import copy_here, whole

_GGUF = "gguf_fingerprint"
_MERGE_WITH_PEFT = "merge the adapter into the model with PEFT (merge_and_unload), or train it on other targets"


def save(model: nn.Module, folder: str | Path) -> None:
    """Writes the adapter as a PEFT folder: adapter_config.json and adapter_model.safetensors; other files stay.

    If the experts are distributed over ranks, every rank must call this; rank zero writes the factors of all.
    """
    adapter = adapter_of(model)
    if adapter is not None:
        write_adapter(folder, adapter)


def adapter_of(model: nn.Module) -> Adapter | None:
    state = attaching.attached_to(model)
    others = linears.tensors_of(state.linears)
    others |= {f"{linears.PREFIX}{name}": tensor for name, tensor in attaching.whole_tensors(model, state).items()}
    others = {name: whole(tensor) for name, tensor in others.items()}
    experts = {name: _whole_factors(model.get_submodule(name), layer) for name, layer in state.experts.items()}
    if None in experts.values():
        return None
    layouts = [state.layouts[name] for name in state.experts] or list(state.layouts.values())
    return Adapter(
        experts={name: factors for name, factors in experts.items() if factors is not None},
        others=others,
        config=state.config,
        gated=all(layout.gated for layout in layouts),
        interleaved=any(layout.interleaved for layout in layouts),
        base=base_of(model),
    )


@torch.no_grad()
def _whole_factors(module: Any, layer: ExpertsLora) -> LoraFactors | None:
    placed, factors = placed_in(module), layer.factors()
    if not isinstance(placed, ShardedExperts):
        return factors
    found: dict[str, Tensor] = {}
    for name, share in stored_tensors(factors).items():
        gathered = gather_share(whole(share).cpu(), placed.owners, placed.ranks, f"factors {name}")
        if gathered is not None:
            found[name] = gathered
    shared = found.pop(SHARED_A, None)
    if shared is not None:
        found |= {"gate_lora_a": shared, "up_lora_a": shared}
    return LoraFactors(**found, scaling=factors.scaling) if placed.ranks.rank == 0 else None


def load(model: nn.Module, folder: str | Path, *, trainable: bool = False) -> attaching.Attached:
    """Loads an adapter folder into the model: written by `save`, by PEFT, or with separate tensors per expert.

    trainable: leave the factors trainable; otherwise the whole model is frozen, for inference.

    If the model already has factors, the file's values are copied into them. An adapter that belongs to another model,
    by names, shapes or recorded base model, raises ValueError.
    """
    adapter = read_adapter(folder, layouts_of(model), decoder_name(model))
    adapter = replace(adapter, others=_without_copies(model, adapter.others))
    state = model.__dict__.get(attaching.STATE)
    if state is None:
        attaching.prepare(model)
        names, whole = _others(model, adapter, folder)
        check_base(model, adapter, folder)
        state = attaching.start(model, dict(adapter.config))
        for name, factors in adapter.experts.items():
            attaching.add_experts(model, state, name, factors)
        modules, parameters = scalings_of_others(adapter.config, adapter.others)
        of_weights = {name.removesuffix(".weight"): found for name, found in parameters.items()}
        attaching.add_linears(model, state, {name: (modules | of_weights)[name] for name in names})
        attaching.add_whole_modules(model, state, list(dict.fromkeys(name.rpartition(".")[0] for name in whole)))
        if not trainable:
            model.requires_grad_(False)
    elif state.merged:
        raise bad_value("model", "one whose factors are not merged", "one whose are", "call amoeba.lora.unmerge first")
    _fill(model, state, adapter, folder)
    return state


@torch.no_grad()
def _fill(model: nn.Module, state: attaching.Attached, adapter: Adapter, folder: str | Path) -> None:
    for name, layer in state.experts.items():
        if name in adapter.experts and adapter.experts[name].scaling != layer.scaling:
            got = f"{adapter.experts[name].scaling:g} in {folder}"
            raise bad_value(f"{name}: alpha / r", f"{layer.scaling:g}", got, "attach with the r and alpha of the file")
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, layer in state.experts.items():
        ours |= {f"{name}.{key}": parameter for key, parameter in layer.named_parameters()}
    for name, factors in adapter.experts.items():
        share = stored_tensors(attaching.share_of(model.get_submodule(name), factors))
        theirs |= {f"{name}.{key}": tensor for key, tensor in share.items()}
    ours |= {key.removeprefix(linears.PREFIX): tensor for key, tensor in linears.tensors_of(state.linears).items()}
    ours |= attaching.whole_tensors(model, state)
    theirs |= {key.removeprefix(linears.PREFIX): tensor for key, tensor in adapter.others.items()}
    for name in dict.fromkeys((*ours, *theirs)):
        shapes = [tuple(side[name].shape) if name in side else "none" for side in (ours, theirs)]
        if shapes[0] != shapes[1]:
            remedy = "the adapter is another model's, or was trained with another rank or other targets"
            raise bad_value(name, f"shape {shapes[0]}, as this model has it", f"{shapes[1]} in {folder}", remedy)
    for name, tensor in ours.items():
        copy_here(tensor, theirs[name])


def _without_copies(model: nn.Module, others: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT adds the frozen weight of an output head or an embedding that it has put factors on."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_copy(key: str, tensor: Tensor) -> bool:
        name = key.removeprefix(linears.PREFIX)
        own = parameters.get(name, parameters.get(name.replace(".base_layer.", ".")))
        return ".base_layer." in name and own is not None and torch.equal(tensor.to(own), own)

    return {key: tensor for key, tensor in others.items() if not is_copy(key, tensor)}


def _others(model: nn.Module, adapter: Adapter, folder: str | Path) -> tuple[list[str], list[str]]:
    names, whole = [], []
    remedy = f"the adapter is for another model: its base model is {adapter.config.get('base_model_name_or_path')!r}"
    modules, routers = dict(model.named_modules()), set(routers_of(model, layouts_of(model)))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for key, tensor in adapter.others.items():
        name = key.removeprefix(linears.PREFIX)
        module, is_factor, factor = name.partition(".lora_")
        if not is_factor:
            if name in tensors:
                _check_not_tied(model, name, adapter)
                whole.append(name)
                continue
            there = name
            while there not in modules:
                there = there.rpartition(".")[0]
            of_peft = there != "" and not any(modules[there].children())  # a layer of ours that PEFT does more with
            got = f"{tuple(tensor.shape)} in {folder}"
            raise bad_value(key, "a tensor of this model", got, _MERGE_WITH_PEFT if of_peft else remedy)
        layer: Any = modules.get(module)
        if layer is None:
            raise bad_value(key, "factors of a linear layer of this model", "no such module", remedy)
        served = isinstance(layer, nn.Linear) or (module in routers and getattr(layer, "weight", None) is not None)
        if not served or factor not in ("A.weight", "B.weight"):
            expected = "factors of a linear layer, of experts or of a router"
            raise bad_value(key, expected, type(layer).__name__, _MERGE_WITH_PEFT)
        out_features, in_features = layer.weight.shape
        wanted = ("R", in_features) if factor == "A.weight" else (out_features, "R")
        if tensor.dim() != 2 or any(size not in ("R", found) for size, found in zip(wanted, tensor.shape, strict=True)):
            shape = f"({wanted[0]}, {wanted[1]})"
            raise bad_value(key, f"shape {shape}", tuple(tensor.shape), remedy)
        if module not in names:
            names.append(module)
    return names, whole


def _check_not_tied(model: nn.Module, name: str, adapter: Adapter) -> None:
    """PEFT trains a copy of one of two tied layers, and the other one keeps the weight of the base model."""
    others = [place for place in linears.places_of(model, name) if place != name]
    if others and not adapter.config.get("ensure_weight_tying"):
        got = f"{name}, trained apart from {', '.join(others)}, with which it shares its weight in this model"
        remedy = "train it again with ensure_weight_tying=True in LoraConfig, or use it with PEFT"
        raise bad_value("adapter", "layers trained in full that share no weight", got, remedy)


def base_of(model: nn.Module) -> dict[str, Any]:
    return _described(text_config(model.config).to_dict())


def _described(text: dict[str, Any]) -> dict[str, Any]:
    found = {"model_type": text.get("model_type"), "layers": text.get("num_hidden_layers")}
    fingerprint = text.get("gguf_fingerprint")
    return found if fingerprint is None else found | {_GGUF: fingerprint}


def check_base(model: nn.Module, adapter: Adapter, folder: str | Path) -> None:
    """Where nothing is known of the base model, and the targets do not tell what should be there, a warning at most."""
    here, there = base_of(model), adapter.base or _base_in_config(adapter.config)
    if _GGUF in there and there[_GGUF] != here.get(_GGUF):
        logger.warning("%s was trained on another file of its base model (GGUF %s)", folder, there.pop(_GGUF))
    for what, of_adapter in there.items():
        if of_adapter is not None and here.get(what) is not None and of_adapter != here[what]:
            got = repr(of_adapter)
            raise bad_value(f"{folder}: {what} of the base model", repr(here[what]), got, another_model(adapter.config))
    class_name = (adapter.config.get("auto_mapping") or {}).get("base_model_class")
    if class_name is not None and class_name != type(model).__name__:
        raise bad_value(str(folder), f"an adapter of {type(model).__name__}", class_name, another_model(adapter.config))
    missing = list(_missing(model, adapter))
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise bad_value(
            str(folder), "factors for all that its targets name in this model", f"none for {named}", "it is for a "
            "model with fewer layers, or was not copied whole; layers_to_transform in its config says which are meant",
        )  # fmt: skip
    layouts = layouts_of(model)
    if adapter.experts and len(adapter.experts) < len(layouts):
        logger.warning("the adapter changes the experts of %d of %d layers", len(adapter.experts), len(layouts))


def _base_in_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a file that PEFT wrote: what the base model's own folder says, where it is on this machine."""
    path = Path(str(config.get("base_model_name_or_path") or "")) / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    text = found.get("text_config")
    return _described(text if isinstance(text, dict) else found)


def _missing(model: nn.Module, adapter: Adapter) -> Iterator[str]:
    config = adapter.config
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return
    there = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in adapter.others}
    modules, parameters = config.get("target_modules") or (), config.get("target_parameters") or ()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in there and _named(name, modules):
            yield name
    of_experts = [name for name in PROJECTIONS if not isinstance(modules, str) and name in modules]
    for name in layouts_of(model):
        leaves = (*UP_PARAMETERS.values(), "down_proj")
        of_parameters = any(is_targeted(f"{name}.{leaf}", parameters) for leaf in leaves)
        if name not in adapter.experts and (of_parameters or (adapter.experts and of_experts)):
            yield name


def _named(name: str, targets: str | Iterable[str]) -> bool:
    """PEFT's own rule for target_modules: a regular expression, or names by their ends."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
