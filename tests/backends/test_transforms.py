"""Every way to differentiate, over every operator: right numbers from backward passes, a sentence from all others."""

import importlib.util

import pytest
import torch
from torch.autograd import forward_ad

from amoeba import MoE, MoEConfig, Routing, experts
from amoeba.backends.backend import Request
from amoeba.backends.custom_activation import experts_composed
from amoeba.backends.registry import backends_of
from amoeba.core.config import RouterConfig
from amoeba.core.weights import ExpertWeights
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.packed_experts import pack_experts
from amoeba.cpu.weights import load_packed
from amoeba.proof.reference.experts import activate
from amoeba.routing.fused_router import fused_route
from amoeba.routing.router import load_balance_loss
from selection import each_value_once
from small_layer import Layer, kernel_device


def through_experts(backend, **how):
    layer = Layer(**how).to(kernel_device() if backend == "triton" else "cpu")
    _skip_unless_served(backend, layer)
    weight = layer.tensors["weight"].detach()

    def function(x_TH):
        return layer.run(backend, x=x_TH, weight=weight)

    return function, layer.tensors["x"].detach()


def _skip_unless_served(name, layer):
    weights = layer.weights(layer.tensors)
    request = Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), weights)
    for backend in backends_of(ExpertWeights, weights.device):
        if backend.name == name and backend.why_not(request) is not None:
            pytest.skip(f"{name}: {backend.why_not(request)}")


def through_the_routing_weights(backend):
    layer = Layer()
    return lambda weight_TK: layer.run(backend, weight=weight_TK), layer.tensors["weight"].detach()


def through_packed():
    try:
        load_packed()
    except CoreUnavailable as reason:
        pytest.skip(str(reason))
    layer = Layer(bias=False, hidden=64, inner=64)
    packed = pack_experts(layer.weights(layer.tensors), kind="bf16", nodes=1, threads=1)
    routing = Routing(layer.expert_TK, layer.tensors["weight"].detach())
    return lambda x_TH: experts(x_TH, routing, packed), layer.tensors["x"].detach().to(packed.dtype)


def through_composed():
    layer = Layer()
    tensors = layer.tensors
    routing = Routing(layer.expert_TK, tensors["weight"].detach())
    weights = [tensors[name] for name in ("gate_up", "down", "gate_up_bias", "down_bias")]

    def function(x_TH):
        return experts_composed(x_TH, routing, *weights, gate=lambda h: activate(h, layer.activation))

    return function, tensors["x"].detach()


def through_the_fused_router():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    config = RouterConfig(12, 3)
    return lambda logits_TE: fused_route(logits_TE, config, None)[1], torch.randn(5, 12).to(kernel_device())


def through_a_layer():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(16, 8, RouterConfig(8, 2)))
    return layer, torch.randn(5, 16)


OPERATORS = {
    **{name: lambda name=name: through_experts(name) for name in ("eager", "grouped", "cpu")},
    "triton": lambda: through_experts("triton", tokens=3),
    "lora": lambda: through_experts("eager", rank=3),
    "routing weights": lambda: through_the_routing_weights("auto"),
    "decode": lambda: through_experts("cpu", tokens=1),
    "packed": through_packed,
    "composed": through_composed,
    "fused router": through_the_fused_router,
    "layer": through_a_layer,
}


def dual(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def total(function):
    return lambda x: function(x).float().square().sum()


REFUSED = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)), "forward-mode"),
    "jvp of a sum": (lambda f, x: torch.func.jvp(total(f), (x,), (torch.ones_like(x),)), "forward-mode"),
    "forward_ad": (dual, "forward-mode"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "not implemented"),
    "linearize": (lambda f, x: torch.func.linearize(f, x), "not implemented"),
    "vmap": (lambda f, x: torch.func.vmap(f)(torch.stack((x, x))), "vmap"),
    "vmap of grad": (lambda f, x: torch.func.vmap(torch.func.grad(total(f)))(torch.stack((x, x))), "vmap"),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), "vmap"),
    "hessian": (lambda f, x: torch.func.hessian(total(f))(x), "not implemented"),
    "grad of grad": (
        lambda f, x: torch.func.grad(lambda z: torch.func.grad(total(f))(z).float().square().sum())(x),
        "second derivatives",
    ),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


@each_value_once()
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("transform", REFUSED)
def test_what_has_no_rule_raises_our_own_sentence(transform, name):
    if name == "triton" and transform not in ("jvp", "vmap"):
        pytest.skip("slow in Triton's interpreter, and the same code as of the other backends")
    function, x = OPERATORS[name]()
    apply, reason = REFUSED[transform]
    with pytest.raises(NotImplementedError, match=rf"^amoeba.*: .*{reason}.*; got .* (Use|Flatten|Route) "):
        apply(function, x)


@every_operator
def test_grad_and_vjp_of_torch_func_equal_autograd(operator):
    function, x = operator()
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    (expected,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    found_y, pull_back = torch.func.vjp(function, x)
    assert torch.equal(found_y, y)
    assert torch.equal(pull_back(dy)[0], expected)
    (expected,) = torch.autograd.grad(total(function)(leaf), leaf)
    assert torch.equal(torch.func.grad(total(function))(x), expected)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_at_once_are_refused_or_equal_one_after_another(name):
    refused = name not in ("composed", "fused router")  # torch runs these again and again
    function, x = OPERATORS[name]()
    x = x.clone().requires_grad_()
    y = function(x)
    dy = torch.randn((2, *y.shape), generator=torch.Generator().manual_seed(0)).to(y)
    expected = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in dy])
    if refused:
        with pytest.raises(NotImplementedError, match=r"several gradients at once are not implemented; got .* Use "):
            torch.autograd.grad(y, x, dy, is_grads_batched=True)
    else:
        assert torch.equal(torch.autograd.grad(y, x, dy, is_grads_batched=True)[0], expected)


def test_grad_over_the_parameters_of_a_training_layer():
    """As functional training loops write it: statistics count once, the balance loss is differentiated too."""
    torch.manual_seed(0)
    layer, x = MoE(MoEConfig(16, 8, RouterConfig(8, 2), shared_intermediate_size=8)).train(), torch.randn(9, 16)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters):
        y, routing = torch.func.functional_call(layer, parameters, (x,), {"return_routing": True})
        return y.square().sum() + load_balance_loss(routing, 8)

    found = torch.func.grad(loss)(parameters)
    assert layer.statistics.load_E.sum() == 18
    y, routing = layer(x, return_routing=True)
    (y.square().sum() + load_balance_loss(routing, 8)).backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_a_tangent_that_never_meets_the_experts_is_not_refused():
    function, x = through_experts("eager")
    y, tangent = torch.func.jvp(lambda z: function(x).detach().sum() * z, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert y == 2 * tangent
    assert torch.func.vmap(lambda z: z * function(x).sum())(torch.arange(3.0)).shape == (3,)


@pytest.mark.thorough  # not compiled: test_what_has_no_rule_raises_our_own_sentence
@pytest.mark.parametrize("name", ["jvp", "forward_ad", "vmap"])
def test_the_same_sentences_come_out_of_compiled_code(name):
    function, x = through_experts("eager")
    transform, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"amoeba::eager: {reason}"):
        torch.compile(lambda z: transform(function, z), backend="aot_eager")(x)
    if name != "forward_ad":
        with pytest.raises(NotImplementedError, match=f"amoeba::eager: {reason}"):
            transform(torch.compile(function, backend="aot_eager"), x)


@pytest.mark.thorough
def test_compiled_code_may_hold_torch_func_grad():
    function, x = through_experts("eager")
    gradient = torch.func.grad(total(function))
    assert torch.equal(torch.compile(gradient, backend="aot_eager")(x), gradient(x))
