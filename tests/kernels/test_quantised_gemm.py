"""Products of quantised rows with quantised matrices in plain Triton, against fp64 on what the codes stand for.

N rows · E experts · H in · J out
"""

import itertools

import pytest
import torch

from amoeba.core.layout import build_layout
from amoeba.kernels import quantised_gemm
from amoeba.precision import FP8_128, FP8_128_ROWS, FP8_TRAINING, FP8_TRAINING_ROWS, Format, quantise
from amoeba.precision.formats import MXFP8_TRAINING, MXFP8_TRAINING_ROWS, NVFP4, NVFP4_TRAINING, NVFP4_TRAINING_ROWS
from selection import each_value_once

PAIRS = [
    (FP8_TRAINING_ROWS, FP8_TRAINING, 1),
    (FP8_128_ROWS, FP8_128, 2),
    (MXFP8_TRAINING_ROWS, MXFP8_TRAINING, 1),
    (NVFP4_TRAINING_ROWS, NVFP4_TRAINING, 1),
    (NVFP4_TRAINING_ROWS, NVFP4, 2),  # as files have it
]
by_formats = pytest.mark.parametrize(
    ("row_format", "format", "parts"),
    PAIRS,
    ids=lambda each: each.name if isinstance(each, Format) else f"{each} parts",
)


@each_value_once()
@pytest.mark.parametrize("sizes", [(40, 128, 256), (13, 200, 72), (9, 33, 50), (150, 64, 130)], ids=str)
@by_formats
def test_products_are_those_of_fp64_on_the_numbers_that_codes_stand_for(row_format, format, parts, sizes, device):
    tokens, width, columns = sizes
    generator, experts, top_k = torch.Generator().manual_seed(0), 5, 2
    expert_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    expert_TK[expert_TK == 1] = 3  # one without rows
    expert_TK[::4, 1] = experts  # of nobody's
    layout = build_layout(expert_TK, experts)
    x = torch.randn(tokens, width, generator=generator) * torch.exp(2 * torch.randn(tokens, 1, generator=generator))
    matrix = torch.randn(experts, columns, width, generator=generator)
    matrix[2] *= 30
    bias = torch.randn(experts, columns, generator=generator)
    rows, weights = quantise(x.to(device), row_format), quantise(matrix.to(device), format, parts=parts)
    offs, order = layout.offs_E.to(device, torch.int32), layout.order_N.to(device, torch.int32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    out = torch.full((order.shape[0], columns), 77.0, device=device, dtype=dtype)
    quantised_gemm.multiply(rows, weights, offs, out, order_N=order, top_k=top_k, bias_EO=bias.to(device, dtype))
    wide = rows.dequantise(torch.float64)[order // top_k]
    ends = [0, *offs.tolist()]
    for e, (start, end) in enumerate(itertools.pairwise(ends)):
        expected = wide[start:end] @ weights[e].dequantise(torch.float64).T + bias[e].to(device, dtype).double()
        error = (out[start:end].double() - expected).norm()
        assert error <= (5e-6 if dtype == torch.float32 else 3e-3) * expected.norm(), e
    assert (out[ends[-1] :] == 77).all()


def test_emulated_products_of_mxfp8_have_the_bits_of_dot_scaled(device, monkeypatch):
    """As before Blackwell."""
    if device.type == "cuda":
        pytest.skip("dot_scaled is for Blackwell")
    generator = torch.Generator().manual_seed(2)
    rows = quantise(torch.randn(40, 160, generator=generator) * 2.0**30, MXFP8_TRAINING_ROWS)
    weights = quantise(torch.randn(2, 48, 160, generator=generator) * 2.0**-40, MXFP8_TRAINING)
    found = []
    for emulated in (False, True):
        monkeypatch.setattr(quantised_gemm, "_is_emulated", lambda scale, device, emulated=emulated: emulated)
        found.append(torch.empty(40, 48))
        quantised_gemm.multiply(rows, weights, torch.tensor([7, 40], dtype=torch.int32), found[-1])
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@by_formats
def test_without_an_order_rows_are_read_where_they_lie(row_format, format, parts, device):
    generator = torch.Generator().manual_seed(1)
    rows = quantise(torch.randn(70, 96, generator=generator).to(device), row_format)
    weights = quantise(torch.randn(2, 64, 96, generator=generator).to(device), format, parts=parts)
    offs = torch.tensor([69, 70], dtype=torch.int32, device=device)
    out = torch.empty(70, 64, device=device)
    quantised_gemm.multiply(rows, weights, offs, out)
    numbers, matrices = rows.dequantise(torch.float64), weights.dequantise(torch.float64)
    expected = torch.cat((numbers[:69] @ matrices[0].T, numbers[69:] @ matrices[1].T))
    assert (out.double() - expected).norm() <= 5e-6 * expected.norm()


def test_operands_of_two_formats_are_refused(device):
    rows = quantise(torch.ones(4, 64, device=device), MXFP8_TRAINING_ROWS)
    weights = quantise(torch.ones(2, 8, 64, device=device), FP8_TRAINING)
    offs = torch.tensor([1, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="quantised alike"):
        quantised_gemm.multiply(rows, weights, offs, torch.empty(4, 8, device=device))
