"""A pass over experts in codes that comes again is repeated from its list of launches: the same bits, with the codes of
the day."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from amoeba import ExpertWeights, LoraFactors, Routing, experts
from amoeba.backends import quantised_rows, quantised_triton
from amoeba.kernels.launch import plan as launch_plan
from amoeba.precision import FP8_128, MXFP4, NVFP4, Format
from amoeba.precision.quantised_experts import QuantisedExperts, quantise_experts
from repeated_steps import check_elsewhere, check_repeated, plans
from selection import quick
from small_layer import Layer, kernel_device

DEVICE = kernel_device()
FORMATS = (FP8_128, MXFP4, NVFP4)


@pytest.fixture(autouse=True)
def nothing_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in ("DECODE_TOKENS", "DECODE_SLOTS"):
        monkeypatch.setattr(quantised_triton, most, 0)  # which would take the forward that saves nothing
    launch_plan.forget_plans()


def step(layer: Layer, format: Format, seed: int) -> dict[str, Tensor]:
    """Other numbers, other codes and another dy for each seed."""
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for name, tensor in layer.tensors.items():
        named[name] = (
            tensor.detach() + 0.1 * torch.rand(tensor.shape, generator=generator).to(DEVICE)
        ).requires_grad_()
    weights = quantise_experts(layer.weights(named), format)
    wanted = [tensor for name, tensor in named.items() if name in ("x", "weight") or "lora" in name]
    routing = Routing(layer.expert_TK, named["weight"])
    y_TH = experts(named["x"], routing, weights, lora=layer.lora(named), backend="triton")
    dy_TH = torch.rand(y_TH.shape, generator=generator).to(DEVICE)
    gradients = torch.autograd.grad(y_TH, wanted, dy_TH)
    return {"y": y_TH.detach(), **{f"gradient {place}": each for place, each in enumerate(gradients)}}


@quick(lambda format: format is MXFP4)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_repeated_pass_has_the_bits_of_one_that_is_computed(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(rank=3).to(DEVICE)
    check_repeated(lambda seed: step(layer, format, seed), monkeypatch)


def test_two_formats_of_the_same_sizes_are_two_kinds() -> None:
    """Both have bytes of e4m3, but blocks of other sizes would make other launches."""
    layer = Layer(bias=False).to(DEVICE)
    routing = Routing(layer.expert_TK, layer.tensors["weight"].detach())
    x_TH = layer.tensors["x"].detach()
    kinds = [quantise_experts(layer.weights(layer.tensors), format) for format in (MXFP4, NVFP4)]
    found = [[experts(x_TH, routing, weights, backend="triton") for _ in range(3)] for weights in kinds]
    assert plans() == 2
    for each in found:
        assert all(torch.equal(each[0], y_TH) for y_TH in each)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.gpu
@pytest.mark.parametrize("many_rows", [1 << 20, 1], ids=["decoded", "dequantised"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_repeated_passes_on_a_gpu_in_a_graph_and_on_another_stream(format, many_rows, monkeypatch):
    monkeypatch.setattr(quantised_rows, "MANY_ROWS", many_rows)
    monkeypatch.setattr(quantised_rows, "MANY_ROWS_OF_NVFP4", many_rows)
    monkeypatch.setattr(quantised_rows, "DEQUANTISED_BYTES", 3 * 512 * 256 * 2)  # of eight experts three at a time
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").div(shape[-1] ** 0.5).bfloat16()

    x_TH, dy_TH = normal(300, 256), normal(300, 256)
    weights = quantise_experts(ExpertWeights(normal(8, 512, 256), normal(8, 256, 256)), format)
    assert isinstance(weights, QuantisedExperts)
    expert_TK = torch.randint(0, 8, (300, 2), generator=generator, device="cuda")
    weight_TK = torch.rand(300, 2, generator=generator, device="cuda")
    shapes = [(8, 16, 256), (8, 256, 16)] * 3
    factors = [normal(*shape).float().requires_grad_() for shape in shapes]
    inputs = [x_TH.requires_grad_(), weight_TK.requires_grad_(), *factors]

    def run() -> tuple[Tensor, ...]:
        lora = LoraFactors(*factors, scaling=2.0)
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), weights, lora=lora, backend="triton")
        return y_TH.detach(), *torch.autograd.grad(y_TH, inputs, dy_TH)

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    assert plans() == 2
    check_elsewhere(run, first)
