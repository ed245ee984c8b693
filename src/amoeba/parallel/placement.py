"""Experts over ranks, as a placement: each process keeps its share of what it was given."""

from __future__ import annotations

import torch
import torch.distributed as dist

from amoeba.parallel.sharded import shard_experts
from amoeba.placement import Placement, Tolerance


def _why_not() -> str | None:
    if not dist.is_available():
        return "needs a torch that was built with torch.distributed"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "needs several processes with torch.distributed set up, as torchrun starts them"
    return None


# The commands do not know of several processes yet, so it is not offered to them; `amoeba verify --ranks` proves it.
RANKS = Placement(
    "ranks",
    "over the ranks of torch.distributed",
    make=shard_experts,
    tolerances={dtype: Tolerance() for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    why_not=_why_not,
    offered=False,
)
