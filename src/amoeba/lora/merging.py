"""Merges factors into the weights, and restores the weights.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    merge(model)          # W + scaling · B @ A in place of W, added in fp32 and rounded once
    unmerge(model)        # W again, bit for bit

A rounded sum cannot be undone by a subtraction, so merge keeps the weights that it replaces: until unmerge or detach
the adapted layers are in memory twice. `merge(model, keep_base=False)` keeps nothing and cannot be undone.

While it is merged the model has no factors in it: state_dict, save_pretrained and torch.compile see the plain model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.integrations.experts_module import LORA, ExpertsLayout, check_own_parameters
from amoeba.lora import targets
from amoeba.lora.attaching import attached_to


@torch.no_grad()
def merge(model: nn.Module, *, keep_base: bool = True) -> None:
    """Adds the factors into the weights, in fp32 and rounded once; the model is then a plain one without factors.

    keep_base: keep the replaced weights in memory for `unmerge`; without them the merge cannot be undone.

    Experts that are packed for the CPU cannot be merged.
    """
    state = attached_to(model)
    if state.merged:
        raise bad_value("model", "one whose factors are not merged", "one whose are", "call amoeba.lora.unmerge first")
    for name in state.experts:
        remedy = "merge into the model's unquantised checkpoint, loaded without a placement"
        check_own_parameters(model.get_submodule(name), name, remedy)
    base: dict[str, Tensor] = {}

    changed: list[str] = []

    def replace(name: str, parameter: Tensor, merged: Tensor) -> None:
        changed.append(name)
        if keep_base:
            base[name] = parameter.data
        parameter.data = merged

    for name, layer in state.linears.items():
        replace(f"{name}.weight", layer.base_layer.weight, targets.merged_weight(layer))
    targets.unwrap(model, state.linears)
    for name, lora in state.experts.items():
        module, layout = model.get_submodule(name), state.layouts[name]
        for parameter_name, merged in _merged_experts(module, layout, lora.factors()).items():
            replace(f"{name}.{parameter_name}", getattr(module, parameter_name), merged)
        delattr(module, LORA)
    state.merged, state.base, state.changed = True, base if keep_base else None, changed


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Undoes `merge`: restores the base weights, bit for bit, and attaches the factors again."""
    state = attached_to(model)
    if not state.merged:
        raise bad_value("model", "one whose factors are merged", "one whose are not", "there is nothing to undo")
    if state.base is None:
        raise bad_value(
            "model",
            "one that was merged with keep_base=True",
            "one whose base weights were not kept",
            "load the base model and the adapter again",
        )
    for name, tensor in state.base.items():
        model.get_parameter(name).data = tensor.to(model.get_parameter(name).device)
    targets.rewrap(model, state.linears)
    for name, layer in state.experts.items():
        experts = model.get_submodule(name)
        experts.register_module(LORA, layer.to(next(experts.parameters()).device).train(experts.training))
    state.merged, state.base, state.changed = False, None, []


def _merged_experts(module: nn.Module, layout: ExpertsLayout, factors: LoraFactors) -> dict[str, Tensor]:
    """The changed parameters by name, as the module stores them."""
    up_name = "gate_up_proj" if layout.gated else "up_proj"
    rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if layout.interleaved else {
        "gate": slice(layout.intermediate), "up": slice(layout.intermediate, None)
    }  # fmt: skip
    if not layout.gated:
        rows["up"] = slice(None)
    changed: dict[str, Tensor] = {}
    for projection, a, b in (
        ("gate", factors.gate_lora_a, factors.gate_lora_b),
        ("up", factors.up_lora_a, factors.up_lora_b),
        ("down", factors.down_lora_a, factors.down_lora_b),
    ):
        if a is None or b is None:
            continue
        name = "down_proj" if projection == "down" else up_name
        stored = changed.setdefault(name, getattr(module, name).detach().clone())
        weight_EOI = stored.mT if layout.transposed else stored
        if projection != "down":
            weight_EOI = weight_EOI[:, rows[projection]]
        wide = torch.promote_types(stored.dtype, torch.float32)
        for weight_OI, a_RI, b_OR in zip(weight_EOI, a, b, strict=True):  # one by one: no wide copy of all experts
            weight_OI.copy_(weight_OI.to(wide) + factors.scaling * (b_OR.to(wide) @ a_RI.to(wide)))
    return changed
