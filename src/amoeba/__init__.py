"""aMoEba: one mixture-of-experts engine for PyTorch that takes the shape of the hardware it finds."""

from amoeba._version import __version__
from amoeba.config import Activation, MoEConfig, RouterConfig
from amoeba.experts import experts
from amoeba.layer import MoE
from amoeba.routing import Routing, route
from amoeba.weights import ExpertWeights

__all__ = [
    "Activation",
    "ExpertWeights",
    "MoE",
    "MoEConfig",
    "RouterConfig",
    "Routing",
    "__version__",
    "experts",
    "register",
    "route",
]


def register() -> None:
    """Makes experts_implementation="amoeba" known to Hugging Face transformers."""
    from amoeba.integrations.transformers import register as register_with_transformers

    register_with_transformers()
