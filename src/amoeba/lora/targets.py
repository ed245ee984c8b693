"""Which modules and parameters of a model a user's LoRA targets name, and PEFT's layers on those outside the experts.

    chosen = choose(model, ["experts", "q_proj"])
    chosen.projections       # {"model.layers.0.mlp.experts": {"gate", "up", "down"}, ...}
    chosen.linears           # ["model.layers.0.self_attn.q_proj", ...]
    layers = inject(model, {name: (16, 2.0)})    # rank and scaling; peft's lora.Linear around each nn.Linear
    tensors_of(layers)                           # {"base_model.model.NAME.lora_A.weight": (R, in), ...} as in files
    unwrap(model, layers); rewrap(model, layers)

A name matches as in PEFT: it is the whole name or its end after a dot. `down_proj` is thus the experts' and that of
every dense or shared MLP; `experts.down_proj` the experts' alone. Linear layers whose factors could never get a
gradient are left out, and `chosen.left_out` says why. "experts" and "all-linear" mean the text model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.integrations.experts_module import ROUTER_NAMES, ExpertsLayout, layouts_of
from amoeba.integrations.text_model import beyond_text

EXPERTS, ALL_LINEAR = "experts", "all-linear"
# Sparse attention chooses keys by the top-k of an indexer's scores: the choice is all that is used of them.
_NO_GRADIENT = "an indexer's top-k choice passes no gradient back"
# Mamba's kernels are given the weight (PEFT refuses out_proj too); factors next to it would not be seen.
_BY_WEIGHT = "Mamba reads its weight without calling it, so factors have no effect"
_NOT_TEXT = "not part of the text model"
_READ_BY_MAMBA = ("out_proj", "dt_proj")


class Chosen(NamedTuple):
    projections: dict[str, set[str]]  # by the name of the experts module
    linears: list[str]
    left_out: dict[str, str]  # why, by the name of the linear layer or experts module


def choose(model: nn.Module, targets: str | Iterable[str]) -> Chosen:
    """ValueError where a target matches nothing; it names what there is."""
    names = [targets] if isinstance(targets, str) else list(targets)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise bad_value("targets", "one name or several", repr(targets), f"{EXPERTS!r} takes every expert")
    layouts = layouts_of(model)
    routers = set(routers_of(model, layouts))
    linears = [name for name in _linears(model) if name not in routers]
    head = model.get_output_embeddings()  # type: ignore[operator]
    other_parts = beyond_text(model)
    chosen = Chosen({}, [], {})
    for target in names:
        by_kind = target in (EXPERTS, ALL_LINEAR)
        taken, left_out = [], dict[str, str]()
        for module, layout in layouts.items():
            projections = _projections(target, module, layout)
            if projections and by_kind and module in other_parts:
                left_out[module] = _NOT_TEXT
            elif projections:
                taken.append(module)
                chosen.projections.setdefault(module, set()).update(projections)
        for name in linears:
            if not _matches(name, target) and (target != ALL_LINEAR or model.get_submodule(name) is head):
                continue
            reason = _NOT_TEXT if by_kind and name in other_parts else _cannot_train(model, name)
            if reason is not None:
                left_out[name] = reason
                continue
            taken.append(name)
            if name not in chosen.linears:
                chosen.linears.append(name)
        if not taken and left_out:
            got = f"{target!r}: {in_one_line(left_out)}"
            raise bad_value("targets", "layers whose factors can be trained", got, "leave it out")
        if not taken:
            raise _matches_nothing(target, layouts, linears)
        if not by_kind:
            _warn(target, left_out, [name for name in taken if name in other_parts])
        chosen.left_out.update(left_out)
    return chosen


def in_one_line(left_out: dict[str, str]) -> str:
    """self_attn.indexer.wk (24), ...: an indexer's top-k choice passes no gradient back"""
    parts = []
    for reason in dict.fromkeys(left_out.values()):
        ends = Counter(_without_number(name) for name, why in left_out.items() if why == reason)
        named = [f"{end} ({count})" if count > 1 else end for end, count in ends.items()]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        parts.append(f"{', '.join(named[:4])}{more}: {reason}")
    return "; ".join(parts)


def routers_of(model: nn.Module, experts: Iterable[str]) -> Iterator[str]:
    for name in experts:
        parent = name.rpartition(".")[0]
        for child in ROUTER_NAMES:
            if isinstance(getattr(model.get_submodule(parent), child, None), nn.Module):
                yield f"{parent}.{child}" if parent else child


def places_of(model: nn.Module, name: str) -> list[str]:
    """All names of a parameter: several where layers are tied, as the output head is to the embeddings."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, parameter in named.items() if parameter is named.get(name)]


def _linears(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _cannot_train(model: nn.Module, name: str) -> str | None:
    parent, _, child = name.rpartition(".")
    if child in _READ_BY_MAMBA and "Mamba" in type(model.get_submodule(parent)).__name__:
        return _BY_WEIGHT
    while parent:
        if "Indexer" in type(model.get_submodule(parent)).__name__:
            return _NO_GRADIENT
        parent = parent.rpartition(".")[0]
    return None


def _without_number(name: str) -> str:
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[numbers[-1] + 1 :] if numbers and numbers[-1] + 1 < len(words) else words)


def _warn(target: str, left_out: dict[str, str], not_text: list[str]) -> None:
    if left_out:
        logger.warning("target %r leaves out %s", target, in_one_line(left_out))
    if not_text:
        named = in_one_line(dict.fromkeys(not_text, _NOT_TEXT))
        logger.warning("target %r takes %s; text alone does not train it", target, named)


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
    projections, layers = (", ".join(names) or "this model has none" for names in (of_experts, ends))
    expected = f"{EXPERTS}, {ALL_LINEAR}, a projection of the experts ({projections}) or a linear layer ({layers})"
    remedy = "name a part of it, or more of a name to choose among equal ends: layers.0.self_attn.q_proj"
    return bad_value("targets", expected, f"{target!r}, which matches nothing in this model", remedy)


ADAPTER = "default"
PREFIX = "base_model.model."  # of every key in PEFT's files
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # by PEFT, in target_modules


def inject(model: nn.Module, ranks: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """Puts PEFT's layers in the places of the modules of these names, each with its rank and scaling.

    A router has a weight, but its forward is its own: there the factors are added to the weight before it is called.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        got = f"none, and the target {next(iter(ranks))}"
        remedy = "install it: pip install 'amoeba-moe[lora]', or target the experts alone"
        raise bad_value("targets", "the package peft for layers outside the experts", got, remedy) from error
    layers: dict[str, Any] = {}
    for name, (rank, scaling) in ranks.items():
        # Alone in a list, since in a model PEFT 0.21 takes every up_proj for an expert's
        module = model.get_submodule(name)
        holder = nn.ModuleList([module])
        is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        by_weight: dict[str, Any] = {"target_modules": [], "target_parameters": ["0.weight"]}
        target = {"target_modules": ["0"]} if is_plain else by_weight
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, **target), holder, ADAPTER)
        layer: Any = holder[0]
        layers[name] = layer
        layer.scaling[ADAPTER] = scaling
        for parameter in factors_of(layer):
            if parameter.dtype.itemsize < 4:  # as PEFT does: Adam's steps are below the rounding of bf16
                parameter.data = parameter.data.float()
    rewrap(model, layers)
    return layers


def factors_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def tensors_of(layers: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, layer in layers.items():
        for part, factor in zip("AB", factors_of(layer), strict=True):
            found[f"{PREFIX}{name}.lora_{part}.weight"] = factor.detach()
    return found


def merged_weight(layer: Any) -> Tensor:
    """W + scaling · B @ A, added in fp32 or wider and rounded once."""
    a, b = (factor.detach() for factor in factors_of(layer))
    weight = layer.base_layer.weight.detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + layer.scaling[ADAPTER] * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def unwrap(model: nn.Module, layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        model.set_submodule(name, layer.base_layer)


def rewrap(model: nn.Module, layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        model.set_submodule(name, layer)
