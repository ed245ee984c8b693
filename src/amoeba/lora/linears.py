"""LoRA on layers outside the experts, linear ones and routers: PEFT's own layers, put in and taken out.

R LoRA rank

    layers = inject(model, {name: (16, 2.0)})    # rank and scaling; peft's lora.Linear around each nn.Linear
    tensors_of(layers)                           # {"base_model.model.NAME.lora_A.weight": (R, in), ...} as in files
    unwrap(model, layers)                        # the nn.Linear are back in their places
    rewrap(model, layers)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value

ADAPTER = "default"
PREFIX = "base_model.model."  # of every key in PEFT's files
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def inject(model: nn.Module, ranks: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """Puts PEFT's layers in the places of the modules of these names, each with its rank and scaling.

    A router has a weight, but its forward is its own: there the factors are added to the weight before it is called.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise bad_value(
            "targets",
            "the package peft for layers outside the experts",
            f"none, and the target {next(iter(ranks))}",
            "install it: pip install 'amoeba-moe[lora]', or target the experts alone",
        ) from error
    layers: dict[str, Any] = {}
    for name, (rank, scaling) in ranks.items():
        # Alone in a list, since in a model PEFT 0.21 takes every up_proj for an expert's
        module = model.get_submodule(name)
        holder = nn.ModuleList([module])
        is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        target: dict[str, Any] = (
            {"target_modules": ["0"]} if is_plain else {"target_modules": [], "target_parameters": ["0.weight"]}
        )
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, **target), holder, ADAPTER)
        layer: Any = holder[0]
        layers[name] = layer
        layer.scaling[ADAPTER] = scaling
        for parameter in factors_of(layer):
            if parameter.dtype.itemsize < 4:  # as PEFT does: Adam's steps are below the rounding of bf16
                parameter.data = parameter.data.float()
    rewrap(model, layers)
    return layers


def parameters_to_target(names: Iterable[str]) -> list[str]:
    """Weights to be named in target_parameters, because in target_modules PEFT takes them for experts."""
    return [f"{name}.weight" for name in names if name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]


def factors_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def keys_of(name: str) -> tuple[str, str]:
    return f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight"


def tensors_of(layers: dict[str, Any]) -> dict[str, Tensor]:
    return {
        key: factor.detach()
        for name, layer in layers.items()
        for key, factor in zip(keys_of(name), factors_of(layer), strict=True)
    }


def merged_weight(layer: Any) -> Tensor:
    """W + scaling · B @ A, added in fp32 or wider and rounded once."""
    a, b = (factor.detach() for factor in factors_of(layer))
    weight = layer.base_layer.weight.detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + layer.scaling[ADAPTER] * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def unwrap(model: nn.Module, layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        model.set_submodule(name, layer.base_layer)


def rewrap(model: nn.Module, layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        model.set_submodule(name, layer)
