"""Gradients over ranks, what ranks say of them, and shards that an optimizer steps; with stand-ins for other ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amoeba.parallel import Owners, shards
from amoeba.parallel.agreement import facts_of


def given(seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def twice(tensor: Tensor, what: str) -> Tensor:
    return tensor * 2  # of two ranks that have the same


def test_frozen_parameters_get_no_gradients_and_others_their_sum() -> None:
    trained, idle, frozen = given(0, 5), given(1, 2), given(2, 3).requires_grad_(False)
    trained.grad = torch.ones(5)
    ranks: Any = SimpleNamespace(count=2, add_up=twice)
    shards.add_up_gradients([trained, idle, frozen], ranks)
    assert frozen.grad is None and torch.equal(trained.grad, torch.full((5,), 2.0))
    assert idle.grad is not None and not idle.grad.any()


def test_gradients_are_added_up_a_few_numbers_at_a_time_and_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_BUCKET", 8)
    sizes = (0, 5, 3, 20, 1, 4, 0, 9)
    parameters = [given(place, size) for place, size in enumerate(sizes)]
    parameters[4] = nn.Parameter(parameters[4].detach().double())
    sent: list[int] = []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def add_up(tensor: Tensor, what: str) -> Tensor:
        sent.append(len(tensor))
        return tensor * 2

    shards.add_up_gradients(parameters, SimpleNamespace(count=2, add_up=add_up))  # type: ignore[arg-type]
    assert all(torch.equal(each.grad, torch.full_like(each, 2.0)) for each in parameters)
    assert sent == [8, 20, 4, 9, 1]


@pytest.mark.parametrize("most", [1.0, 10.0])
def test_gradients_are_scaled_down_and_never_up(most: float) -> None:
    parameter, ranks = given(0, 2), SimpleNamespace(count=1)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(shards.clip_gradients([parameter], most, ranks)) == pytest.approx(5.0)  # type: ignore[arg-type]
    torch.testing.assert_close(parameter.grad, torch.tensor([3.0, 4.0]) * min(most / 5, 1))


@pytest.mark.parametrize("of", ["x", "the routing weights"])
def test_ranks_tell_which_gradients_they_will_ask_for(of: str) -> None:
    x_TH, weight_TK = given(0, 3, 4), given(1, 3, 2)
    (x_TH if of == "x" else weight_TK).requires_grad_(False)
    facts = facts_of(Owners.even(4, 2), x_TH, weight_TK, gradients=True)
    assert {name for name, value in facts.items() if name.startswith("gradient of") and not value} == {
        f"gradient of {of}"
    }
    without = facts_of(Owners.even(4, 2), x_TH, weight_TK, gradients=False)
    assert not any(value for name, value in without.items() if name.startswith("gradient"))


def test_a_shard_that_several_ranks_have_counts_once_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, ranks = given(0, 6), SimpleNamespace(count=2, add_up=twice)
    parameter.grad = torch.full((6,), 3.0)
    monkeypatch.setattr(shards, "is_own", lambda _: True)
    monkeypatch.setattr(shards, "_here", lambda parameter: (parameter.grad, 2))
    norm = shards.clip_gradients([parameter], 1e9, ranks)  # type: ignore[arg-type]
    torch.testing.assert_close(float(norm), 54**0.5)
