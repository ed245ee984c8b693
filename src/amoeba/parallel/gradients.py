"""Gradients of a model whose experts are over ranks: who adds up what, and one norm over all of it.

    loss = model(input_ids, labels=labels).loss / ranks.count       # of this rank's tokens, as many as the others have
    loss.backward()
    add_up_gradients(model.parameters(), ranks)
    norm = clip_gradients(model.parameters(), 1.0, ranks)

An expert's gradient comes from the tokens of all ranks already. All other parameters are the same on every rank, and
each rank has the gradient of its own tokens: these are added up, and nothing is divided. So a rank divides its loss
beforehand, by the number of ranks, or by the number of all tokens where ranks have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import is_own


def add_up_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """In place, of all parameters that are not this rank's own. One without a gradient here counts as zeros."""
    shared = [each for each in parameters if each.requires_grad and not is_own(each)]
    if ranks.count == 1 or not shared:
        return
    for dtype in dict.fromkeys(each.dtype for each in shared):
        alike = [each for each in shared if each.dtype == dtype]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in alike]
        total = ranks.add_up(torch.cat([each.flatten() for each in gradients]), "gradients of shared parameters")
        parts = total.split([each.numel() for each in gradients])
        for parameter, part in zip(alike, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, ranks: Ranks) -> Tensor:
    """The norm over the parameters of all ranks, those that all have counted once; scaled down where it is above most.

    The same on every rank, so that the parameters that all have stay the same. Called after `add_up_gradients`.
    """
    found = [each for each in parameters if each.grad is not None]
    own = _square([each for each in found if is_own(each)])
    if ranks.count > 1:
        own = ranks.add_up(own, "norms of gradients")
    norm = (own + _square([each for each in found if not is_own(each)])).sqrt()
    scale = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for parameter in found:
        assert parameter.grad is not None
        parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm


def _square(parameters: list[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        assert parameter.grad is not None
        total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).double().square().to(device)
    return total
