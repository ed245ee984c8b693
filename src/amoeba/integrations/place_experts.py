"""Where the frozen experts of a Hugging Face model are kept: as its own tensors, or in another placement.

E experts · H hidden · I intermediate · J = 2I or I

    place_experts(model, "cpu-int8")        # the rest of the model may go to a GPU afterwards
    place_experts(model, "auto", trains=False, device=torch.device("cuda"))     # to generate with, the rest on that GPU

Placed experts take no gradient, unless their kind of weights trains; x, the routing weights and LoRA factors do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.placement import LayerSizes, Load, Placement, Situation
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.integrations import experts_module
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.precision import set_products
from amoeba.integrations.text_model import text_config
from amoeba.placements import AUTO, RESIDENT, all_placements, placement_named
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.precision.recipes import W8A8


class Placed(NamedTuple):
    placement: str
    reason: str
    plans: tuple[Any, ...] = ()  # of their memory, where that was asked for


def place_experts(
    model: nn.Module,
    placement: str,
    load: Load | None = None,
    *,
    trains: bool = True,
    device: torch.device | None = None,
    stored_dtype: torch.dtype | None = None,
    read: Callable[[str, Any, Placement | None], None] | None = None,
) -> Placed:
    """Places the experts of every layer, one after the other, and frees their tensors; "resident" changes nothing.

    placement: a name of `amoeba.placements`, "resident" or "auto".
    load: how large a pass will be. Then the memory is planned first, and MemoryError says what would not fit.
    trains: for "auto", whether LoRA factors will be trained on the experts; else the model generates.
    device: for "auto", where the rest of the model will be; None for a GPU, if there is one.
    stored_dtype: for "auto", the checkpoint's dtype where the model has another one only because it is faster here: a
    placement that keeps numbers of this dtype rounds nothing. None: the model's.
    read: gives a module of this name its parameters, where the model was made without them (see `leave_shapes`), just
    before it is placed so; None for experts that stay resident.
    """
    check_placement(placement)
    modules = experts_module.experts_modules(model)
    if not modules:
        if placement not in (AUTO, RESIDENT):
            check_coverage(model, "experts", f"leave the placement {placement} out")
        return Placed(RESIDENT, "there are no experts to place")
    already = _already_placed(model, modules, placement)
    if already is not None:
        return already
    placed = Placed(placement, "as requested")
    if placement == AUTO:
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        placed = _choose(model, list(modules.values()), trains, device, stored_dtype)
    if placed.placement == RESIDENT:
        if read is not None:
            for name, module in modules.items():
                read(name, module, None)
        return placed
    chosen = placement_named(placed.placement)
    for name, module in modules.items():
        if experts_module.LORA in module._modules:
            raise bad_value(name, "experts without factors yet", "LoRA factors", "place the experts, then attach")
    if load is not None and chosen.check_memory is not None:
        sizes = Counter(_sizes(module) for module in modules.values())
        top_k = getattr(text_config(model.config), "num_experts_per_tok", None)
        load = load._replace(top_k=top_k or min(load.top_k, max(size.experts for size in sizes)))
        owned = (p for module in modules.values() for p in module.parameters() if not p.is_cuda)
        placed = placed._replace(plans=chosen.check_memory(sizes, load, sum(p.nbytes for p in owned)))
    from amoeba.integrations.transformers import take_over

    take_over(model)  # nothing else finds them there
    for name, module in modules.items():
        if read is not None:
            read(name, module, chosen)
        experts_module.place(module, chosen)
        if isinstance(experts_module.placed_in(module), PackedExperts):
            experts_module.overlap_shared_experts(model.get_submodule(name.rpartition(".")[0]), module)
    logger.info("experts: %d layers %s", len(modules), chosen.summary)
    return placed


def _already_placed(model: nn.Module, modules: dict[str, Any], asked: str) -> Placed | None:
    """Experts that came placed, as those of a quantised checkpoint do, stay where they are."""
    for name, module in modules.items():
        there = experts_module.described(module).placement if experts_module.placed_in(module) is not None else None
        if there is None:
            continue
        if asked == W8A8 and isinstance(experts_module.placed_in(module), QuantisedExperts):
            set_products(model, W8A8)
        elif asked not in (AUTO, RESIDENT, there.name):
            remedy = "leave the placement out (--experts, --precision), or load the model's unquantised checkpoint"
            raise bad_value("experts", "experts as ordinary tensors", f"{name}, {there.summary}", remedy)
        return Placed(there.name, "as stored in the checkpoint")
    return None


def check_placement(name: str) -> None:
    if name not in (RESIDENT, AUTO):
        placement_named(name)


def _choose(
    model: nn.Module, modules: list[Any], trains: bool, device: torch.device, stored_dtype: torch.dtype | None
) -> Placed:
    for module in modules:
        if experts_module.described(module).fused is None:
            return Placed(RESIDENT, f"{type(module).__name__} computes them with its own functions")
    dtype = stored_dtype or modules[0].down_proj.dtype
    expert_bytes = sum(tensor.numel() * dtype.itemsize for module in modules for tensor in _tensors(module))
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    situation = Situation(
        device,
        trains,
        dtype,
        expert_bytes=expert_bytes,
        model_bytes=expert_bytes + sum(p.nbytes for p in model.parameters() if id(p) not in owned),
        free_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    )
    against = []
    for placement in all_placements():
        right, reason = placement.chosen(situation)
        if right:
            return Placed(placement.name, reason)
        against += [reason] if reason else []
    return Placed(RESIDENT, "; ".join(against))


def _tensors(module: Any) -> list[Tensor]:
    return [*module.parameters()] or [each for each in vars(module).values() if isinstance(each, Tensor)]


def _sizes(module: Any) -> LayerSizes:
    weights = experts_module.resident(module)
    has_bias = weights.gate_up_bias_EJ is not None
    return LayerSizes(weights.num_experts, weights.hidden, weights.intermediate, weights.activation, has_bias)
