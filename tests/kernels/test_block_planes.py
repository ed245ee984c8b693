"""Numbers of blocks, plane by plane, have the bits of the definition."""

import math

import pytest
import torch
import triton
import triton.language as tl

from amoeba.kernels.blocks import columns_of, columns_together, layout_of, load_packed, value_of
from amoeba.kernels.constants import Group
from amoeba.precision.formats import OF_BLOCKS
from amoeba.precision.quantised import QuantisedMatrix
from random_blocks import random_rows
from selection import each_value_once

ROWS, WRITTEN, UNTOUCHED = 5, 4, -7.0


@triton.jit
def _unpack(data, out, stride, ROWS: tl.constexpr, WRITTEN: tl.constexpr, STEP: tl.constexpr, MATRIX: tl.constexpr):
    row = tl.arange(0, triton.next_power_of_2(ROWS))[:, None]
    first = tl.program_id(0) * STEP
    packed = load_packed(data + row * MATRIX.STRIDE, row < WRITTEN, first, STEP, MATRIX)
    for plane in tl.static_range(MATRIX.PLANES):
        column = columns_of(first, plane, STEP, MATRIX)[None, :]
        tl.store(out + row * stride + column, value_of(packed, plane, STEP, MATRIX), mask=row < ROWS)


def unpacked(data: torch.Tensor, kind: str, columns: int, step: int) -> torch.Tensor:
    """With what is behind the last column, to the end of a step."""
    matrix = QuantisedMatrix(data, data.new_empty((0, 0)), OF_BLOCKS[kind], columns)
    steps = math.ceil(columns / step)
    out = torch.full((ROWS, steps * step), UNTOUCHED, device=data.device)
    constants = Group(STRIDE=data.stride(0), BLOCK_COLUMNS=OF_BLOCKS[kind].block[1], **layout_of(matrix))
    _unpack[(steps,)](data, out, out.stride(0), ROWS=ROWS, WRITTEN=WRITTEN, STEP=step, MATRIX=constants)
    return out


@each_value_once("kind")
@pytest.mark.parametrize("longer", [1, 4])
@pytest.mark.parametrize("columns", [1536, 800, 31])
@pytest.mark.parametrize("kind", OF_BLOCKS)
def test_any_bits_give_the_numbers_of_the_definition(kind, columns, longer, device) -> None:
    data = torch.from_numpy(random_rows(kind, ROWS, math.ceil(columns / OF_BLOCKS[kind].block[1]))).to(device)
    expected = QuantisedMatrix(data, data.new_empty((0, 0)), OF_BLOCKS[kind], columns).dequantise()
    found = unpacked(data, kind, columns, columns_together(kind) * longer)
    assert torch.equal(found[:WRITTEN, :columns].view(torch.int32), expected[:WRITTEN].view(torch.int32))
    assert not found[WRITTEN:].any(), "rows that do not exist are zeros"
    behind = expected.shape[1] if kind.endswith("_k") else math.ceil(columns / 32) * 32
    if columns != 31:
        assert not found[:, math.ceil(behind / 256) * 256 :].any(), "so is what follows the last block"
