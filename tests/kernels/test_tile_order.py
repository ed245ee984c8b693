"""Orders of tiles: each tile once, groups that are one expert's, and the order that each layer's bytes ask for."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from amoeba.kernels.hopper import order
from amoeba.kernels.hopper.order import BY_COLUMNS, IN_GROUPS, TALL, WIDE, group_of_gradient, order_of_product
from amoeba.kernels.hopper.product import tile_table

BLOCK_M, GROUP_M = 128, 8


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels compute with, of plain numbers."""
    plain = types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda one, other: -(-one // other))
    monkeypatch.setattr(order, "gl", plain)


def tiles_in_order(counts: list[int], column_tiles: int, which: int, device: torch.device) -> list[tuple[int, ...]]:
    """Expert, row, end and column tile as a kernel finds them, tile after tile."""
    offs_E = torch.tensor(counts, device=device).cumsum(0).int()
    table = tile_table(offs_E, sum(counts))
    if which > 0:
        table = order.list_tiles(table, column_tiles, which)
    (tiles, begun, _, _), *entries = table.view(-1, 4).tolist()
    assert which <= 0 or begun == 0, "programs count from zero"
    found = []
    for tile in range(tiles * column_tiles):
        slot, n = order._slot_of_tile.fn(tile, tiles, column_tiles, GROUP_M, which)
        found.append((*entries[slot][:3], entries[slot][3] if which > 0 else n))
    return found


COUNTS = [0, 1, 127, 128, 129, 0, 2048, 2049, 3000, 3072, 6000, 5]


@pytest.mark.parametrize("which", [IN_GROUPS, BY_COLUMNS, 2, TALL])
@pytest.mark.parametrize("column_tiles", [1, 3, 8, 112])
def test_each_tile_comes_once(which: int, column_tiles: int, device: torch.device) -> None:
    found, start, expected = tiles_in_order(COUNTS, column_tiles, which, device), 0, []
    for expert, count in enumerate(COUNTS):
        for row in range(start, start + count, BLOCK_M):
            expected += [(expert, row, start + count, n) for n in range(column_tiles)]
        start += count
    assert sorted(found) == expected


def test_a_row_tiles_columns_follow_one_another(device: torch.device) -> None:
    rows = [row for _, row, _, _ in tiles_in_order(COUNTS, 7, BY_COLUMNS, device)]
    assert [row for row, _ in itertools.groupby(rows)] == sorted(set(rows))


def test_a_group_is_one_experts_and_sweeps_the_columns_together(device: torch.device) -> None:
    """Where an expert has 24 row tiles, it has two groups of twelve."""
    found = tiles_in_order(COUNTS, 7, TALL, device)
    heights: dict[int, set[int]] = {}
    for (expert, _), run in itertools.groupby(found, key=lambda place: (place[0], place[3])):
        rows = [row for _, row, _, _ in run]
        assert rows == list(range(rows[0], rows[0] + BLOCK_M * len(rows), BLOCK_M))
        heights.setdefault(expert, set()).add(len(rows))
    assert heights == {1: {1}, 2: {1}, 3: {1}, 4: {2}, 6: {16}, 7: {17}, 8: {12}, 9: {12}, 10: {16, 15}, 11: {1}}


@pytest.mark.parametrize("group", [8, TALL, -WIDE, -3])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (16, 6), (56, 16), (18, 20), (3, 11)])
def test_each_tile_of_a_gradient_comes_once(group: int, height: int, width: int) -> None:
    found = [order.place_in_gradient.fn(inside, height, width, group) for inside in range(height * width)]
    assert sorted(found) == list(itertools.product(range(height), range(width)))


@pytest.mark.parametrize(
    # rows: of an expert; of up, down and dx, dA'
    ("rows", "hidden", "inner", "expected"),
    [
        (2048, 2048, 768, (BY_COLUMNS, BY_COLUMNS, BY_COLUMNS)),  # qwen3_30b: small matrices
        (4096, 2048, 1024, (BY_COLUMNS, BY_COLUMNS, BY_COLUMNS)),  # olmoe
        (2048, 7168, 2048, (TALL, TALL, BY_COLUMNS)),  # dsv3: dA' has eight column tiles
        (2048, 4096, 14336, (TALL, TALL, TALL)),  # mixtral
    ],
)
def test_wide_matrices_are_swept_by_tall_groups(
    rows: int, hidden: int, inner: int, expected: tuple[int, int, int]
) -> None:
    gate_up, down = 4 * hidden * inner, 2 * hidden * inner
    found = (
        order_of_product(rows, -(-2 * inner // 256), gate_up),
        order_of_product(rows, -(-hidden // 256), gate_up),
        order_of_product(rows, -(-inner // 256), down),
    )
    assert found == expected


def test_a_gradients_groups_lie_along_the_side_whose_other_is_read_less_often() -> None:
    assert group_of_gradient(56, 16) == -WIDE, "dsv3: x twice, dh once"
    assert group_of_gradient(32, 112) == TALL, "mixtral: dh twice, x once; along W, x 14 times"
    assert group_of_gradient(16, 6) == -WIDE, "qwen3_30b: one group each way, dh has fewer bytes"
    assert group_of_gradient(8, 6) == TALL
