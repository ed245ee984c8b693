"""A Hugging Face model whose experts train in fp8: its own parameters, plain Trainer's way, plain checkpoints."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import amoeba
from amoeba.decoding.decoder import why_not
from amoeba.integrations.experts_module import experts_modules, weights_of
from amoeba.precision.recipes import Fp8Experts
from selection import quick
from tiny_models import build

IDS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@quick(lambda family, precision: (family == "gpt_oss") == (precision == "fp8"))
@pytest.mark.parametrize("precision", ["fp8", "fp8-ste"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # gpt-oss: biases, (E, in, out), gate and up in turns
def test_every_parameter_gets_a_gradient_near_that_of_the_unchanged_model(family: str, precision: str) -> None:
    model = build(family)
    model.set_experts_implementation("amoeba")
    names = list(model.state_dict())
    plain_loss, plain = loss_and_gradients(model)
    amoeba.set_precision(model, precision)
    assert all(isinstance(weights_of(module), Fp8Experts) for module in experts_modules(model).values())
    loss, gradients = loss_and_gradients(model)
    assert list(model.state_dict()) == names and gradients.keys() == plain.keys()
    assert loss != plain_loss and torch.isclose(loss, plain_loss, rtol=5e-3)
    for name, gradient in gradients.items():
        if "experts" in name:
            error = (gradient - plain[name]).norm() / plain[name].norm()
            assert 1e-3 < error < 0.2, (name, float(error))
    assert why_not(model.eval()) is None  # on a GPU that has no kernels for it the backend would say what waits
    copied, _ = loss_and_gradients(copy.deepcopy(model))
    assert torch.equal(copied, loss)
    amoeba.set_precision(model, "bf16")
    assert torch.equal(loss_and_gradients(model)[0], plain_loss)


def test_a_model_that_trained_so_is_saved_as_any_other(tmp_path: Path) -> None:
    model = build("qwen3_moe").train()
    amoeba.set_precision(model, "fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.gradient_checkpointing_enable()
    losses = []
    for _ in range(8):
        loss, _ = loss_and_gradients(model)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager", dtype=torch.float32)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"precision: expected one of bf16, fp8, .*, fp8-all, mxfp8, nvfp4, auto"):
        amoeba.set_precision(build("qwen3_moe"), "fp4")
    with pytest.raises(ValueError, match="a model with experts that transformers hands over; got Linear"):
        amoeba.set_precision(nn.Linear(2, 2), "fp8")
    model = build("qwen3_moe")
    amoeba.place_experts(model, "fp8-weights")
    with pytest.raises(ValueError, match="one of bf16, w8a8, auto for quantised experts"):
        amoeba.set_precision(model, "fp8")
