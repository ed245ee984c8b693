"""NaN and infinities reach the output and every gradient that hangs on them, in every backend, and no other number.

Each is put into one tensor; the reference in fp64 tells where it must show. Where numbers are quantised they may show
in more of the same token or expert, which share a scale, but in no other.
"""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

import amoeba.stream  # noqa: F401  registers its placement
from amoeba import Activation, Routing, experts
from amoeba.backends.backend import Request
from amoeba.backends.custom_activation import experts_composed
from amoeba.backends.registry import all_backends_of, backends_of
from amoeba.core.placement import Placement
from amoeba.core.weights import LORA_NAMES, ExpertWeights
from amoeba.placements import all_placements
from amoeba.precision.formats import FP8_128, MXFP4, MXFP8, NVFP4
from amoeba.precision.quantised_experts import quantise_experts
from amoeba.proof.reference.experts import experts_backward, experts_forward
from amoeba.stream.placement import stream_from_memory
from fp8_stand_ins import stand_in
from selection import each_value_once
from small_layer import E, K, Layer

NAN, INF = math.nan, math.inf
ACTIVATIONS = {
    "silu": Activation(),
    "gpt_oss": Activation("silu", alpha=1.702, limit=0.7, up_shift=1.0, interleaved=True),
    "gelu": Activation("gelu", gated=False),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2", gated=False, limit=1.5),
    "relu": Activation("relu", gated=False),
}
TENSORS = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", "up_lora_a", "down_lora_b")
BACKENDS = ("eager", "grouped", "cpu")


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


@each_value_once()
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


# --- every placement and every precision ------------------------------------------------------------------------------


def _streamed(format):
    make = lambda weights: stream_from_memory(quantise_experts(weights, format))  # noqa: E731
    return Placement(f"streamed-{format.name}", "", make=make, tolerances={torch.float32: None})


RESIDENT = Placement("resident", "", make=lambda weights: weights, tolerances={torch.float32: None}, trains=True)
PLACES = [each for each in all_placements() if each.name != "ranks"]  # which takes several processes
PLACEMENTS = (RESIDENT, *PLACES, *map(_streamed, (FP8_128, MXFP8, MXFP4, NVFP4)))
# By the kind of weights that a placement makes. Triton's interpreter takes seconds for a pass.
SERVING = {
    "ExpertWeights": ("eager", "grouped", "cpu", "exact", "triton", "tasks"),
    "Fp8Experts": ("eager", "triton"),
    "QuantisedExperts": ("eager", "cpu", "cpu-fused", "exact", "triton"),
    "PackedExperts": ("cpu",),
    "StreamedExperts": ("streamed",),
}
INTERPRETED = ("triton", "tasks")
EVERY_TENSOR = ("x", "dy", "weight", "gate_up", "down", "gate_up_bias", "down_bias", *LORA_NAMES)
# A limit that rounding takes no number across: beyond it there is no gradient, not even NaN.
UNCLAMPED = {
    "silu": Activation(),
    "gpt_oss": Activation("silu", alpha=1.702, limit=30.0, up_shift=1.0, interleaved=True),
    "relu": Activation("relu", gated=False),
}
WITHOUT_CODES = ("resident", "cpu-bf16", "cpu-bf16-3-nodes", "streamed")


class NotServed(Exception):
    """Not a case: nobody computes this here."""


def assert_visible(placement, backend, name, value, activation, *, tokens=13, where=None, hidden=64, inner=64):
    """In output and gradients of placed experts, wherever the reference without any precision has it."""
    device, dtype = where or (torch.device("cpu"), None)
    if (reason := placement.why_not()) is not None:
        raise NotServed(reason)
    rank = 3 if name in LORA_NAMES else 0
    layer = Layer(activation, tokens=tokens, hidden=hidden, inner=inner, rank=rank)
    if (name != "dy" and name not in layer.tensors) or (rank and placement.trains and placement is not RESIDENT):
        raise NotServed("no such tensor")
    named = {n: tensor.detach().clone() for n, tensor in layer.tensors.items()}
    changed = layer.dy_TH if name == "dy" else named[name]
    changed.view(-1)[changed.numel() // 2] = value
    if dtype is not None:
        named = {n: tensor.to(device, torch.float32 if n == "weight" else dtype) for n, tensor in named.items()}
    trained = [n for n in named if n in ("x", "weight", *LORA_NAMES) or placement.trains]
    weights = placement.make(layer.weights({n: t.requires_grad_(n in trained) for n, t in named.items()}))
    named["x"] = named["x"].detach().to(weights.dtype).requires_grad_()
    routing = Routing(layer.expert_TK.to(device), named["weight"], trusted=True)
    lora = layer.lora(named)
    serving = {one.name: one for one in all_backends_of(type(weights), device)}
    assert set(serving) == set(SERVING[type(weights).__name__]), "every backend is one of the cases"
    if (reason := serving[backend].why_not(Request(named["x"], routing, weights, lora))) is not None:
        raise NotServed(reason)
    y_TH = experts(named["x"], routing, weights, lora=lora, backend=backend)
    gradients = torch.autograd.grad(y_TH, [named[n] for n in trained], layer.dy_TH.to(y_TH))
    found = {"output": y_TH.detach(), **dict(zip(trained, gradients, strict=True))}
    with torch.no_grad():
        decoded = experts(named["x"], routing, weights, lora=lora, backend=backend)

    exact = {n: tensor.detach().double().cpu() for n, tensor in named.items()}
    given = exact["x"], layer.expert_TK, exact["weight"], layer.weights(exact), layer.lora(exact)
    expected = experts_backward(layer.dy_TH.double(), *given) | {"output": experts_forward(*given)}
    lines = {what: (~tensor.isfinite()).flatten(1).any(1) for what, tensor in expected.items()}
    met_T = torch.stack([lines[what] for what in ("output", "x", "weight")]).any(0)
    met_E = torch.stack([line for what, line in lines.items() if what not in ("output", "x", "weight")]).any(0)
    for what, tensor in (*found.items(), ("output", decoded)):
        finite, strange = tensor.isfinite().cpu(), ~expected[what].isfinite()
        assert not (finite & strange).any(), f"{what}: finite where the reference is not"
        # relu and a clamp make a number of an infinity, and none of the NaN that stands for it in codes
        stays_infinite = placement.name in WITHOUT_CODES and name not in LORA_NAMES  # gate's and up's share a product
        if stays_infinite or activation == UNCLAMPED["silu"]:
            met = lines["output"] if what == "output" else met_T if what in ("x", "weight") else met_E
            assert (finite.flatten(1).all(1) | met).all(), f"{what}: not finite in other tokens or experts"


def _kind(placement):
    if placement.name.startswith("streamed"):
        return "StreamedExperts"
    if placement.name.startswith("cpu-"):
        return "PackedExperts"
    return "ExpertWeights" if placement is RESIDENT else "Fp8Experts" if placement.trains else "QuantisedExperts"


def _cases():
    """A few changes are for every run: each placement and backend with some tensors, each tensor with some of those.
    The others of a placement and backend are a case of their own."""
    several = ("fp8 eager", "fp8-all eager", "cpu-int8 cpu", "mxfp4-weights cpu", "nvfp4-weights eager")
    changes = list(itertools.product(EVERY_TENSOR, (1, 13), (NAN, INF, -INF), UNCLAMPED))
    for placement, backend in ((each, name) for each in PLACEMENTS for name in SERVING[_kind(each)]):
        interpreted, pair, often, others = backend in INTERPRETED, f"{placement.name} {backend}", [], []
        for change in changes:
            name, *plain = change
            quick = plain == [13, INF, "silu"] and (name in ("x", "dy", "weight") or pair in several)
            if interpreted:
                quick = plain == [13, INF, "silu"] and pair == "fp8-all triton" and name in ("x", "dy")
            if quick:
                often.append(change)
            elif not interpreted or plain == [13, INF, "silu"]:
                others.append(change)
        if often:
            yield pytest.param(placement, backend, often, id=pair)
        yield pytest.param(placement, backend, others, id=f"{pair}-others", marks=pytest.mark.thorough)


@pytest.mark.parametrize(("placement", "backend", "changes"), list(_cases()))
def test_every_tensor_of_every_placement(placement, backend, changes, monkeypatch):
    if _kind(placement) == "Fp8Experts" and backend == "triton":
        stand_in(monkeypatch)  # for Hopper's products alone; what quantises are our kernels
    reasons = []
    for name, tokens, value, activation in changes:
        cannot_hold_it = placement.name.startswith("cpu-int8") and name in ("gate_up", "down")
        refused = pytest.raises(ValueError, match="NaN or an infinity in expert") if cannot_hold_it else nullcontext()
        try:
            with refused:
                assert_visible(placement, backend, name, value, UNCLAMPED[activation], tokens=tokens)
        except NotServed as reason:
            reasons.append(str(reason))
    if len(reasons) == len(changes):
        pytest.skip(reasons[0])


@pytest.mark.gpu
@each_value_once("placement")
@pytest.mark.parametrize("inner", [192, 256])  # blocks that hold gates and ups, and blocks that do not
@pytest.mark.parametrize("activation", UNCLAMPED.values(), ids=UNCLAMPED.keys())
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("tokens", [1, 199])
@pytest.mark.parametrize("name", EVERY_TENSOR)
@pytest.mark.parametrize(
    "placement",
    [each for each in PLACEMENTS if _kind(each) not in ("PackedExperts", "StreamedExperts")],
    ids=lambda placement: placement.name,
)
def test_every_tensor_by_the_kernels_of_a_gpu(placement, name, tokens, value, activation, inner):
    """On Hopper these are the products in fp8, whose last step quantises what the next one reads."""
    where = torch.device("cuda"), torch.bfloat16
    try:
        assert_visible(
            placement, "triton", name, value, activation, tokens=tokens, where=where, hidden=256, inner=inner
        )
    except NotServed as reason:
        pytest.skip(str(reason))
