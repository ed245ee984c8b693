"""Each node's copies of LoRA factors, packed again by themselves whenever a factor has changed.

E experts · R LoRA rank

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
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.weights import LoraFactors
from amoeba.cpu.node_experts import NodeExperts
from amoeba.cpu.node_factors import NodeFactors
from amoeba.cpu.node_library import load_node
from amoeba.cpu.numa import NumaNode, run_on_nodes
from amoeba.cpu.partition import Partition
from amoeba.cpu.pointers import CPU, address, place_of
from amoeba.cpu.pool import WorkerPool


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
        load_node().factor_checksums(*self._where(pool), self._of_checksums(found_FE))
        return found_FE

    def has(self, checksum_FE: Tensor, pool: WorkerPool, expert_TK: Tensor) -> bool:
        named = address("expert_TK", expert_TK, torch.int64, tuple(expert_TK.shape)), expert_TK.numel()
        return bool(load_node().factors_have(*self._where(pool), *named, self._of_checksums(checksum_FE)))

    def _of_checksums(self, checksum_FE: Tensor) -> int:
        return address("checksum_FE", checksum_FE, torch.int64, (self._count, self._experts))

    def _where(self, pool: WorkerPool) -> tuple:
        return pool.handle, self._count, self._experts, self._data, self._bytes
