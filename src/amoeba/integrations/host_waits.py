"""Whether the host has to do something within a pass of a model's experts, so that no CUDA graph can hold the pass.

    why_waits(model)                        # None, or "its experts are computed on the CPU, and ..."
    why_waits(model, trains=True)           # of a forward with its backward

Capture, continuous batching and captured training ask this, and never where the experts are: the backend answers that
computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from amoeba.backends import fp8_choice
from amoeba.backends.backend import Backend, PassesBackend, Request
from amoeba.backends.registry import explain
from amoeba.integrations.experts_module import experts_modules, weights_of
from amoeba.routing.router import Routing


def why_waits(model: nn.Module, *, trains: bool = False) -> str | None:
    found = dict.fromkeys(backend.why_waits(request, trains) for backend, request in _serving(model))
    reasons = [reason for reason in found if reason is not None]
    return f"its experts {', and some '.join(reasons)}" if reasons else None


def repeats_forward(model: nn.Module) -> bool:
    """Whether a compiled backward computes the forward of its experts once more."""
    return any(isinstance(each, PassesBackend) and each.saves and each.traced is None for each, _ in _serving(model))


def one_token(module: Any) -> Request | None:
    """A pass over its experts by which a backend is chosen; None where its own functions are called."""
    weights = weights_of(module)
    if weights is None:
        return None
    x_TH = torch.zeros(1, weights.hidden, dtype=weights.dtype, device=weights.device)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int64, device=x_TH.device), x_TH.new_ones(1, 1), trusted=True)
    request = Request(x_TH, routing, weights)
    return replace(request, weights=fp8_choice.settled(request))


def _serving(model: nn.Module) -> Iterator[tuple[Backend, Request]]:
    """Functions of a module's own are captured as they are; what waits in them shows then."""
    for module in experts_modules(model).values():
        request = one_token(module)
        backend = None if request is None else explain(request).backend
        if request is not None and backend is not None:
            yield backend, request
