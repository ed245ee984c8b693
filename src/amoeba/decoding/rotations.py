"""Rotary embeddings whose angles change with the length of the text (dynamic, longrope), with fixed addresses.

    rotations = Rotations(model)
    with rotations.fixed(): step()      # angles as they are, whatever the positions: no decision by the host
    rotations.reach(tokens)             # before a step whose last token is this one: new angles, at the same address

transformers looks at the positions in every pass, for which the host would wait. A decoder knows how long its texts
are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import dynamic_rope_update


class Rotations:
    def __init__(self, model: Any) -> None:
        found = {module: _kinds(module) for module in model.modules()}
        self._layer_types = {module: kinds for module, kinds in found.items() if kinds}
        self._fixed: dict[tuple[Any, str], Tensor] = {}
        self._computed = [module for module in model.modules() if _computes_anew(module)]
        self._computed_once: dict[Any, tuple[Tensor, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._layer_types)

    def why_not(self) -> str | None:
        if any(module.config.rope_parameters["rope_type"] != "default" for module in self._computed):
            return "it reads its text again where its rotary embedding changes with the length"
        return None

    @contextmanager
    def fixed(self) -> Iterator[None]:
        own = [(module, module.rope_init_fn) for module in self._computed]
        try:
            for module in self._computed:
                module.rope_init_fn = partial(_first, self._once(module))
            for module in self._layer_types:
                self._keep_addresses(module)
                module.forward = partial(inspect.unwrap(type(module).forward), module)
            yield
        finally:
            for module, function in own:
                module.rope_init_fn = function
            for module in self._layer_types:
                module.__dict__.pop("forward", None)

    def reach(self, tokens: int) -> None:
        if not self._layer_types:
            return
        position = torch.tensor([[tokens - 1]], dtype=torch.int64, device="cpu")  # which the host compares
        for module, kinds in self._layer_types.items():
            for kind in kinds:
                _update(module, _buffers(module)[0][1], position, **({} if kind is None else {"layer_type": kind}))
            self._keep_addresses(module)

    def _once(self, module: Any) -> tuple[Tensor, float]:
        """Frequencies, and what sines and cosines are multiplied by."""
        if module not in self._computed_once:
            frequencies, scale = module.rope_init_fn(module.config)
            self._computed_once[module] = frequencies.to(module.inv_freq.device), scale
        return self._computed_once[module]

    def _keep_addresses(self, module: Any) -> None:
        for name, current in _buffers(module):
            own = self._fixed.setdefault((module, name), current.clone())
            if current is not own:
                own.copy_(current)
                module._buffers[name] = own


@dynamic_rope_update
def _update(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> None:
    """transformers' own decision, and nothing after it."""


def _first(found: Any, *_: Any) -> Any:
    return found


def _computes_anew(module: Any) -> bool:
    """Phi-MoE's frequencies: in every pass, on the host."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return hasattr(module, "inv_freq") and code is not None and "rope_init_fn" in code.co_names


def _kinds(module: Any) -> list[str | None]:
    """The layer types whose angles change; [None] for a module that has no types."""
    types = getattr(module, "rope_type", None)
    if not hasattr(type(module).forward, "__wrapped__") or not _buffers(module):
        return []
    if isinstance(types, dict):
        return [layer_type for layer_type, each in types.items() if _changes(each)]
    return [None] if _changes(types) else []


def _changes(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _buffers(module: Any) -> list[tuple[str, Tensor]]:
    """Those that `forward` reads; others keep what it began with."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name and "long_inv_freq" not in name
    ]
