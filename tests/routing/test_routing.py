"""What `amoeba.routing.router` promises of its choice: experts, weights, capacity, and the same as transformers.

T tokens · K experts per token · E experts · H hidden · G groups of experts
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.core.config import RouterConfig
from amoeba.routing.router import route
from amoeba.routing.statistics import RoutingStatistics
from router_logits import random_logits

torch.set_num_threads(1)

fast_property = settings(max_examples=60, deadline=None)


@dataclass
class Case:
    config: RouterConfig
    logits_TE: torch.Tensor
    bias_E: torch.Tensor | None

    def route(self):
        return route(self.logits_TE, self.config, bias_E=self.bias_E)


@st.composite
def cases(draw, capacity=False):
    n_group = draw(st.integers(1, 5))
    size = draw(st.integers(1, 4))
    topk_group = draw(st.integers(1, n_group))
    config = RouterConfig(
        num_experts=n_group * size,
        top_k=draw(st.integers(1, topk_group * size)),
        score=draw(st.sampled_from(["softmax", "sigmoid", "topk_softmax"])),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        n_group=n_group,
        topk_group=topk_group,
        group_score=draw(st.sampled_from(["top2_sum", "max"])),
        selection_bias=draw(st.booleans()),
        capacity_factor=draw(st.floats(0.05, 2.0)) if capacity else None,
    )
    seed = draw(st.integers(0, 2**31))
    logits_TE = random_logits(draw(st.sampled_from([0, 1, 2, 17, 63])), config.num_experts, seed)
    # far below zero: a mask of 0 instead of -inf would let excluded groups win
    bias_E = random_logits(1, config.num_experts, seed + 1)[0] - 10 if config.selection_bias else None
    return Case(config, logits_TE, bias_E)


def rows_per_expert(expert_TK, num_experts):
    return torch.bincount(expert_TK.flatten(), minlength=num_experts)[:num_experts]


# ---- choice and weights


@fast_property
@given(cases())
def test_chosen_experts_are_distinct_and_in_range(case):
    expert_TK = case.route().expert_TK
    assert expert_TK.dtype == torch.int64
    assert ((expert_TK >= 0) & (expert_TK < case.config.num_experts)).all()
    assert all(len(set(line)) == case.config.top_k for line in expert_TK.tolist())


@fast_property
@given(cases())
def test_chosen_experts_lie_in_the_best_groups(case):
    config, routing = case.config, case.route()
    choice_TE = routing.logits_TE if config.score == "topk_softmax" else routing.scores_TE
    choice_TE = choice_TE if case.bias_E is None else choice_TE + case.bias_E
    size = config.num_experts // config.n_group
    descending = choice_TE.unflatten(1, (config.n_group, size)).sort(dim=-1, descending=True).values
    rank_TG = descending[..., : 1 if config.group_score == "max" else 2].sum(dim=-1)
    for rank_G, chosen_K in zip(rank_TG, routing.expert_TK, strict=True):
        used = {int(expert) // size for expert in chosen_K}
        assert len(used) <= config.topk_group
        threshold = rank_G.sort(descending=True).values[config.topk_group - 1]
        assert all(rank_G[group] >= threshold for group in used)


@fast_property
@given(cases())
def test_renormalised_weights_are_positive_and_sum_to_the_scaling_factor(case):
    config, routing = case.config, case.route()
    assert routing.weight_TK.dtype == torch.float32
    assert (routing.weight_TK > 0).all()
    if config.renormalize or config.score == "topk_softmax":
        total_T = torch.full((routing.num_tokens,), config.scaling_factor)
        torch.testing.assert_close(routing.weight_TK.sum(dim=1), total_T)
    routing.check_values()


def test_excluded_groups_are_never_chosen_though_all_scores_are_negative():
    config = RouterConfig(8, 4, score="sigmoid", n_group=4, topk_group=2, selection_bias=True)
    bias_E = torch.tensor([-3.0, -3, -2, -2, -9, -9, -9, -9])
    routing = route(random_logits(63, 8), config, bias_E=bias_E)
    assert (routing.expert_TK < 4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_routed_in_fp32(dtype):
    logits_TE = random_logits(63, 12).to(dtype)
    routing, expected = route(logits_TE, RouterConfig(12, 3)), route(logits_TE.float(), RouterConfig(12, 3))
    assert routing.weight_TK.dtype == routing.scores_TE.dtype == torch.float32
    assert torch.equal(routing.weight_TK, expected.weight_TK)


def test_renormalised_weights_survive_scores_that_underflow():
    # the bias picks experts whose probability is 0 in fp32, where p / Σ p would be 0 / 0
    config = RouterConfig(4, 2, selection_bias=True)
    logits_TE = torch.tensor([[300.0, 0.0, 0.0, 0.0]])
    routing = route(logits_TE, config, bias_E=torch.tensor([0.0, 0.0, 9.0, 9.0]))
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[0.5, 0.5]]))


def test_jitter_is_multiplicative_bounded_and_for_training_only():
    config = RouterConfig(8, 2, jitter=0.1)
    logits_TE = random_logits(63, 8)
    assert torch.equal(route(logits_TE, config).logits_TE, logits_TE)

    noisy_TE = route(logits_TE, config, training=True, generator=torch.Generator().manual_seed(1)).logits_TE
    factor_TE = noisy_TE / logits_TE
    assert factor_TE.min() >= 0.9 - 1e-6
    assert factor_TE.max() <= 1.1 + 1e-6
    assert factor_TE.std() > 0.04
    again_TE = route(logits_TE, config, training=True, generator=torch.Generator().manual_seed(1)).logits_TE
    assert torch.equal(noisy_TE, again_TE)


# ---- capacity


@fast_property
@given(cases(capacity=True))
def test_capacity_is_never_exceeded_and_drops_no_more_than_it_must(case):
    config, routing = case.config, case.route()
    num_slots = routing.num_tokens * config.top_k
    capacity = math.ceil(config.capacity_factor * num_slots / config.num_experts)
    wanted_E = rows_per_expert(routing.chosen_TK, config.num_experts)
    kept_E = rows_per_expert(routing.expert_TK, config.num_experts)
    assert torch.equal(kept_E, wanted_E.clamp(max=capacity))

    dropped_TK = routing.expert_TK == config.num_experts
    assert (routing.weight_TK[dropped_TK] == 0).all()
    assert torch.equal(routing.expert_TK[~dropped_TK], routing.chosen_TK[~dropped_TK])

    statistics = RoutingStatistics(config.num_experts)
    statistics.record(routing)
    expected = (wanted_E - kept_E).sum().item() / max(num_slots, 1)
    assert statistics.summary()["drop_rate"].item() == pytest.approx(expected)


@fast_property
@given(cases(capacity=True))
def test_capacity_keeps_first_choices_and_earlier_tokens(case):
    routing = case.route()
    for expert in range(case.config.num_experts):
        # priority order: slot first, then token
        kept_in_order = (routing.expert_TK == expert).t()[(routing.chosen_TK == expert).t()].tolist()
        assert kept_in_order == sorted(kept_in_order, reverse=True)


def test_dropped_slots_get_gradient_zero():
    config = RouterConfig(4, 2, renormalize=False, score="sigmoid", capacity_factor=0.5)
    logits_TE = random_logits(63, 4).requires_grad_()
    routing = route(logits_TE, config)
    routing.weight_TK.sum().backward()
    kept_TE = torch.zeros(63, 5, dtype=torch.bool).scatter(1, routing.expert_TK, True)[:, :4]
    assert torch.equal(logits_TE.grad != 0, kept_TE)


# ---- parity with transformers


def hidden_states(num_tokens=63, hidden=16):
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(5))


def assert_same_routing(router, config, bias_E=None):
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for tensor in router.parameters():
            tensor.normal_(generator=generator)
        told = router(hidden_states())
    if not isinstance(told, tuple):  # deepseek_v3's in transformers 5.8
        pytest.skip(f"{type(router).__name__} gives logits alone in this transformers")
    logits_TE, weight_TK, expert_TK = told
    routing = route(logits_TE, config, bias_E=bias_E)
    order_TK, expected_order_TK = routing.expert_TK.argsort(dim=1), expert_TK.argsort(dim=1)
    assert torch.equal(routing.expert_TK.gather(1, order_TK), expert_TK.gather(1, expected_order_TK))
    torch.testing.assert_close(
        routing.weight_TK.gather(1, order_TK), weight_TK.gather(1, expected_order_TK), rtol=2e-6, atol=1e-7
    )


def test_equals_mixtral():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)
    assert_same_routing(mixtral.MixtralTopKRouter(config), RouterConfig(8, 2))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_equals_qwen3_moe(norm_topk_prob):
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen.Qwen3MoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    assert_same_routing(qwen.Qwen3MoeTopKRouter(config), RouterConfig(12, 3, renormalize=norm_topk_prob))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_equals_olmoe(norm_topk_prob):
    olmoe = pytest.importorskip("transformers.models.olmoe.modeling_olmoe")
    config = olmoe.OlmoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    assert_same_routing(olmoe.OlmoeTopKRouter(config), RouterConfig(12, 3, renormalize=norm_topk_prob))


def test_equals_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(hidden_size=16, num_local_experts=12, num_experts_per_tok=4)
    assert_same_routing(gpt_oss.GptOssTopKRouter(config), RouterConfig(12, 4, score="topk_softmax"))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("offset", [0.0, -4.0])
def test_equals_deepseek_v3(norm_topk_prob, offset):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    router = deepseek.DeepseekV3TopkRouter(config)
    bias_E = offset + 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(7))
    router.e_score_correction_bias.copy_(bias_E)
    ours = RouterConfig(
        16,
        4,
        score="sigmoid",
        renormalize=norm_topk_prob,
        n_group=4,
        topk_group=2,
        selection_bias=True,
        scaling_factor=2.5,
    )
    assert_same_routing(router, ours, bias_E)


def test_equals_deepseek_v3_where_the_floor_of_the_denominator_matters():
    config = RouterConfig(4, 2, score="sigmoid")
    logits_TE = torch.tensor([[-45.0, -46.0, -60.0, -70.0]], dtype=torch.float64)
    score_TK = logits_TE[:, :2].sigmoid()
    expected_TK = score_TK / (score_TK.sum() + 1e-20)
    assert 0.1 < expected_TK.sum() < 0.9
    torch.testing.assert_close(route(logits_TE, config).weight_TK, expected_TK, rtol=1e-12, atol=0)


def test_equals_deepseek_v2_groups():
    deepseek = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = deepseek.DeepseekV2Config(
        hidden_size=16,
        num_attention_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    ours = RouterConfig(16, 4, renormalize=False, n_group=4, topk_group=2, group_score="max", scaling_factor=16.0)
    if not hasattr(deepseek, "DeepseekV2TopkRouter"):
        pytest.skip("this transformers has no router of its own for deepseek_v2")
    assert_same_routing(deepseek.DeepseekV2TopkRouter(config), ours)
