"""Each node's copies of LoRA factors, packed again by themselves whenever a factor has changed.

E experts · R LoRA rank

    copies = FactorCopies()
    factors = copies.of(lora, shares, places, partition, expert_TK)      # one NodeFactors per node, never stale

That a factor changed shows in its version counter, which in-place operations of torch move on. Not all do: what is
written through `factor.data` or a numpy view, or by torch's own fused SGD, Adam and AdamW, moves no counter. That shows
in a checksum: of every 64-bit word, times an odd number that depends on its place, summed per expert. One changed word
is always seen, any other change but for one in 2**64. Of few tokens only the experts that they meet are summed, so that
decoding reads no more than it computes with.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.cpu.node import NodeExperts, NodeFactors
from amoeba.cpu.partition import Partition
from amoeba.cpu.places import Place, run_everywhere
from amoeba.weights import LoraFactors


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a factor was when it was copied."""

    shape: tuple
    version: int
    checksum_E: Tensor

    @staticmethod
    def of(factor: Tensor) -> _Seen:
        return _Seen((factor.dtype, factor.shape), version(factor), checksum(factor))

    def is_still(self, factor: Tensor, active: Tensor | None) -> bool:
        if self.version != version(factor) or self.shape != (factor.dtype, factor.shape):
            return False
        expected_E = self.checksum_E if active is None else self.checksum_E[active]
        return torch.equal(expected_E, checksum(factor, active))


class FactorCopies:
    """Of the factors that were used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
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
            if not (self._copies and self._are_of(lora.scaling, lora.tensors(), expert_TK)):
                self._pack(lora, shares, places, partition)
            return self._copies

    def _pack(
        self, lora: LoraFactors, shares: Sequence[NodeExperts], places: Sequence[Place], partition: Partition
    ) -> None:
        factors = lora.tensors()
        seen = {name: _Seen.of(factor) for name, factor in factors.items()}

        def pack(node: int) -> NodeFactors:
            parts = {name: partition.take(name, factor.detach(), node) for name, factor in factors.items()}
            if lora.up_lora_a is not None and lora.up_lora_a is lora.gate_lora_a:
                parts["up_lora_a"] = parts["gate_lora_a"]
            part = LoraFactors(**parts, scaling=lora.scaling)
            return NodeFactors.pack(shares[node], part, places[node].pool)

        jobs = [functools.partial(pack, node) for node in range(partition.nodes)]
        self._copies = run_everywhere(places, jobs)
        self._seen, self._scaling = seen, lora.scaling

    def _are_of(self, scaling: float, factors: dict[str, Tensor], expert_TK: Tensor) -> bool:
        if scaling != self._scaling or factors.keys() != self._seen.keys():
            return False
        experts = next(iter(factors.values())).shape[0]
        active = None
        if expert_TK.numel() < experts:
            active = expert_TK[(expert_TK >= 0) & (expert_TK < experts)].unique()
        return all(self._seen[name].is_still(factor, active) for name, factor in factors.items())


def version(tensor: Tensor) -> int:
    """Its version counter; tensors of torch.inference_mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def checksum(factor: Tensor, active: Tensor | None = None) -> Tensor:
    """One number per expert, or for each of the active ones; int64."""
    flat = factor.detach().contiguous().flatten(1)
    size = flat.shape[1] * flat.element_size()
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.int16) if size % dtype.itemsize == 0)
    words, multipliers = flat.view(word), _multipliers(size // word.itemsize)
    if active is None:
        return (words * multipliers).sum(1)  # by all threads
    return words.index_select(0, active).to(torch.int64) @ multipliers  # by one, and without a temporary


@functools.lru_cache(maxsize=16)
def _multipliers(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
