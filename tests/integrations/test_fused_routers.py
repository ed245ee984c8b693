"""Routers of transformers by our own: recognised by what they compute, with the same results and gradients."""

import pytest
import torch

from amoeba.integrations import fused_routers as module
from amoeba.integrations.fused_routers import fused_routers, recognise, rehearse
from tiny_models import build, experts_of, token_ids

KINDS = {
    "mixtral": ("softmax", True),
    "qwen3_moe": ("softmax", True),
    "olmoe": ("softmax", False),
    "gpt_oss": ("softmax", True),
}


def results(model):
    model.zero_grad()
    ids = token_ids()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sharpen(model):
    for name, parameter in model.named_parameters():
        if ".gate." in name or ".router." in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", KINDS)
def test_the_same_logits_and_gradients(family):
    model = build(family, **({"norm_topk_prob": True} if family == "qwen3_moe" else {})).train()
    sharpen(model)
    classes = [type(module) for module in model.modules()]
    logits, gradients = results(model)
    with fused_routers(model) as count:
        assert count == len(experts_of(model))
        router = next(module for module in model.modules() if hasattr(module, "found"))
        assert (router.found.config.score, router.found.config.renormalize) == KINDS[family]
        found, others = results(model)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-6)
    assert [type(module) for module in model.modules()] == classes


def test_routers_that_are_fused_already_stay_so():
    model = build("qwen3_moe")
    classes = [type(module) for module in model.modules()]
    with fused_routers(model) as count, fused_routers(model) as again:
        assert count > 0 and again == 0
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_routers_that_choose_otherwise_stay_as_they_are(family):
    with fused_routers(build(family)) as count:
        assert count == 0


@pytest.mark.filterwarnings("ignore")
def test_a_router_that_looks_alike_and_weighs_otherwise_is_not_taken_for_one():
    model = build("mixtral")
    sharpen(model)
    router = model.model.layers[0].mlp.gate
    assert recognise(router) is not None

    class Cooler(type(router)):
        def forward(self, hidden_states):
            logits, weights, experts = super().forward(hidden_states)
            return logits, weights.square(), experts

    router.__class__ = Cooler
    assert recognise(router) is None


@pytest.mark.filterwarnings("ignore")
def test_results_in_the_order_of_older_granite_routers_stay_in_it():
    """transformers 5.17: experts, weights, logits."""
    model = build("mixtral")
    sharpen(model)
    block = model.model.layers[0].mlp

    class IdsFirst(type(block.gate)):
        def forward(self, hidden_states):
            return super().forward(hidden_states)[::-1]

    block.gate.__class__ = IdsFirst
    x = torch.randn(5, block.gate.weight.shape[1])
    expected = block.gate(x)
    with fused_routers(block) as count:
        assert count == 1
        found = block.gate(x)
    assert torch.equal(found[0], expected[0]) and not found[0].is_floating_point()
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_concluded_from_a_router_of_zeros_or_one_that_draws_noise():
    model = build("mixtral")
    sharpen(model)
    router = model.model.layers[0].mlp.gate
    own = type(router)

    class Noisy(own):
        def forward(self, hidden_states):
            return super().forward(hidden_states + torch.randn_like(hidden_states) * self.training)

    router.__class__ = Noisy
    assert recognise(router) is None
    router.__class__ = own
    torch.nn.init.zeros_(router.weight)
    assert recognise(router) is None


def test_a_rehearsal_routes_as_recognising_does(monkeypatch):
    """On a GPU, the kernel of it is compiled ahead by this."""
    asked = []
    own = module.route
    monkeypatch.setattr(
        module,
        "route",
        lambda logits_TE, config: asked.append((logits_TE.shape, logits_TE.dtype, config)) or own(logits_TE, config),
    )
    model = build("qwen3_moe")
    with fused_routers(model) as count:
        recognised, router = asked[-1], next(each for each in model.modules() if hasattr(each, "found"))
        rehearse(router)
    assert count and asked.pop() == recognised and asked
