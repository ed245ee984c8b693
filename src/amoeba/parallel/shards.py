"""Parameters that FSDP2 has sharded: what of them is in this rank's memory, and an optimizer that sees just that.

    local_part(parameter)          # a plain tensor: the rows of this rank, or all of a parameter that is not sharded
    rows_here(parameter)           # range(4, 8); None for one that is not sharded
    optimizer = AdamW([local_parameter(each) for each in model.parameters()])
    hand_over_gradients(optimizer, model.parameters())

An optimizer works number by number, so that it need not know of meshes: torch's would refuse to take tensors of two
meshes in one call, and ours has kernels for plain tensors.

Gradients of a model with expert parallelism are summed over ranks where they have to be, and have one norm:

    loss = model(input_ids, labels=labels).loss / ranks.count       # of this rank's tokens, as many as the others have
    loss.backward()
    add_up_gradients(model.parameters(), ranks)
    norm = clip_gradients(model.parameters(), 1.0, ranks)

An expert's gradient comes from the tokens of all ranks already. All other parameters are the same on every rank, and
each rank has the gradient of its own tokens: these are added up, and nothing is divided. So a rank divides its loss
beforehand, by the number of ranks, or by the number of all tokens where ranks have different numbers of them.

Parameters that FSDP2 has sharded are added up by it. It has to be told not to divide (set_gradient_divide_factor(1.0)):
experts are in fewer shards than all else, and would be divided by another number. `clip_gradients` takes the ranks of
all meshes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import is_own

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


_BUCKET = 1 << 25  # numbers that are added up at once, unless one parameter has more


def add_up_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Sums the gradients of all replicated parameters over the ranks, in place; a missing gradient counts as zeros."""
    shared = [each for each in parameters if each.requires_grad and not _is_apart(each)]
    if ranks.count == 1 or not shared:
        return
    for alike in _buckets(shared):
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in alike]
        total = ranks.add_up(torch.cat([each.flatten() for each in gradients]), "gradients of shared parameters")
        parts = total.split([each.numel() for each in gradients])
        for parameter, part in zip(alike, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype each. All at once, the gradients of a whole model would be in memory twice."""
    found: list[list[nn.Parameter]] = []
    for dtype in dict.fromkeys(each.dtype for each in parameters):
        room = -1
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if parameter.numel() > room:
                found.append([])
                room = _BUCKET
            found[-1].append(parameter)
            room -= parameter.numel()
    return found


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, ranks: Ranks) -> Tensor:
    """Returns the norm over the parameters of all ranks, replicated ones counted once; scales gradients down to `most`.

    The norm is the same on every rank, so replicated parameters stay identical. Call it after `add_up_gradients`.
    """
    found = [each for each in parameters if each.grad is not None]
    own = _square([each for each in found if _is_apart(each)])
    if ranks.count > 1:
        own = ranks.add_up(own, "norms of gradients")
    norm = (own + _square([each for each in found if not _is_apart(each)])).sqrt()
    scale = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for parameter in found:
        gradient, _ = _here(parameter)
        gradient.mul_(scale.to(gradient.device))
    return norm


def _square(parameters: list[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        gradient, copies = _here(parameter)
        total += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square().to(device) / copies
    return total


def _is_apart(parameter: Tensor) -> bool:
    """Whether ranks have different parts of it: experts of their own, or shards, which FSDP adds up itself."""
    return is_own(parameter) or is_shard(parameter)


def _here(parameter: Tensor) -> tuple[Tensor, int]:
    """What of the gradient is in this rank's memory, and how many ranks have that same part."""
    gradient: Any = parameter.grad
    assert gradient is not None
    if not is_shard(gradient):
        return gradient, 1
    mesh = gradient.device_mesh
    copies = math.prod(mesh.size(place) for place, each in enumerate(gradient.placements) if each.is_replicate())
    return gradient.to_local(), copies
