"""A pass in fp8 that comes again is repeated from its list of launches: the same bits, with the codes of the day.

The products, which need a GPU, are stood in for by torch, as launches of their own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_fp8_kernels import by_recipe, stood_in, without_gpu  # noqa: F401
from torch import Tensor

from amoeba import Routing, experts, with_precision
from amoeba.kernels import launch
from amoeba.kernels.hopper import fp8_gemm, fp8_wgrad
from amoeba.kernels.launch import plan as launch_plan
from amoeba.precision import QuantisedMatrix
from fp8_stand_ins import product, up, weight_gradient
from repeated_steps import check_repeated
from selection import quick
from small_layer import Layer

pytestmark = without_gpu


def as_launch(compute: Callable[..., None]) -> Callable[..., None]:
    """The same, noted down as a kernel would be: tensors one by one, all else known."""

    def launched(*given: Any, **named: Any) -> None:
        names, values = list(named), [*given, *named.values()]
        flat = [part for value in values for part in _parts(value)]

        def start(stream: Any, arguments: Any) -> None:
            left = iter(arguments)
            whole = [_whole(value, left) for value in values]
            compute(*whole[: len(given)], **dict(zip(names, whole[len(given) :], strict=True)))

        def first() -> launch.Launched:
            start(None, flat)
            return launch.Launched(start, tuple(flat), interpreted=True)

        if launch.listening.recorder is None:
            start(None, flat)
        else:
            launch.listening.recorder.launch(first)

    return launched


def _parts(value: Any) -> tuple:
    if isinstance(value, QuantisedMatrix):
        return value.data, value.scales
    return value if isinstance(value, tuple) else (value,)


def _whole(value: Any, parts: Iterator[Any]) -> Any:
    """The same made of others."""
    if isinstance(value, QuantisedMatrix):
        return QuantisedMatrix(next(parts), next(parts), value.format, value.columns, value.parts)
    return type(value)(*(next(parts) for _ in value)) if isinstance(value, tuple) else next(parts)


@pytest.fixture
def layer(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> Layer:  # noqa: F811
    monkeypatch.setattr(fp8_gemm, "multiply", as_launch(product))
    monkeypatch.setattr(fp8_gemm, "up", as_launch(up))
    monkeypatch.setattr(fp8_wgrad, "weight_gradient", as_launch(weight_gradient))
    launch_plan.forget_plans()
    return Layer(tokens=5, hidden=64, inner=64, bias=False)


def step(layer: Layer, recipe: str, change: float = 0.0) -> dict[str, Tensor]:
    """change: added to x, and to a weight that tells nobody."""
    named = layer.tensors | {"x": layer.tensors["x"] + change}
    weights = with_precision(layer.weights(named), recipe)
    weights.gate_up_EJH.data.add_(change)
    y_TH = experts(named["x"], Routing(layer.expert_TK, named["weight"]), weights, backend="triton")
    found = torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH)
    weights.gate_up_EJH.data.sub_(change)
    return {"y": y_TH.detach()} | dict(zip(named, found, strict=True))


@quick(lambda recipe: recipe == "fp8-all")
@by_recipe
def test_a_repeated_step_has_the_bits_of_one_that_is_computed(recipe, layer, monkeypatch):
    check_repeated(lambda seed: step(layer, recipe, seed / 8), monkeypatch)


@pytest.mark.thorough
def test_a_backward_whose_codes_were_written_over_writes_them_again(layer):
    """By a pass without gradients, which writes one orientation only."""
    named, found = layer.tensors, []
    weights, routing = with_precision(layer.weights(named), "fp8"), Routing(layer.expert_TK, named["weight"])
    for between in (False, True, True, True):
        y_TH = experts(named["x"], routing, weights, backend="triton")
        if between:
            with torch.no_grad():
                experts(named["x"], routing, weights, backend="triton")
        found.append(torch.autograd.grad(y_TH, [named["x"]], layer.dy_TH)[0])
    assert all(torch.equal(found[0], other) for other in found)
