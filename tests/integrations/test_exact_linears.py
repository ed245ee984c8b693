"""Linear layers in exact mode by the kernels of a GPU, in Triton's interpreter, in fp16."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from amoeba.integrations.exact_linears import few_launches
from amoeba.kernels import exact as kernels
from amoeba.kernels import launch
from amoeba.ops import exact as ops
from amoeba.ops.exact import ExactOperators
from tiny_models import relative

TOKENS, HIDDEN = 70, 72
LIMIT = 2e-3  # relative L2, from fp64


class Layer(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, width, bias=False) for width in (96, 32, 40))
        self.o_proj: Any = nn.Linear(HIDDEN, 56, bias=False)
        self.half()
        if lora:
            inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules=["o_proj"]), self)
            for factors in (self.o_proj.lora_A, self.o_proj.lora_B):
                factors.default.weight.data = torch.randn_like(factors.default.weight, dtype=torch.float32) / 8
            self.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        parts = (each(x) for each in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))
        return torch.cat([*parts], -1)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(ops, "kernels_on", lambda device: kernels)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(device: torch.device) -> Tensor:
    return torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(1)).half().to(device)


@pytest.mark.parametrize("lora", [False, True])
def test_a_token_is_the_same_among_others_and_gradients_are_those_of_fp64(lora: bool, on_gpu: torch.device) -> None:
    layer, x = Layer(lora).to(on_gpu), rows(on_gpu).requires_grad_()
    with few_launches(layer):
        with ExactOperators():
            whole = layer(x)
            alone = [layer(x[1:, token : token + 1]) for token in (0, 34)]
        assert all(torch.equal(each[0, 0], whole[1, token]) for each, token in zip(alone, (0, 34), strict=True))
        dy = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2)).half().to(on_gpu)
        leaves = [x, *layer.parameters()]
        found = torch.autograd.grad(whole, leaves, dy)
    truth, wide = Layer(lora).to(on_gpu).double(), x.detach().double().requires_grad_()
    wanted = truth(wide)
    assert relative(whole, wanted) < LIMIT
    for got, expected in zip(found, torch.autograd.grad(wanted, [wide, *truth.parameters()], dy.double()), strict=True):
        assert relative(got, expected) < LIMIT


def test_three_launches_instead_of_ten(on_gpu: torch.device) -> None:
    layer, x = Layer(True).to(on_gpu), rows(on_gpu)

    def launched() -> list[str]:
        names: list[str] = []

        class Recorder:
            def launch(self, start: Any, kernel: Any, *_: Any) -> None:
                names.append(kernel.__name__)
                start()

        launch.listening.recorder = Recorder()  # type: ignore[assignment]
        try:
            with torch.no_grad(), ExactOperators():
                layer(x)
        finally:
            launch.listening.recorder = None
        return names

    with few_launches(layer):
        assert launched() == ["_linears", "_product", "_linears"]
    assert launched() == ["_product"] * 6


def test_keys_of_other_rows_than_the_queries_are_their_own(on_gpu: torch.device) -> None:
    layer, x = Layer(False).to(on_gpu), rows(on_gpu)
    with few_launches(layer), ExactOperators():
        wanted = layer.k_proj(x + 1)
        layer.q_proj(x)
        assert torch.equal(layer.k_proj(x + 1), wanted)


def test_elsewhere_modules_are_what_they_were(on_gpu: torch.device) -> None:
    layer, x = Layer(True).to(on_gpu), rows(on_gpu).float()
    layer.float()
    wanted, kinds = layer(x), [type(each) for each in layer.modules()]
    with few_launches(layer):
        assert torch.equal(layer(x), wanted)
        layer.o_proj.lora_dropout["default"] = nn.Dropout(0.5)
        with ExactOperators(), pytest.raises(ValueError, match="no random numbers"):
            layer.half()(x.half())
    assert [type(each) for each in layer.modules()][:5] == kinds[:5]
