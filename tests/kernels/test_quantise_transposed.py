"""Transposed copies in e4m3 for gradients of weights, against the formats' definitions, code by code."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from amoeba.kernels.hopper.gemm import tile_table
from amoeba.kernels.quantise import BLOCK, RowBlocks, Transposed, row_blocks, transpose_rows, transpose_tokens
from amoeba.precision import quantise
from amoeba.precision.formats import FP8_TRAINING_COLUMNS, fp8_training_columns
from selection import each_value_once

# Rows of each expert: none, fewer than a block, whole blocks, one more.
COUNTS = [(1, 0, 199), (63, 128, 5, 0), (0, 257, 0), (0, 0)]
UNOWNED = 3  # rows of sentinels behind them
WRITTEN_BY_NOBODY = 0x5A


def drawn(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of all sizes; a column of zeros, one with an infinity, one with NaN, one at the edge of a scale."""
    generator = torch.Generator().manual_seed(rows + width)
    found = torch.randn(rows, width, generator=generator) * torch.exp(6 * torch.randn(rows, width, generator=generator))
    found[:, 1] = 0
    found[: rows // 2, 2], found[rows // 3, 3], found[:, 4] = math.inf, math.nan, 448.0
    return found.to(device, dtype)


def blocks_of(counts: tuple[int, ...], device: torch.device) -> tuple[RowBlocks, list[slice]]:
    """And the rows of each block that there is."""
    offs_E = torch.tensor(counts, device=device).cumsum(0).int()
    ends = [0, *offs_E.tolist()]
    parts = [
        slice(first, min(first + BLOCK, end))
        for start, end in itertools.pairwise(ends)
        for first in range(start, end, BLOCK)
    ]
    return row_blocks(offs_E, tile_table(offs_E, sum(counts) + UNOWNED)), parts


def assert_blocks(found: Transposed, expected: list[Tensor]) -> None:
    """expected: codes (rows, W) of each block; behind them zeros, and blocks behind the last one are not written."""
    for block, codes in enumerate(expected):
        turned = found.codes_BWR[block].t()
        both_nan = (turned[: len(codes)] & 127 == 127) & (codes & 127 == 127)  # whose sign means nothing
        assert bool(((turned[: len(codes)] == codes) | both_nan).all()), block
        assert bool((turned[len(codes) :] == 0).all()), block
    assert bool((found.codes_BWR[len(expected) :] == WRITTEN_BY_NOBODY).all())


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory has something in it."""
    empty = torch.empty

    def filled(*shape, **options) -> Tensor:
        found = empty(*shape, **options)
        return found.fill_(
            WRITTEN_BY_NOBODY if found.dtype == torch.uint8 else math.nan if found.is_floating_point() else 7
        )

    monkeypatch.setattr(torch, "empty", filled)


@each_value_once()
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(192, torch.bfloat16), (72, torch.float32)], ids=str)
def test_blocks_of_sorted_rows_have_the_codes_of_the_definition(width, dtype, counts, marked, device):
    rows_NW = drawn(sum(counts) + UNOWNED, 2 * width, dtype, device)[:, :width]  # of wider ones
    rows_NW[sum(counts) :] = math.nan
    blocks, parts = blocks_of(counts, device)
    found = transpose_rows(rows_NW, blocks)
    expected = [quantise(rows_NW[part], FP8_TRAINING_COLUMNS) for part in parts]
    assert_blocks(found, [each.data for each in expected])
    for block, each in enumerate(expected):
        assert torch.equal(found.scales[block * width : (block + 1) * width], each.scales[0]), block
    assert bool(found.scales[len(parts) * width :].isnan().all())


@each_value_once()
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(192, torch.bfloat16), (72, torch.float32)], ids=str)
def test_gathered_rows_have_codes_by_scales_of_all_tokens(width, dtype, counts, marked, device):
    """Of those without an expert here, too: the last token has the largest numbers."""
    top_k, slots = 2, sum(counts) + UNOWNED
    tokens = slots // top_k + 1
    rows_TW = drawn(tokens, 2 * width, dtype, device)[:, :width]
    rows_TW[-1] = 3e5
    order_N = torch.randperm(slots, generator=torch.Generator().manual_seed(1)).int().to(device)
    blocks, parts = blocks_of(counts, device)
    found = transpose_tokens(rows_TW, order_N, top_k, blocks)
    codes = quantise(rows_TW, fp8_training_columns(tokens))
    assert torch.equal(found.scales, codes.scales[0])
    assert_blocks(found, [codes.data[order_N[part].long() // top_k] for part in parts])


def test_blocks_of_an_expert_end_where_the_next_ones_begin(device: torch.device) -> None:
    for counts in COUNTS:
        blocks, parts = blocks_of(counts, device)
        assert blocks.end_E.tolist() == list(itertools.accumulate(-(-count // BLOCK) for count in counts))
        assert blocks.most >= len(parts) and blocks.end_E.dtype == torch.int32
