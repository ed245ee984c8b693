"""Which rank owns which expert.

E experts · W ranks

    owners = Owners.even(10, 4)            # 3, 3, 3 and 1, as torch.chunk and DTensor divide
    owners.take(gate_up_EJH, rank=1)       # the rows of experts 3, 4 and 5
    owners = Owners((1, 0, 0, 1), ranks=3) # any table; a rank may own nothing

On its rank an expert is known by its place among those that the rank owns, in the order of their ids.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.errors import bad_value


@dataclass(frozen=True)
class Owners:
    rank_of_E: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        outside = [rank for rank in self.rank_of_E if not 0 <= rank < self.ranks]
        if outside:
            expected = f"a rank for each expert, 0 to {self.ranks - 1}"
            raise bad_value("rank_of_E", expected, outside[0], "count ranks within the group, from 0")

    @classmethod
    def even(cls, experts: int, ranks: int) -> Owners:
        """Divides like torch.chunk: ceil(E / W) experts per rank; the last ranks get the rest, or none."""
        share = max(-(-experts // ranks), 1)
        return cls(tuple(expert // share for expert in range(experts)), ranks)

    @property
    def num_experts(self) -> int:
        return len(self.rank_of_E)

    def experts_of(self, rank: int) -> list[int]:
        return [expert for expert, owner in enumerate(self.rank_of_E) if owner == rank]

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """The entries of this rank's experts in a tensor with one entry per expert; a view if they are contiguous."""
        if tensor.shape[0] != self.num_experts:
            expected = f"one entry for each of {self.num_experts} experts"
            raise bad_value("tensor", expected, tuple(tensor.shape), "shard tensors of all experts")
        mine = self.experts_of(rank)
        if not mine or mine == list(range(mine[0], mine[-1] + 1)):
            return tensor[mine[0] : mine[-1] + 1] if mine else tensor[:0]
        return tensor[torch.tensor(mine, dtype=torch.int64, device=tensor.device)]

    def join(self, shares: list[Tensor]) -> Tensor:
        """The inverse of `take`: shares of all ranks, in the order of the ranks."""
        joined = torch.cat(shares)
        ids = [expert for rank in range(self.ranks) for expert in self.experts_of(rank)]
        back = torch.empty(len(ids), dtype=torch.int64, device=joined.device)
        back[torch.tensor(ids, dtype=torch.int64, device=joined.device)] = torch.arange(
            len(ids), dtype=torch.int64, device=joined.device
        )
        return joined[back]

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64 (E + 1,): rank and local id of each expert, followed by those of a sentinel, W and -1."""
        return _tables(self, device)

    def find(self, expert_TK: Tensor) -> tuple[Tensor, Tensor]:
        """For each slot, the owner's rank and the expert's id there; W and -1 for a sentinel."""
        experts = self.num_experts
        rank_E1, local_E1 = self.tables(expert_TK.device)
        inside_TK = (expert_TK >= 0) & (expert_TK < experts)
        place_TK = torch.where(inside_TK, expert_TK, experts).long()
        return rank_E1[place_TK], local_E1[place_TK]


@functools.lru_cache(maxsize=64)
def _tables(owners: Owners, device: torch.device) -> tuple[Tensor, Tensor]:
    met = [0] * owners.ranks
    local = []
    for rank in owners.rank_of_E:
        local.append(met[rank])
        met[rank] += 1
    ranks = (*owners.rank_of_E, owners.ranks)
    return (
        torch.tensor(ranks, dtype=torch.int64, device=device),
        torch.tensor((*local, -1), dtype=torch.int64, device=device),
    )
