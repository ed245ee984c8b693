"""What a router makes of NaN and infinite logits: weights that are right, or NaN, for that token and for no other.

T tokens · K experts per token · E experts
"""

import importlib.util
import math

import pytest
import torch

from amoeba import MoE, MoEConfig
from amoeba.core.config import RouterConfig
from amoeba.proof.reference.router import router_backward, router_forward
from amoeba.routing.fused_router import fused_route
from amoeba.routing.router import route
from selection import each_value_once
from small_layer import kernel_device

NAN, INF = math.nan, math.inf
E, K = 12, 3
CONFIGS = {
    "softmax": RouterConfig(E, K),
    "softmax_not_renormalised": RouterConfig(E, K, renormalize=False, scaling_factor=2.5),
    "softmax_biased": RouterConfig(E, K, selection_bias=True),
    "softmax_groups": RouterConfig(E, K, n_group=4, topk_group=2),
    "softmax_groups_by_best": RouterConfig(E, K, n_group=4, topk_group=2, group_score="max"),
    "topk_softmax": RouterConfig(E, K, score="topk_softmax"),
    "topk_softmax_biased": RouterConfig(E, K, score="topk_softmax", selection_bias=True),
    "topk_softmax_groups": RouterConfig(E, K, score="topk_softmax", n_group=4, topk_group=2),
    "sigmoid": RouterConfig(E, K, score="sigmoid", scaling_factor=2.5),
    "sigmoid_not_renormalised": RouterConfig(E, K, score="sigmoid", renormalize=False),
    "deepseek_v3": RouterConfig(E, K, score="sigmoid", n_group=4, topk_group=2, selection_bias=True),
    "every_expert": RouterConfig(4, 4),
    "one_expert_each": RouterConfig(E, 1),
}
# Where they are put: the columns of a token's logits, and the number.
PLACES = {
    "nan first": ([0], NAN),
    "nan last": ([-1], NAN),
    "nan everywhere": (slice(None), NAN),
    "inf first": ([0], INF),
    "two inf": ([1, -1], INF),
    "inf everywhere": (slice(None), INF),
    "one masked": ([2], -INF),
    "all but one masked": (slice(1, None), -INF),
    "all masked": (slice(None), -INF),
}


def torch_path(logits_TE, config, bias_E):
    routing = route(logits_TE, config, bias_E=bias_E)
    return routing.expert_TK, routing.weight_TK, routing.scores_TE


def kernel_path(logits_TE, config, bias_E):
    there = kernel_device()
    found = fused_route(logits_TE.to(there), config, None if bias_E is None else bias_E.to(there))
    return tuple(tensor.to(logits_TE.device) for tensor in found)


PATHS = {"torch": torch_path}
if importlib.util.find_spec("triton") is not None:
    PATHS["kernel"] = kernel_path
TOKENS = 2 * len(PLACES)  # every other one of them strange
STRANGE = dict(zip(PLACES, range(1, TOKENS, 2), strict=True))
OTHERS = range(0, TOKENS, 2)
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
# numpy, in Triton's interpreter, is not used to infinities


def inputs(config):
    generator = torch.Generator().manual_seed(3)
    logits_TE = 2 * torch.randn(TOKENS, config.num_experts, generator=generator)
    bias_E = torch.randn(config.num_experts, generator=generator) if config.selection_bias else None
    return logits_TE, bias_E, torch.randn(TOKENS, config.top_k, generator=generator)


def run(path, logits_TE, config, bias_E, dweight_TK):
    logits_TE = logits_TE.clone().requires_grad_()
    expert_TK, weight_TK, _ = path(logits_TE, config, bias_E)
    return expert_TK, weight_TK.detach(), torch.autograd.grad(weight_TK, logits_TE, dweight_TK)[0]


def put(logits_TE):
    for name, (columns, value) in PLACES.items():
        logits_TE[STRANGE[name], columns] = value
    return logits_TE


@each_value_once("path")
@every_path
@every_config
def test_weights_and_gradient_are_the_reference_s_or_nan_where_it_is(config, path):
    logits_TE, bias_E, dweight_TK = inputs(config)
    clean = run(path, logits_TE, config, bias_E, dweight_TK)
    expert_TK, weight_TK, dlogits_TE = found = run(path, put(logits_TE), config, bias_E, dweight_TK)
    for ours, before in zip(found, clean, strict=True):
        assert torch.equal(ours[OTHERS], before[OTHERS])
    assert all(len(set(chosen)) == config.top_k for chosen in expert_TK.tolist())
    assert expert_TK.min() >= 0 and expert_TK.max() < config.num_experts

    _, expected_TK = router_forward(logits_TE.double(), config, bias_E)
    torch.testing.assert_close(weight_TK.double(), expected_TK, rtol=1e-5, atol=1e-7, equal_nan=True)
    undefined_T = expected_TK.isnan().any(dim=1)
    assert weight_TK[undefined_T].isnan().all()
    assert dlogits_TE[undefined_T].isnan().any(dim=1).all()
    expected_TE = router_backward(dweight_TK.double(), logits_TE.double(), expert_TK, config)
    defined_T = ~undefined_T
    torch.testing.assert_close(dlogits_TE[defined_T].double(), expected_TE[defined_T], rtol=1e-4, atol=1e-6)


@every_config
def test_which_numbers_leave_nothing_to_say(config):
    """So that the test above does not compare NaN with NaN alone."""
    logits_TE, bias_E, _ = inputs(config)
    _, weight_TK = router_forward(put(logits_TE).double(), config, bias_E)
    for name, (_, value) in PLACES.items():
        token = STRANGE[name]
        if value != value or (config.score != "sigmoid" and (value == INF or name == "all masked")):
            assert weight_TK[token].isnan().all(), name
        elif not (config.selection_bias and name == "all but one masked"):  # 0 / 0 where the bias chose the masked
            assert weight_TK[token].isfinite().all(), name


@every_path
@pytest.mark.parametrize("name", ["softmax_biased", "topk_softmax_biased", "deepseek_v3"])
def test_a_bias_of_nan_makes_every_weight_nan(name, path):
    config = CONFIGS[name]
    logits_TE, bias_E, _ = inputs(config)
    bias_E[5] = NAN
    assert path(logits_TE, config, bias_E)[1].isnan().all()


@every_path
def test_masked_experts_of_a_chosen_group_come_before_those_of_other_groups(path):
    config = RouterConfig(6, 2, score="topk_softmax", n_group=3, topk_group=1)
    logits_TE = torch.tensor([[-INF, -INF, 4.0, -INF, -INF, -INF], [-INF, -INF, 4.0, -INF, 5.0, 6.0]])
    expert_TK, weight_TK, _ = path(logits_TE, config, None)
    assert expert_TK.tolist() == [[2, 3], [5, 4]]
    assert weight_TK[0].tolist() == [1.0, 0.0]


def test_a_token_of_nan_is_not_dropped_by_capacity():
    config = RouterConfig(4, 2, capacity_factor=0.25)
    logits_TE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    logits_TE[7, 1] = NAN  # the last token, when every expert is full
    routing = route(logits_TE, config)
    expected = router_forward(logits_TE.double(), config)[1]
    assert routing.weight_TK[7].isnan().all() and (routing.expert_TK[7] < 4).all()
    assert routing.weight_TK[:7].isfinite().all() and expected[:7].isfinite().all()
    assert ((routing.expert_TK[:7] == 4) == (expected[:7] == 0)).all()


def test_noise_keeps_nan_and_infinities():
    config = RouterConfig(E, K, jitter=0.1)
    logits_TE, _, _ = inputs(config)
    logits_TE[2, 3], logits_TE[5, 0] = INF, NAN
    weight_TK = route(logits_TE, config, training=True).weight_TK
    assert weight_TK.isnan().any(dim=1).tolist() == [token in (2, 5) for token in range(TOKENS)]


@each_value_once()
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.num_experts == E], ids=str)
def test_a_token_of_nan_gives_nan_and_changes_no_other_token(config, value):
    torch.manual_seed(0)
    layer = MoE(MoEConfig(16, 8, config))
    x_TH = torch.randn(TOKENS, 16)
    clean = layer(x_TH).detach()
    x_TH[5, 3] = value  # a router's logits are then NaN or infinite
    y_TH = layer(x_TH)
    assert y_TH[5].isnan().all()
    assert torch.equal(y_TH[OTHERS], clean[OTHERS])
    y_TH.sum().backward()
    assert not layer.gate.weight.grad.isfinite().all()
    assert not layer.experts.down_proj.grad.isfinite().all()


def test_a_router_weight_of_nan_reaches_every_token():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(16, 8, RouterConfig(E, K)))
    with torch.no_grad():
        layer.gate.weight[3, 2] = NAN
    assert layer(torch.randn(TOKENS, 16)).isnan().all()
