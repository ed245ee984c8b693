"""A kind of activation that is in the configuration alone: everything that computes one refuses it by name."""

import re
from typing import Literal, get_args

import pytest
import torch

import amoeba.stream  # noqa: F401  registers its placement
from amoeba import Activation, Routing, experts
from amoeba.backends import rowwise
from amoeba.backends.backend import Request
from amoeba.backends.registry import all_backends_of
from amoeba.core import config
from amoeba.core.config import ActivationKind
from amoeba.cpu.node_library import activation_number
from amoeba.kernels import activation as kernels
from amoeba.placements import RESIDENT, all_placements
from amoeba.proof.reference import experts as reference
from selection import each_value_once
from small_layer import Layer

NEW = "softplus"
REFUSED = re.compile(f"activation.kind: expected .* computes; got '{NEW}'")
PLACEMENTS = {placement.name: placement for placement in all_placements()}


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def activation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Activation:
    monkeypatch.setattr(config, "ActivationKind", Literal[(*get_args(ActivationKind), NEW)])
    return Activation(NEW, gated=request.param)  # type: ignore[arg-type]


def layer_with(activation: Activation, tokens: int) -> Layer:
    return Layer(activation, bias=False, tokens=tokens, hidden=64, inner=64)


def test_the_reference(activation: Activation) -> None:
    layer = layer_with(activation, tokens=3)
    named = {name: tensor.detach() for name, tensor in layer.tensors.items()}
    given = named["x"], layer.expert_TK, named["weight"], layer.weights(named)
    with pytest.raises(ValueError, match=REFUSED):
        reference.experts_forward(*given)
    with pytest.raises(ValueError, match=REFUSED):
        reference.experts_backward(layer.dy_TH, *given)
    with pytest.raises(ValueError, match=REFUSED):
        reference.act_slope(named["x"], activation)


def test_rows_in_plain_torch(activation: Activation) -> None:
    x_TH = torch.ones(3, 8)
    with pytest.raises(ValueError, match=REFUSED):
        rowwise.activate(x_TH, activation)
    with pytest.raises(ValueError, match=REFUSED):
        rowwise._act_backward(x_TH, x_TH, activation)


@each_value_once()
@pytest.mark.parametrize("tokens", [1, 5])  # decoded, and in a pass of many rows
@pytest.mark.parametrize("placement", [RESIDENT, *PLACEMENTS])
def test_every_backend(placement: str, tokens: int, activation: Activation) -> None:
    layer = layer_with(activation, tokens)
    named = {name: tensor.detach() for name, tensor in layer.tensors.items()}
    weights = layer.weights(named)
    if placement != RESIDENT:
        if (reason := PLACEMENTS[placement].why_not()) is not None:
            pytest.skip(reason)
        weights = PLACEMENTS[placement].make(weights)
    x_TH = named["x"].to(weights.dtype)
    routing = Routing(layer.expert_TK, named["weight"])
    served = []
    for backend in all_backends_of(type(weights), torch.device("cpu")):
        for leaf in (x_TH, x_TH.clone().requires_grad_()):
            if backend.why_not(Request(leaf, routing, weights)) is None:
                with pytest.raises(ValueError, match=REFUSED):
                    experts(leaf, routing, weights, backend=backend.name)
                served.append(backend.name)
    assert served


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_all_others_are_known_everywhere(kind: ActivationKind) -> None:
    assert kind in kernels.KINDS
    assert activation_number(kind) == get_args(ActivationKind).index(kind)  # the order of csrc/activation.h
    assert reference.act(torch.ones(1), Activation(kind)).isfinite().all()
    assert rowwise.activate(torch.ones(1, 2), Activation(kind)).isfinite().all()
