"""Linear layers of one input become one product in what torch.compile makes of a training step."""

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amoeba.integrations.compiled_layers import CompiledLayers
from amoeba.integrations.inductor_passes import JoinedLinears

TOKENS, HIDDEN = 40, 8
SIZES = 12, 4, 4


class Projections(nn.Module):
    def __init__(self, bias: tuple[bool, ...] = (False,) * len(SIZES), between: str = "") -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(HIDDEN, size, bias=has) for size, has in zip(SIZES, bias, strict=True)
        ).double()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        found = [self.parts[0](x)]
        if self.between == "in place":
            x += 1
        elif self.between == "method":
            x.add_(1)
        elif self.between == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                found.append(self.parts[1](x).double())
        found += [part(x) for part in self.parts[len(found) :]]
        return torch.cat([one.tanh() * (index + 1) for index, one in enumerate(found)], -1)


def run(module: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Result and gradients as joined, and how many linear layers are left."""
    left = []

    def backend(graph_module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        JoinedLinears()(graph_module.graph)
        graph_module.graph.lint()
        left.append(sum(node.target is linear for node in graph_module.graph.nodes))
        graph_module.recompile()
        return graph_module

    torch._dynamo.reset()
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = torch.compile(module, backend=backend, fullgraph=True)(x)
    y.square().sum().backward()
    return [y, x.grad, *(weight.grad for weight in module.parameters() if weight.requires_grad)], left[0]


def plain(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return [y, x.grad, *(weight.grad for weight in module.parameters() if weight.requires_grad)]


def check(module: nn.Module, left: int, tokens: tuple[int, ...] = (TOKENS,)) -> None:
    x = torch.randn(*tokens, HIDDEN, dtype=torch.float64)
    expected = [one.clone() for one in plain(module, x)]
    found, count = run(module, x)
    assert count == left
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [(TOKENS,), (5, 8)], ids=["rows", "batches of rows"])
def test_layers_of_one_input_become_one_product_with_the_same_gradients(tokens):
    check(Projections(), 1, tokens)


def test_biases_are_joined_and_layers_without_one_stay_apart_from_those():
    check(Projections((True, True, True)), 1)
    check(Projections((True, False, True)), 2)


def test_a_frozen_weight_is_not_joined_with_a_trained_one():
    module = Projections()
    module.parts[1].weight.requires_grad_(False)
    check(module, 2)


@pytest.mark.parametrize("between", ["in place", "method", "autocast"])
def test_what_comes_after_a_change_is_not_joined_with_what_came_before(between):
    module = Projections(between=between)
    if between != "autocast":
        module.requires_grad_(False)  # else autograd needs the input as it was
    check(module, 3 if between == "autocast" else 2)


def test_fewer_tokens_than_rows_of_weights_are_left_alone():
    check(Projections(), 3, tokens=(sum(SIZES) - 1,))
    check(Projections(), 1, tokens=(sum(SIZES),))


def test_other_inputs_stay_apart():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, HIDDEN).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    check(Chain(), 2)


def test_compiled_layers_join_theirs_and_the_compiled_code_can_be_kept(monkeypatch):
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, options: given.append(options))
    layers = CompiledLayers.__new__(CompiledLayers)
    layers.modules, layers.looping = [nn.Linear(2, 2)], []
    layers.begin()
    joins = given[0]["pre_grad_custom_pass"]
    assert isinstance(joins, JoinedLinears)
    assert joins.uuid() and pickle.dumps(joins) == pickle.dumps(JoinedLinears())  # what caches know it by
