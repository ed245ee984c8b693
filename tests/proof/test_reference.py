"""The truth itself: `amoeba.proof.reference.experts` against finite differences, autograd and torch's own.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank
"""

import itertools
from typing import get_args

import pytest
import torch
from torch.nn import functional

from amoeba.core.config import Activation, ActivationKind
from amoeba.core.weights import ExpertWeights
from amoeba.proof.reference.experts import (
    LoraFactors,
    act,
    act_slope,
    activate,
    activate_backward,
    experts_backward,
    experts_forward,
    join_gate_up,
    shared_expert_backward,
    shared_expert_forward,
    split_gate_up,
)
from selection import each_value_once

KINDS = get_args(ActivationKind)
GPT_OSS = Activation("silu", alpha=1.702, limit=0.7, up_shift=1.0, interleaved=True)
ACTIVATIONS = [
    *(Activation(kind, gated=gated) for kind, gated in itertools.product(KINDS, (True, False))),
    *(Activation(kind, gated=False, limit=0.7) for kind in KINDS),
    Activation("silu", interleaved=True),
    Activation("gelu", limit=0.7, up_shift=-0.3),
    GPT_OSS,
]
T, K, E, H, I, R = 5, 3, 4, 3, 4, 2
SENTINELS = torch.tensor([[0, 2, 3], [2, 4, 0], [-1, 7, 3], [5, 5, 5], [3, 3, 0]])  # expert 1 gets nothing


def name_of(activation):
    words = (activation.kind, "gated" if activation.gated else "plain", activation.limit, activation.interleaved)
    return "-".join(str(word) for word in words)


def tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def problem(activation, bias, lora):
    """Named inputs, and the function of them (in their order) that experts_forward is."""
    width = activation.width(I)
    inputs = {
        "x": tensor(T, H, seed=1),
        "weight": tensor(T, K, seed=2).abs().detach().requires_grad_(),
        "gate_up": tensor(E, width, H, seed=3),
        "down": tensor(E, H, I, seed=4),
    }
    if bias:
        inputs |= {"gate_up_bias": tensor(E, width, seed=5), "down_bias": tensor(E, H, seed=6)}
    if lora:
        inputs |= {"up_lora_a": tensor(E, R, H, seed=7), "up_lora_b": tensor(E, I, R, seed=8)}
        inputs |= {"down_lora_a": tensor(E, R, I, seed=9), "down_lora_b": tensor(E, H, R, seed=10)}
        if activation.gated:
            inputs |= {"gate_lora_a": tensor(E, R, H, seed=11), "gate_lora_b": tensor(E, I, R, seed=12)}

    def arguments(tensors):
        named = dict(zip(inputs, tensors, strict=True))
        biases = named.get("gate_up_bias"), named.get("down_bias")
        weights = ExpertWeights(named["gate_up"], named["down"], *biases, activation)
        factors = {name: value for name, value in named.items() if "lora" in name}
        low_rank = LoraFactors(**factors, scaling=1.7) if lora else None
        return named["x"], SENTINELS, named["weight"], weights, low_rank

    return inputs, lambda *tensors: experts_forward(*arguments(tensors)), lambda: arguments(inputs.values())


EXPERTS = pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
LORA = pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])


@each_value_once("lora")
@EXPERTS
@pytest.mark.parametrize(("bias", "lora"), [(False, False), (True, True)], ids=["bare", "bias-lora"])
def test_gradients_of_the_forward_agree_with_finite_differences(activation, bias, lora):
    inputs, forward, _ = problem(activation, bias, lora)
    assert torch.autograd.gradcheck(forward, tuple(inputs.values()), fast_mode=True)


@pytest.mark.thorough  # a random direction of every gradient: above
def test_gradients_agree_with_finite_differences_element_by_element():
    inputs, forward, _ = problem(GPT_OSS, bias=True, lora=True)
    assert torch.autograd.gradcheck(forward, tuple(inputs.values()))


@each_value_once("lora")
@EXPERTS
@BIAS
@LORA
def test_written_out_backward_agrees_with_autograd(activation, bias, lora):
    inputs, forward, arguments = problem(activation, bias, lora)
    dy_TH = tensor(T, H, seed=20).detach()
    by_autograd = torch.autograd.grad(forward(*inputs.values()), list(inputs.values()), dy_TH)
    with torch.no_grad():
        by_hand = experts_backward(dy_TH, *arguments())
    assert set(by_hand) == set(inputs)
    for name, expected in zip(inputs, by_autograd, strict=True):
        error = (by_hand[name] - expected).norm() / expected.norm()
        assert error < 1e-12, f"{name}: {error:.1e}"


def test_one_factor_pair_alone_is_enough():
    """LoRA on a single projection, the others without factors."""
    for name, shape_a, shape_b in (
        ("gate", (E, R, H), (E, I, R)),
        ("up", (E, R, H), (E, I, R)),
        ("down", (E, R, I), (E, H, R)),
    ):
        inputs, _, arguments = problem(Activation(), False, False)
        factors = {f"{name}_lora_a": tensor(*shape_a, seed=7), f"{name}_lora_b": tensor(*shape_b, seed=8)}
        x, expert, weight, weights, _ = arguments()
        lora = LoraFactors(**factors)
        dy_TH = tensor(T, H, seed=20).detach()
        expected = torch.autograd.grad(
            experts_forward(x, expert, weight, weights, lora), [*inputs.values(), *factors.values()], dy_TH
        )
        with torch.no_grad():
            found = experts_backward(dy_TH, x, expert, weight, weights, lora)
        for key, gradient in zip([*inputs, *factors], expected, strict=True):
            torch.testing.assert_close(found[key], gradient, rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("activation", [Activation(), GPT_OSS, Activation("relu2", gated=False)], ids=name_of)
def test_lora_equals_weights_with_the_product_added(activation):
    inputs, forward, arguments = problem(activation, bias=True, lora=True)
    x, expert, weight, weights, lora = arguments()
    delta = {
        part: 1.7 * b @ a
        for part, a, b in (
            ("gate", lora.gate_lora_a, lora.gate_lora_b),
            ("up", lora.up_lora_a, lora.up_lora_b),
            ("down", lora.down_lora_a, lora.down_lora_b),
        )
        if a is not None
    }
    merged_up = weights.gate_up_EJH.transpose(1, 2)
    if activation.gated:
        gate, up = split_gate_up(merged_up, activation)
        merged_up = join_gate_up(gate + delta["gate"].transpose(1, 2), up + delta["up"].transpose(1, 2), activation)
    else:
        merged_up = merged_up + delta["up"].transpose(1, 2)
    merged = ExpertWeights(
        merged_up.transpose(1, 2),
        weights.down_EHI + delta["down"],
        weights.gate_up_bias_EJ,
        weights.down_bias_EH,
        activation,
    )
    torch.testing.assert_close(forward(*inputs.values()), experts_forward(x, expert, weight, merged))


def test_forward_is_the_definition_token_by_token():
    inputs, forward, arguments = problem(Activation(), bias=True, lora=False)
    x, expert, weight, weights, _ = arguments()
    expected = torch.zeros(T, H, dtype=torch.float64)
    for t, k in itertools.product(range(T), range(K)):
        e = int(expert[t, k])
        if 0 <= e < E:
            gate, up = (weights.gate_up_EJH[e] @ x[t] + weights.gate_up_bias_EJ[e]).chunk(2)
            y = weights.down_EHI[e] @ (functional.silu(gate) * up) + weights.down_bias_EH[e]
            expected[t] += weight[t, k] * y
    torch.testing.assert_close(forward(*inputs.values()), expected, rtol=1e-13, atol=1e-13)
    assert (expected[3] == 0).all(), "token 3 goes to nobody"


def test_slots_of_nobodys_and_idle_experts_get_exactly_zero():
    _, _, arguments = problem(Activation(), bias=True, lora=True)
    with torch.no_grad():
        grads = experts_backward(tensor(T, H).detach(), *arguments())
    outside = (SENTINELS < 0) | (SENTINELS >= E)
    assert (grads["weight"][outside] == 0).all()
    assert (grads["weight"][~outside] != 0).all()
    for name in set(grads) - {"x", "weight"}:
        assert (grads[name][1] == 0).all(), name
        assert (grads[name][2] != 0).any(), name


def test_no_tokens():
    weights = ExpertWeights(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    nothing = torch.zeros(0, K)
    assert experts_forward(torch.zeros(0, H), nothing.long(), nothing, weights).shape == (0, H)
    grads = experts_backward(torch.zeros(0, H), torch.zeros(0, H), nothing.long(), nothing, weights)
    assert grads["gate_up"].count_nonzero() == 0


def test_shared_expert_agrees_with_finite_differences_and_with_autograd():
    inputs = {
        "x": tensor(T, H, seed=1),
        "shared_gate": tensor(I, H, seed=2),
        "shared_up": tensor(I, H, seed=3),
        "shared_down": tensor(H, I, seed=4),
    }
    assert torch.autograd.gradcheck(shared_expert_forward, tuple(inputs.values()))
    dy_TH = tensor(T, H, seed=20).detach()
    y_TH = shared_expert_forward(*inputs.values())
    x, gate, up, down = inputs.values()
    torch.testing.assert_close(y_TH, (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    by_autograd = dict(zip(inputs, torch.autograd.grad(y_TH, list(inputs.values()), dy_TH), strict=True))
    with torch.no_grad():
        by_hand = shared_expert_backward(dy_TH, *inputs.values())
    assert set(by_hand) == set(by_autograd)
    for name, expected in by_autograd.items():
        assert (by_hand[name] - expected).norm() < 1e-12 * expected.norm(), name


TORCH_OWN = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda z: functional.relu(z).square(),
}


class TestActivations:
    z = torch.cat((torch.linspace(-9, 9, 361, dtype=torch.float64), torch.tensor([0.0]).double()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_value_and_slope_agree_with_torch(self, kind):
        z = self.z.clone().requires_grad_()
        expected = TORCH_OWN[kind](z)
        (slope,) = torch.autograd.grad(expected.sum(), z)
        torch.testing.assert_close(act(self.z, Activation(kind)), expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(act_slope(self.z, Activation(kind)), slope, rtol=1e-12, atol=1e-13)

    def test_alpha_is_the_slope_inside_silu(self):
        z = self.z.clone().requires_grad_()
        expected = z * torch.sigmoid(1.702 * z)
        (slope,) = torch.autograd.grad(expected.sum(), z)
        activation = Activation("silu", alpha=1.702)
        torch.testing.assert_close(act(self.z, activation), expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(act_slope(self.z, activation), slope, rtol=1e-12, atol=1e-13)

    def test_gpt_oss_is_its_published_formula(self):
        activation = Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)
        h = (4 * torch.randn(50, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
        # as in the modelling code of gpt-oss
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        torch.testing.assert_close(activate(h, activation), expected)
        da = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (dh,) = torch.autograd.grad(expected, h, da)
        torch.testing.assert_close(activate_backward(da, h.detach(), activation), dh)
        assert (h.abs() > 7).any(), "the clamp took part"

    def test_a_value_on_the_limit_passes_its_gradient_in_every_version_of_torch(self):
        limit = 0.5
        h = torch.tensor([[0.5, 0.5], [0.5, -0.5], [0.6, 0.6], [-0.6, -0.6]], dtype=torch.float64, requires_grad=True)
        for activation in (Activation("silu", limit=limit), Activation("silu", gated=False, limit=limit)):
            a = activate(h, activation)
            (dh,) = torch.autograd.grad(a.sum(), h)
            torch.testing.assert_close(activate_backward(torch.ones_like(a), h.detach(), activation), dh)

    def test_interleaving_is_a_reordering_and_joining_undoes_splitting(self):
        h = torch.arange(12.0).view(2, 6)
        interleaved, halves = Activation(interleaved=True), Activation()
        assert split_gate_up(h, interleaved)[1].tolist() == [[1, 3, 5], [7, 9, 11]]
        assert split_gate_up(h, halves)[1].tolist() == [[3, 4, 5], [9, 10, 11]]
        for activation in (interleaved, halves):
            assert torch.equal(join_gate_up(*split_gate_up(h, activation), activation), h)
