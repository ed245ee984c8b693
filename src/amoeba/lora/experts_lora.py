"""The factors of one experts module as its parameters.

E experts · H hidden · I intermediate · R LoRA rank

    experts.lora_factors = ExpertsLora(factors, torch.float32, device)
    experts(x, routing, weights, lora=experts.lora_factors.factors())

Where gate and up have one A, as in PEFT, it is one parameter, gate_up_lora_a.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.weights import LoraFactors
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.parallel.sharded import own_parameter

PROJECTIONS = ("gate", "up", "down")
SHARED_A = "gate_up_lora_a"


class ExpertsLora(nn.Module):
    """stays: the factors remain where they are when the model is moved, since the experts they belong to do too.
    own: they are those of one rank's experts, and of no other rank's."""

    def __init__(
        self, factors: LoraFactors, dtype: torch.dtype, device: torch.device, stays: bool = False, own: bool = False
    ) -> None:
        super().__init__()
        self.scaling, self.stays = factors.scaling, stays
        for name, tensor in stored_tensors(factors).items():
            placed = tensor.to(device, dtype)
            # a share is a view, with which all factors would stay in memory
            self.register_parameter(name, own_parameter(placed.clone()) if own else nn.Parameter(placed))

    def factors(self, device: torch.device | None = None) -> LoraFactors:
        """What the seam takes. device: where to, differentiably, if they are not there."""
        own: Mapping[str, Tensor | None] = self._parameters
        if device is not None and any(tensor.device != device for tensor in own.values() if tensor is not None):
            own = {name: None if tensor is None else tensor.to(device) for name, tensor in own.items()}
        shared = own.get(SHARED_A)
        return LoraFactors(
            gate_lora_a=own.get("gate_lora_a") if shared is None else shared,
            gate_lora_b=own.get("gate_lora_b"),
            up_lora_a=own.get("up_lora_a") if shared is None else shared,
            up_lora_b=own.get("up_lora_b"),
            down_lora_a=own.get("down_lora_a"),
            down_lora_b=own.get("down_lora_b"),
            scaling=self.scaling,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertsLora:
        """What model.to and its like call."""
        return self if self.stays else super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.named_parameters())


def stored_tensors(factors: LoraFactors) -> dict[str, Tensor]:
    """The tensors by the names of the parameters, an A that gate and up share once."""
    tensors = factors.tensors()
    if factors.gate_lora_a is not None and factors.gate_lora_a is factors.up_lora_a:
        del tensors["gate_lora_a"], tensors["up_lora_a"]
        tensors[SHARED_A] = factors.gate_lora_a
    return tensors


def fresh_factors(
    layout: ExpertsLayout,
    projections: Collection[str],
    *,
    r: int,
    scaling: float,
    dtype: torch.dtype,
    share_a: bool = True,
) -> LoraFactors:
    """A uniform in ±1/√in, as PEFT draws it, and B zero: the model is the same until the first step.

    On the CPU, so that one seed gives the same factors for every device.
    """
    found: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        if name not in projections:
            continue
        fan_in, fan_out = layout.hidden, layout.intermediate
        if name == "down":
            fan_in, fan_out = fan_out, fan_in
        if name == "up" and share_a and "gate_lora_a" in found:
            found["up_lora_a"] = found["gate_lora_a"]
        else:
            bound = 1 / math.sqrt(fan_in)
            a_ERI = torch.empty(layout.num_experts, r, fan_in, dtype=dtype, device="cpu")
            found[f"{name}_lora_a"] = a_ERI.uniform_(-bound, bound)
        found[f"{name}_lora_b"] = torch.zeros(layout.num_experts, fan_out, r, dtype=dtype, device="cpu")
    return LoraFactors(**found, scaling=scaling)
