"""Mistakes that are easily made in the backward of routed experts, each written so that making it fails a test.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

(x of the *sender* under expert parallelism is in test_layout.py.)
"""

import functools
import itertools

import pytest
import torch
from torch.nn import functional

from amoeba import Routing
from amoeba.backends.custom_activation import experts_composed
from amoeba.proof.reference.experts import activate
from selection import each_value_once
from small_layer import H, K, Layer, T


def test_gate_gradient_is_counted_once_per_slot(backend):
    """A token that meets one expert in several slots: each slot's weight gets <dO, y>, not the sum over the slots."""
    layer = Layer(expert_TK=torch.tensor([[2, 2, 2], [1, 2, 1], [0, 1, 2]]), tokens=3)
    ds_TK = layer.gradients(backend)["weight"]
    for t, k in itertools.product(range(3), range(3)):
        torch.testing.assert_close(ds_TK[t, k], layer.dy_TH[t] @ layer.expert_output(t, k))


def test_routing_weight_of_zero_still_gets_its_gradient(backend):
    """Dividing the weighted output by the weight would give NaN here."""
    layer = Layer()
    silent = torch.zeros(T, K, requires_grad=True)
    found = layer.gradients(backend, weight=silent)
    torch.testing.assert_close(found["weight"], _contiguous(backend)["weight"])
    assert all((found[name] == 0).all() for name in found if name != "weight")


def test_routing_weight_gradient_with_a_function_after_the_expert():
    """ds is taken against what the routing weight multiplies: the finished output, not the projection before it."""
    layer = Layer()
    named = layer.tensors

    def finish(y_NH):
        return functional.rms_norm(y_NH, (H,)) + 0.3

    y_TH = experts_composed(
        named["x"],
        Routing(layer.expert_TK, named["weight"]),
        *layer.weights(named).tensors(),
        gate=lambda h: activate(h, layer.activation),
        finish=finish,
    )
    found = dict(zip(named, torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH), strict=True))
    for t, k in itertools.product(range(T), range(K)):
        finished = finish(layer.expert_output(t, k)[None])[0]
        torch.testing.assert_close(found["weight"][t, k], layer.dy_TH[t] @ finished, rtol=1e-4, atol=1e-5)

    expected_TH = torch.zeros(T, H)
    for t, k in itertools.product(range(T), range(K)):
        e = int(layer.expert_TK[t, k])
        h = named["gate_up"][e] @ named["x"][t] + named["gate_up_bias"][e]
        y = named["down"][e] @ activate(h, layer.activation) + named["down_bias"][e]
        expected_TH = expected_TH.index_add(0, torch.tensor([t]), named["weight"][t, k] * finish(y[None]))
    torch.testing.assert_close(y_TH, expected_TH, rtol=1e-4, atol=1e-5)
    by_autograd = torch.autograd.grad(expected_TH, list(named.values()), layer.dy_TH)
    for name, expected in zip(named, by_autograd, strict=True):
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("clamp", [1e-12, 0.0])
def test_function_after_the_expert_gets_nothing_from_rows_of_nobodys(clamp):
    """Such rows are zeros: a norm of them divides by zero, and what is added to them is not zero."""
    layer = Layer(bias=False, expert_TK=torch.tensor([[0, 9], [-1, 9], [1, 2]]), tokens=3)
    shift_H = torch.full((H,), 0.3, requires_grad=True)
    named = layer.tensors | {"shift": shift_H}
    y_TH = experts_composed(
        named["x"],
        Routing(layer.expert_TK, named["weight"]),
        *layer.weights(named).tensors(),
        gate=lambda h: activate(h, layer.activation),
        finish=lambda y: y / y.norm(dim=1, keepdim=True).clamp(min=clamp) + shift_H,
    )
    found = dict(zip(named, torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH), strict=True))
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
    assert (y_TH[1] == 0).all()
    assert found["weight"][0, 1] == found["weight"][1, 0] == found["weight"][1, 1] == 0
    s_TK, dy_TH = named["weight"].detach(), layer.dy_TH
    torch.testing.assert_close(found["shift"], s_TK[0, 0] * dy_TH[0] + s_TK[2].sum() * dy_TH[2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_foreign_activation_may_return_a_view(device):
    def gradients(gate):
        layer = Layer()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        named = {name: tensor.detach().to(device, dtype).requires_grad_() for name, tensor in layer.tensors.items()}
        routing = Routing(layer.expert_TK.to(device), named["weight"])
        y_TH = experts_composed(named["x"], routing, *layer.weights(named).tensors(), gate=gate)
        return torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH.to(device, dtype))

    for found, expected in zip(
        gradients(lambda h: h[:, 1::2]), gradients(lambda h: h[:, 1::2].contiguous()), strict=True
    ):
        assert torch.equal(found, expected)


def test_results_are_bitwise_equal_from_run_to_run(backend):
    if backend == "triton":
        pytest.skip("the interpreter runs one program after another; test_gpu.py compares two runs of the real kernels")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer = Layer(tokens=199)
        first = layer.gradients(backend)
        for _ in range(3):
            again = layer.gradients(backend)
            assert all(torch.equal(again[name], first[name]) for name in first)
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _contiguous(backend):
    return Layer().gradients(backend)


@each_value_once("backend")
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_weight_gradients_come_in_the_layout_of_the_weight(backend, name):
    layer = Layer()
    stored = layer.tensors[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    found = layer.gradients(backend, **{name: stored})[name]
    torch.testing.assert_close(found, _contiguous(backend)[name])
    assert found.stride() == stored.stride()


def test_frozen_tensors_get_no_gradient_and_the_others_the_same_as_ever(backend):
    expected = _contiguous(backend)
    names = [name for name in expected if name != "output"]
    alone = [(name,) for name in names]
    if backend == "triton":  # a pass takes half a second in the interpreter
        alone = [("gate_up", "down_bias", "x"), ("down", "gate_up_bias", "weight")]
    for frozen in (*alone, ("gate_up", "down", "gate_up_bias", "down_bias"), ("x", "weight")):
        layer = Layer()
        for name in frozen:
            layer.tensors[name].requires_grad_(False)
        layer.run(backend).backward(layer.dy_TH)
        for name in names:
            gradient = layer.tensors[name].grad
            if name in frozen:
                assert gradient is None, (name, frozen)
            else:
                assert torch.equal(gradient, expected[name]), (name, frozen)


def test_all_frozen_gives_an_output_without_history(backend):
    layer = Layer()
    for tensor in layer.tensors.values():
        tensor.requires_grad_(False)
    assert not layer.run(backend).requires_grad


def test_unused_output_gives_no_gradient(backend):
    layer = Layer()
    (layer.run(backend) * 0 + layer.tensors["x"]).sum().backward()
    assert (layer.tensors["gate_up"].grad == 0).all()
    assert torch.equal(layer.tensors["x"].grad, torch.ones(T, H))
