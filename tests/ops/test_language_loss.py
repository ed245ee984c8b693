"""The loss from hidden states, part by part, against cross-entropy of all logits."""

import weakref

import pytest
import torch

from amoeba.ops import language_loss
from amoeba.ops.exact import ExactOperators
from amoeba.ops.language_loss import linear_cross_entropy
from selection import each_value_once

T, H, V = 33, 16, 101
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@each_value_once()
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows_at_once", [1, 7, 33, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_every_gradient(dtype, rows_at_once, biased, monkeypatch):
    monkeypatch.setattr(language_loss, "PART_BYTES", V * dtype.itemsize * rows_at_once)
    torch.manual_seed(0)
    inputs = [torch.randn(T, H), torch.randn(V, H) / 4, *([torch.randn(V)] if biased else [])]
    inputs = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    labels = torch.randint(0, V, (T,))
    labels[3] = labels[-1] = -100
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), labels, reduction="sum")
    wanted = torch.autograd.grad(expected * 0.5, exact)
    hidden, weight, *bias = inputs
    loss = linear_cross_entropy(hidden, weight, labels, *bias)
    found = torch.autograd.grad(loss * 0.5, inputs)
    assert abs(loss.item() - expected.item()) / expected.item() < ROUNDING[dtype]
    for gradient, right in zip(found, wanted, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - right).norm() / right.norm() < ROUNDING[dtype]


def test_frozen_parts_get_no_gradient_and_no_memory():
    hidden, weight = torch.randn(5, H, requires_grad=True), torch.randn(V, H)
    loss = linear_cross_entropy(hidden, weight, torch.arange(5))
    loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, torch.arange(5)), loss)


def test_in_exact_mode_a_token_has_the_same_loss_alone_and_among_others():
    hidden, weight = torch.randn(7, 67), torch.randn(53, 67)
    with ExactOperators():
        for token in range(7):
            label = torch.full((7,), -1)
            label[token] = 3
            among = linear_cross_entropy(hidden, weight, label)
            assert torch.equal(among, linear_cross_entropy(hidden[token : token + 1], weight, label[token : token + 1]))


def test_the_logits_of_one_part_are_gone_before_the_next_are_made(monkeypatch):
    monkeypatch.setattr(language_loss, "PART_BYTES", 4 * 50 * 4)  # four tokens
    linear, made = torch.nn.functional.linear, []

    def watched(*arguments):
        assert all(logits() is None for logits in made)
        found = linear(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    hidden_TH, weight_VH = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    linear_cross_entropy(hidden_TH, weight_VH, torch.arange(10))
    assert len(made) == 3


def test_autocast_computes_in_its_dtype():
    hidden, weight = torch.randn(5, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, torch.arange(5))
    rounded = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), torch.arange(5))
    assert torch.equal(loss, rounded) and loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == torch.float32


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"hidden_TH and weight_VH: expected shapes \(T, H\) and \(V, H\)"):
        linear_cross_entropy(torch.randn(2, 5, H), torch.randn(V, H), torch.zeros(10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"label_T: expected shape \(5,\)"):
        linear_cross_entropy(torch.randn(5, H), torch.randn(V, H), torch.zeros(4, dtype=torch.int64))
