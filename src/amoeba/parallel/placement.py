"""Experts over ranks, as a placement: each process keeps its share of what it was given.

Importing `amoeba.parallel` registers it and its backend; nothing below knows of either.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from amoeba.core.placement import Placement, Tolerance
from amoeba.parallel.sharded import shard_experts
from amoeba.parallel.sharded_backend import RanksBackend
from amoeba.placements import register_placement


def _why_not() -> str | None:
    if not dist.is_available():
        return "needs a torch that was built with torch.distributed"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "needs several processes with torch.distributed set up, as torchrun starts them"
    return None


RANKS = Placement(
    "ranks",
    "over the ranks of torch.distributed",
    make=shard_experts,
    backends=(RanksBackend(),),
    tolerances={dtype: Tolerance() for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    why_not=_why_not,
    offered=False,  # to one process, which is all that doctor and bench have; over ranks the commands take it
)
register_placement(RANKS)
