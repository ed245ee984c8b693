"""What the names that a user gives as targets stand for in a model.

    chosen = choose(model, ["experts", "q_proj"])
    chosen.projections       # {"model.layers.0.mlp.experts": {"gate", "up", "down"}, ...}
    chosen.linears           # ["model.layers.0.self_attn.q_proj", ...]

A name matches as in PEFT: it is the whole name or its end after a dot. `down_proj` is thus the experts' and that of
every dense or shared MLP; `experts.down_proj` the experts' alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from amoeba.errors import bad_value
from amoeba.integrations.experts_module import ROUTER_NAMES, ExpertsLayout, layouts_of

EXPERTS, ALL_LINEAR = "experts", "all-linear"


class Chosen(NamedTuple):
    projections: dict[str, set[str]]  # by the name of the experts module
    linears: list[str]


def choose(model: nn.Module, targets: str | Iterable[str]) -> Chosen:
    """ValueError where a target matches nothing; it names what there is."""
    names = [targets] if isinstance(targets, str) else list(targets)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise bad_value("targets", "one name or several", repr(targets), f"{EXPERTS!r} takes every expert")
    layouts = layouts_of(model)
    routers = set(routers_of(model, layouts))
    linears = [name for name in _linears(model) if name not in routers]
    head = model.get_output_embeddings()  # type: ignore[operator]
    chosen = Chosen({}, [])
    for target in names:
        found = False
        for module, layout in layouts.items():
            projections = _projections(target, module, layout)
            if projections:
                found = True
                chosen.projections.setdefault(module, set()).update(projections)
        for name in linears:
            if _matches(name, target) or (target == ALL_LINEAR and model.get_submodule(name) is not head):
                found = True
                if name not in chosen.linears:
                    chosen.linears.append(name)
        if not found:
            raise _matches_nothing(target, layouts, linears)
    return chosen


def routers_of(model: nn.Module, experts: Iterable[str]) -> Iterator[str]:
    """Names of the modules that choose among these experts."""
    for name in experts:
        parent = name.rpartition(".")[0]
        for child in ROUTER_NAMES:
            if isinstance(getattr(model.get_submodule(parent), child, None), nn.Module):
                yield f"{parent}.{child}" if parent else child


def _linears(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        parent, _, child = name.rpartition(".")
        # Mamba's fused kernel takes out_proj's weight and would not see factors beside it (PEFT refuses it too)
        in_kernel = child == "out_proj" and "Mamba" in type(model.get_submodule(parent)).__name__
        if isinstance(module, nn.Linear) and not in_kernel:
            yield name


def _projections(target: str, module: str, layout: ExpertsLayout) -> tuple[str, ...]:
    everything = ("gate", "up", "down") if layout.gated else ("up", "down")
    if target in (ALL_LINEAR, EXPERTS) or _matches(module, target):
        return everything
    for name, projections in _parts(layout).items():
        if target in projections and len(projections) == 1:  # "gate", "up", "down"
            return projections
        if _matches(f"{module}.{name}", target):
            return projections
    return ()


def _parts(layout: ExpertsLayout) -> dict[str, tuple[str, ...]]:
    """What of the experts a name takes: of their parameters, and of the projections that older checkpoints name."""
    if not layout.gated:
        return {"up_proj": ("up",), "down_proj": ("down",)}
    return {"gate_up_proj": ("gate", "up"), "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",)}


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _matches_nothing(target: str, layouts: dict[str, ExpertsLayout], linears: list[str]) -> ValueError:
    of_experts = dict.fromkeys(name for layout in layouts.values() for name in _parts(layout))
    ends = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    return bad_value(
        "targets",
        f"{EXPERTS}, {ALL_LINEAR}, a projection of the experts ({', '.join(of_experts) or 'this model has none'}) or a "
        f"linear layer ({', '.join(ends) or 'this model has none'})",
        f"{target!r}, which matches nothing in this model",
        "name a part of it, or more of a name to choose among equal ends: layers.0.self_attn.q_proj",
    )
