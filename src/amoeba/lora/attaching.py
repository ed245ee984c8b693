"""Attaches LoRA factors to a Hugging Face model with experts, and detaches them.

E experts · R LoRA rank

    attached = attach(model, r=16, alpha=32, targets=["experts", "q_proj"])
    merge(model)          # W + scaling · B @ A in place of W, added in fp32 and rounded once
    unmerge(model)        # W again, bit for bit: merge keeps the weights that it replaces
    detach(model)

The factors of the experts are parameters of a child `lora_factors` of each experts module; those of other layers are
PEFT's. All other parameters are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.experts_module import (
    LORA,
    ExpertsLayout,
    check_own_parameters,
    home_of_factors,
    layouts_of,
    placed_in,
    stays,
)
from amoeba.lora import targets
from amoeba.lora import targets as linears
from amoeba.lora.factors import ExpertsLora, fresh_factors
from amoeba.lora.targets import EXPERTS, choose, routers_of
from amoeba.parallel.sharded import ShardedExperts, shard_lora

STATE = "_amoeba_lora"


@dataclass
class Attached:
    """The adapter of a model. Its modules stay the same, in the model's tree or, while merged, outside it."""

    config: dict[str, Any]  # of adapter_config.json: r, lora_alpha, modules_to_save, ...
    experts: dict[str, ExpertsLora] = field(default_factory=dict)  # by the name of the experts module
    layouts: dict[str, ExpertsLayout] = field(default_factory=dict)
    linears: dict[str, Any] = field(default_factory=dict)  # PEFT's layers by the name of the nn.Linear
    replaced: dict[str, Tensor] = field(default_factory=dict)  # base values of what is trained whole, by full name
    left_out: dict[str, str] = field(default_factory=dict)  # what the targets mean and cannot train: why, by name
    trained_before: list[str] = field(default_factory=list)  # parameters that required a gradient
    base: dict[str, Tensor] | None = None  # while merged: the weights as they were, {} if they were not kept
    merged: bool = False
    whole: dict[str, Tensor] = field(default_factory=dict)  # while taken off: the values of `replaced`
    changed: list[str] = field(default_factory=list)  # while merged: the parameters that have the factors in them

    def trainable(self) -> int:
        """How many numbers the factors have, not counting modules that are trained in full."""
        of_experts = sum(p.numel() for layer in self.experts.values() for p in layer.parameters())
        return of_experts + sum(f.numel() for layer in self.linears.values() for f in linears.factors_of(layer))


def attach(
    model: nn.Module,
    r: int = 16,
    alpha: float = 32,
    targets: str | Iterable[str] = EXPERTS,
    *,
    train_router: bool = False,
    share_a: bool = True,
) -> Attached:
    """Puts new LoRA factors on the targets and freezes all else; until they are trained, the output is unchanged.

    r:            the rank.
    alpha:        the update is scaled by alpha / r.
    targets:      "experts", "gate", "up", "down", names of parameters or linear layers by their ends ("gate_up_proj",
                  "q_proj"), or "all-linear".
    train_router: the routers are trained in full and saved with the adapter.
    share_a:      gate and up share one A, so that PEFT's file has rank r; otherwise it has 2r.

    Factors on weights of half precision are fp32. Targets outside the experts need the package peft.
    """
    check_rank_and_alpha(r, alpha)
    prepare(model)
    chosen = choose(model, targets)
    state = start(model, {"r": r, "lora_alpha": alpha})
    state.left_out = chosen.left_out
    for name, projections in chosen.projections.items():
        dtype, _ = home_of_factors(model.get_submodule(name))
        factors = fresh_factors(state.layouts[name], projections, r=r, scaling=alpha / r, dtype=dtype, share_a=share_a)
        add_experts(model, state, name, factors)
    by_weight = (name for name in chosen.linears if name.rpartition(".")[2] in linears.TAKEN_FOR_EXPERTS)
    state.config["target_parameters"] = [f"{name}.weight" for name in by_weight]
    add_linears(model, state, dict.fromkeys(chosen.linears, (r, alpha / r)))
    if train_router:
        add_whole_modules(model, state, list(routers_of(model, state.layouts)))
    return state


def check_rank_and_alpha(r: Any, alpha: Any) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise bad_value("r", "a whole number of at least 1", repr(r), "8 to 64 are usual ranks")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise bad_value("alpha", "a finite number, not 0", repr(alpha), "twice the rank is usual")


def detach(model: nn.Module) -> None:
    """Removes the factors. The base weights are then those from before `attach`, or the merged ones if merged."""
    state = attached_to(model)
    if not state.merged:
        linears.unwrap(model, state.linears)
        for name in state.experts:
            delattr(model.get_submodule(name), LORA)
        for name, base in state.replaced.items():
            _put(model, name, base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in state.trained_before)
    delattr(model, STATE)


def take_off(model: nn.Module) -> Attached:
    """Removes the factors and keeps them: `put_on` brings the same ones back, at the same addresses."""
    state = attached_to(model)
    state.whole = {name: tensor.clone() for name, tensor in whole_tensors(model, state).items()}
    detach(model)
    return state


def put_on(model: nn.Module, state: Attached) -> None:
    """What `take_off` returned, onto a model without factors."""
    if STATE in model.__dict__ or state.merged:
        raise bad_value("model", "one without LoRA factors", "one that has some", "take them off first")
    for name, layer in state.experts.items():
        model.get_submodule(name).register_module(LORA, layer)
    linears.rewrap(model, state.linears)
    for name, value in state.whole.items():
        _put(model, name, value)
    model.__dict__[STATE] = state


def attached_to(model: nn.Module) -> Attached:
    state = model.__dict__.get(STATE)
    if state is None:
        raise bad_value("model", "one with LoRA factors", "one without", "call amoeba.lora.attach or load first")
    return state


# --- the steps of attaching, which loading an adapter takes too


def prepare(model: nn.Module) -> None:
    """Checks that factors can be put on this model, and has aMoEba compute its experts."""
    if STATE in model.__dict__:
        raise bad_value("model", "one without LoRA factors", "one that has some", "call amoeba.lora.detach first")
    if hasattr(model, "peft_config"):
        remedy = "start from the base model: amoeba.lora.load reads the adapter that PEFT saved"
        raise bad_value("model", "a model without PEFT's layers", f"a {type(model).__name__} with some", remedy)
    remedy = "use PEFT itself for such models"
    check_coverage(model, "model", remedy)
    if not layouts_of(model):
        raise bad_value("model", "one with stacked experts", f"{type(model).__name__}, which has others", remedy)
    from amoeba.integrations.transformers import take_over

    take_over(model)


def start(model: nn.Module, config: dict[str, Any]) -> Attached:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    shared = {"base_model_name_or_path": getattr(model, "name_or_path", None) or None, "task_type": "CAUSAL_LM"}
    state = Attached(config=shared | config, layouts=layouts_of(model), trained_before=trained)
    model.__dict__[STATE] = state
    return state


def add_experts(model: nn.Module, state: Attached, name: str, factors: LoraFactors) -> None:
    """factors: of all experts, of which a rank keeps those of its own."""
    experts: Any = model.get_submodule(name)
    share, own = share_of(experts, factors), isinstance(placed_in(experts), ShardedExperts)
    state.experts[name] = layer = ExpertsLora(share, *home_of_factors(experts), stays=stays(experts), own=own)
    experts.register_module(LORA, layer.train(experts.training))


def share_of(experts: Any, factors: LoraFactors) -> LoraFactors:
    placed = placed_in(experts)
    return shard_lora(factors, placed) if isinstance(placed, ShardedExperts) else factors


def add_linears(model: nn.Module, state: Attached, ranks: dict[str, tuple[int, float]]) -> None:
    """ranks: rank and scaling by the name of the nn.Linear."""
    if not ranks:
        return
    try:
        state.linears = linears.inject(model, ranks)
    except ValueError:
        detach(model)
        raise


def add_whole_modules(model: nn.Module, state: Attached, names: list[str]) -> None:
    """Modules that are trained themselves, without factors (PEFT's modules_to_save): their base values are kept."""
    for name in names:
        module = model.get_submodule(name)
        for key, tensor in module.state_dict().items():
            state.replaced[f"{name}.{key}"] = tensor.detach().clone()
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    state.config["modules_to_save"] = names


def whole_tensors(model: nn.Module, state: Attached) -> dict[str, Tensor]:
    return {name: _tensor_of(model, name).detach() for name in state.replaced}


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    module, _, key = name.rpartition(".")
    return getattr(model.get_submodule(module), key)


@torch.no_grad()
def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Not by `.data`, so that what was packed of the tensor is found to be old."""
    _tensor_of(model, name).copy_(value)


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
    for name in state.linears:
        own = f"{name}.base_layer.weight"
        if others := [place for place in targets.places_of(model, own) if place != own]:
            got = f"{name}, which has the weight of {', '.join(others)}, too"
            remedy = "use the adapter without merging it"
            raise bad_value("model", "factors on layers that share no weight", got, remedy)
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
        got, remedy = "one whose base weights were not kept", "load the base model and the adapter again"
        raise bad_value("model", "one that was merged with keep_base=True", got, remedy)
    for name, tensor in state.base.items():
        model.get_parameter(name).data = tensor.to(model.get_parameter(name).device)
    targets.rewrap(model, state.linears)
    for name, layer in state.experts.items():
        experts = model.get_submodule(name)
        experts.register_module(LORA, layer.to(next(experts.parameters()).device).train(experts.training))
    state.merged, state.base, state.changed = False, None, []


def _merged_experts(module: nn.Module, layout: ExpertsLayout, factors: LoraFactors) -> dict[str, Tensor]:
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
