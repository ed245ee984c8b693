"""precision="auto": fp8 where kernels serve the layer and an expert gets enough rows, else as without a precision."""

import pytest
import torch

from amoeba import ExpertWeights, Request, Routing, experts, with_precision
from amoeba.backends import fp8_choice
from amoeba.precision import UnchangedWeights
from amoeba.precision.recipes import Fp8Experts
from small_layer import E, K, Layer


@pytest.fixture(autouse=True)
def small_experts_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE", 0)


def request(layer: Layer, precision: str = "auto") -> Request:
    weights = with_precision(layer.weights(layer.tensors), precision)
    return Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), weights)


def test_without_kernels_for_it_the_numbers_are_those_without_a_precision() -> None:
    layer = Layer(rank=2)
    plain, auto = (request(layer, precision) for precision in ("bf16", "auto"))
    for lora in (None, layer.lora(layer.tensors)):
        expected, found = (experts(each.x_TH, each.routing, each.weights, lora=lora) for each in (plain, auto))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("fewest", "recipe"), [(4 * K, "fp8"), (4 * K + 1, None)])
def test_rows_per_expert_decide_where_kernels_serve(fewest, recipe, monkeypatch):
    monkeypatch.setattr(fp8_choice.BACKEND, "why_not", lambda request: None)
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_PER_EXPERT", fewest)
    layer = Layer(tokens=4 * E)
    asked = request(layer)
    found = fp8_choice.settled(asked)
    assert (found.recipe if isinstance(found, Fp8Experts) else None) == recipe
    assert all(one is other for one, other in zip(found.tensors(), asked.weights.tensors(), strict=True))
    if recipe is None:
        assert type(found) is ExpertWeights
        assert "rows per expert" in (fp8_choice.why_not(asked) or "")


@pytest.mark.parametrize(("fewest", "recipe"), [(4 * K, "fp8"), (4 * K + 1, None)])
def test_fewer_rows_are_enough_while_weights_are_promised_not_to_change(fewest, recipe, monkeypatch):
    monkeypatch.setattr(fp8_choice.BACKEND, "why_not", lambda request: None)
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_UNCHANGED", fewest)
    asked = request(Layer(tokens=4 * E))
    with UnchangedWeights():
        found = fp8_choice.settled(asked)
        assert recipe is not None or "weights unchanged" in (fp8_choice.why_not(asked) or "")
    assert (found.recipe if isinstance(found, Fp8Experts) else None) == recipe
    assert not isinstance(fp8_choice.settled(asked), Fp8Experts)  # the promise is over


def test_a_compiled_layer_asks_again_whether_a_promise_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_choice.BACKEND, "why_not", lambda request: None)
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_UNCHANGED", 0)
    asked = request(Layer(tokens=4 * E))
    seen = torch.compile(lambda: isinstance(fp8_choice.settled(asked), Fp8Experts), backend="eager")
    assert not seen()
    with UnchangedWeights():
        assert seen()
    assert not seen()


def test_small_experts_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_choice.BACKEND, "why_not", lambda request: None)
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_PER_EXPERT", 0)
    asked = request(Layer(hidden=64, inner=24))
    for least, taken in ((64 * 24, True), (64 * 24 + 1, False)):
        monkeypatch.setattr(fp8_choice, "LEAST_SIZE", least)
        assert isinstance(fp8_choice.settled(asked), Fp8Experts) == taken
    assert "64 x 24" in (fp8_choice.why_not(asked) or "")
