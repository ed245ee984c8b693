"""Matrices quantised by the C++ core, compared with torch's way bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.quantise import is_compiled, load_quantise
from amoeba.precision.formats import FP8_128, FP8_128_ROWS, MXFP4, MXFP8, NVFP4, Format, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix, empty_quantised, quantise
from selection import each_value_once

try:
    load_quantise()
except CoreUnavailable as error:
    pytest.skip(f"needs the C++ core: {error}", allow_module_level=True)

FORMATS = {each.name: each for each in (FP8_128, FP8_128_ROWS, MXFP8, MXFP4, NVFP4)}
SHAPES = [(1, 1), (2, 16), (63, 31), (130, 199), (256, 128), (300, 33), (34, 760)]
SIZES = [0.0, 1e-42, 1e-38, 1e-30, 1.0, 1e30, 3e38]


def by_core(
    matrix: Tensor, format: Format, parts: int, threads: int = 2, closest: bool = False
) -> tuple[bool, QuantisedMatrix]:
    found = empty_quantised(tuple(matrix.shape), format, parts)
    found.data.fill_(0xEE)
    bits, scale = format.element.bits, format.scale
    tensors = found.data, found.scales, found.matrix_scale
    return load_quantise()(matrix, bits, scale, format.block, parts, *tensors, closest=closest, threads=threads), found


def numbers(rows: int, columns: int, size: float, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    found = torch.randn(rows, columns, generator=generator)
    if kind == "wide":
        found *= torch.exp2(torch.randint(-40, 40, found.shape, generator=generator).float())
    elif kind == "ties":  # halfway between codes, when the largest of a block is 6 or 448
        found = torch.randint(-48, 49, found.shape, generator=generator) / 8
        found[:, ::16] = 6.0 * 448 / 448
    elif kind == "sparse":
        found[torch.rand(found.shape, generator=generator) < 0.8] = -0.0
    return (found * size).clamp(-3.3e38, 3.3e38)


@each_value_once("format")
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_torch_s(format: str, dtype: torch.dtype, kind: str) -> None:
    check_codes_and_scales(format, dtype, kind, closest=False)


@each_value_once()
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "sparse"])
@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.element.bits == 4])
def test_the_closest_scales_are_torch_s(format: str, kind: str) -> None:
    check_codes_and_scales(format, torch.bfloat16, kind, closest=True)


@pytest.mark.parametrize(("format", "most"), [("mxfp4", 0.98), ("nvfp4", 0.87)])
def test_the_closest_scales_have_less_error(format: str, most: float) -> None:
    matrix = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    plain, closest = (quantise(matrix, FORMATS[format], closest=each).dequantise() for each in (False, True))
    assert (closest - matrix).norm() < most * (plain - matrix).norm()
    blocks = FORMATS[format].block[1]
    by_block = [(each - matrix).unflatten(1, (-1, blocks)).square().sum(-1) for each in (plain, closest)]
    assert (by_block[1] <= by_block[0] * 1.0001).all()


def check_codes_and_scales(format: str, dtype: torch.dtype, kind: str, closest: bool) -> None:
    of_kind = len(kind) + len(format)  # each kind meets each shape, and most of the pairs of shapes and sizes come
    pairs = [
        (shape, size) for i, shape in enumerate(SHAPES) for j, size in enumerate(SIZES) if (i + j + of_kind) % 3 == 0
    ]
    for (rows, columns), size in pairs:
        matrix = numbers(rows, columns, size, kind).to(dtype)
        for parts in (1, 2) if rows % 2 == 0 else (1,):
            expected = quantise(matrix, FORMATS[format], parts=parts, closest=closest)
            finite, found = by_core(matrix, FORMATS[format], parts, closest=closest)
            assert finite, (rows, columns, size)
            assert torch.equal(found.data, expected.data), (rows, columns, size, parts)
            assert torch.equal(found.scales, expected.scales), (rows, columns, size, parts)
            if expected.matrix_scale is not None:
                assert found.matrix_scale is not None and torch.equal(found.matrix_scale, expected.matrix_scale)


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_number_becomes_the_same_code(format: str) -> None:
    """In blocks of growing numbers, so that scales take all their values and codes theirs."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].view(-1, 128)
    for matrix in (every, every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))].t()):
        matrix = matrix.contiguous()
        expected = quantise(matrix, FORMATS[format])
        finite, found = by_core(matrix, FORMATS[format], 1)
        assert finite and torch.equal(found.data, expected.data) and torch.equal(found.scales, expected.scales)


@each_value_once()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_not_finite_is_told(format: str, value: float, dtype: torch.dtype) -> None:
    matrix = torch.randn(199, 70).to(dtype)
    matrix[198, 69] = value
    assert not by_core(matrix, FORMATS[format], 1)[0]


def test_rows_may_lie_apart_and_the_number_of_threads_changes_nothing() -> None:
    wide = torch.randn(130, 300).bfloat16()
    for format in FORMATS.values():
        expected = quantise(wide[:, 20:219].contiguous(), format, parts=2)
        for threads in (1, 2, 5):
            _, found = by_core(wide[:, 20:219], format, 2, threads)
            assert torch.equal(found.data, expected.data) and torch.equal(found.scales, expected.scales)


def test_what_was_not_compiled_is_known_before() -> None:
    assert not is_compiled(torch.float16, 8, "fp32", (128, 128))
    other = fp8_blocks(64, 32)
    assert not is_compiled(torch.float32, 8, other.scale, other.block)
    assert not is_compiled(torch.float32, 4, "e8m0", (2, 32))
