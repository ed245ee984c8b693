"""aMoEba: one mixture-of-experts engine for PyTorch that takes the shape of the hardware it finds.

Names are imported when they are first used, so that `import amoeba` itself costs nothing, not even torch. If it comes
before torch, torch's threads do not spin while they wait (system/thread_waiting.py).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from amoeba._version import __version__
from amoeba.system.thread_waiting import wait_passively

if TYPE_CHECKING:
    from amoeba import lora, optim, replay
    from amoeba.backends.backend import Backend, PassesBackend, Request
    from amoeba.backends.registry import explain, register_backend
    from amoeba.core.config import Activation, MoEConfig, RouterConfig
    from amoeba.core.placement import Placement
    from amoeba.core.weights import ExpertWeights, LoraFactors
    from amoeba.cpu.packed_experts import pack_experts
    from amoeba.experts import experts, submit_experts
    from amoeba.integrations.exact_mode import exact as exact
    from amoeba.integrations.place_experts import place_experts as place_experts
    from amoeba.integrations.precision import set_precision as set_precision
    from amoeba.layer import MoE
    from amoeba.placements import register_placement
    from amoeba.plan.taking import adapt as adapt
    from amoeba.precision.recipes import with_precision
    from amoeba.routing.router import Routing, route

# Without adapt, exact, place_experts and set_precision: they need transformers, and `from amoeba import *` should need
# torch alone.
__all__ = [
    "Activation",
    "Backend",
    "ExpertWeights",
    "LoraFactors",
    "MoE",
    "MoEConfig",
    "PassesBackend",
    "Placement",
    "Request",
    "RouterConfig",
    "Routing",
    "__version__",
    "experts",
    "explain",
    "lora",
    "optim",
    "pack_experts",
    "register",
    "register_backend",
    "register_placement",
    "replay",
    "route",
    "submit_experts",
    "with_precision",
]

wait_passively()

_HOME = {
    "Activation": "amoeba.core.config",
    "adapt": "amoeba.plan.taking",
    "Backend": "amoeba.backends.backend",
    "ExpertWeights": "amoeba.core.weights",
    "LoraFactors": "amoeba.core.weights",
    "MoE": "amoeba.layer",
    "MoEConfig": "amoeba.core.config",
    "RouterConfig": "amoeba.core.config",
    "Routing": "amoeba.routing.router",
    "PassesBackend": "amoeba.backends.backend",
    "Placement": "amoeba.core.placement",
    "Request": "amoeba.backends.backend",
    "exact": "amoeba.integrations.exact_mode",
    "experts": "amoeba.experts",
    "explain": "amoeba.backends.registry",
    "pack_experts": "amoeba.cpu.packed_experts",
    "place_experts": "amoeba.integrations.place_experts",
    "register_backend": "amoeba.backends.registry",
    "register_placement": "amoeba.placements",
    "route": "amoeba.routing.router",
    "set_precision": "amoeba.integrations.precision",
    "submit_experts": "amoeba.experts",
    "with_precision": "amoeba.precision.recipes",
}

_PACKAGES = ("lora", "optim", "replay", "stream")


def register() -> None:
    """Makes experts_implementation="amoeba" known to Hugging Face transformers, 5.8 or newer."""
    from amoeba.integrations.transformers import register as register_with_transformers

    register_with_transformers()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"amoeba.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'amoeba' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})


class _Package(ModuleType):
    """Keeps `amoeba.experts` the function: importing the module of that name would otherwise replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
