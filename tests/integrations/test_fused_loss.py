"""Models of transformers with the loss from their hidden states: the same loss and gradients, or a reason."""

import pytest
import torch

from amoeba.integrations.fused_loss import fused_loss
from selection import each_value_once
from tiny_models import build, needs, token_ids


def loss_and_gradients(model, **arguments):
    model.zero_grad()
    ids = token_ids()
    labels = ids.clone()
    labels[0, :3] = -100
    loss = model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@each_value_once()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("arguments", [{}, {"num_items_in_batch": torch.tensor(7)}])
def test_same_loss_and_gradients(family, arguments):
    torch.manual_seed(0)
    model = build(family).train()
    expected, gradients = loss_and_gradients(model, **arguments)
    with fused_loss(model) as reason:
        assert reason is None
        found, others = loss_and_gradients(model, **arguments)
        assert model(input_ids=token_ids(), use_cache=False).logits.shape[-1] == model.config.hidden_size
    assert found == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)
    assert model(input_ids=token_ids(), use_cache=False).logits.shape[-1] == model.config.vocab_size
    assert loss_and_gradients(model, **arguments)[0] == expected


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_scales_its_logits_keeps_its_own_loss():
    model = build(needs("granitemoe"), logits_scaling=3.0).train()
    expected, _ = loss_and_gradients(model)
    with fused_loss(model) as reason:
        assert reason == "something comes between its output head and its loss"
        assert loss_and_gradients(model)[0] == expected


@pytest.mark.filterwarnings("ignore")
def test_heads_and_losses_of_another_kind_are_left_alone():
    model = build("qwen3_moe")
    model.loss_function = lambda *args, **kwargs: torch.zeros(())
    with fused_loss(model) as reason:
        assert reason == "it has a loss of its own"
    model = build("qwen3_moe")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with fused_loss(model) as reason:
        assert reason == "its output head is a Sequential, not a plain Linear"


@pytest.mark.filterwarnings("ignore")
def test_trying_it_computes_experts_as_training_does():
    model = build("qwen3_moe")
    seen = []
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.register_forward_hook(lambda module, args, output: seen.append((len(args[0]), output.requires_grad)))
    with fused_loss(model) as reason:
        assert reason is None
    # not as a few tokens are decoded, nor for an odd number of them: for either Triton compiles kernels of their own
    assert seen and all(tokens % 16 == 0 and with_gradient for tokens, with_gradient in seen)
    assert all(parameter.grad is None for parameter in model.parameters())
