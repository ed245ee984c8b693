"""Scales in tiles of 128 x 4: byte by byte against the definition, and back again, for ragged sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.precision import FP8_TRAINING, MXFP8, NVFP4, quantise
from amoeba.precision.formats import MXFP8_TRAINING, NVFP4_TRAINING
from amoeba.precision.scale_layouts import scales_by_row, swizzle, swizzled_bytes, unswizzle

SIZES = [(1, 1), (128, 4), (31, 3), (33, 5), (129, 4), (128, 9), (300, 17), (0, 4), (5, 0)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_each_scale_is_where_the_definition_puts_it_and_zeros_fill_the_tiles(rows: int, columns: int) -> None:
    scales = drawn(rows, columns)
    found = swizzle(scales).tolist()
    across = (columns + 3) // 4
    expected = [0] * ((rows + 127) // 128 * across * 512)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            within = row % 128 % 32 * 16 + row % 128 // 32 * 4 + column % 4
            expected[tile * 512 + within] = int(scales[row, column])
    assert found == expected and len(found) == swizzled_bytes(rows, columns)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 400), columns=st.integers(0, 40), experts=st.integers(0, 3), seed=st.integers(0, 99))
def test_unswizzling_brings_every_scale_back_and_swizzling_again_every_byte(rows, columns, experts, seed) -> None:
    scales = drawn(experts, rows, columns, seed=seed)
    swizzled = swizzle(scales)
    assert torch.equal(unswizzle(swizzled, rows, columns), scales)
    assert torch.equal(swizzle(unswizzle(swizzled, rows, columns)), swizzled)
    for e in range(experts):
        assert torch.equal(swizzled[e], swizzle(scales[e]))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("format", [MXFP8, NVFP4, MXFP8_TRAINING, NVFP4_TRAINING], ids=lambda format: format.name)
def test_scales_that_several_rows_share_are_repeated_for_each(format, parts: int) -> None:
    matrix = quantise(torch.randn(3, 70, 100, generator=torch.Generator().manual_seed(0)), format, parts=parts)
    lines, (height, width) = scales_by_row(matrix), format.block
    assert lines.shape == (3, 70, -(-100 // width))
    down = matrix.scales.shape[1] // parts
    for row in range(70):
        of_part = 70 // parts
        line = row // of_part * down + row % of_part // height
        assert torch.equal(lines[:, row], matrix.scales[:, line])
    assert torch.equal(unswizzle(swizzle(lines), 70, lines.shape[2]), lines)


def test_what_has_no_such_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of one byte each; got torch\.float32"):
        swizzle(quantise(torch.ones(4, 256), FP8_TRAINING).scales)
    with pytest.raises(ValueError, match="expected 512 bytes for 5 x 4 scales; got 511"):
        unswizzle(torch.zeros(511, dtype=torch.uint8), 5, 4)
