"""Parameters that FSDP2 has sharded: what of them is in this rank's memory, and an optimizer that sees just that.

    local_part(parameter)          # a plain tensor: the rows of this rank, or all of a parameter that is not sharded
    rows_here(parameter)           # range(4, 8); None for one that is not sharded
    optimizer = AdamW([local_parameter(each) for each in model.parameters()])
    hand_over_gradients(optimizer, model.parameters())

An optimizer works number by number, so that it need not know of meshes: torch's would refuse to take tensors of two
meshes in one call, and ours has kernels for plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_LOCAL = "_amoeba_local_part"


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # a DTensor has it


def local_part(tensor: Tensor) -> Tensor:
    found: Any = tensor.detach()
    return found.to_local() if is_shard(found) else found


def rows_here(tensor: Any) -> range | None:
    """FSDP2 shards the first dimension, over one dimension of ranks, by torch.chunk's rule."""
    if not is_shard(tensor):
        return None
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    share = -(-rows // mesh.size())
    begin = min(share * mesh.get_local_rank(), rows)
    return range(begin, min(begin + share, rows))


def whole(tensor: Any) -> Tensor:
    """All of it, on each of its ranks, which all have to ask for it."""
    return tensor.detach().full_tensor() if is_shard(tensor) else tensor.detach()


def copy_here(tensor: Tensor, source: Tensor) -> None:
    """source: all of it, of which this rank takes its rows."""
    rows = rows_here(tensor)
    local_part(tensor).copy_(source if rows is None else source[rows.start : rows.stop])


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer steps, always the same one; the parameter itself if it is not sharded."""
    if not is_shard(parameter):
        return parameter
    if not hasattr(parameter, _LOCAL):
        setattr(parameter, _LOCAL, nn.Parameter(local_part(parameter), parameter.requires_grad))
    return getattr(parameter, _LOCAL)


def hand_over_gradients(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Before each step of an optimizer of local parameters, those of the sharded ones; they are dropped after it."""
    sharded = [each for each in parameters if is_shard(each)]

    def hand_over(*_: Any) -> None:
        for parameter in sharded:
            local_parameter(parameter).grad = None if parameter.grad is None else local_part(parameter.grad)

    def drop(*_: Any) -> None:
        for parameter in sharded:
            local_parameter(parameter).grad = None

    if sharded:
        optimizer.register_step_pre_hook(hand_over)
        optimizer.register_step_post_hook(drop)
