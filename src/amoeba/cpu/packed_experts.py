"""Frozen experts packed for the matrix units of a CPU, whole or divided over nodes: the kind of weights "packed".

E experts · H hidden · I intermediate · J = 2I (gated) or I

    packed = pack_experts(ExpertWeights(gate_up_EJH, down_EHI), kind="int8", nodes="auto")
    del gate_up_EJH, down_EHI                                            # nothing refers to them any more
    y_TH = experts(x_TH, routing, packed, lora=lora)                     # x in bf16, on the CPU or on a GPU

The weights are read in tile order, once as W for forward and once as Wᵀ for backward, which is packed by the first
backward. They get no gradient; x, the routing weights and the LoRA factors do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import ExpertsByHandle, ExpertWeights
from amoeba.cpu.factor_copies import FactorCopies
from amoeba.cpu.node_experts import NodeExperts
from amoeba.cpu.numa import NumaNode, numa_nodes, run_one_by_one
from amoeba.cpu.packed_weights import PackedKind, PackedWeights
from amoeba.cpu.partition import Partition
from amoeba.cpu.pointers import CPU


@dataclass(frozen=True, eq=False)
class PackedExperts(ExpertsByHandle):
    """Made by `pack_experts`. A copy of it is itself: nothing in it ever changes but the copies of LoRA factors."""

    kind: PackedKind
    num_experts: int
    hidden: int
    partition: Partition
    shares: tuple[NodeExperts, ...] = field(repr=False)
    numa_nodes: tuple[NumaNode, ...] = field(repr=False)
    copies: FactorCopies = field(repr=False, default_factory=FactorCopies)

    placement = "packed"
    dtype = torch.bfloat16  # of x, y and what is between them
    device = CPU

    @property
    def nodes(self) -> int:
        return self.partition.nodes

    @property
    def intermediate(self) -> int:
        return self.partition.intermediate

    @property
    def activation(self) -> Activation:
        return self.partition.activation

    def takes(self, device: torch.device) -> bool:
        """x may be on a GPU: it comes and y goes through pinned memory."""
        return device.type in ("cpu", "cuda")

    def to(self, dtype: torch.dtype) -> PackedExperts:
        if dtype == self.dtype:
            return self
        raise bad_value("dtype", f"{self.dtype}, in which packed experts compute", dtype, "use autocast in bfloat16")

    @functools.cached_property
    def expert_bytes(self) -> int:
        """Of one packed expert's W, over all nodes."""
        data = [packed.forward.data for share in self.shares for packed in (share.gate_up, share.down)]
        return sum(tensor.nbytes for tensor in data) // self.num_experts

    def nbytes(self) -> int:
        """Of the packed weights as they are now: W, Wᵀ once a backward has been, scales, sums and biases."""
        return sum(tensor.nbytes for share in self.shares for tensor in _tensors(share))

    def __reduce__(self) -> tuple:
        raise TypeError(
            "PackedExperts: packed weights are for this machine and this process and are not pickled. "
            "Save the weights they were made from, and pack those again."
        )


def pack_experts(
    weights: ExpertWeights,
    kind: PackedKind = "bf16",
    nodes: int | Literal["auto"] = 1,
    threads: int | None = None,
) -> PackedExperts:
    """Packs gate_up and then down, each node its own part in its own memory; the weights may go afterwards.

    kind: "bf16", or "int8", which takes half the memory and rounds the weights and the rows of x.
    nodes: "auto" for one per NUMA node; any number of them works on any machine.
    threads: of all nodes together; None for torch's number.

    Beside the packed weights this takes the memory of one node's part of gate_up, where gate and up have to be joined.
    """
    if kind not in ("bf16", "int8"):
        raise bad_value("kind", "bf16 or int8", repr(kind), "int8 takes half the memory of bf16")
    if weights.placement != "resident" or weights.device.type != "cpu" or weights.dtype not in _SOURCES:
        raise bad_value(
            "weights",
            "resident weights on the CPU in bfloat16 or float32",
            f"{weights.placement} weights on {weights.device} in {weights.dtype}",
            "move them with .cpu() before packing",
        )
    found = numa_nodes(nodes, threads)
    partition = Partition.of(weights.intermediate, len(found), weights.activation)

    def pack(node: int) -> NodeExperts:
        def part(name: str, tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else partition.take(name, tensor.detach(), node)

        def bias(name: str, tensor: Tensor | None) -> Tensor | None:
            mine = part(name, tensor)
            return None if mine is None else mine.to(torch.float32, copy=True).contiguous()

        def matrix(name: str, tensor: Tensor) -> PackedWeights:
            mine = part(name, tensor)
            assert mine is not None
            return PackedWeights.pack(mine, kind)

        return NodeExperts(
            matrix("gate_up", weights.gate_up_EJH),
            matrix("down", weights.down_EHI),
            bias("gate_up_bias", weights.gate_up_bias_EJ),
            bias("down_bias", weights.down_bias_EH),
            weights.activation,
        )

    shares = run_one_by_one(found, [functools.partial(pack, node) for node in range(len(found))])
    return PackedExperts(kind, weights.num_experts, weights.hidden, partition, tuple(shares), found)


_SOURCES = (torch.bfloat16, torch.float32)


def _tensors(share: NodeExperts) -> list[Tensor]:
    found = [share.gate_up_bias_EJ, share.down_bias_EH]
    for packed in (share.gate_up, share.down):
        found += [packed.forward.data, packed.forward.column_scale_EC, packed.forward.sum_EC]
        if "transposed" in vars(packed):
            found += [packed.transposed.data, packed.transposed.sum_EC]
    return [tensor for tensor in found if tensor is not None]
