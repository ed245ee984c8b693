"""A router's score that is in the configuration alone: everything that computes one refuses it by name."""

from typing import Literal, get_args

import pytest
import torch

from amoeba.core import config as configurations
from amoeba.core.config import RouterConfig, ScoreFunction
from amoeba.kernels import expert_request
from amoeba.kernels import router as router_kernel
from amoeba.proof.reference.router import router_backward, router_forward
from amoeba.routing import fused_router, route
from amoeba.routing.fused_router import why_not_shape

LOGITS_TE = torch.zeros(2, 4, dtype=torch.float64)
REFUSED = "score: expected one that .* computes; got 'softplus'"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    monkeypatch.setattr(configurations, "ScoreFunction", Literal[(*get_args(ScoreFunction), "softplus")])
    return RouterConfig(num_experts=4, top_k=2, score="softplus")  # type: ignore[arg-type]


def test_routing_refuses_it(config: RouterConfig) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        route(LOGITS_TE, config)
    assert "softplus" in (why_not_shape(torch.float32, config) or "")
    assert "softplus" in (expert_request.why_not(1, config) or "")
    assert fused_router.SCORES == router_kernel.SCORES


def test_the_reference_refuses_it(config: RouterConfig) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        router_forward(LOGITS_TE, config)
    with pytest.raises(ValueError, match=REFUSED):
        router_backward(torch.ones(2, 2), LOGITS_TE, torch.tensor([[0, 1]] * 2), config)
