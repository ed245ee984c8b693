"""Whether an adapter belongs to a model: what its files say of the model it was trained on, and what they leave out.

    base_of(model)                           # goes into the adapter's file: {"model_type": "qwen3_moe", "layers": 3}
    check_base(model, adapter, folder)       # ValueError that names what differs or is missing

Names and shapes are checked where the tensors are read. They are not enough: models of two architectures may have the
same names and sizes, and a deeper model has all names of a shallower one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import layouts_of
from amoeba.integrations.text_model import text_config
from amoeba.lora.adapter_config import UP_PARAMETERS, another_model, is_targeted
from amoeba.lora.peft_files import PROJECTIONS, Adapter

logger = logging.getLogger("amoeba")


def base_of(model: nn.Module) -> dict[str, Any]:
    return _described(text_config(model.config).to_dict())


def _described(text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": text.get("model_type"), "layers": text.get("num_hidden_layers")}


def check_base(model: nn.Module, adapter: Adapter, folder: str | Path) -> None:
    """Where nothing is known of the base model, and the targets do not tell what should be there, a warning at most."""
    here, there = base_of(model), adapter.base or _base_in_config(adapter.config)
    for what, of_adapter in there.items():
        if of_adapter is not None and here.get(what) is not None and of_adapter != here[what]:
            raise bad_value(
                f"{folder}: {what} of the base model", repr(here[what]), repr(of_adapter), another_model(adapter.config)
            )
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
    """What the targets of the config name in this model and the file has nothing for."""
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
        of_parameters = [
            leaf for leaf in (*UP_PARAMETERS.values(), "down_proj") if is_targeted(f"{name}.{leaf}", parameters)
        ]
        if name not in adapter.experts and (of_parameters or (adapter.experts and of_experts)):
            yield name


def _named(name: str, targets: str | Iterable[str]) -> bool:
    """PEFT's own rule for target_modules: a regular expression, or names by their ends."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
