"""How the ranks of a run share a model: experts over groups of them, everything else by DDP or FSDP2.

W ranks · N of them have all experts together · W / N groups of N

    mesh = make_mesh(Ranks(), expert_ranks=2, dense="fsdp", device=torch.device("cpu"))    # of 4 ranks: 2 x 2
    mesh.experts            # the group of this rank, among which tokens travel ("ep")
    mesh.of_shares          # over the ranks that have the same experts, one of each group ("efsdp"); None: one group
    mesh.of_dense           # over all ranks, for all other parameters; None: each rank has a copy

Groups are of ranks in a row, which are the ones on one machine.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from amoeba.core.errors import bad_value
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.transports.choice import chosen_by_auto

DENSE = ("ddp", "fsdp")  # parameters that are no expert's: a copy on each rank, or shards


@dataclass(frozen=True, eq=False)
class RankMesh:
    """every: all ranks of the run, which share each batch."""

    every: Ranks
    experts: Ranks
    of_shares: Any = None
    of_dense: Any = None

    @property
    def groups(self) -> int:
        return self.every.count // self.experts.count

    @property
    def shards(self) -> bool:
        """Whether anything is sharded by FSDP2."""
        return self.of_shares is not None or self.of_dense is not None

    def experts_of(self, owners: Owners, rank: int) -> list[int]:
        """The experts of which this one of all ranks keeps weights and optimizer states."""
        share = owners.experts_of(rank % self.experts.count)
        return [share[place] for place in Owners.even(len(share), self.groups).experts_of(rank // self.experts.count)]

    def __str__(self) -> str:
        """What was chosen, for the user."""
        count, own, groups = self.every.count, self.experts.count, self.groups
        if count == 1:
            return "on one rank"
        if own == 1:
            said = f"sharded by FSDP2 over {count} ranks, which share each batch"
        elif own == count:
            said = f"over {count} ranks, which share each batch and exchange rows by {chosen_by_auto(self.experts)}"
        else:
            said = f"in {groups} groups of {own} ranks, which share each batch; in a group rows are exchanged by "
            said += f"{chosen_by_auto(self.experts)}, between groups FSDP2 shards the experts"
        if not self.shards:
            return said
        rest = "sharded by FSDP2 over all ranks" if self.of_dense is not None else "a copy on each rank"
        return f"{said}; all other parameters: {rest}"


def check_dense(dense: str) -> None:
    if dense not in DENSE:
        raise bad_value("dense", "ddp or fsdp", repr(dense), "ddp: a copy on each rank; fsdp: sharded over all")


def check_expert_ranks(expert_ranks: int, ranks: int) -> None:
    if expert_ranks < 1 or ranks % expert_ranks:
        divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
        raise bad_value(
            "--expert-ranks",
            f"a number that divides the {ranks} ranks ({', '.join(divisors)})",
            expert_ranks,
            "choose one of these, or leave it out for experts over all ranks",
        )


def make_mesh(ranks: Ranks, expert_ranks: int | None, dense: str, device: torch.device) -> RankMesh:
    """Each of the ranks calls this, once; where they make groups, they are all processes that there are.
    expert_ranks: None for all."""
    check_dense(dense)
    own = ranks.count if expert_ranks is None else expert_ranks
    check_expert_ranks(own, ranks.count)
    if ranks.count == 1:
        return RankMesh(ranks, ranks)
    names, group, place = ranks.global_ranks, ranks.rank // own, ranks.rank % own
    fully = dense == "fsdp" or own < ranks.count
    if fully and device.type == "cuda" and not ranks.has_own_gpu:
        option = "--dense fsdp" if dense == "fsdp" else f"--expert-ranks {own}"
        remedy = "give each rank a GPU of its own, or leave it out"
        raise bad_value(option, "a GPU for each rank, which NCCL requires", "ranks that share one", remedy)
    if own == ranks.count:
        return RankMesh(ranks, ranks, None, _device_mesh(ranks.group, device, "dp") if fully else None)
    # every process has to take part in making a group, also in one that it is not in
    expert_groups = [_group(names[first : first + own], ranks) for first in range(0, ranks.count, own)]
    share_groups = [_group(names[first::own], ranks) for first in range(own)]
    return RankMesh(
        ranks,
        Ranks(expert_groups[group], ranks.deadline),
        _device_mesh(share_groups[place], device, "efsdp"),
        _device_mesh(ranks.group, device, "dp") if dense == "fsdp" else None,
    )


def _group(members: list[int], ranks: Ranks) -> Any:
    """Of some of the ranks, whose waits end when those of all do."""
    timeout = datetime.timedelta(seconds=ranks.deadline)
    return dist.new_group(members, timeout=timeout, backend=dist.get_backend_config(ranks.group))


def _device_mesh(group: Any, device: torch.device, name: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
