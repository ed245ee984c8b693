"""The reference router against numbers worked by hand and autograd, and `route` against the reference.

T tokens · K experts per token · E experts
"""

import math
from dataclasses import replace

import pytest
import torch

from amoeba.core.config import RouterConfig
from amoeba.proof.reference.router import router_backward, router_forward
from amoeba.routing.router import route
from selection import each_value_once

torch.set_num_threads(1)

CONFIGS = {
    "softmax": RouterConfig(12, 3, renormalize=False),
    "softmax_renormalized": RouterConfig(12, 3, scaling_factor=1.7),
    "softmax_groups_max": RouterConfig(
        12, 3, renormalize=False, n_group=4, topk_group=2, group_score="max", scaling_factor=16.0
    ),
    "softmax_groups_bias": RouterConfig(12, 4, n_group=4, topk_group=2, selection_bias=True),
    "sigmoid": RouterConfig(12, 3, score="sigmoid", renormalize=False, scaling_factor=0.5),
    "sigmoid_renormalized": RouterConfig(12, 3, score="sigmoid"),
    "deepseek_v3": RouterConfig(
        12, 4, score="sigmoid", n_group=4, topk_group=2, selection_bias=True, scaling_factor=2.5
    ),
    "topk_softmax": RouterConfig(12, 3, score="topk_softmax"),
    "topk_softmax_groups_bias": RouterConfig(
        12, 4, score="topk_softmax", n_group=3, topk_group=2, selection_bias=True, scaling_factor=1.3
    ),
    "one_expert_each": RouterConfig(12, 1, score="sigmoid", renormalize=False),
    "every_expert": RouterConfig(12, 12, renormalize=False),
    "groups_of_one": RouterConfig(12, 3, n_group=12, topk_group=4),
    "capacity": RouterConfig(12, 3, capacity_factor=0.8),
    "capacity_sigmoid": RouterConfig(12, 3, score="sigmoid", renormalize=False, capacity_factor=1.0),
}
SIZES = [0, 1, 63]

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def make_inputs(config, num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens)
    logits_TE = 2 * torch.randn(num_tokens, config.num_experts, dtype=dtype, generator=generator)
    bias_E = torch.randn(config.num_experts, dtype=dtype, generator=generator)
    grad_TK = torch.randn(num_tokens, config.top_k, dtype=dtype, generator=generator)
    return logits_TE, bias_E if config.selection_bias else None, grad_TK


def choice_before_capacity(routing):
    return routing.expert_TK if routing.chosen_TK is None else routing.chosen_TK


def test_softmax_by_hand():
    logits_TE = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]], dtype=torch.float64)
    expert_TK, weight_TK = router_forward(logits_TE, RouterConfig(3, 2, renormalize=False))
    assert expert_TK.tolist() == [[2, 1]]
    torch.testing.assert_close(weight_TK, torch.tensor([[5 / 8, 2 / 8]], dtype=torch.float64))

    _, weight_TK = router_forward(logits_TE, RouterConfig(3, 2, scaling_factor=3.0))
    torch.testing.assert_close(weight_TK, torch.tensor([[15 / 7, 6 / 7]], dtype=torch.float64))


def test_groups_by_hand():
    # sigmoid keeps the order of logits; the best expert of all (id 5) sits in the group with the worst sum
    logits_TE = torch.tensor([[1.0, 0.9, 0.8, 0.7, -9.0, 1.2]], dtype=torch.float64)
    two_best = RouterConfig(6, 2, score="sigmoid", n_group=3, topk_group=1)
    best = RouterConfig(6, 2, score="sigmoid", n_group=3, topk_group=1, group_score="max")
    assert router_forward(logits_TE, two_best)[0].tolist() == [[0, 1]]
    assert router_forward(logits_TE, best)[0].tolist() == [[5, 4]]


def test_capacity_by_hand():
    logits_TE = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    # ceil(3 · 2 / 3) = 2 rows each; expert 1 is taken by token 2's first choice before any second choice
    expert_TK, weight_TK = router_forward(logits_TE, RouterConfig(3, 2, capacity_factor=1.0))
    assert expert_TK.tolist() == [[0, 1], [0, 3], [1, 2]]
    assert weight_TK[1, 1] == 0


@every_config
def test_written_backward_equals_autograd_of_the_reference(config):
    logits_TE, bias_E, grad_TK = make_inputs(config, 9)
    logits_TE.requires_grad_()
    expert_TK, weight_TK = router_forward(logits_TE, config, bias_E)
    (expected_TE,) = torch.autograd.grad(weight_TK, logits_TE, grad_TK)

    kept_TK = expert_TK < config.num_experts
    chosen_TK, _ = router_forward(logits_TE.detach(), replace(config, capacity_factor=None), bias_E)
    dlogits_TE = router_backward(grad_TK * kept_TK, logits_TE.detach(), chosen_TK, config)
    torch.testing.assert_close(dlogits_TE, expected_TE, rtol=1e-12, atol=1e-12)


@each_value_once()
@every_config
@pytest.mark.parametrize("num_tokens", SIZES)
def test_route_equals_the_reference(config, num_tokens):
    logits_TE, bias_E, _ = make_inputs(config, num_tokens)
    expert_TK, weight_TK = router_forward(logits_TE, config, bias_E)
    routing = route(logits_TE, config, bias_E=bias_E)
    assert torch.equal(routing.expert_TK, expert_TK)
    torch.testing.assert_close(routing.weight_TK, weight_TK, rtol=1e-12, atol=1e-12)


@each_value_once()
@every_config
@pytest.mark.parametrize("num_tokens", SIZES)
def test_gradient_of_route_equals_the_written_backward(config, num_tokens):
    logits_TE, bias_E, grad_TK = make_inputs(config, num_tokens)
    logits_TE.requires_grad_()
    routing = route(logits_TE, config, bias_E=bias_E)
    (dlogits_TE,) = torch.autograd.grad(routing.weight_TK, logits_TE, grad_TK)

    kept_TK = routing.expert_TK < config.num_experts
    expected_TE = router_backward(grad_TK * kept_TK, logits_TE.detach(), choice_before_capacity(routing), config)
    torch.testing.assert_close(dlogits_TE, expected_TE, rtol=1e-12, atol=1e-12)


@every_config
def test_gradcheck_of_route(config):
    logits_TE, bias_E, _ = make_inputs(config, 3)

    def weights(logits_TE):
        return route(logits_TE, config, bias_E=bias_E).weight_TK

    assert torch.autograd.gradcheck(weights, logits_TE.requires_grad_())


def test_unnormalised_jacobian_used_after_renormalising_is_wrong():
    renormalized, plain = RouterConfig(12, 3), RouterConfig(12, 3, renormalize=False)
    logits_TE, _, grad_TK = make_inputs(renormalized, 9)
    logits_TE.requires_grad_()
    routing = route(logits_TE, renormalized)
    (dlogits_TE,) = torch.autograd.grad(routing.weight_TK, logits_TE, grad_TK)

    arguments = grad_TK, logits_TE.detach(), routing.expert_TK
    torch.testing.assert_close(dlogits_TE, router_backward(*arguments, renormalized), rtol=1e-12, atol=1e-12)
    wrong_TE = router_backward(*arguments, plain)
    assert ((dlogits_TE - wrong_TE).norm() / dlogits_TE.norm()) > 0.1

    not_chosen_TE = torch.ones_like(dlogits_TE, dtype=torch.bool).scatter(1, routing.expert_TK, False)
    assert (dlogits_TE[not_chosen_TE] == 0).all()
    assert (wrong_TE[not_chosen_TE] != 0).all()


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_router_gradient_is_exactly_zero_with_one_expert_and_renormalisation(score, dtype):
    config = RouterConfig(12, 1, score=score, scaling_factor=2.5)
    logits_TE, _, grad_TK = make_inputs(config, 63, dtype)
    logits_TE.requires_grad_()
    routing = route(logits_TE, config)
    (dlogits_TE,) = torch.autograd.grad(routing.weight_TK, logits_TE, grad_TK.to(routing.weight_TK.dtype))
    assert (dlogits_TE == 0).all()
    assert (routing.weight_TK == 2.5).all()


def test_top_k_is_chosen_with_the_bias_and_weighted_without_it():
    config = RouterConfig(4, 2, score="sigmoid", renormalize=False, selection_bias=True)
    logits_TE = torch.tensor([[2.0, 1.0, -1.0, -2.0]], dtype=torch.float64)
    bias_E = torch.tensor([-5.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    for expert_TK, weight_TK in (
        router_forward(logits_TE, config, bias_E),
        (lambda routing: (routing.expert_TK, routing.weight_TK))(route(logits_TE, config, bias_E=bias_E)),
    ):
        assert expert_TK.tolist() == [[3, 1]]
        torch.testing.assert_close(weight_TK, logits_TE[:, [3, 1]].sigmoid())
