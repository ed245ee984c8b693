"""A step of routing compiles, waits for nothing and can be captured; what is malformed is refused in words.

T tokens · K experts per token · E experts
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

torch.set_num_threads(1)

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
