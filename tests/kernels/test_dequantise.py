"""Block-scaled matrices to the numbers that they stand for, to the bit."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from amoeba.kernels.dequantise import dequantise
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format, QuantisedMatrix, quantise
from selection import quick

FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4)
SIZES = {"whole blocks": (128, 256, 1), "half blocks in two parts": (320, 192, 2), "awkward": (37, 45, 1)}


@quick(lambda format, size: size != "whole blocks")
@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_some_experts_have_the_numbers_of_dequantise(format: Format, size: str, device: torch.device) -> None:
    rows, columns, parts = SIZES[size]
    matrix = torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(1))
    quantised = quantise(matrix.to(device), format, parts=parts)
    for dtype in (torch.float32, torch.bfloat16 if device.type == "cuda" else torch.float16):
        out = torch.full((2, rows, columns), math.nan, dtype=dtype, device=device)
        assert torch.equal(dequantise(quantised, 1, 3, out), quantised.dequantise(dtype)[1:3])


@pytest.mark.gpu
def test_every_code_and_the_ends_of_the_scales(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).reshape(1, 8, 32).repeat(1, 6, 1)
    scales = torch.tensor([0, 1, 127, 200, 254, 255], dtype=torch.uint8, device=device)
    quantised = QuantisedMatrix(codes, scales.repeat_interleave(8).reshape(1, 48, 1), MXFP8, 32)
    found = dequantise(quantised, 0, 1, torch.empty(1, 48, 32, device=device))
    torch.testing.assert_close(found, quantised.dequantise(), rtol=0, atol=0, equal_nan=True)


def test_a_place_of_another_size_is_refused() -> None:
    quantised = quantise(torch.randn(3, 8, 32), MXFP4)
    with pytest.raises(ValueError, match=r"\(2, 8, 32\)"):
        dequantise(quantised, 1, 3, torch.empty(3, 8, 32))
