"""Counts, entropies and gradients of routers, against torch."""

import pytest
import torch

pytest.importorskip("triton")

from amoeba.kernels.router_balance import add_entropy, balance_gradient, count_experts
from amoeba.routing.balance import ENTROPY_UNIT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("experts", [1, 8, 63])
def test_counts_of_ids_inside(experts):
    torch.manual_seed(0)
    ids = torch.randint(-2, experts + 2, (2500,), device=DEVICE)
    before = torch.arange(experts + 1, device=DEVICE)
    counts = before.clone()
    count_experts(ids, counts)
    inside = torch.where((ids >= 0) & (ids < experts), ids, experts)
    assert torch.equal(counts, before + torch.bincount(inside, minlength=experts + 1))
    count_experts(ids[:0], counts)


@pytest.mark.parametrize("shape", [(1, 1), (7, 8), (199, 63), (65, 256)])
def test_entropy_and_gradient(shape):
    torch.manual_seed(0)
    logits = (torch.randn(shape, device=DEVICE) * 3).requires_grad_()
    count_E = torch.randint(0, 50, shape[1:], device=DEVICE)
    totals = torch.tensor([3, 5], device=DEVICE)
    add_entropy(logits.detach(), totals, ENTROPY_UNIT)
    assert totals[0] == 3 + shape[0]
    probability = logits.double().softmax(-1)
    entropy = -(probability * probability.log()).sum()
    assert abs((totals[1].item() - 5) * ENTROPY_UNIT - entropy.item()) < 2e-5 * max(entropy.item(), 1)
    loss = 0.3 * (count_E * probability).sum() + 0.2 * logits.double().logsumexp(-1).square().sum()
    (expected,) = torch.autograd.grad(loss, logits)
    found = balance_gradient(logits.detach(), count_E, 0.3, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
