"""A weight of every format with a few rows, by the products of a decode step, compared with fp64.

B rows · V outputs · H inputs
"""

import ctypes

import pytest
import torch
from test_core_blocks import random_matrix
from torch import Tensor

from amoeba.backends.read_quantised import scaled_codes
from amoeba.cpu import step
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.weights import PackedWeights, ScaledCodes
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4
from amoeba.precision.formats import OF_BLOCKS, fp8_blocks
from amoeba.precision.quantised_experts import ReadInBlocks, quantise
from selection import each_value_once

try:
    step.load_step()
except CoreUnavailable as error:
    pytest.skip(f"needs the C++ core: {error}", allow_module_level=True)

FORMATS = {
    "fp8": FP8_128, "fp8 narrow": fp8_blocks(16, 32), "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4,
    "fp32": torch.float32, "bf16": torch.bfloat16, "packed bf16": "bf16", "packed int8": "int8",
} | OF_BLOCKS  # fmt: skip


def made(name: str, outputs: int, inputs: int) -> tuple[Tensor | PackedWeights | ScaledCodes, Tensor]:
    """A weight, and the numbers it stands for."""
    generator, format = torch.Generator().manual_seed(0), FORMATS[name]
    weight = torch.randn(1, outputs, inputs, generator=generator) / inputs**0.5
    if isinstance(format, torch.dtype):
        return weight.to(format), weight.to(format)[0].double()
    if isinstance(format, str):
        stored = weight.bfloat16()
        packed = PackedWeights.pack(stored, format)
        if format == "bf16":
            return packed, stored[0].double()
        scale = stored[0].double().abs().amax(1, keepdim=True) / 127
        return packed, (stored[0].double() / scale).round() * scale
    if format.scale == "inside":
        matrix = random_matrix(format, 1, outputs, inputs, size=0x9B)
    else:
        matrix = quantise(weight, format)
    return scaled_codes(ReadInBlocks(matrix, torch.float32)), matrix[0].dequantise(torch.float32).double()


def head_alone(weight: Tensor | PackedWeights | ScaledCodes, outputs: int, x_BH: Tensor) -> step.Stepper:
    """Of a model without layers, whose norm has a weight of 1."""
    (rows, inputs), kept = x_BH.shape, []
    ones = torch.ones(inputs)
    model = step.CStepModel(
        rows, inputs, outputs, 1, 1, 2, 1, 0, None, step.matrix("embedding", x_BH, None, kept),
        0, step.norm("norm", ones, 0.0, kept), step.matrix("head", weight, None, kept), 1.0, 1.0,
    )  # fmt: skip
    return step.Stepper(ctypes.pointer(model).contents, kept, {})


def products(weight: Tensor | PackedWeights | ScaledCodes, outputs: int, x_BH: Tensor) -> Tensor:
    rows = len(x_BH)
    out_BV, zeros = torch.full((rows, outputs), torch.nan), torch.zeros(rows, 1, dtype=torch.int64)
    stepper = head_alone(weight, outputs, x_BH)
    stepper.run(zeros, zeros[:, 0].contiguous(), slot=0, x_BH=x_BH.clone(), layers=(0, 0), logits_BV=out_BV)
    return out_BV


@each_value_once()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [(37, 256), (5, 760), (33, 199), (6, 16), (7, 33)], ids=str)
def test_products_are_those_of_fp64(name: str, sizes: tuple[int, int]) -> None:
    weight, expected_VH = made(name, *sizes)
    for rows in (1, 2, 3, 5, 8):
        x_BH = torch.randn(rows, sizes[1], generator=torch.Generator().manual_seed(rows))
        normed = x_BH.double() / x_BH.double().square().mean(1, keepdim=True).sqrt()
        wanted = normed @ expected_VH.T
        # rows meet whole numbers in fixed point of 16 bits; a rounding of int8 weights may fall on the other side, and
        # random offsets of blocks cancel
        error = (products(weight, sizes[0], x_BH) - wanted).norm() / wanted.norm()
        assert error < (3e-3 if name == "packed int8" else 2e-4 if name in OF_BLOCKS else 5e-5), (rows, error)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("inputs", [128, 224])
def test_every_scale_is_what_torch_makes_of_it(name: str, inputs: int) -> None:
    """Each row has one block with another of the 256 scales, from 2^-127 to NaN."""
    format = FORMATS[name]
    matrix = quantise(torch.randn(1, 256, inputs, generator=torch.Generator().manual_seed(0)), format)
    one = 1.0 if format.scale == "e8m0" else 0.5
    matrix.scales[:] = 127 if format.scale == "e8m0" else 0x30
    for block in (0, matrix.scales.shape[2] - 1):
        matrix.scales[0, :, block] = torch.arange(256, dtype=torch.uint8)
        x_BH = torch.zeros(1, inputs)
        x_BH[0, block * format.block[1]] = one
        wanted = matrix[0].dequantise(torch.float32).double() @ (x_BH.double().T * inputs**0.5 / one)
        found = products(scaled_codes(ReadInBlocks(matrix, torch.float32)), 256, x_BH)[0].double()
        invalid = [255] if format.scale == "e8m0" else [127, 255]
        assert found[invalid].isnan().all()
        held = wanted[:, 0].abs() < 2.0**96  # sums in fixed point end there
        torch.testing.assert_close(found[held], wanted[held, 0], rtol=1e-4, atol=0)
        matrix.scales[0, :, block] = 127 if format.scale == "e8m0" else 0x30


@pytest.mark.parametrize("vocabulary", [1, 15, 256, 300, 1000])
def test_the_first_of_the_largest_logits_is_chosen(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    x_B1, weight_V1 = torch.ones(2, 1), torch.randn(vocabulary, 1, generator=generator).round(decimals=1)
    for value in (None, -3.0, 3.0, torch.inf, -torch.inf, torch.nan):
        for place in (0, vocabulary // 2, vocabulary - 1):
            if value is not None:
                weight_V1[place:] = value
            stepper = head_alone(weight_V1.clone(), vocabulary, x_B1)
            logits_BV, chosen_B1 = torch.empty(2, vocabulary), torch.full((2, 1), -1)
            zeros = torch.zeros(2, 1, dtype=torch.int64)
            first_B, x_BH = torch.zeros(2, dtype=torch.int64), x_B1.clone()
            call = stepper.call(zeros, first_B, x_BH=x_BH, logits_BV=logits_BV, chosen_B1=chosen_B1)
            stepper.run_call(call, 0)
            assert torch.equal(chosen_B1[:, 0], logits_BV.argmax(1)), (value, place)
