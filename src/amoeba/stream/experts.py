"""Experts in a store on disk, a few of them in slots of memory: the kind of weights "streamed".

E experts · S slots · H hidden · I intermediate · J = 2I (gated) or I

    memory = ExpertMemory(open_store(path), slots=[12] * 48)
    y_TH = experts(x_TH, routing, memory.layers[0])         # reads what is not there, evicts what is colder

A slot holds one expert as the store has it. The slots of a layer are one piece of memory, so gate_up of all of them is
one tensor (S, J, H) with a stride of one slot, which the backends for resident experts read. Where the store has codes
and scales, slots have them too, and are computed with as resident quantised experts. The weights get no gradient; x,
the routing weights and LoRA factors do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import ExpertsByHandle
from amoeba.stream.store.layers import StoredExperts


@dataclass(frozen=True, eq=False)
class ExpertsInSlots(ExpertsByHandle):
    """One layer's share of a memory, which makes it.

    slots:  the memory as weights of S experts: who is in which slot, the memory tells.
    others: weights of all E experts whose values mean nothing, by which a backend is chosen.
    """

    memory: Any = field(repr=False)
    layer: int
    slots: StoredExperts = field(repr=False)
    others: StoredExperts = field(repr=False)

    placement = "in slots"

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @property
    def num_experts(self) -> int:
        return self.others.num_experts

    @property
    def hidden(self) -> int:
        return self.slots.hidden

    @property
    def intermediate(self) -> int:
        return self.slots.intermediate

    @property
    def dtype(self) -> torch.dtype:
        return self.slots.dtype

    @property
    def activation(self) -> Activation:
        return self.slots.activation

    def takes(self, device: torch.device) -> bool:
        return device == self.device

    def to(self, dtype: torch.dtype) -> Self:
        if dtype == self.dtype:
            return self
        got, remedy = f"autocast in {dtype}", "leave autocast out, or convert the checkpoint"
        raise bad_value("dtype", f"{self.dtype}, as the store has these experts", got, remedy)


def of_all(weights: StoredExperts, experts: int) -> StoredExperts:
    """No memory of its own: every expert is what lies in the first slot."""
    tensors = [None if t is None else t[:1].expand(experts, *t.shape[1:]) for t in weights.tensors()]
    return weights.of(tensors, weights.constants())
