"""Experts distributed over ranks: the kind of weights of which each process holds its own share.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank · W ranks

    sharded = shard_experts(ExpertWeights(gate_up_EJH, down_EHI))       # in each process, out of all experts
    y_TH = experts(x_TH, routing, sharded, lora=shard_lora(lora, sharded))

    sharded = ShardedExperts(local, Owners.even(E, W), Ranks())         # a share that was loaded as such, of any kind

Routing speaks of all E experts. LoRA factors are sharded as the experts are: those of a rank have one entry for each
expert that it owns. The gradients of a share are summed over the tokens of all ranks, as one process with all tokens
would have them: no reduction is left to do, and what the loss is divided by is the caller's to say, in the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import AnyExperts, ExpertWeights, LoraFactors
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.ranks import Ranks

Tokens = Literal["own", "same"]


@dataclass(frozen=True, eq=False)
class ShardedExperts:
    """Experts that are distributed over ranks.

    local:     the experts that this rank owns, in the order of their ids; of any kind: resident, trained in fp8, packed
               for the CPU.
    owners:    which rank owns which expert.
    ranks:     the processes, and how long they wait for each other.
    tokens:    "own": each rank has its own tokens, which are sent to the experts' owners. "same": all ranks have the
               same tokens and get the same sums; only the sums are exchanged. The gradient of the output must then be
               the same, too.
    transport: how rows are sent; "auto" for the fastest that works between these ranks.
    local_backend: the backend for this rank's own experts, as in `experts`.
    most_tokens: the most tokens of one rank in any pass; the same on all ranks. With it, `peers` needs no communication
               between the hosts during a pass, as CUDA graphs require; all ranks then allocate that many rows.
    most_rows: the most rows with an expert on this rank in any pass. With it, the buffers of `peers` between the
               products have that size instead of one row per slot of all ranks' tokens. More rows are an error; none
               are dropped.
    overlap:   with `peers`, the GPU's copy engines send rows while the rank's own rows are computed.
    straight:  with `peers` and `triton`, sums for other ranks are written directly into their memory; None: if there
               are many rows. The results are bitwise identical.
    """

    local: AnyExperts
    owners: Owners
    ranks: Ranks = field(default_factory=Ranks)
    tokens: Tokens = "own"
    transport: str = "auto"
    local_backend: str = "auto"
    most_tokens: int | None = None
    most_rows: int | None = None
    overlap: bool = False
    straight: bool | None = None

    placement = "ranks"

    def __post_init__(self) -> None:
        if self.tokens not in get_args(Tokens):
            raise bad_value("tokens", "own or same", repr(self.tokens), "own: each rank has its own batch")
        if self.owners.ranks != self.ranks.count:
            expected = f"owners among the {self.ranks.count} ranks of the group"
            raise bad_value("owners", expected, f"{self.owners.ranks} ranks", "make them with Owners.even(E, W)")
        mine = len(self.owners.experts_of(self.ranks.rank))
        if self.local.num_experts != mine:
            expected = f"the {mine} experts that rank {self.ranks.rank} owns"
            raise bad_value("local", expected, f"{self.local.num_experts} of them", "shard by the same owners")

    @property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self.owners.num_experts

    @property
    def own_experts(self) -> int:
        return self.local.num_experts

    @property
    def trains(self) -> bool:
        return self.local.trains

    @property
    def hidden(self) -> int:
        return self.local.hidden

    @property
    def intermediate(self) -> int:
        return self.local.intermediate

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def activation(self) -> Activation:
        return self.local.activation

    def takes(self, device: torch.device) -> bool:
        return self.local.takes(device)

    def to(self, dtype: torch.dtype) -> ShardedExperts:
        return replace(self, local=self.local.to(dtype))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.local.tensors()

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> ShardedExperts:
        """The same experts in other tensors, as FSDP2 gathers the share of a rank out of its shards in each pass."""
        assert isinstance(self.local, ExpertWeights)  # no other kind has tensors that train
        return replace(self, local=type(self.local).of(tensors, self.local.constants()))

    def __deepcopy__(self, memo: dict) -> ShardedExperts:
        """Of the share alone: the ranks stay the same. A copied parameter forgets whose it is, and is told again."""
        local = copy.deepcopy(self.local, memo)
        for before, after in zip(self.local.tensors(), local.tensors(), strict=True):
            if before is not None and after is not None and is_own(before):
                setattr(after, _OWN, True)
        return replace(self, local=local)


def shard_experts(
    weights: ExpertWeights,
    ranks: Ranks | None = None,
    owners: Owners | None = None,
    *,
    make_local: Callable[[ExpertWeights], AnyExperts] | None = None,
    tokens: Tokens = "own",
    transport: str = "auto",
) -> ShardedExperts:
    """This rank's share of experts that it has all of. The share is a copy, parameters that train as `weights` do, and
    in the same precision.

    make_local: what becomes of the share, such as pack_experts. A rank without experts has nothing to make it of.
    """
    ranks = ranks or Ranks()
    owners = owners or Owners.even(weights.num_experts, ranks.count)
    gate_up, down, gate_up_bias, down_bias = (
        None if t is None else own_parameter(owners.take(t.detach(), ranks.rank).clone(), t.requires_grad)
        for t in weights.tensors()
    )
    assert gate_up is not None
    assert down is not None
    share: AnyExperts = replace(
        weights, gate_up_EJH=gate_up, down_EHI=down, gate_up_bias_EJ=gate_up_bias, down_bias_EH=down_bias
    )
    if make_local is not None and gate_up.shape[0]:
        assert isinstance(share, ExpertWeights)
        share = make_local(share)
    return ShardedExperts(share, owners, ranks, tokens, transport)


def own_parameter(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A parameter that this rank has alone. Its gradient is whole: `amoeba.parallel.shards` does not add it up."""
    parameter = nn.Parameter(tensor, requires_grad)
    setattr(parameter, _OWN, True)
    return parameter


def is_own(parameter: Tensor) -> bool:
    return getattr(parameter, _OWN, False)


_OWN = "_amoeba_own_to_rank"


def shard_lora(lora: LoraFactors, sharded: ShardedExperts) -> LoraFactors:
    """This rank's share of factors that it has all of, differentiably; an A that gate and up share stays shared."""
    return lora.each(lambda factor: sharded.owners.take(factor, sharded.ranks.rank))


def gather_share(share: Tensor, owners: Owners, ranks: Ranks, name: str) -> Tensor | None:
    """On the first rank the entries of all experts, of which each comes with its own; None elsewhere."""
    if ranks.count == 1:
        return share
    counts = [len(owners.experts_of(rank)) for rank in range(ranks.count)]
    sent = [counts[ranks.rank]] + [0] * (ranks.count - 1)
    received = counts if ranks.rank == 0 else [0] * ranks.count
    rows = ranks.exchange(share.flatten(1).contiguous(), sent, received, f"{name} of all ranks")
    return owners.join(list(rows.unflatten(1, share.shape[1:]).split(counts))) if ranks.rank == 0 else None
