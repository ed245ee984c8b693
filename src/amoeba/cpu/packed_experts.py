"""Frozen experts packed for the matrix units of a CPU, whole or divided over nodes: the kind of weights "packed".

E experts · R LoRA rank · H hidden · I intermediate · J = 2I (gated) or I

    packed = pack_experts(ExpertWeights(gate_up_EJH, down_EHI), kind="int8", nodes="auto")
    del gate_up_EJH, down_EHI                                            # nothing refers to them any more
    y_TH = experts(x_TH, routing, packed, lora=lora)                     # x in bf16, on the CPU or on a GPU

The weights are read in tile order, once as W for forward and once as Wᵀ for backward, which is packed by the first
backward. They get no gradient; x, the routing weights and the LoRA factors do.

Each node has copies of LoRA factors, packed again by themselves whenever a factor has changed.

    copies = FactorCopies()
    factors = copies.of(lora, shares, numa_nodes, partition, expert_TK)      # one NodeFactors per node, never stale

That a factor changed shows in its version counter, which in-place operations of torch move on. Not all do: what is
written through `factor.data` or a numpy view, or by torch's own fused SGD, Adam and AdamW, moves no counter. That shows
in a checksum per expert (csrc/checksum.h). Only the experts that a pass meets are summed, so that decoding reads no
more than it computes with.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import ExpertsByHandle, ExpertWeights, LoraFactors
from amoeba.cpu.node_experts import NodeExperts, NodeFactors
from amoeba.cpu.node_library import load_node
from amoeba.cpu.numa import NumaNode, WorkerPool, numa_nodes, run_on_nodes, run_one_by_one
from amoeba.cpu.partition import Partition
from amoeba.cpu.pointers import CPU, address, place_of
from amoeba.cpu.weights import PackedKind, PackedWeights, StoredWeights


@dataclass(frozen=True, eq=False)
class _Seen:
    """What the factors were when they were copied."""

    kinds: list[tuple]  # name, version, address and form of each
    memory: FactorMemory
    checksum_FE: Tensor


class FactorCopies:
    """Of the factors that were used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        self._scaling = 1.0
        self._copies: list[NodeFactors] = []

    def of(
        self,
        lora: LoraFactors,
        shares: Sequence[NodeExperts],
        numa_nodes: Sequence[NumaNode],
        partition: Partition,
        expert_TK: Tensor,
    ) -> list[NodeFactors]:
        with self._lock:
            if not self._are_of(lora.scaling, lora.tensors(), expert_TK, numa_nodes[0].pool):
                self._pack(lora, shares, numa_nodes, partition)
            return self._copies

    def _pack(
        self, lora: LoraFactors, shares: Sequence[NodeExperts], numa_nodes: Sequence[NumaNode], partition: Partition
    ) -> None:
        factors = lora.tensors()
        memory = FactorMemory(factors)
        seen = _Seen(_kinds(factors), memory, memory.checksums(numa_nodes[0].pool))

        def pack(node: int) -> NodeFactors:
            parts = {name: partition.take(name, factor.detach(), node) for name, factor in factors.items()}
            if lora.up_lora_a is not None and lora.up_lora_a is lora.gate_lora_a:
                parts["up_lora_a"] = parts["gate_lora_a"]
            part = LoraFactors(**parts, scaling=lora.scaling)
            return NodeFactors.pack(shares[node], part, numa_nodes[node].pool)

        jobs = [functools.partial(pack, node) for node in range(partition.nodes)]
        self._copies = run_on_nodes(numa_nodes, jobs)
        self._seen, self._scaling = seen, lora.scaling

    def _are_of(self, scaling: float, factors: dict[str, Tensor], expert_TK: Tensor, pool: WorkerPool) -> bool:
        if self._seen is None or scaling != self._scaling or _kinds(factors) != self._seen.kinds:
            return False
        memory = FactorMemory(factors) if self._seen.memory.copied else self._seen.memory
        return memory.has(self._seen.checksum_FE, pool, expert_TK)


def _kinds(factors: dict[str, Tensor]) -> list[tuple]:
    return [
        (name, _version(factor), place_of(factor), factor.dtype, factor.shape, factor.stride())
        for name, factor in factors.items()
    ]


def _version(tensor: Tensor) -> int:
    """Its version counter; tensors of torch.inference_mode have none."""
    return 0 if tensor.is_inference() else tensor._version


class FactorMemory:
    """Where the factors lie, expert after expert.

    memory = FactorMemory(factors)
    checksum_FE = memory.checksums(pool)                          # one number per factor and expert, int64
    memory.has(checksum_FE, pool, expert_TK)                      # of the experts that these name; int64, contiguous
    """

    def __init__(self, factors: dict[str, Tensor]) -> None:
        plain = [factor.detach().contiguous() for factor in factors.values()]
        # Factors that do not lie so are copied, and the copy is of this moment.
        self.copied = [each for each, factor in zip(plain, factors.values(), strict=True) if not factor.is_contiguous()]
        self._count, self._experts = len(plain), plain[0].shape[0]
        starts = (
            address(name, factor, factor.dtype, (self._experts, *factor.shape[1:]))
            for name, factor in zip(factors, plain, strict=True)
        )
        self._data = (ctypes.c_void_p * self._count)(*starts)
        self._bytes = (ctypes.c_int64 * self._count)(*(factor.nbytes // self._experts for factor in plain))

    def checksums(self, pool: WorkerPool) -> Tensor:
        found_FE = torch.empty((self._count, self._experts), dtype=torch.int64, device=CPU)
        load_node().amoeba_factor_checksums(*self._where(pool), self._of_checksums(found_FE))
        return found_FE

    def has(self, checksum_FE: Tensor, pool: WorkerPool, expert_TK: Tensor) -> bool:
        named = address("expert_TK", expert_TK, torch.int64, tuple(expert_TK.shape)), expert_TK.numel()
        return bool(load_node().amoeba_factors_have(*self._where(pool), *named, self._of_checksums(checksum_FE)))

    def _of_checksums(self, checksum_FE: Tensor) -> int:
        return address("checksum_FE", checksum_FE, torch.int64, (self._count, self._experts))

    def _where(self, pool: WorkerPool) -> tuple:
        return pool.handle, self._count, self._experts, self._data, self._bytes


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
        """Of the weights as they are now: W, Wᵀ once a backward has been or W as stored for it, scales, sums and
        biases."""
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
    backward: PackedKind | None = None,
) -> PackedExperts:
    """Packs gate_up and then down, each node its own part in its own memory; the weights can be freed afterwards.

    kind: "bf16", or "int8", which takes half the memory and rounds the weights and the rows of x.
    backward: "bf16" with kind="int8": backward computes with the weights in bf16, as they are stored, and h again from
        them. Its gradients are as precise as those of "bf16". The weights are kept; do not change them.
    nodes: "auto" for one per NUMA node; any number of them works on any machine.
    threads: of all nodes together; None for torch's number.

    In addition to the packed weights, this takes the memory of one node's part of gate_up, where gate and up have to be
    joined.
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
    if backward not in (None, kind) and (kind, backward) != ("int8", "bf16"):
        raise bad_value("backward", f'{kind}, or "bf16" with kind="int8"', repr(backward), "leave it out")
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

        def stored(name: str, tensor: Tensor) -> StoredWeights:
            mine = part(name, tensor)
            assert mine is not None
            mine = mine.to(torch.bfloat16)  # no copy where it is in bf16 already; of several nodes each has its own
            return StoredWeights(mine.clone(memory_format=torch.contiguous_format) if len(found) > 1 else mine)

        gate_up_bias, down_bias = (
            bias("gate_up_bias", weights.gate_up_bias_EJ),
            bias("down_bias", weights.down_bias_EH),
        )
        gate_up, down = matrix("gate_up", weights.gate_up_EJH), matrix("down", weights.down_EHI)
        of_backward = None
        if backward not in (None, kind):
            as_stored = stored("gate_up", weights.gate_up_EJH), stored("down", weights.down_EHI)
            of_backward = NodeExperts(*as_stored, gate_up_bias, down_bias, weights.activation)
        share = NodeExperts(gate_up, down, gate_up_bias, down_bias, weights.activation, of_backward)
        found[node].keep(_tensors(share))
        return share

    shares = run_one_by_one(found, [functools.partial(pack, node) for node in range(len(found))])
    return PackedExperts(kind, weights.num_experts, weights.hidden, partition, tuple(shares), found)


_SOURCES = (torch.bfloat16, torch.float32)


def _tensors(share: NodeExperts) -> list[Tensor]:
    found = [share.gate_up_bias_EJ, share.down_bias_EH]
    for packed in (share.gate_up, share.down):
        found += [packed.forward.data, packed.forward.column_scale_EC, packed.forward.sum_EC]
        if "transposed" in vars(packed):
            found += [packed.transposed.data, packed.transposed.sum_EC]
    if share.of_backward is not None:
        found += [share.of_backward.gate_up.forward.data, share.of_backward.down.forward.data]
    return [tensor for tensor in found if tensor is not None]
