"""Experts' quantised matrices to numbers, some experts at a time: the bits of the definition.

E experts · O rows of a matrix · I columns
"""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from amoeba.kernels.dequantise import dequantise
from amoeba.precision import E2M1, FP8_128, FP8_128_ROWS, MXFP4, MXFP8, NVFP4, Format, quantise
from amoeba.precision.blocks import BLOCK_KINDS
from amoeba.precision.formats import OF_BLOCKS, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix
from random_blocks import HALVES, random_rows
from selection import each_value_once, quick

FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4)
OTHERS = (FP8_128_ROWS, fp8_blocks(32, 512))
# Torch rounds to bf16 as a GPU does, Triton's interpreter need not.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SIZES = {"a tile": (16, 256, 1), "awkward": (37, 45, 1), "two parts": (140, 300, 2), "a column": (3, 1, 1)}
UNTOUCHED = -7.0
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # elsewhere it is interpreted


@each_value_once()
@quick(lambda format, size, dtype: dtype == DTYPES[-1] and (size == "two parts" or format in FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", FORMATS + OTHERS, ids=lambda format: format.name)
def test_each_number_is_the_code_times_its_scale(format: Format, size: str, dtype: torch.dtype, device) -> None:
    rows, columns, parts = SIZES[size]
    drawn = torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(2))
    matrix = quantise(drawn.to(device) * torch.logspace(-2, 2, 4, device=device)[:, None, None], format, parts=parts)
    expected = matrix.dequantise(dtype)
    for first, last in ((0, 4), (1, 3), (3, 4)):
        memory = torch.full((last - first + 1, rows, columns), UNTOUCHED, dtype=dtype, device=device)
        out_EOI = memory[: last - first]
        assert dequantise(matrix, first, last, out_EOI) is out_EOI
        assert torch.equal(out_EOI, expected[first:last]), (first, last)
        assert (memory[last - first :] == UNTOUCHED).all(), "written behind the last one"


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_experts_in_slots_have_something_between_them(format: Format, device: torch.device) -> None:
    matrix = quantise(torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(2)).to(device), format)

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack((torch.zeros_like(tensor), tensor), 1)[:, 1]

    of_matrix = None if matrix.matrix_scale is None else apart(matrix.matrix_scale)
    in_slots = replace(matrix, data=apart(matrix.data), scales=apart(matrix.scales), matrix_scale=of_matrix)
    out_EOI = torch.full((2, 64, 64), UNTOUCHED, device=device)
    assert torch.equal(dequantise(in_slots, 1, 3, out_EOI), matrix.dequantise()[1:])


ENDS = {
    "fp32": (1e-40, 1.2e-38, 1.0, 1e36, math.inf, math.nan),
    "e8m0": (0, 1, 127, 253, 254, 255),
    "e4m3": (0, 1, 0x38, 0x7E, 0x7F, 0xC0),
}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_code_and_the_ends_of_the_scales(format: Format, device: torch.device) -> None:
    ends = ENDS[format.scale]
    matrix = quantise(torch.zeros(len(ends), 2, 256, device=device), format)
    every = torch.arange(256, device=device).to(torch.uint8)
    matrix.data.copy_(every if format.element.bits == 8 else E2M1.pack(every & 15))
    for e, end in enumerate(ends):
        matrix.scales[e] = end
    if matrix.matrix_scale is not None:
        matrix.matrix_scale.copy_(torch.tensor([1e-30, 1e-38, 1e-3, 1.0, 1.0, 1e20]))
    expected = matrix.dequantise()
    found = dequantise(matrix, 0, len(ends), torch.full_like(expected, UNTOUCHED))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def blocks_of(kind: str, columns: int, device: torch.device, experts: int = 1) -> QuantisedMatrix:
    """Of any bits, 37 rows of each expert."""
    format = OF_BLOCKS[kind]
    rows = random_rows(kind, 37 * experts, math.ceil(columns / format.block[1]))
    data = torch.from_numpy(rows).view(experts, 37, -1).to(device)
    return QuantisedMatrix(data, data.new_empty((experts, 0, 0)), format, columns)


@quick(lambda kind, columns, dtype: dtype == torch.float32 and (columns == 768 or kind in ("q4_k", "q5_0")))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("columns", [768, 300, 31])
@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_any_bits_of_a_block_give_the_numbers_of_the_definition(kind, columns, dtype, device) -> None:
    matrix = blocks_of(kind, columns, device, experts=3)
    expected = matrix.dequantise(dtype)
    for first, last in ((0, 3), (1, 2)):
        memory = torch.full((last - first + 1, 37, columns), UNTOUCHED, dtype=dtype, device=device)
        found = dequantise(matrix, first, last, memory[: last - first])
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), expected[first:last].view(bits)), (first, last)
        assert (memory[last - first :] == UNTOUCHED).all(), "written behind the last one"


@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_the_ends_of_a_block_s_scales(kind: str, device: torch.device) -> None:
    """In fp16, or the upper half of fp32: zeros, a subnormal number, the largest one, infinities and NaN, for scale and
    offset alike."""
    matrix = blocks_of(kind, 1536, device)
    places = HALVES.get(kind, [0, 2])
    blocks = matrix.data.view(37, -1, BLOCK_KINDS[kind].bytes)
    wide = (0x7F7F, 0x7F80, 0xFF80, 0x7FC0) if kind == "nf4" else (0x7BFF, 0x7C00, 0xFC00, 0x7E00)
    for number, end in enumerate((0x0000, 0x8000, 0x0001, *wide)):
        for row, place in enumerate(places):
            blocks[row + 2 * number, :, place], blocks[row + 2 * number, :, place + 1] = end & 255, end >> 8
    expected = matrix.dequantise()
    found = dequantise(matrix, 0, 1, torch.full_like(expected, UNTOUCHED))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().any()


def test_no_experts_and_no_columns(device: torch.device) -> None:
    matrix = quantise(torch.zeros(3, 4, 32, device=device), MXFP4)
    assert dequantise(matrix, 2, 2, torch.empty(0, 4, 32, device=device)).shape == (0, 4, 32)
    nothing = quantise(torch.zeros(3, 4, 0, device=device), FP8_128)
    assert dequantise(nothing, 0, 3, torch.empty(3, 4, 0, device=device)).shape == (3, 4, 0)


def test_an_output_that_does_not_fit_is_refused(device: torch.device) -> None:
    matrix = quantise(torch.zeros(3, 4, 32, device=device), MXFP4)
    with pytest.raises(ValueError, match="expected"):
        dequantise(matrix, 0, 3, torch.empty(2, 4, 32, device=device))
    with pytest.raises(ValueError, match="expected"):
        dequantise(matrix, 2, 4, torch.empty(2, 4, 32, device=device))  # of three experts
    with pytest.raises(ValueError, match="contiguous"):
        dequantise(matrix, 0, 3, torch.empty(3, 32, 4, device=device).mT)
    turned = replace(matrix, data=matrix.data.mT.contiguous().mT)
    with pytest.raises(ValueError, match="contiguous"):
        dequantise(turned, 0, 3, torch.empty(3, 4, 32, device=device))
