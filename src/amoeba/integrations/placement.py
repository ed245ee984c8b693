"""Where the frozen experts of a Hugging Face model are kept: as its own tensors, or packed for the CPU's matrix units.

E experts · H hidden · I intermediate · J = 2I or I

    place_experts(model, "cpu-int8")        # the rest of the model may go to a GPU afterwards
    place_experts(model, "auto")

Packed experts take no gradient; x, the routing weights and LoRA factors do. A module whose experts are packed keeps the
shapes of its parameters as tensors on the meta device, which are no parameters any more: `model.to`, optimizers and
state_dict do not see them, and saving such a model raises, since its experts would be missing.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.cpu_features import has_bf16_instructions
from amoeba.errors import bad_value
from amoeba.experts import experts
from amoeba.integrations.transformers import LORA, PACKED, expert_weights, plan_of
from amoeba.routing import Routing

logger = logging.getLogger("amoeba")

PLACEMENTS = ("resident", "cpu-bf16", "cpu-int8", "auto")
_ENGINE = "amoeba.cpu.packed_experts"


class Placed(NamedTuple):
    placement: str
    reason: str


def place_experts(model: nn.Module, placement: str) -> Placed:
    """Packs the experts of every layer, one after the other, and frees their tensors; "resident" changes nothing."""
    check_placement(placement)
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    placed = _choose(list(modules.values())) if placement == "auto" else Placed(placement, "as asked")
    if placed.placement == "resident":
        return placed
    kind = placed.placement.removeprefix("cpu-")
    for name, module in modules.items():
        if LORA in module._modules:
            raise bad_value(name, "experts without factors yet", "LoRA factors", "place the experts, then attach")
        _pack(name, module, kind)
    logger.info("experts: %d layers packed in %s", len(modules), kind)
    return placed


def check_placement(placement: str) -> None:
    if placement not in PLACEMENTS:
        raise bad_value("experts", f"one of {', '.join(PLACEMENTS)}", repr(placement), "leave it out for auto")
    if placement.startswith("cpu-") and not engine_is_here():
        raise bad_value("experts", f"resident, or {_ENGINE} for {placement}", "a version without it", "use resident")


def engine_is_here() -> bool:
    return importlib.util.find_spec(_ENGINE) is not None


def experts_forward_packed(module: Any, x_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts' forward does where they are packed; x may be on a GPU and in any dtype."""
    packed = module.__dict__[PACKED]
    routing = Routing(expert_TK=top_k_index, weight_TK=top_k_weights, trusted=True)
    adapter = module._modules.get(LORA)
    lora = None if adapter is None else adapter.factors(packed.device)
    with torch.autocast(x_TH.device.type, enabled=False):
        y_TH = experts(x_TH.to(packed.dtype), routing, packed, lora=lora)
    return y_TH.to(x_TH.dtype)


def _choose(modules: list[Any]) -> Placed:
    needed = sum(p.nbytes for module in modules for p in module.parameters())
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        if 2 * needed <= free or not engine_is_here():
            return Placed("resident", f"{needed / 2**30:.1f} GiB of experts, {free / 2**30:.1f} GiB free on the GPU")
        return Placed("cpu-bf16", f"{needed / 2**30:.1f} GiB of experts and {free / 2**30:.1f} GiB free on the GPU")
    if not engine_is_here():
        return Placed("resident", "this version has no packed experts")
    if modules and modules[0].down_proj.dtype != torch.bfloat16:
        return Placed("resident", f"the weights are {modules[0].down_proj.dtype}, which packing would round")
    if not has_bf16_instructions():
        return Placed("resident", "this CPU has no bf16 instructions")
    return Placed("cpu-bf16", "this CPU has bf16 instructions")


def _pack(name: str, module: Any, kind: str) -> None:
    from amoeba.cpu.packed_experts import pack_experts

    plan = plan_of(module)
    if plan.fused is None:
        raise bad_value(
            name, "an activation that the CPU engine computes", type(module).__name__, "keep the experts resident"
        )
    with torch.no_grad():
        module.__dict__[PACKED] = pack_experts(expert_weights(module, plan), kind=kind, nodes="auto")
    for parameter_name in list(module._parameters):
        parameter = module._parameters.pop(parameter_name)
        if parameter is not None:
            module.__dict__[parameter_name] = torch.empty_like(parameter, device="meta")
    module.register_state_dict_pre_hook(_refuse_to_save)


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise bad_value(
        "model",
        "experts as ordinary tensors",
        f"{prefix.rstrip('.')}, packed for the CPU",
        "save the adapter (amoeba.lora.save), or load the model again without a placement and save that",
    )
