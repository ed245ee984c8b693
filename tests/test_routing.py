"""What `amoeba.routing` promises: choice, weights, capacity, losses, balance update, statistics, errors.

T tokens · K experts per token · E experts · H hidden · G groups of experts
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amoeba import routing_statistics
from amoeba.config import RouterConfig
from amoeba.routing import (
    Routing,
    load_balance_loss,
    route,
    sequence_balance_loss,
    update_selection_bias_,
    z_loss,
)
from amoeba.routing_statistics import RoutingStatistics
from selection import quick

torch.set_num_threads(1)

fast_property = settings(max_examples=60, deadline=None)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FULL_CONFIG = RouterConfig(
    12,
    4,
    score="sigmoid",
    n_group=4,
    topk_group=2,
    selection_bias=True,
    scaling_factor=2.5,
    jitter=0.1,
    capacity_factor=1.0,
)


def random_logits(num_tokens, num_experts, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)


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
def test_weights_are_positive_and_sum_to_the_scaling_factor_when_renormalised(case):
    config, routing = case.config, case.route()
    assert routing.weight_TK.dtype == torch.float32
    assert (routing.weight_TK > 0).all()
    if config.renormalize or config.score == "topk_softmax":
        total_T = torch.full((routing.num_tokens,), config.scaling_factor)
        torch.testing.assert_close(routing.weight_TK.sum(dim=1), total_T)
    routing.check_values()


def test_excluded_groups_are_never_chosen_when_all_biased_scores_are_negative():
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
def test_first_choices_are_kept_before_second_choices_and_earlier_tokens_before_later(case):
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
        logits_TE, weight_TK, expert_TK = router(hidden_states())
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
    assert_same_routing(deepseek.DeepseekV2TopkRouter(config), ours)


# ---- losses


@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_loss_and_its_gradient_equal_transformers(masked):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    ours_TE = random_logits(63, 8).requires_grad_()
    theirs_TE = ours_TE.detach().clone().requires_grad_()
    mask_T = (torch.arange(63) % 3 != 0).long() if masked else None
    loss = load_balance_loss(route(ours_TE, RouterConfig(8, 2)), 8, attention_mask=mask_T)
    expected = mixtral.load_balancing_loss_func((theirs_TE,), 8, 2, mask_T)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours_TE.grad, theirs_TE.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_balanced_routing_has_load_balance_loss_top_k_and_sequence_loss_one(score):
    logits_TE = 0.01 * torch.stack([torch.arange(6.0).roll(shift) for shift in range(6)]).double()
    routing = route(logits_TE, RouterConfig(6, 2, score=score))
    assert load_balance_loss(routing, 6).item() == pytest.approx(2.0, rel=1e-12)
    assert sequence_balance_loss(routing, 6, 6).item() == pytest.approx(1.0, rel=1e-12)


def test_load_balance_loss_counts_dropped_slots_for_the_expert_they_were_meant_for():
    logits_TE = random_logits(63, 8)
    dropless = load_balance_loss(route(logits_TE, RouterConfig(8, 2)), 8)
    routing = route(logits_TE, RouterConfig(8, 2, capacity_factor=0.5))
    assert (routing.expert_TK == 8).any()
    torch.testing.assert_close(load_balance_loss(routing, 8), dropless)


def test_z_loss_is_the_mean_squared_logsumexp():
    logits_TE = random_logits(63, 8, dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(x) for x in line)) ** 2 for line in logits_TE.tolist()) / 63
    assert z_loss(logits_TE).item() == pytest.approx(expected, rel=1e-12)
    assert z_loss(logits_TE.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_sequence_balance_loss_equals_the_equations(score):
    num_experts, top_k, length = 8, 2, 21
    logits_TE = random_logits(63, num_experts, dtype=torch.float64)
    routing = route(logits_TE, RouterConfig(num_experts, top_k, score=score))
    total = 0.0
    for start in range(0, 63, length):
        tokens = range(start, start + length)
        for expert in range(num_experts):
            rows = sum(expert in routing.expert_TK[token].tolist() for token in tokens)
            shares = [routing.scores_TE[token, expert] / routing.scores_TE[token].sum() for token in tokens]
            total += num_experts / (top_k * length) * rows * (sum(shares) / length).item()
    loss = sequence_balance_loss(routing, num_experts, length)
    assert loss.item() == pytest.approx(total / 3, rel=1e-12)


def test_losses_of_no_tokens_are_zero_and_have_gradients():
    logits_TE = random_logits(0, 8).requires_grad_()
    routing = route(logits_TE, RouterConfig(8, 2, capacity_factor=1.0))
    loss = load_balance_loss(routing, 8) + sequence_balance_loss(routing, 8, 5) + z_loss(logits_TE)
    loss = loss + load_balance_loss(routing, 8, attention_mask=torch.ones(0))
    assert loss.item() == 0
    loss.backward()
    assert logits_TE.grad.shape == (0, 8)


def test_load_balance_loss_of_masked_tokens_only_is_zero():
    routing = route(random_logits(5, 8), RouterConfig(8, 2))
    assert load_balance_loss(routing, 8, attention_mask=torch.zeros(5)).item() == 0


# ---- balance update


def test_selection_bias_moves_by_rate_towards_balance():
    bias_E = torch.tensor([0.5, 0.5, 0.5, 0.5], requires_grad=True)
    returned = update_selection_bias_(bias_E, torch.tensor([4, 10, 0, 2]), 0.25)
    assert returned is bias_E
    assert bias_E.tolist() == [0.5, 0.25, 0.75, 0.75]


def test_selection_bias_sees_a_difference_of_one_row_in_large_counts():
    large = 2**40
    bias_E = update_selection_bias_(torch.zeros(2), torch.tensor([large, large + 1]), 1.0)
    assert bias_E.tolist() == [1.0, -1.0]


def test_selection_bias_updates_balance_a_skewed_router():
    config = RouterConfig(8, 2, score="sigmoid", selection_bias=True)
    skew_E = torch.linspace(-1, 1, 8)
    bias_E, statistics = torch.zeros(8), RoutingStatistics(8)
    violations = []
    for step in range(150):
        routing = route(random_logits(64, 8, seed=step) + skew_E, config, bias_E=bias_E)
        statistics.reset()
        statistics.record(routing)
        violations.append(statistics.summary()["max_violation"].item())
        update_selection_bias_(bias_E, statistics.load_E, 0.01)
    assert sum(violations[-20:]) / 20 < 0.5 * violations[0]


# ---- statistics


def test_statistics_summarise_what_was_recorded():
    statistics = RoutingStatistics(4)
    expert_TK = torch.tensor([[0, 1], [0, 4], [0, -1]])  # 4: dropped; -1: another's
    scores_TE = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2]])
    statistics.record(Routing(expert_TK, torch.ones(3, 2), scores_TE=scores_TE))
    statistics.record(Routing(expert_TK.int(), torch.ones(3, 2)))  # no scores: no entropy
    summary = statistics.summary()
    assert summary["load_E"].tolist() == [6, 2, 0, 0]
    assert summary["load_E"].dtype == torch.int64
    assert summary["dead_experts"].item() == 2
    assert summary["max_violation"].item() == pytest.approx(6 / 2 - 1)
    assert summary["drop_rate"].item() == pytest.approx(2 / 12)
    assert summary["entropy"].item() == pytest.approx((math.log(2) + 0 + math.log(4)) / 3)
    assert (statistics.tokens.item(), statistics.slots.item(), statistics.steps.item()) == (6, 12, 2)


def test_statistics_start_and_reset_at_nothing():
    statistics = RoutingStatistics(4)
    empty = {name: value.tolist() for name, value in statistics.summary().items() if name != "entropy"}
    assert empty == {"load_E": [0, 0, 0, 0], "max_violation": 0.0, "dead_experts": 4, "drop_rate": 0.0}
    assert statistics.summary()["entropy"].isnan()
    statistics.record(route(random_logits(63, 4), RouterConfig(4, 2)))
    assert statistics.load_E.sum() == 126
    statistics.reset()
    assert all((buffer == 0).all() for buffer in statistics.buffers())
    statistics.record(route(random_logits(0, 4), RouterConfig(4, 2)))
    assert statistics.summary()["max_violation"] == 0
    assert statistics.state_dict() == {}


def test_statistics_keep_their_precision_when_the_model_is_cast():
    statistics = torch.nn.Sequential(RoutingStatistics(4)).to(torch.bfloat16)[0]
    assert statistics.entropy_sum.dtype == torch.float32
    assert statistics.load_E.dtype == torch.int64


class Block(torch.nn.Module):
    """A router under activation checkpointing, with its statistics and noise."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.gate = torch.nn.Linear(5, 8)
        self.statistics = RoutingStatistics(8)

    def inner(self, x_TH):
        routing = route(self.gate(x_TH), RouterConfig(8, 2, renormalize=False, jitter=0.1), training=True)
        self.statistics.record(routing)
        return routing.weight_TK.sin().square()

    def forward(self, x_TH):
        return checkpoint(self.inner, x_TH, use_reentrant=self.use_reentrant).sum()


@quick(lambda use_reentrant, compiled: not (use_reentrant and compiled))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_statistics_are_not_counted_twice_under_checkpointing(use_reentrant, compiled):
    block = Block(use_reentrant)
    step = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    for _ in range(2):
        step(torch.randn(63, 5, requires_grad=True)).backward()
    assert block.gate.weight.grad.abs().sum() > 0
    assert block.statistics.steps.item() == 2
    assert block.statistics.tokens.item() == 126
    assert block.statistics.load_E.sum().item() == 252


def test_statistics_are_not_counted_twice_when_a_compiled_block_is_checkpointed():
    block = Block(use_reentrant=False)
    inner = torch.compile(block.inner, backend="aot_eager", fullgraph=True)
    checkpoint(inner, torch.randn(63, 5, requires_grad=True), use_reentrant=False).sum().backward()
    assert block.statistics.steps.item() == 1
    assert block.statistics.load_E.sum().item() == 126


# ---- compile and device


def full_step(logits_TE, bias_E, statistics, training):
    """Everything that runs in a step, on the most demanding config."""
    routing = route(logits_TE, FULL_CONFIG, bias_E=bias_E, training=training)
    statistics.record(routing)
    loss = load_balance_loss(routing, 12) + z_loss(routing.logits_TE) + sequence_balance_loss(routing, 12, 7)
    return routing, loss + routing.weight_TK.square().sum()


# tracing alone tells of graph breaks; the backward, and mutation made functional, need AOT autograd
@quick(lambda training: not training)
@pytest.mark.parametrize(("training", "backend"), [(True, "aot_eager"), (False, "eager")])
def test_compiles_without_graph_breaks_and_gives_the_same_numbers(training, backend):
    bias_E, eager_statistics, statistics = torch.zeros(12), RoutingStatistics(12), RoutingStatistics(12)
    compiled = torch.compile(full_step, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens in (63, 21):
        logits_TE = random_logits(num_tokens, 12).requires_grad_()
        torch.manual_seed(num_tokens)
        routing, loss = compiled(logits_TE, bias_E, statistics, training)
        torch.manual_seed(num_tokens)
        expected_routing, expected_loss = full_step(logits_TE, bias_E, eager_statistics, training)
        assert isinstance(routing, Routing)
        assert torch.equal(routing.expert_TK, expected_routing.expert_TK)
        assert torch.equal(routing.logits_TE, logits_TE) == (not training)  # noise
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(torch.autograd.grad(loss, logits_TE), torch.autograd.grad(expected_loss, logits_TE))
    assert torch.equal(statistics.load_E, eager_statistics.load_E)


class RefuseHostReads(TorchDispatchMode):
    """Fails on every operator whose result, or its shape, must come back to the host."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in self.refused), f"{name} waits for the device"
        if "index.Tensor" in name or "index_put" in name:
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask waits"
        return func(*args, **(kwargs or {}))


def test_nothing_in_a_step_reads_back_from_the_device(monkeypatch):
    # a dispatch mode does not look into operators: run the body of record_routing as it stands
    monkeypatch.setattr(routing_statistics, "record_routing", routing_statistics.record_routing._init_fn)
    statistics, mask_T = RoutingStatistics(12), torch.ones(63)
    logits_TE = random_logits(63, 12).requires_grad_()
    with RefuseHostReads():
        routing, loss = full_step(logits_TE, torch.zeros(12), statistics, True)
        (loss + load_balance_loss(routing, 12, attention_mask=mask_T)).backward()
        update_selection_bias_(torch.zeros(12), statistics.load_E, 0.001)
        statistics.summary()
        statistics.reset()
        with pytest.raises(AssertionError, match="waits for the device"):
            routing.check_values()


@pytest.mark.gpu
@on_gpu
def test_a_step_is_captured_in_a_cuda_graph_and_replays_bitwise():
    device = torch.device("cuda")
    statistics, bias_E = RoutingStatistics(12, device=device), torch.zeros(12, device=device)
    logits_TE = random_logits(63, 12).to(device).requires_grad_()

    def step():
        routing, loss = full_step(logits_TE, bias_E, statistics, False)
        return routing.expert_TK, routing.weight_TK, *torch.autograd.grad(loss, logits_TE)

    side = torch.cuda.Stream()  # autograd remembers the stream of the first use, and the default one cannot be captured
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    statistics.reset()
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, expected, strict=True))
    assert statistics.steps.item() == 3


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_are_not_counted_twice_in_the_backward_thread_of_a_gpu(use_reentrant):
    block = Block(use_reentrant).cuda()
    block(torch.randn(63, 5, device="cuda", requires_grad=True)).backward()
    assert block.statistics.steps.item() == 1


# ---- Routing and errors


def test_routing_says_its_sizes():
    routing = Routing(torch.zeros(63, 3, dtype=torch.int32), torch.zeros(63, 3, dtype=torch.bfloat16))
    assert (routing.num_tokens, routing.top_k, routing.trusted) == (63, 3, False)
    assert route(random_logits(1, 4), RouterConfig(4, 2)).trusted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_values_accepts_zeros_infinities_and_no_tokens(dtype):
    for weight_TK in (torch.zeros(1, 1), torch.full((1, 1), math.inf), torch.zeros(0, 3), -torch.zeros(2, 2)):
        Routing(weight_TK.long().zero_(), weight_TK.to(dtype)).check_values()


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_check_values_names_the_first_bad_weight(bad):
    weight_TK = torch.ones(3, 2)
    weight_TK[1, 1] = weight_TK[2, 0] = bad
    message = rf"weight_TK: expected no NaN and no negative .* 2 bad of 6, .* token 1, slot 1: {bad}.* Look for NaN"
    with pytest.raises(ValueError, match=message):
        Routing(torch.zeros(3, 2, dtype=torch.int64), weight_TK.requires_grad_()).check_values()


EXPERT_TK, WEIGHT_TK = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
BAD_ROUTINGS = {
    "expert_dimensions": (EXPERT_TK[0], WEIGHT_TK, r"expert_TK: .*two dimensions.*\(2,\)\. Flatten batch"),
    "weight_shape": (
        EXPERT_TK,
        WEIGHT_TK[:, :1],
        r"weight_TK: .*\(3, 2\); got shape \(3, 1\)\. Pass one weight",
    ),
    "expert_dtype": (EXPERT_TK.float(), WEIGHT_TK, r"expert_TK: .*int64; got torch.float32\. Convert"),
    "expert_bool": (EXPERT_TK.bool(), WEIGHT_TK, r"expert_TK: .*int64; got torch.bool\. Convert"),
    "weight_dtype": (EXPERT_TK, WEIGHT_TK.int(), r"weight_TK: .*floating.*got torch.int32\. Convert"),
    "devices": (EXPERT_TK, WEIGHT_TK.to("meta"), r"weight_TK: .*device.*cpu; got meta\. Move"),
}


@pytest.mark.parametrize(("expert_TK", "weight_TK", "message"), BAD_ROUTINGS.values(), ids=BAD_ROUTINGS.keys())
def test_a_malformed_routing_says_what_to_do(expert_TK, weight_TK, message):
    with pytest.raises(ValueError, match=message):
        Routing(expert_TK, weight_TK)


PLAIN, BIASED = RouterConfig(8, 2), RouterConfig(8, 2, selection_bias=True)
ROUTING = route(torch.zeros(6, 8), PLAIN)
BAD_CALLS = {
    "logits_width": (
        lambda: route(torch.zeros(3, 7), PLAIN),
        r"logits_TE: .*num_experts=8\); got shape \(3, 7\)\. Flatten",
    ),
    "logits_dimensions": (
        lambda: route(torch.zeros(2, 3, 8), PLAIN),
        r"logits_TE: .*got shape \(2, 3, 8\)\. Flatten the tokens",
    ),
    "logits_dtype": (
        lambda: route(torch.zeros(3, 8, dtype=torch.int64), PLAIN),
        r"logits_TE: .*floating dtype; got torch.int64\. Convert",
    ),
    "bias_missing": (
        lambda: route(torch.zeros(3, 8), BIASED),
        r"bias_E: .*selection_bias=True; got None\. Pass bias_E=torch.zeros",
    ),
    "bias_unwanted": (
        lambda: route(torch.zeros(3, 8), PLAIN, bias_E=torch.zeros(8)),
        r"bias_E: expected None.*\(8,\)\. Set selection_bias=True",
    ),
    "bias_shape": (
        lambda: route(torch.zeros(3, 8), BIASED, bias_E=torch.zeros(1)),
        r"bias_E: expected shape \(8,\); got shape \(1,\)\. Pass one number",
    ),
    "loss_without_scores": (
        lambda: load_balance_loss(Routing(EXPERT_TK, WEIGHT_TK), 8),
        r"scores_TE: .*\(3, 8\).*got None\. Make the Routing with",
    ),
    "loss_experts": (
        lambda: sequence_balance_loss(ROUTING, 9, 3),
        r"scores_TE: .*\(6, 9\).*got shape \(6, 8\)\. .*pass its num_experts",
    ),
    "mask_shape": (
        lambda: load_balance_loss(ROUTING, 8, attention_mask=torch.ones(2, 3)),
        r"attention_mask: .*\(6,\).*got shape \(2, 3\)\. Flatten it",
    ),
    "sequence_length": (
        lambda: sequence_balance_loss(ROUTING, 8, 4),
        r"sequence_length: .*divisor .*\(6\); got 4\. Pad every sequence",
    ),
    "sequence_length_zero": (
        lambda: sequence_balance_loss(ROUTING, 8, 0),
        r"sequence_length: .*positive divisor.*got 0\. Pad every sequence",
    ),
    "statistics_experts": (
        lambda: RoutingStatistics(9).record(ROUTING),
        r"scores_TE: .*\(6, 9\).*got shape \(6, 8\)\.",
    ),
    "half_precision_bias": (
        lambda: update_selection_bias_(torch.zeros(8).bfloat16(), torch.zeros(8), 0.1),
        r"bias_E: .*float32.*got torch.bfloat16\. Keep the bias out of",
    ),
    "load_shape": (
        lambda: update_selection_bias_(torch.zeros(8), torch.zeros(4), 0.1),
        r"load_E: .*\(8,\); got shape \(4,\)\. Pass the load of all experts",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
