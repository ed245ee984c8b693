"""The one table of how a layer of experts is divided over nodes: base weights, LoRA factors and gradients.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    partition = Partition.of(intermediate=199, nodes=3, activation=Activation())
    part = partition.take("gate_lora_b", gate_b_EIR, node=1)            # a view wherever there can be one
    whole = partition.merge("gate_lora_b", parts, like=gate_b_EIR)      # of gradients: joined, or added up

A node has a contiguous block of I: those rows of gate and of up, those columns of down. So each computes h and a of its
block alone, and only y and dx, and the gradients of what all nodes read, are sums over the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value

# Blocks are whole multiples of this where I is large enough: weights are packed in tiles of 32, and what is left of the
# last one is padding on every node.
BLOCK_UNIT = 32


class Split(Enum):
    BLOCK = "the node's block of I"
    GATE_AND_UP = "the node's block of gate and of up"
    SHARED = "all of it; gradients add up"
    FIRST = "all of it on the first node, nothing on the others"


class Rule(NamedTuple):
    split: Split
    dim: int = 0  # of I or J


TABLE: dict[str, Rule] = {
    "gate_up": Rule(Split.GATE_AND_UP, 1),  # (E, J, H)
    "gate_up_bias": Rule(Split.GATE_AND_UP, 1),  # (E, J)
    "down": Rule(Split.BLOCK, 2),  # (E, H, I)
    "down_bias": Rule(Split.FIRST),  # (E, H): y is a sum over the nodes, and has its bias once
    "gate_lora_a": Rule(Split.SHARED),  # (E, R, H)
    "gate_lora_b": Rule(Split.BLOCK, 1),  # (E, I, R)
    "up_lora_a": Rule(Split.SHARED),
    "up_lora_b": Rule(Split.BLOCK, 1),
    "down_lora_a": Rule(Split.BLOCK, 2),  # (E, R, I)
    "down_lora_b": Rule(Split.SHARED),  # (E, H, R)
}


@dataclass(frozen=True)
class Partition:
    """Where the blocks of I begin and end: node n has bounds[n] : bounds[n + 1]."""

    bounds: tuple[int, ...]
    activation: Activation

    @staticmethod
    def of(intermediate: int, nodes: int, activation: Activation) -> Partition:
        if not 1 <= nodes <= intermediate:
            raise bad_value("nodes", f"1 to {intermediate}, a part of I for each", nodes, "use fewer nodes")
        unit = BLOCK_UNIT if intermediate >= BLOCK_UNIT * nodes else 1
        units = -(-intermediate // unit)
        bounds = (min(-(-units * node // nodes) * unit, intermediate) for node in range(nodes + 1))
        return Partition(tuple(bounds), activation)

    @property
    def nodes(self) -> int:
        return len(self.bounds) - 1

    @property
    def intermediate(self) -> int:
        return self.bounds[-1]

    @property
    def sizes(self) -> list[int]:
        return [end - start for start, end in pairwise(self.bounds)]

    def take(self, name: str, tensor: Tensor | None, node: int) -> Tensor | None:
        """What the node has of the tensor: a view, but for gate and up that lie one behind the other."""
        split, dim = TABLE[name]
        if tensor is None or (split is Split.FIRST and node > 0):
            return None
        if self.nodes == 1 or split in (Split.SHARED, Split.FIRST):
            return tensor
        start, size = self.bounds[node], self.sizes[node]
        if split is Split.BLOCK or not self.activation.gated:
            return tensor.narrow(dim, start, size)
        if self.activation.interleaved:
            return tensor.narrow(dim, 2 * start, 2 * size)
        gate, up = tensor.narrow(dim, start, size), tensor.narrow(dim, self.intermediate + start, size)
        return torch.cat((gate, up), dim)

    def merge(self, name: str, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The whole gradient of `like`, in its dtype, from those of the nodes."""
        split, dim = TABLE[name]
        if split not in (Split.BLOCK, Split.SHARED):
            raise bad_value("name", "that of a LoRA factor, as the base is frozen", name, "ask for no gradient of it")
        if self.nodes == 1:
            return parts[0].to(like.dtype)
        if split is Split.SHARED:
            return add_up(parts).to(like.dtype)
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for part, start, size in zip(parts, self.bounds, self.sizes, strict=False):
            whole.narrow(dim, start, size).copy_(part)
        return whole


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum over the nodes, always in their order; the first part is written over."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
