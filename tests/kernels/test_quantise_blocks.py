"""Kernels that quantise to mxfp8 and nvfp4 against the formats' definitions, code by code and scale by scale."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from amoeba import Activation
from amoeba.kernels.quantise_blocks import activate_and_quantise, quantise_rows, quantise_weights
from amoeba.precision import FP8_TRAINING_ROWS, Format, QuantisedMatrix, quantise
from amoeba.precision.formats import MXFP8_TRAINING, MXFP8_TRAINING_ROWS, NVFP4_TRAINING, NVFP4_TRAINING_ROWS
from amoeba.precision.quantised import empty_quantised
from amoeba.proof.reference.experts import activate
from selection import each_value_once

ROWS = [MXFP8_TRAINING_ROWS, NVFP4_TRAINING_ROWS]
ACTIVATIONS = [
    Activation(),
    Activation("silu", alpha=1.702, limit=0.75, interleaved=True),
    Activation("relu2", gated=False),
]
by_format = pytest.mark.parametrize("format", ROWS, ids=lambda format: format.name)


def assert_same_bits(found: QuantisedMatrix, expected: QuantisedMatrix) -> None:
    assert torch.equal(found.scales, expected.scales)
    if expected.matrix_scale is not None:
        assert torch.equal(found.matrix_scale, expected.matrix_scale)
    is_nan = expected.dequantise().isnan()  # whose code means nothing where the scale says so, and its sign nowhere
    assert torch.equal(found.dequantise().isnan(), is_nan)
    if not is_nan.any():
        assert torch.equal(found.data, expected.data)
    else:
        assert torch.equal(found.dequantise().nan_to_num(0), expected.dequantise().nan_to_num(0))


def drawn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).to(device)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 768), (33, 200), (2, 64), (0, 128), (5, 1), (3, 1500)], ids=str)
@by_format
def test_rows_have_the_codes_of_the_definition(format: Format, shape, dtype, device) -> None:
    rows = drawn(*shape, device=device).to(dtype)
    assert_same_bits(quantise_rows(rows, format), quantise(rows, format))
    wider = torch.cat((rows, rows), dim=1)[:, : shape[1]]  # other strides
    assert_same_bits(quantise_rows(wider, format), quantise(rows, format))


@by_format
def test_what_is_not_finite_is_nan_and_zeros_stay_zeros(format: Format, device: torch.device) -> None:
    rows = drawn(7, 200, device=device)
    rows[1], rows[2, 3], rows[3, 40] = 0, math.inf, math.nan
    rows[4], rows[5], rows[6, ::2] = math.nan, -math.inf, math.inf
    assert_same_bits(quantise_rows(rows, format), quantise(rows, format))


@by_format
def test_ties_and_the_ends_of_fp32_fall_to_the_same_side(format: Format, device: torch.device) -> None:
    steps = torch.arange(0, 6.25, 1 / 16)
    rows = torch.zeros(2, 128)
    rows[0, : len(steps)], rows[1, : len(steps)] = steps, -steps
    rows[:, len(steps) :] = 6.0
    edges = [448.0, 448.00003, 1.7500001, 2.0**-126, 1.75 * 2**-118, 1.7500001 * 2**-118, 1e-45, 3e38, 6 * 2.0**-120]
    extremes = torch.zeros(len(edges), 128)
    extremes[:, 3] = torch.tensor(edges)
    for given in (rows, extremes):
        assert_same_bits(quantise_rows(given.to(device), format), quantise(given.to(device), format))


@each_value_once()
@pytest.mark.parametrize("transposed", [False, True], ids=["stored (O, I)", "stored (I, O)"])
@pytest.mark.parametrize("shape", [(2, 128, 96), (3, 72, 40), (2, 5, 33)], ids=str)
@pytest.mark.parametrize("format", [MXFP8_TRAINING, NVFP4_TRAINING], ids=lambda format: format.name)
def test_weights_have_the_codes_of_the_definition_both_ways_round(format: Format, shape, transposed, device) -> None:
    weight = drawn(*shape, device=device)
    weight[-1] *= 100  # another scale of the matrix
    weight[0, :4] = 0
    if transposed:
        weight = weight.mT.contiguous().mT
    experts, height, width = shape
    found = empty_quantised(shape, format, device=device)
    turned = replace(empty_quantised((experts, width, height), format, device=device), matrix_scale=found.matrix_scale)
    quantise_weights(weight, found, turned)
    expected = quantise(weight, format)
    assert_same_bits(found, expected)
    assert_same_bits(turned, expected.transposed())
    weight[1, 2, 3] = math.nan
    quantise_weights(weight, found)
    assert_same_bits(found, quantise(weight, format))


@each_value_once()
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("format", [FP8_TRAINING_ROWS, *ROWS], ids=lambda format: format.name)
def test_activated_rows_are_rounded_once_and_those_of_sentinels_are_left(format: Format, activation, device) -> None:
    intermediate, owned = 200, 6
    h = drawn(9, activation.width(intermediate), device=device) / 10
    offs = torch.tensor([2, 2, owned], dtype=torch.int32, device=device)
    found = empty_quantised((9, intermediate), format, device=device)
    found.data.fill_(99)
    activate_and_quantise(h, activation, found, offs)
    expected = quantise(activate(h.double(), activation).float()[:owned], format)
    assert (found.data[owned:] == 99).all()
    # a number next to the middle between two codes may fall to the other one
    assert (found.data[:owned] != expected.data).float().mean() < 0.01
    one = found.dequantise()[:owned]
    assert (one - expected.dequantise()).norm() < 5e-3 * expected.dequantise().norm()
