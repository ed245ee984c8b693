"""NaN and infinities reach the output and every gradient that hangs on them, in every backend, and no other number.

Each is put into one tensor; the reference in fp64 tells where it must show.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from amoeba import Activation, Routing, experts
from amoeba.backends.backend import Request
from amoeba.backends.composed import experts_composed
from amoeba.backends.registry import backends_of
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.packed_experts import pack_experts
from amoeba.cpu.packed_weights import load_packed
from amoeba.proof.reference.experts import experts_backward, experts_forward
from amoeba.weights import LORA_NAMES, ExpertWeights, LoraFactors
from selection import each_value_once
from small_layer import SCALING, E, K, Layer

NAN, INF = math.nan, math.inf
ACTIVATIONS = {
    "silu": Activation(),
    "gpt_oss": Activation("silu", alpha=1.702, limit=0.7, up_shift=1.0, interleaved=True),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2", gated=False, limit=1.5),
    "relu": Activation("relu", gated=False),
}
TENSORS = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", "up_lora_a", "down_lora_b")
BACKENDS = ("eager", "grouped", "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def layer_with(name, value, activation=None, **how):
    layer = Layer(activation, **how)
    tensor = layer.tensors[name].detach()
    tensor.view(-1)[tensor.numel() // 2] = value
    return layer


def expected_of(layer, dtype=torch.float64):
    named = {name: tensor.detach().to(dtype) for name, tensor in layer.tensors.items()}
    given = named["x"], layer.expert_TK, named["weight"], layer.weights(named), layer.lora(named)
    found = experts_backward(layer.dy_TH.to(dtype), *given)
    return {"output": experts_forward(*given)} | {name: found[name] for name in named}


def served(name, layer):
    request = Request(
        layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), layer.weights(layer.tensors)
    )
    (backend,) = (backend for backend in backends_of(ExpertWeights, torch.device("cpu")) if backend.name == name)
    if backend.why_not(request) is not None:
        pytest.skip(f"{name}: {backend.why_not(request)}")
    return name


def run(layer, backend):
    """Output and gradients by name; the routing is trusted, as a model's is."""
    named = layer.tensors
    routing = Routing(layer.expert_TK, named["weight"], trusted=True)
    y_TH = experts(named["x"], routing, layer.weights(named), lora=layer.lora(named), backend=backend)
    return {"output": y_TH.detach()} | dict(
        zip(named, torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH), strict=True)
    )


def assert_same_where_finite(found, expected, tolerance=1e-4):
    for name, value in found.items():
        strange = ~expected[name].isfinite()
        finite = value.isfinite()
        assert not (finite & strange).any(), f"{name}: finite where the reference is not"
        assert (finite | strange).all(), f"{name}: not finite where the reference is"
        error = (value.double() - expected[name])[finite].norm() / expected[name][finite].norm().clamp(min=1e-3)
        assert error < tolerance, f"{name}: off by {error:.1e}"


@each_value_once("backend")
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_are_finite_where_the_reference_is(backend, activation, value):
    for name in TENSORS:
        layer = layer_with(name, value, activation, rank=3 if "lora" in name else 0)
        found, expected = run(layer, served(backend, layer)), expected_of(layer)
        assert value == INF or not expected["output"].isfinite().all()  # a clamp takes infinity for its limit
        assert_same_where_finite(found, expected)


@pytest.mark.parametrize(("name", "activation"), [("x", "relu2"), ("weight", "silu"), ("gate_up", "gpt_oss")])
def test_the_same_of_the_kernels(name, activation):
    layer = layer_with(name, NAN, ACTIVATIONS[activation], tokens=3)
    assert_same_where_finite(run(layer, served("triton", layer)), expected_of(layer))


@each_value_once("backend")
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_a_few_tokens(backend, activation, value, tokens):
    for name in TENSORS:
        layer = layer_with(name, value, activation, tokens=tokens, rank=3 if "lora" in name else 0)
        layer.expert_TK = torch.tensor([[1, 2], [0, 3]])[:tokens]  # the middle of a weight belongs to expert 2
        for tensor in layer.tensors.values():
            tensor.requires_grad_(False)
        named = layer.tensors
        routing = Routing(layer.expert_TK, named["weight"], trusted=True)
        given = named["x"], routing, layer.weights(named)
        found = experts(*given, lora=layer.lora(named), backend=served(backend, layer))
        assert_same_where_finite({"output": found}, expected_of(layer))


@pytest.mark.parametrize("name", ["x", "weight", "gate_up", "down"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_the_same_of_somebody_else_s_activation(value, name):
    layer = layer_with(name, value)
    named = layer.tensors
    routing = Routing(layer.expert_TK, named["weight"], trusted=True)
    weights = [named[part] for part in ("gate_up", "down", "gate_up_bias", "down_bias")]

    def gate(h_NJ):
        gate_NI, up_NI = h_NJ.chunk(2, dim=1)
        return functional.silu(gate_NI) * up_NI

    y_TH = experts_composed(named["x"], routing, *weights, gate=gate)
    gradients = torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH)
    assert_same_where_finite({"output": y_TH.detach(), **dict(zip(named, gradients, strict=True))}, expected_of(layer))


@each_value_once("kind")
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["x", "weight", "down_lora_a", "up_lora_b"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_packed_experts(activation, tokens, value, name, kind):
    """Rounded to bf16 or int8 on the way, so only where it is finite is compared, token by token."""
    try:
        load_packed()
    except CoreUnavailable as reason:
        pytest.skip(str(reason))
    layer = Layer(ACTIVATIONS[activation], bias=False, hidden=64, inner=64, tokens=tokens, rank=3)
    packed = pack_experts(layer.weights(layer.tensors), kind=kind, nodes=1, threads=1)
    named = {n: t.detach().clone() for n, t in layer.tensors.items()}
    named[name].view(-1)[named[name].numel() // 2] = value
    leaves = {n: named[n].to(packed.dtype if n == "x" else torch.float32).requires_grad_() for n in ("x", "weight")}
    leaves |= {n: named[n].requires_grad_() for n in LORA_NAMES}
    routing = Routing(layer.expert_TK, leaves["weight"], trusted=True)
    lora = LoraFactors(**{n: leaves[n] for n in LORA_NAMES}, scaling=SCALING)
    y_TH = experts(leaves["x"], routing, packed, lora=lora)
    gradients = torch.autograd.grad(y_TH, list(leaves.values()), layer.dy_TH.to(y_TH.dtype))
    with torch.no_grad():
        decoded = experts(leaves["x"], routing, packed, lora=lora)

    exact = {n: t.detach().double() for n, t in (named | leaves).items()}
    given = exact["x"], layer.expert_TK, exact["weight"], layer.weights(exact), layer.lora(exact)
    expected = experts_backward(layer.dy_TH.double(), *given) | {"output": experts_forward(*given)}
    found = {"output": y_TH.detach(), **dict(zip(leaves, gradients, strict=True))}
    for what, tensor in (*found.items(), ("output", decoded)):
        finite, strange = tensor.isfinite(), ~expected[what].isfinite()
        if what in ("output", "x"):  # a token is quantised as a whole
            finite, strange = finite.all(dim=1), strange.any(dim=1)
        assert not (finite & strange).any(), f"{what}: finite where the reference is not"
        if what == "output":
            assert (finite | strange).all(), "not finite where the reference is"


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_the_weight_of_a_slot_that_belongs_to_nobody_may_be_anything(backend):
    layer = Layer(tokens=4, expert_TK=torch.tensor([[0, E], [-1, 2], [3, 1], [E + 7, -5]]))
    expected = run(layer, served(backend, layer))
    with torch.no_grad():
        layer.tensors["weight"][0, 1], layer.tensors["weight"][1, 0], layer.tensors["weight"][3] = NAN, INF, -INF
    found = run(layer, backend)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert found["weight"].shape == (4, K)
