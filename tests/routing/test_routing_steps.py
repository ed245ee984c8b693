"""Auxiliary losses, the update of the selection bias and the statistics of a router.

T tokens · K experts per token · E experts
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amoeba.core.config import RouterConfig
from amoeba.routing import statistics as routing_statistics
from amoeba.routing.router import (
    Routing,
    load_balance_loss,
    route,
    sequence_balance_loss,
    update_selection_bias_,
    z_loss,
)
from amoeba.routing.statistics import RoutingStatistics
from router_logits import random_logits
from selection import quick

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- losses


@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_loss_and_its_gradient_equal_transformers(masked):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    ours_TE = random_logits(63, 8).requires_grad_()
    theirs_TE = ours_TE.detach().clone().requires_grad_()
    mask_T = (torch.arange(63) % 3 != 0).long() if masked else None
    loss = load_balance_loss(route(ours_TE, RouterConfig(8, 2)), 8, attention_mask=mask_T)
    # a batch of one sequence: transformers 5.8 wants the mask as a tokenizer makes it
    expected = mixtral.load_balancing_loss_func((theirs_TE,), 8, 2, None if mask_T is None else mask_T[None])
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


def test_load_balance_loss_counts_dropped_slots_for_their_expert():
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


def test_statistics_of_a_checkpointed_compiled_block_count_once():
    block = Block(use_reentrant=False)
    inner = torch.compile(block.inner, backend="aot_eager", fullgraph=True)
    checkpoint(inner, torch.randn(63, 5, requires_grad=True), use_reentrant=False).sum().backward()
    assert block.statistics.steps.item() == 1
    assert block.statistics.load_E.sum().item() == 126


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_are_not_counted_twice_in_the_backward_thread_of_a_gpu(use_reentrant):
    block = Block(use_reentrant).cuda()
    block(torch.randn(63, 5, device="cuda", requires_grad=True)).backward()
    assert block.statistics.steps.item() == 1


# A step of routing compiles, waits for nothing and can be captured; what is malformed is refused in words.


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


# ---- compile and device


def full_step(logits_TE, bias_E, statistics, training):
    """Everything that runs in a step, on the most demanding config."""
    routing = route(logits_TE, FULL_CONFIG, bias_E=bias_E, training=training)
    statistics.record(routing)
    loss = load_balance_loss(routing, 12) + z_loss(routing.logits_TE) + sequence_balance_loss(routing, 12, 7)
    return routing, loss + routing.weight_TK.square().sum()


# tracing alone tells of graph breaks; the backward, and mutation made functional, need AOT autograd
@pytest.mark.thorough  # in every run, a whole compiled layer: test_layer_training.py
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


# ---- Routing and errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_values_accepts_zeros_infinities_and_no_tokens(dtype):
    for weight_TK in (torch.zeros(1, 1), torch.full((1, 1), math.inf), torch.zeros(0, 3), -torch.zeros(2, 2)):
        Routing(weight_TK.long().zero_(), weight_TK.to(dtype)).check_values()


EXPERT_TK, WEIGHT_TK = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)


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
