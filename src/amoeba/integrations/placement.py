"""Where the frozen experts of a Hugging Face model are kept: as its own tensors, or packed for the CPU's matrix units.

E experts · H hidden · I intermediate · J = 2I or I

    place_experts(model, "cpu-int8")        # the rest of the model may go to a GPU afterwards
    place_experts(model, "auto")
    place_experts(model, "auto", trains=False, device=torch.device("cuda"))     # to generate with, the rest on that GPU

Packed experts take no gradient; x, the routing weights and LoRA factors do. A module whose experts are packed keeps the
shapes of its parameters as tensors on the meta device, which are no parameters any more: `model.to`, optimizers and
state_dict do not see them, and saving such a model raises, since its experts would be missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.node_library import load_node
from amoeba.cpu.packed_experts import pack_experts
from amoeba.cpu.packed_weights import PackedKind, load_packed
from amoeba.cpu.places import numa_cores
from amoeba.cpu.planner import LayerSizes, Plan, check_memory, plan
from amoeba.cpu_features import has_bf16_instructions
from amoeba.errors import bad_value
from amoeba.experts import experts
from amoeba.integrations.transformers import LORA, PACKED, expert_weights, plan_of
from amoeba.routing import Routing
from amoeba.weights import ExpertWeights

logger = logging.getLogger("amoeba")

# Of a GPU's free memory, kept for what generating needs beside the model: keys, values and what passes through.
_SHARE_BESIDE = 0.15
PLACEMENTS = ("resident", "cpu-bf16", "cpu-int8", "auto")


class Placed(NamedTuple):
    placement: str
    reason: str
    plans: tuple[Plan, ...] = ()  # of packed experts' memory, one for each size of layer, where that was asked for


class Load(NamedTuple):
    """What the packed experts will be used for, as far as memory goes."""

    tokens: int  # of a pass
    rank: int  # of LoRA factors on all projections
    recompute: bool = False  # activation checkpointing keeps no caches


def place_experts(
    model: nn.Module,
    placement: str,
    load: Load | None = None,
    *,
    trains: bool = True,
    device: torch.device | None = None,
) -> Placed:
    """Packs the experts of every layer, one after the other, and frees their tensors; "resident" changes nothing.

    load: then their memory is planned first, and MemoryError says what would not fit and what to change.
    trains, device: what for, and where the rest of the model will be (None: on a GPU, if there is one), for "auto".
    """
    check_placement(placement)
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}
    if not modules:
        return Placed("resident", "there are no experts to pack")
    if placement == "auto":
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        placed = _choose(model, list(modules.values()), trains, device)
    else:
        placed = Placed(placement, "as asked")
    if placed.placement == "resident":
        return placed
    kind: PackedKind = "int8" if placed.placement == "cpu-int8" else "bf16"
    for name, module in modules.items():
        if LORA in module._modules:
            raise bad_value(name, "experts without factors yet", "LoRA factors", "place the experts, then attach")
    if load is not None:
        placed = placed._replace(plans=_plans(model, list(modules.values()), kind, load))
    for module in modules.values():
        _pack(module, kind)
    logger.info("experts: %d layers packed in %s", len(modules), kind)
    return placed


def check_placement(placement: str) -> None:
    if placement not in PLACEMENTS:
        raise bad_value("experts", f"one of {', '.join(PLACEMENTS)}", repr(placement), "leave it out for auto")
    reason = _why_no_packing() if placement.startswith("cpu-") else None
    if reason is not None:
        raise bad_value("experts", f"a machine that compiles the CPU core, for {placement}", reason, "use resident")


def _why_no_packing() -> str | None:
    try:
        load_packed(), load_node()
    except CoreUnavailable as reason:
        return str(reason)
    return None


def experts_forward_packed(module: Any, x_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts' forward does where they are packed; x may be on a GPU and in any dtype."""
    packed = module.__dict__[PACKED]
    routing = Routing(expert_TK=top_k_index, weight_TK=top_k_weights, trusted=True)
    adapter = module._modules.get(LORA)
    lora = None if adapter is None else adapter.factors(packed.device)
    with torch.autocast(x_TH.device.type, enabled=False):
        y_TH = experts(x_TH.to(packed.dtype), routing, packed, lora=lora)
    return y_TH.to(x_TH.dtype)


def _choose(model: nn.Module, modules: list[Any], trains: bool, device: torch.device) -> Placed:
    if device.type == "cuda":
        needed = sum(p.nbytes for module in modules for p in module.parameters())
        whole = sum(p.nbytes for p in model.parameters())
        free, _ = torch.cuda.mem_get_info(device)
        sizes = f"{needed / 2**30:.1f} GiB of experts, {free / 2**30:.1f} GiB free on the GPU"
        fits = 2 * needed <= free if trains else whole <= (1 - _SHARE_BESIDE) * free
        return Placed("resident" if fits else "cpu-bf16", sizes)
    if not trains:
        return Placed("resident", "a CPU reads them where they lie")
    if modules[0].down_proj.dtype != torch.bfloat16:
        return Placed("resident", f"the weights are {modules[0].down_proj.dtype}, which packing would round")
    if not has_bf16_instructions():
        return Placed("resident", "this CPU has no bf16 instructions")
    reason = _why_no_packing()
    return Placed("cpu-bf16", "this CPU has bf16 instructions") if reason is None else Placed("resident", reason)


def _plans(model: Any, modules: list[Any], kind: PackedKind, load: Load) -> tuple[Plan, ...]:
    """Raises MemoryError where the packed experts would not fit beside the rest, their own tensors being freed."""
    config = model.config.get_text_config()
    sizes = Counter(_sizes(module) for module in modules)
    top_k = getattr(config, "num_experts_per_tok", None) or min(8, max(size.experts for size in sizes))
    plans = tuple(
        plan(
            size,
            kind=kind,
            nodes=len(numa_cores()),
            ranks=(load.rank,) * 3,
            max_len=load.tokens,
            top_k=top_k,
            keep="recompute" if load.recompute else "retain",
            factor_itemsize=4,
            layers=layers,
        )
        for size, layers in sizes.items()
    )
    freed = sum(parameter.nbytes for module in modules for parameter in module.parameters() if not parameter.is_cuda)
    together = plans[0] if len(plans) == 1 else Plan(sum((p.items for p in plans), ()), "layers of several sizes")
    remedy = "Place them as cpu-int8, pass fewer tokens at once (batch size, sequence length), or use checkpointing."
    check_memory(together, already=freed, remedy=remedy)
    return plans


def _sizes(module: Any) -> LayerSizes:
    weights = _weights(module)
    has_bias = weights.gate_up_bias_EJ is not None
    return LayerSizes(weights.num_experts, weights.hidden, weights.intermediate, weights.activation, has_bias)


def _weights(module: Any) -> ExpertWeights:
    found = plan_of(module)
    if found.fused is None:
        expected = "an activation that the CPU engine computes"
        raise bad_value("experts", expected, f"that of {type(module).__name__}", "keep the experts resident")
    with torch.no_grad():
        return expert_weights(module, found)


def _pack(module: Any, kind: PackedKind) -> None:
    module.__dict__[PACKED] = pack_experts(_weights(module), kind=kind, nodes="auto")
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
