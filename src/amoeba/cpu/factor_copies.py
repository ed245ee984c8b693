"""Each node's copies of LoRA factors, packed again by themselves whenever a factor has changed.

E experts · R LoRA rank

    copies = FactorCopies()
    factors = copies.of(lora, shares, places, partition, expert_TK)      # one NodeFactors per node, never stale

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

from amoeba.cpu.node import NodeExperts, NodeFactors
from amoeba.cpu.node_library import load_node
from amoeba.cpu.partition import Partition
from amoeba.cpu.places import Place, run_everywhere
from amoeba.cpu.pool import WorkerPool
from amoeba.weights import LoraFactors


@dataclass(frozen=True, eq=False)
class _Seen:
    """What the factors were when they were copied."""

    kinds: dict[str, tuple]  # version, dtype and shape by name
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
        places: Sequence[Place],
        partition: Partition,
        expert_TK: Tensor,
    ) -> list[NodeFactors]:
        with self._lock:
            if not self._are_of(lora.scaling, lora.tensors(), expert_TK, places[0].pool):
                self._pack(lora, shares, places, partition)
            return self._copies

    def _pack(
        self, lora: LoraFactors, shares: Sequence[NodeExperts], places: Sequence[Place], partition: Partition
    ) -> None:
        factors = lora.tensors()
        seen = _Seen(_kinds(factors), checksums(factors, places[0].pool))

        def pack(node: int) -> NodeFactors:
            parts = {name: partition.take(name, factor.detach(), node) for name, factor in factors.items()}
            if lora.up_lora_a is not None and lora.up_lora_a is lora.gate_lora_a:
                parts["up_lora_a"] = parts["gate_lora_a"]
            part = LoraFactors(**parts, scaling=lora.scaling)
            return NodeFactors.pack(shares[node], part, places[node].pool)

        jobs = [functools.partial(pack, node) for node in range(partition.nodes)]
        self._copies = run_everywhere(places, jobs)
        self._seen, self._scaling = seen, lora.scaling

    def _are_of(self, scaling: float, factors: dict[str, Tensor], expert_TK: Tensor, pool: WorkerPool) -> bool:
        if self._seen is None or scaling != self._scaling or _kinds(factors) != self._seen.kinds:
            return False
        expected_FE = self._seen.checksum_FE
        return torch.equal(checksums(factors, pool, expert_TK, out=expected_FE.clone()), expected_FE)


def _kinds(factors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (version(factor), factor.dtype, factor.shape) for name, factor in factors.items()}


def version(tensor: Tensor) -> int:
    """Its version counter; tensors of torch.inference_mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def checksums(
    factors: dict[str, Tensor], pool: WorkerPool, expert_TK: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """One number per factor and expert, (F, E) int64, into `out` where that is given.

    expert_TK: int64, contiguous; only the sums of experts that it names are written.
    """
    plain = [factor.detach().contiguous() for factor in factors.values()]
    count, experts = len(plain), plain[0].shape[0]
    if out is None:
        out = torch.empty(count, experts, dtype=torch.int64)
    data = (ctypes.c_void_p * count)(*(factor.data_ptr() for factor in plain))
    size = (ctypes.c_int64 * count)(*(factor.nbytes // experts for factor in plain))
    slots, slot_count = (None, 0) if expert_TK is None else (expert_TK.data_ptr(), expert_TK.numel())
    load_node().factor_checksums(pool.handle, count, experts, data, size, slots, slot_count, out.data_ptr())
    return out
