"""Blocks of GGUF files stand for the numbers that the package gguf gives, bit for bit, in every type that is read."""

import pytest
import torch

from amoeba.precision.blocks import BLOCK_KINDS, dequantise_blocks, mxfp4_parts, quantise_blocks
from amoeba.precision.formats import MXFP4
from amoeba.precision.quantised import QuantisedMatrix
from random_blocks import random_rows

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'amoeba-moe[gguf]'")
ROWS, BLOCKS = 8, 3


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "nf4"])
def test_numbers_are_those_of_the_package_gguf(kind):
    number, rows = gguf.GGMLQuantizationType[kind.upper()], random_rows(kind)
    assert gguf.GGML_QUANT_SIZES[number] == (BLOCK_KINDS[kind].numbers, BLOCK_KINDS[kind].bytes)
    expected = torch.from_numpy(gguf.dequantize(rows, number))
    found = dequantise_blocks(torch.from_numpy(rows), kind)
    if kind == "mxfp4":  # which has one zero there, and two here
        found, expected = found + 0, expected + 0
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_codes_and_scales_of_mxfp4_stand_for_the_same_numbers():
    rows = torch.from_numpy(random_rows("mxfp4"))
    codes, scales = mxfp4_parts(rows)
    matrix = QuantisedMatrix(codes, scales, MXFP4, 32 * BLOCKS)
    assert torch.equal(matrix.dequantise(), dequantise_blocks(rows, "mxfp4"))


@pytest.mark.parametrize(
    ("kind", "error"), [("q8_0", 9e-3), ("q4_0", 0.16), ("q4_k", 0.14), ("q5_k", 7e-2), ("q6_k", 4e-2), ("nf4", 9.3e-2)]
)
def test_numbers_that_are_quantised_come_back_within_the_error_of_the_format(kind, error):
    values = torch.randn(ROWS, BLOCKS * 256, generator=torch.Generator().manual_seed(0))
    values[1], values[2, 0] = 0, torch.nan
    found = dequantise_blocks(quantise_blocks(values, kind), kind)
    clean = [0, *range(3, ROWS)]
    assert (found[clean] - values[clean]).norm() < error * values[clean].norm()
    assert not found[1].any()
    assert found[2, : BLOCK_KINDS[kind].numbers].isnan().all()
    assert found[2, BLOCK_KINDS[kind].numbers :].isfinite().all()
