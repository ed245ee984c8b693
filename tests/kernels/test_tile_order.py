"""Orders of tiles: each tile once, groups that are one expert's, and the order that each layer's bytes ask for."""

import itertools
import types

import pytest
import torch

from amoeba.kernels.hopper import tile_order
from amoeba.kernels.hopper.gemm import rows_of_tile, tile_table
from amoeba.kernels.hopper.tile_order import BY_COLUMNS, IN_GROUPS, TALL
from selection import each_value_once

BLOCK_M, GROUP_M = 128, 8


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels compute with, of plain numbers."""
    plain = types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda one, other: -(-one // other))
    monkeypatch.setattr(tile_order, "gl", plain)


def tiles_in_order(counts: list[int], column_tiles: int, which: int, device: torch.device) -> list[tuple[int, ...]]:
    """Expert, row, end and column tile as a kernel finds them, tile after tile."""
    offs_E = torch.tensor(counts, device=device).cumsum(0).int()
    table = tile_table(offs_E, sum(counts))
    if which > 0:
        table = tile_order.list_tiles(table, column_tiles, which, BLOCK_M)
    (tiles, begun, _, _), *entries = table.view(-1, 4).tolist()
    assert which <= 0 or begun == 0, "programs count from zero"
    found = []
    for tile in range(tiles * column_tiles):
        slot, n = tile_order._slot_of_tile.fn(tile, tiles, column_tiles, GROUP_M, which)
        found.append((*entries[slot][:3], entries[slot][3] if which > 0 else n))
    return found


COUNTS = [0, 1, 127, 128, 129, 0, 2048, 2049, 3000, 3072, 6000, 5]


@each_value_once()
@pytest.mark.parametrize("which", [IN_GROUPS, BY_COLUMNS, 2, TALL])
@pytest.mark.parametrize("column_tiles", [1, 3, 8, 112])
def test_each_tile_comes_once(which: int, column_tiles: int, device: torch.device) -> None:
    found, start, expected = tiles_in_order(COUNTS, column_tiles, which, device), 0, []
    for expert, count in enumerate(COUNTS):
        for row in range(start, start + count, BLOCK_M):
            expected += [(expert, row, start + count, n) for n in range(column_tiles)]
        start += count
    assert sorted(found) == expected


def test_a_group_is_one_experts_and_sweeps_the_columns_together(device: torch.device) -> None:
    """Where an expert has 24 row tiles, it has two groups of twelve."""
    found = tiles_in_order(COUNTS, 7, TALL, device)
    heights: dict[int, set[int]] = {}
    for (expert, _), run in itertools.groupby(found, key=lambda place: (place[0], place[3])):
        rows = [row for _, row, _, _ in run]
        assert rows == list(range(rows[0], rows[0] + BLOCK_M * len(rows), BLOCK_M))
        heights.setdefault(expert, set()).add(len(rows))
    assert heights == {1: {1}, 2: {1}, 3: {1}, 4: {2}, 6: {16}, 7: {17}, 8: {12}, 9: {12}, 10: {16, 15}, 11: {1}}


@pytest.mark.parametrize(("rows", "experts", "height"), [(0, 0, 64), (1, 1, 64), (4096, 128, 64), (8192, 128, 128)])
def test_experts_with_few_rows_have_tiles_half_as_tall(rows: int, experts: int, height: int) -> None:
    assert rows_of_tile(rows, experts) == rows_of_tile(rows, experts, depth=4096) == height


@pytest.mark.parametrize(("each", "height"), [(64, 128), (96, 128), (128, 64), (160, 64), (256, 128), (4096, 128)])
def test_long_products_have_them_where_second_tiles_would_be_nearly_empty(each: int, height: int) -> None:
    assert rows_of_tile(8 * each, 8, depth=4096) == height
    assert rows_of_tile(8 * each, 8, depth=2048) == 128
