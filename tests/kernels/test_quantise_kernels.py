"""Quantising kernels against the formats' definitions, code by code and scale by scale."""

import math

import pytest
import torch
from torch import Tensor

from amoeba import Activation
from amoeba.kernels.activate import activate_backward
from amoeba.kernels.quantise import empty_rows, empty_weights, quantise_rows, quantise_weights
from amoeba.precision import FP8_128_ROWS, FP8_TRAINING, FP8_TRAINING_ROWS, QuantisedMatrix, quantise
from selection import each_value_once


def assert_same_bits(found: QuantisedMatrix, expected: QuantisedMatrix) -> None:
    assert torch.equal(found.scales, expected.scales)
    both_nan = (found.data & 127 == 127) & (expected.data & 127 == 127)  # whose sign means nothing
    assert bool(((found.data == expected.data) | both_nan).all())


def drawn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(6 * torch.randn(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).to(device)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 768), (33, 200), (2, 64), (0, 128), (5, 1)], ids=str)
def test_rows_have_the_codes_of_the_definition(shape, dtype, device):
    rows = drawn(*shape, device=device).to(dtype)
    if rows.numel() > 1000:
        rows[1], rows[2, 3], rows[3, 5] = 0, math.inf, math.nan
        rows[4], rows[5], rows[6, ::2] = math.nan, -math.inf, math.inf
    for format in (FP8_TRAINING_ROWS, FP8_128_ROWS):
        assert_same_bits(quantise_rows(rows, format=format), quantise(rows, format))
        wider = torch.cat((rows, rows), dim=1)[:, : shape[1]]  # other strides
        assert_same_bits(quantise_rows(wider, format=format), quantise(rows, format))


def test_every_tie_and_every_scale_falls_to_the_same_side(device: torch.device) -> None:
    """All multiples of half the smallest step, and of a quarter of every larger one, beside 448."""
    steps = torch.arange(127 * 20) / 1024
    sizes = torch.cat((steps, *(2.0**power * (1 + torch.arange(127) / 127.0) for power in range(-6, 8))))
    sizes = torch.cat((sizes, *(2.0**power * (1 + torch.arange(32) / 32) for power in range(-6, 9))))
    sizes = sizes[sizes <= 448]
    sizes = sizes[: len(sizes) // 127 * 127].view(-1, 127)
    rows = torch.cat((torch.cat((sizes, -sizes)), torch.full((2 * len(sizes), 1), 448.0)), dim=1).to(device)
    assert_same_bits(quantise_rows(rows), quantise(rows, FP8_TRAINING_ROWS))
    # around 1.75 times a power of two, where the scale doubles, and at both ends of what fp32 has
    edges = [448.0, 448.00003, 447.99997, 1.75, 1.7500001, 2.0**-126, 1.75 * 2**-118, 1.7500001 * 2**-118, 1e-45, 3e38]
    rows = torch.zeros(len(edges), 128, device=device)
    rows[:, 3] = torch.tensor(edges, device=device)
    for format in (FP8_TRAINING_ROWS, FP8_128_ROWS):
        assert_same_bits(quantise_rows(rows, format=format), quantise(rows, format))


@each_value_once()
@pytest.mark.parametrize("transposed", [False, True], ids=["stored (O, I)", "stored (I, O)"])
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 200, 72)], ids=str)
def test_weights_have_the_codes_of_the_definition_both_ways_round(shape, transposed, device):
    experts, height, width = shape
    weight = drawn(*shape, device=device)
    weight[0, 0, 0], weight[1, 3, :5], weight[-1] = math.inf, math.nan, -math.inf
    weight = weight.mT.contiguous().mT if transposed else weight
    found, turned = empty_weights(*shape, device), empty_weights(experts, width, height, device)
    quantise_weights(weight, found, turned)
    expected = quantise(weight, FP8_TRAINING)
    assert_same_bits(found, expected)
    assert torch.equal(turned.data, found.data.mT) and torch.equal(turned.scales, found.scales.mT)
    alone = empty_weights(*shape, device)
    quantise_weights(weight, alone)
    assert_same_bits(alone, expected)


@pytest.mark.parametrize("activation", [Activation(), Activation("relu2", gated=False)], ids=str)
def test_the_activations_backward_quantises_the_dh_that_it_writes(activation: Activation, device: torch.device) -> None:
    rows, inner, owned = 21, 384, 17
    width = activation.width(inner)
    da, h = drawn(rows, inner, device=device, seed=1), torch.randn(rows, width).to(device)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2)).int().to(device)
    offs = torch.tensor([5, 5, owned], dtype=torch.int32, device=device)
    weight = torch.rand(rows, 1).to(device)
    dh, without = torch.empty_like(h), torch.empty_like(h)
    codes = empty_rows(rows, width, device)
    codes.data.fill_(7)
    ds = activate_backward(da, h, weight, order, activation, dh, None, offs, quantised_dh=codes)
    expected_ds = activate_backward(da, h, weight, order, activation, without, None, offs)
    torch.testing.assert_close(dh[:owned], without[:owned], rtol=1e-6, atol=0)
    torch.testing.assert_close(ds, expected_ds, rtol=1e-5, atol=1e-5)
    expected = quantise(dh[:owned], FP8_TRAINING_ROWS)
    assert torch.equal(codes.data[:owned], expected.data) and torch.equal(codes.scales[:owned], expected.scales)
    assert bool((codes.data[owned:] == 7).all()), "rows of sentinels are not written"
    da[3, 5] = math.inf
    activate_backward(da, h, weight, order, activation, dh, None, offs, quantised_dh=codes)
    assert_same_bits(
        QuantisedMatrix(codes.data[:owned], codes.scales[:owned], FP8_TRAINING_ROWS, width),
        quantise(dh[:owned], FP8_TRAINING_ROWS),
    )
