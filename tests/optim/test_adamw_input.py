"""What AdamW cannot work with is refused in words."""

from __future__ import annotations

import pytest
import torch
from optimizers import parameters, train
from torch.nn import Parameter

from amoeba.optim import AdamW


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": torch.tensor(1.0)}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"states": "float16"}, "states"),
        ({"states": torch.bfloat16}, "states"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, name):
    of = parameters(torch.float32)
    with pytest.raises(ValueError, match=f"{name}: expected .* got "):
        AdamW(of, **options)
    optimizer = AdamW(of[:1])
    with pytest.raises(ValueError, match=f"{name}: expected .* got "):
        optimizer.add_param_group({"params": of[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (Parameter(torch.ones(3, dtype=torch.float16)), "expected bfloat16 or float32; got torch.float16"),
        (Parameter(torch.ones(3, dtype=torch.float64)), "expected bfloat16 or float32; got torch.float64"),
        (Parameter(torch.ones(3, 8)[:, :4]), "dense memory"),
        (Parameter(torch.ones(3, 1).expand(3, 4)), "dense memory"),
    ],
)
def test_parameters_it_cannot_train_are_refused(parameter, said):
    with pytest.raises(ValueError, match=said):
        AdamW([parameter])


def test_gradients_it_cannot_take_are_refused():
    (parameter,) = parameters(torch.float32, shapes=[(4, 3)])
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ValueError, match=r"gradient: expected a dense one .* got sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="gradient: expected a dense one"):
        optimizer.note_clipping(1.0)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_to_clip_to_is_a_number_of_at_least_0(max_norm):
    of = parameters(torch.float32)
    train(optimizer := AdamW(of), of, steps=1)
    with pytest.raises(ValueError, match="max_norm: expected"):
        optimizer.note_clipping(max_norm)


def test_clipping_without_gradients_is_refused():
    with pytest.raises(ValueError, match="gradients: expected at least one"):
        AdamW(parameters(torch.float32)).note_clipping(1.0)


def test_a_state_of_other_parameters_is_refused_and_says_so():
    of = parameters(torch.float32)
    train(first := AdamW(of[:1]), of[:1], steps=1)
    with pytest.raises(ValueError, match=r"exp_avg: expected a state of AdamW of shape \(3, 347\); got \(2, 512\)"):
        AdamW(of[1:2]).load_state_dict(first.state_dict())
    momentum = torch.optim.SGD(of[:1], lr=1e-3, momentum=0.9)
    train(momentum, of[:1], steps=1)
    with pytest.raises(ValueError, match="expected a state of AdamW"):
        AdamW(of[:1]).load_state_dict(momentum.state_dict())


def test_a_state_on_another_device_than_its_parameter_is_refused():
    (parameter,) = parameters(torch.float32, shapes=[(4,)])
    train(optimizer := AdamW([parameter]), [parameter], steps=1)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="state of the optimizer: expected it on cpu"):
        optimizer.step()
