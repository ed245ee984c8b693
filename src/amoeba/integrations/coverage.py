"""Which experts of a Hugging Face model aMoEba computes, and which keep to their own code.

    covered = coverage(model)
    covered.ours                 # names of the modules that go through transformers' experts interface
    covered.others               # {"model.layers.0.feed_forward.experts": "Llama4TextExperts", ...}

transformers hands experts over where their class is decorated with `use_experts_implementation`. Where it is not,
experts_implementation="amoeba" changes nothing there, and transformers does not say so. `why_waits` asks the backends
whether the host has to do something within a pass, so that no CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from amoeba.backends import fp8_choice
from amoeba.backends.backend import Backend, PassesBackend, Request
from amoeba.backends.registry import explain
from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import experts_modules, is_experts, weights_of
from amoeba.routing.router import Routing


class Coverage(NamedTuple):
    ours: tuple[str, ...]
    others: dict[str, str]  # name -> class

    def __str__(self) -> str:
        if not self.others:
            return "amoeba"
        whose = f"{self.other_classes} of transformers, which accepts no other implementation"
        if not self.ours:
            return whose
        return f"amoeba in {len(self.ours)} of {len(self.ours) + len(self.others)} layers; the others by {whose}"

    @property
    def other_classes(self) -> str:
        return " and ".join(dict.fromkeys(self.others.values()))


def coverage(model: nn.Module) -> Coverage:
    """Which experts of a model aMoEba computes, by the names of their modules, and which keep to their own code."""
    ours: list[str] = []
    others: dict[str, str] = {}
    inside = ""  # the experts that were found last; what is in them is part of them
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_experts(module):
            ours.append(name)
        elif _holds_experts(module):
            others[name] = type(module).__name__
        else:
            continue
        inside = name + "."
    return Coverage(tuple(ours), others)


def check_coverage(model: Any, argument: str, remedy: str) -> Coverage:
    """ValueError where there are no experts, or none that aMoEba computes."""
    found = coverage(model)
    if found.ours:
        return found
    got, expected = "which has no experts", "a mixture-of-experts model of transformers"
    if found.others:
        got, expected = f"whose experts are computed by {found}", expected + " whose experts can be replaced"
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise bad_value(argument, expected, f"{kind}, {got}", remedy)


def _holds_experts(module: nn.Module) -> bool:
    """By the names that transformers gives such classes: ...Experts, or a whole layer such as DogeCDMoE."""
    name = type(module).__name__
    if name.endswith("SharedExperts") or next(module.parameters(), None) is None:
        return False
    whole = name.endswith("MoE") and isinstance(getattr(module, "num_experts", None), int)
    if name.endswith("Experts") or not whole:
        return name.endswith("Experts")
    return not any(is_experts(each) or type(each).__name__.endswith("Experts") for each in module.modules())


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
