"""A choice that is given: weights and gradients are those of the reference for these experts, whatever the router.

T tokens · K experts per token · E experts
"""

import pytest
import torch
from torch import Tensor

from amoeba import MoE, MoEConfig, RouterConfig, route
from amoeba.proof.reference import router as reference
from amoeba.routing import fused_router
from amoeba.routing.forced_choice import ForcedChoice, is_forced
from router_logits import random_logits

E, K, T = 12, 3, 17
ROUTERS = {
    "softmax": {},
    "softmax, not renormalised": {"renormalize": False},
    "sigmoid": {"score": "sigmoid", "scaling_factor": 2.5},
    "sigmoid, not renormalised": {"score": "sigmoid", "renormalize": False},
    "topk_softmax": {"score": "topk_softmax"},
    "groups": {"n_group": 4, "topk_group": 2, "group_score": "max"},
    "groups and a bias": {"score": "sigmoid", "n_group": 4, "topk_group": 2, "selection_bias": True},
    "K = 1": {"top_k": 1},
}


@pytest.fixture(params=ROUTERS)
def config(request) -> RouterConfig:
    return RouterConfig(**{"num_experts": E, "top_k": K, **ROUTERS[request.param]})


def bias_for(config: RouterConfig) -> Tensor | None:
    return random_logits(1, E, seed=5)[0].double() if config.selection_bias else None


def any_experts(config: RouterConfig, seed: int = 3) -> Tensor:
    return random_logits(T, E, seed).argsort(dim=1)[:, : config.top_k]


def test_weights_and_gradient_of_given_experts_are_those_of_the_reference(config: RouterConfig) -> None:
    logits_TE = random_logits(T, E, dtype=torch.float64).requires_grad_()
    given_TK, gradient_TK = any_experts(config), random_logits(T, config.top_k, seed=4).double()
    with ForcedChoice(given_TK.to(torch.int16), E) as forced:
        routing = route(logits_TE, config, bias_E=bias_for(config))
    assert forced.choices == 1 and torch.equal(routing.expert_TK, given_TK)
    each = zip(logits_TE, given_TK.tolist(), strict=True)
    expected_TK = torch.stack([reference._weigh(logits_E, chosen, config) for logits_E, chosen in each])
    torch.testing.assert_close(routing.weight_TK, expected_TK, rtol=1e-12, atol=1e-14)
    (found_TE,) = torch.autograd.grad(routing.weight_TK, logits_TE, gradient_TK)
    expected_TE = reference.router_backward(gradient_TK, logits_TE.detach(), given_TK, config)
    torch.testing.assert_close(found_TE, expected_TE, rtol=1e-10, atol=1e-14)


def test_the_routers_own_choice_given_back_changes_no_bit(config: RouterConfig) -> None:
    results = []
    own = route(random_logits(T, E), config, bias_E=bias_for(config)).expert_TK
    for given_TK in (torch.full_like(own, -1), own):  # -1: no record
        logits_TE = random_logits(T, E).requires_grad_()
        with ForcedChoice(given_TK, E):
            routing = route(logits_TE, config, bias_E=bias_for(config))
        routing.weight_TK.square().sum().backward()
        results.append((routing.expert_TK, routing.weight_TK, logits_TE.grad))
    logits_TE = random_logits(T, E).requires_grad_()
    live = route(logits_TE, config, bias_E=bias_for(config))
    live.weight_TK.square().sum().backward()
    for found in results:
        assert all(map(torch.equal, found, (live.expert_TK, live.weight_TK, logits_TE.grad)))


def test_rows_without_a_record_are_routed_live() -> None:
    config, logits_TE = RouterConfig(E, K), random_logits(T, E)
    given_TK, live = any_experts(config), route(logits_TE, config)
    given_TK[::2] = -1
    with ForcedChoice(given_TK, E):
        routing = route(logits_TE, config)
    assert torch.equal(routing.expert_TK[::2], live.expert_TK[::2])
    assert torch.equal(routing.expert_TK[1::2], given_TK[1::2])


def group_limited(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V2: weights are the values of a topk over scores that are 0 outside the best groups."""
    scores_TE = logits_TE.softmax(-1)
    best = scores_TE.view(-1, 4, 3).max(-1).values.topk(2, dim=-1, sorted=False)[1]
    allowed = torch.zeros(len(logits_TE), 4, dtype=torch.bool).scatter_(1, best, True)
    scores_TE = scores_TE.masked_fill(~allowed.repeat_interleave(3, dim=1), 0.0)
    return tuple(torch.topk(scores_TE, k=K, dim=-1))


def test_groups_of_the_given_experts_win_so_no_weight_is_masked_away() -> None:
    logits_TE, wrong = random_logits(T, E, dtype=torch.float64), torch.zeros((), dtype=torch.bool)
    given_TK = group_limited(-logits_TE)[1]
    with ForcedChoice(given_TK, E, wrong):
        weight_TK, expert_TK = group_limited(logits_TE)
    assert torch.equal(expert_TK, given_TK) and not wrong
    assert torch.equal(weight_TK, logits_TE.softmax(-1).gather(1, given_TK))


def test_experts_of_more_groups_than_a_router_takes_are_told() -> None:
    wrong = torch.zeros((), dtype=torch.bool)
    with ForcedChoice(torch.tensor([[0, 3, 6]] * T), E, wrong):
        group_limited(random_logits(T, E))
    assert wrong


def test_kernels_that_choose_by_themselves_are_told_of_a_forced_choice(monkeypatch) -> None:
    """And another mode, as `with torch.device(...)` is one, changes nothing."""
    logits_TE = random_logits(T, E)
    monkeypatch.setattr(fused_router, "_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class OnTheGpu:
        device, dtype, shape = torch.device("cuda"), torch.float32, (T, E)

    with torch.device("cpu"):
        assert not is_forced(logits_TE)
        assert fused_router.why_not(OnTheGpu(), RouterConfig(E, K)) is None
        with ForcedChoice(any_experts(RouterConfig(E, K)), E):
            assert is_forced(logits_TE)
            assert "amoeba.replay" in fused_router.why_not(OnTheGpu(), RouterConfig(E, K))
    assert not is_forced(logits_TE)


def test_other_uses_of_topk_are_left_alone() -> None:
    x = random_logits(T, E)
    with ForcedChoice(any_experts(RouterConfig(E, K)), E) as forced:
        for found, expected in (
            (x.topk(K + 1), torch.topk(x, K + 1)),
            (x.topk(K, dim=0), None),
            (x.topk(K, largest=False), None),
        ):
            assert type(found) is torch.return_types.topk, expected
    assert forced.choices == 0


def test_a_compiled_router_takes_the_given_experts() -> None:
    layer = MoE(MoEConfig(hidden_size=8, intermediate_size=4, router=RouterConfig(E, K)))
    given_TK, x_TH = any_experts(layer.config.router), random_logits(T, 8)

    def run(given_TK: Tensor) -> tuple[Tensor, Tensor]:
        with ForcedChoice(given_TK, E):
            routing = layer.gate(x_TH)
        return routing.expert_TK, routing.weight_TK

    expected = run(given_TK)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(given_TK)
    assert torch.equal(found[0], given_TK)
    torch.testing.assert_close(found[1], expected[1])
