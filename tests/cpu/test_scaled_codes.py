"""Experts in codes by the C++ core: codes made numbers, few rows decoded, fused passes, and what is refused.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import amoeba
from amoeba import Activation, ExpertWeights, Request, Routing, experts
from amoeba.backends import cpu_decode, cpu_fused, read_quantised
from amoeba.cpu.core import Core, load_core, why_no_core
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format, quantise
from amoeba.precision.formats import fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.precision.quantised_experts import QuantisedExperts, ReadInBlocks, dequantise_experts, quantise_experts
from amoeba.proof import conformance
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case
from amoeba.proof.reference.experts import experts_forward
from amoeba.system import cpu_features
from selection import each_value_once, quick
from small_layer import Layer

pytestmark = pytest.mark.skipif(why_no_core() is not None, reason="needs the C++ core")
CPU = torch.device("cpu")
GPT_OSS = Activation(alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)
# whole blocks; cut ones, gate and up with blocks of their own; interleaved; small blocks; one number; and each format
# with whole blocks, which fp8's are above, with cut ones and with one number
SHAPES = {
    "whole": (256, 128, Activation(), FP8_128),
    "cut": (199, 200, Activation(), FP8_128),
    "interleaved": (63, 31, GPT_OSS, FP8_128),
    "plain": (300, 77, Activation("relu2", gated=False), fp8_blocks(16, 32)),
    "narrow blocks": (33, 47, Activation(), fp8_blocks(1, 16)),
    "one number": (1, 1, Activation(), FP8_128),
    "mxfp8": (96, 64, GPT_OSS, MXFP8),
    "mxfp8 cut": (63, 50, Activation(), MXFP8),
    "mxfp4": (192, 96, GPT_OSS, MXFP4),
    "mxfp4 cut": (199, 77, Activation(), MXFP4),
    "mxfp4 one number": (1, 1, Activation(), MXFP4),
    "nvfp4": (96, 48, Activation(), NVFP4),
    "nvfp4 cut": (63, 33, Activation("relu2", gated=False), NVFP4),
    "mxfp4, 256 at once and some": (544, 288, Activation(), MXFP4),
    "nvfp4, 256 at once and some": (528, 272, Activation(), NVFP4),
    "fp8, 256 at once and some": (544, 272, Activation(), FP8_128),
    "narrow blocks, 256 at once and some": (288, 272, Activation(), fp8_blocks(1, 16)),
}
by_shape = pytest.mark.parametrize("shape", SHAPES)


def made(shape: str, dtype: torch.dtype = torch.float32, experts: int = 4) -> QuantisedExperts:
    hidden, inner, activation, format = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(experts, activation.width(inner), hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
    biases = (torch.randn(experts, width, generator=generator) for width in (gate_up.shape[1], hidden))
    return quantise_experts(ExpertWeights(gate_up, down, *biases, activation), format).to(dtype)


def inputs(weights: QuantisedExperts, tokens: int, top_k: int = 3, sentinels: bool = True) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(2)
    x_TH = torch.randn(tokens, weights.hidden, generator=generator).to(weights.dtype)
    low, high = (-1, weights.num_experts + 1) if sentinels else (0, weights.num_experts)
    expert_TK = torch.randint(low, high, (tokens, top_k), generator=generator)
    return x_TH, Routing(expert_TK, torch.rand(tokens, top_k, generator=generator).to(weights.dtype))


@pytest.mark.parametrize("flush", [False, True])
def test_every_code_is_the_number_that_torch_makes_of_it(flush: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    expected = codes[0].view(torch.float8_e4m3fn).to(torch.float32)
    matrix = read_quantised.ScaledCodes(codes, torch.ones(1, 1, 1), (128, 128))
    found = torch.empty(8, 32)
    torch.set_flush_denormal(flush)
    try:
        load_core().dequantise(matrix, 0, out=found)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.nan_to_num(nan=1e9).view(torch.int32), expected.nan_to_num(nan=1e9).view(torch.int32))
    assert found.isnan().sum() == 2


@each_value_once()
@by_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_is_dequantised_to_the_bits_of_torch(shape: str, dtype: torch.dtype) -> None:
    weights = made(shape)
    for matrix in (weights.gate_up_EJH, weights.down_EHI):
        found = torch.empty(matrix.shape[1:], dtype=dtype)
        for expert in range(2):
            load_core().dequantise(read_quantised.scaled_codes(matrix), expert, out=found)
            assert torch.equal(found, matrix.matrix[expert].dequantise(dtype))


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """One NaN is as good as another."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[expected.dtype]
    equal = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    return found.dtype == expected.dtype and bool(equal.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [MXFP8, MXFP4, NVFP4], ids=lambda format: format.name)
def test_every_code_times_every_scale_is_the_number_that_torch_makes_of_it(format: Format, dtype: torch.dtype) -> None:
    """From 2^-127, which a float holds as one below its normal numbers, to what is beyond it, and NaN."""
    every_byte, columns = torch.arange(256, dtype=torch.uint8), 256 * 8 // format.element.bits
    scales = every_byte.view(1, 256, 1).expand(1, 256, columns // format.block[1]).contiguous()
    matrix_scale = torch.tensor([0.3]) if format.has_matrix_scale else None
    matrix = QuantisedMatrix(every_byte.repeat(1, 256, 1), scales, format, columns, matrix_scale=matrix_scale)
    found, expected = torch.empty(256, columns, dtype=dtype), matrix[0].dequantise(dtype)
    load_core().dequantise(read_quantised.scaled_codes(ReadInBlocks(matrix, dtype)), 0, out=found)
    if dtype == torch.bfloat16:  # where instructions round to it, numbers below the normal ones are zeros
        found, expected = (each.masked_fill(each.abs() < 2.0**-126, 0) for each in (found, expected))
    assert same_bits(found, expected)
    assert expected.isnan().any() and expected.isinf().any() == (format is not NVFP4)


@pytest.mark.parametrize("format", [FP8_128, MXFP8, MXFP4, NVFP4], ids=lambda format: format.name)
def test_nan_stays_nan(format: Format) -> None:
    matrix = torch.randn(1, 40, 40)
    matrix[0, 3, 35] = torch.nan
    quantised = quantise(matrix, format)
    found = torch.empty(40, 40, dtype=torch.bfloat16)
    load_core().dequantise(read_quantised.scaled_codes(ReadInBlocks(quantised, torch.bfloat16)), 0, out=found)
    of_block = [[3, 35]] if format.element.bits == 8 else [[3, column] for column in range(32, 40)]
    assert found.isnan().nonzero().tolist() == of_block


@each_value_once()
@by_shape
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_few_rows_are_decoded_from_the_codes(shape: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is rounded, and none is dequantised: in fp32 only the order of the sums differs from fp64's."""
    monkeypatch.setattr(Core, "dequantise", lambda *_, **__: pytest.fail("an expert was dequantised"))
    weights = made(shape)
    x_TH, routing = inputs(weights, tokens)
    wide = dequantise_experts(weights, torch.float64)
    truth = experts_forward(x_TH.double(), routing.expert_TK, routing.weight_TK.double(), wide)
    found = experts(x_TH, routing, weights)
    assert (found - truth).norm() <= 2e-6 * truth.norm()
    halves = experts(x_TH.bfloat16(), Routing(routing.expert_TK, routing.weight_TK), weights.to(torch.bfloat16))
    assert (halves - truth).norm() <= 1e-2 * truth.norm()


def test_where_bf16_is_multiplied_experts_are_dequantised_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are torch's where there are no fused passes, as `eager`'s are."""
    monkeypatch.setattr(cpu_features, "has_bf16_instructions", lambda: True)
    monkeypatch.setattr(cpu_fused, "_multiplies_bf16", lambda: False)
    for shape in SHAPES:
        weights = made(shape, torch.bfloat16)
        x_TH, routing = inputs(weights, 30)
        leaves = x_TH.requires_grad_(), routing.weight_TK.requires_grad_()
        dy_TH = torch.randn(x_TH.shape).bfloat16()
        y = [experts(x_TH, routing, weights, backend=backend) for backend in ("cpu", "eager")]
        found, expected = ((each, *torch.autograd.grad(each, leaves, dy_TH)) for each in y)
        for got, right in zip(found, expected, strict=True):
            assert (got - right).norm() <= 5e-3 * right.norm(), shape


def apart(tensor: Tensor) -> Tensor:
    """Experts as in the slots of a store: each contiguous, with other bytes between them."""
    whole = torch.full((len(tensor), tensor[0].numel() + 64), 113, dtype=tensor.dtype)
    whole[:, : tensor[0].numel()] = tensor.flatten(1)
    return whole[:, : tensor[0].numel()].unflatten(1, tensor.shape[1:])


@each_value_once()
@by_shape
@pytest.mark.parametrize("tokens", [2, 70])
def test_experts_that_lie_apart_are_read_where_they_are(shape: str, tokens: int) -> None:
    weights = made(shape, torch.bfloat16)
    stored = [
        (apart(codes), apart(scales), None if whole is None else apart(whole[:, None])[:, 0])
        for codes, scales, whole in (weights.stored_gate_up, weights.stored_down)
    ]
    slots = replace(weights, stored_gate_up=stored[0], stored_down=stored[1])
    assert read_quantised.scaled_codes(slots.down_EHI).code_EOI.data_ptr() == stored[1][0].data_ptr()
    x_TH, routing = inputs(weights, tokens)
    for backend in ("cpu", "cpu-fused"):
        leaf = x_TH.detach().requires_grad_()
        found, expected = (experts(leaf, routing, each, backend=backend) for each in (slots, weights))
        gradients = (torch.autograd.grad(each.float().sum(), leaf) for each in (found, expected))
        assert torch.equal(found, expected) and torch.equal(*(each for (each,) in gradients))
        with torch.no_grad():
            assert torch.equal(*(experts(x_TH, routing, each, backend=backend) for each in (slots, weights)))


CASES = [
    Case(63, 8, SILU, True, "sentinels", lora="all", rank=5),
    Case(0, 2, SILU, True, lora="all"),
    Case(9, 2, PLAIN_RELU2, True, "empty_experts", 31, 23, lora="all", rank=3),
    Case(9, 1, CLAMPED_SWIGLU, True, "all_on_one", lora="all", rank=5, recompute=True),
    Case(21, 2, SILU, False, "random", 144, 136, storage="transposed", narrow=True, lora="all", rank=8),
    Case(130, 2, SILU, False, "random", 144, 136),
]


@each_value_once()
@pytest.mark.parametrize("placement", ["fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_passes_have_every_gradient(case: Case, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "experts", functools.partial(experts, backend="cpu-fused"))
    result = conformance.verify_case(case, placement, CPU, torch.bfloat16)
    assert result.ok and result.refused is None, result


@quick(lambda tokens: tokens == 3)
@pytest.mark.parametrize("tokens", [3, 40])
def test_fused_passes_read_what_is_packed_in_bf16(tokens: int) -> None:
    """Their weights are code · scale rounded to bf16: with those as resident ones, the same bits."""
    from amoeba.cpu.packed_experts import pack_experts

    for shape in SHAPES:
        weights = made(shape, torch.bfloat16)
        x_TH, routing = inputs(weights, tokens)
        leaves = x_TH.requires_grad_(), routing.weight_TK.requires_grad_()
        packed = pack_experts(dequantise_experts(weights, torch.bfloat16))
        found = experts(x_TH, routing, weights, backend="cpu-fused")
        expected = experts(x_TH, routing, packed)
        assert torch.equal(found, expected), shape
        dy_TH = torch.randn_like(found)
        for got, right in zip(*(torch.autograd.grad(y, leaves, dy_TH) for y in (found, expected)), strict=True):
            assert torch.equal(got, right), shape


@each_value_once()
@pytest.mark.parametrize("shape", ["whole", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("bf16", [True, False])
def test_passes_with_gradients_are_fused_where_the_cpu_multiplies_bf16(bf16, shape, monkeypatch):
    monkeypatch.setattr(cpu_fused, "_multiplies_bf16", lambda: bf16)
    calls = []
    forward, decode = cpu_fused.forward, cpu_decode.decode
    monkeypatch.setattr(cpu_fused, "forward", lambda *given: (calls.append("fused"), forward(*given))[1])
    monkeypatch.setattr(cpu_decode, "decode", lambda *given: (calls.append("decoded"), decode(*given))[1])
    weights = made(shape, torch.bfloat16)
    x_TH, routing = inputs(weights, 5)
    with torch.no_grad():
        experts(x_TH, routing, weights)
    assert calls == ["decoded"]
    calls.clear()
    leaves = x_TH.requires_grad_(), routing.weight_TK.requires_grad_()
    found, expected = (experts(x_TH, routing, weights, backend=backend) for backend in ("cpu", "cpu-fused"))
    assert calls == ["fused"] * (2 if bf16 else 1)
    dy_TH = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, leaves, dy_TH) for y in (found, expected)]
    for got, right in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert torch.equal(got, right) if bf16 else (got - right).norm() <= 2e-2 * right.norm()


@pytest.mark.parametrize(
    ("format", "dtype", "reason"),
    [
        (fp8_blocks(128, 8), torch.float32, "cpu reads blocks of powers of two, 16 columns or more; these are 128 x 8"),
        (FP8_128, torch.float16, r"cpu the C\+\+ core takes fp32 and bf16; x is torch.float16"),
        (MXFP4, torch.float16, r"cpu the C\+\+ core takes fp32 and bf16; x is torch.float16"),
    ],
)
def test_what_the_core_does_not_read_goes_to_eager(format: Format, dtype: torch.dtype, reason: str) -> None:
    layer = Layer()
    weights = quantise_experts(layer.weights({k: t.detach() for k, t in layer.tensors.items()}), format).to(dtype)
    x_TH, weight_TK = (layer.tensors[name].detach().to(dtype) for name in ("x", "weight"))
    routing = Routing(layer.expert_TK, weight_TK)
    found = amoeba.explain(Request(x_TH, routing, weights))
    assert found.backend is not None and found.backend.name == "eager"
    for backend, start in (("cpu", reason), ("cpu-fused", "")):
        with pytest.raises(ValueError, match=f"{backend} does not; got {start.removeprefix('cpu ')}"):
            experts(x_TH, routing, weights, backend=backend)


@pytest.mark.parametrize("shape", ["whole", "mxfp8", "mxfp4", "nvfp4"])
def test_codes_on_this_cpu_are_computed_by_the_core(shape: str) -> None:
    weights = made(shape)
    x_TH, routing = inputs(weights, 3)
    found = amoeba.explain(Request(x_TH, routing, weights))
    assert str(found) == "cpu, the C++ core, which reads quantised weights"
    with pytest.raises(ValueError, match=r"computes in bf16; x is torch\.float32"):
        experts(x_TH, routing, weights, backend="cpu-fused")
