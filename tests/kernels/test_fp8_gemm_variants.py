"""Which way each product in e4m3 takes, and which plans can store a tile under the next one's products."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from amoeba.kernels.hopper import fp8_gemm
from amoeba.kernels.hopper.fp8_gemm import BLOCK, PLAIN, TURN, Plan
from amoeba.kernels.hopper.tile_order import IN_GROUPS, TALL
from amoeba.kernels.launch.persistent_grid import share_the_gpu

UP = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=False, GATED=True, KIND="silu")
DOWN = Plan(ACTIVATE=False, GATHER=False, BIAS=False, KEEP=False)
DA = replace(DOWN, GATHER=True)
KEEPING = replace(UP, KEEP=True)


def taken(plan: Plan, depth: int, columns: int) -> str:
    found = fp8_gemm._with_ways(plan, depth, columns).WAYS
    (name,) = (name for name, ways in fp8_gemm.WAYS.items() if ways == found)
    return name


@pytest.mark.parametrize(
    ("plan", "depth", "columns", "way"),
    [
        (replace(UP, KEEP=True), 2048, 768, "along"),
        (replace(UP, KEEP=True, CODED=True), 2048, 768, "along"),
        (UP, 2048, 768, "along"),
        (UP, 7168, 2048, "along"),
        (replace(UP, KEEP=True), 768, 768, "brisk"),
        (replace(UP, KEEP=True, CODED=True), 768, 768, "plain"),
        (UP, 768, 768, "under"),
        (DA, 2048, 768, "along"),
        (DA, 7168, 2048, "along"),
        (DA, 768, 768, "plain"),
        (DOWN, 768, 2048, "under"),
        (DOWN, 1536, 2048, "under"),
        (DOWN, 2048, 7168, "under in turns"),
        (DOWN, 4096, 7168, "under in turns"),
    ],
)
def test_each_product_takes_the_way_that_was_fastest(plan: Plan, depth: int, columns: int, way: str) -> None:
    assert taken(plan, depth, columns) == way


@pytest.mark.parametrize(("plan", "way"), [(UP, "all"), (DOWN, "plain"), (DA, "plain")], ids=["up", "down", "dA'"])
def test_biases_and_half_blocks_keep_the_way_that_they_had(plan: Plan, way: str) -> None:
    assert taken(plan, 2048, 704) == way
    assert taken(replace(plan, BIAS=True), 2048, 768) == way
    assert taken(plan, 704, 768) == way
    assert taken(plan, 768, 704) == way


@pytest.mark.parametrize("plan", [UP, DOWN], ids=["up", "down"])
def test_a_tile_of_one_step_is_not_stored_under_the_next_one(plan: Plan) -> None:
    with fp8_gemm.way("under"):
        assert not fp8_gemm._with_ways(plan, 64, 768).UNDER
        assert not fp8_gemm._with_ways(plan, 128, 768).UNDER
        assert fp8_gemm._with_ways(plan, 192, 768).UNDER


@pytest.mark.parametrize("way", ["under", "under in turns", "all"])
def test_nothing_with_h_to_write_or_an_activation_without_gates_is_stored_so(way: str) -> None:
    plans = [UP, DOWN, replace(UP, KEEP=True), replace(UP, GATED=False)]
    with fp8_gemm.way(way):
        found = [fp8_gemm._with_ways(plan, 2048, 768) for plan in plans]
    assert [plan.UNDER for plan in found] == [way != "all"] * 2 + [False] * 2
    assert [plan.IN_TURNS for plan in found] == [way == "under in turns"] * 2 + [False] * 2


def test_plans_that_have_scales_come_along_take_turns_and_begin_early_unless_h_leaves_in_bf16() -> None:
    with fp8_gemm.way("along"):
        for plan, early in ((UP, True), (DA, True), (replace(UP, KEEP=True, CODED=True), True), (KEEPING, False)):
            found = fp8_gemm._with_ways(plan, 2048, 768)
            assert found.IN_TURNS and early == found.EARLY
            assert not fp8_gemm._with_ways(plan, 768, 768).IN_TURNS


@pytest.mark.parametrize(("depth", "along"), [(512, True), (2048, True), (768, False), (576, False), (128, False)])
def test_scales_come_along_where_a_tile_is_whole_turns_of_the_ring(depth: int, along: bool) -> None:
    with fp8_gemm.way("along"):
        for plan in (UP, replace(UP, KEEP=True), replace(UP, KEEP=True, CODED=True), DA):
            assert along == fp8_gemm._with_ways(plan, depth, 768).ALONG


def test_scales_come_along_with_gathered_rows_but_for_an_activation_without_gates() -> None:
    with fp8_gemm.way("along"):
        for plan in (DOWN, replace(UP, GATED=False)):
            assert not fp8_gemm._with_ways(plan, 2048, 768).ALONG
        for plan in (UP, DA):
            found = fp8_gemm._with_ways(plan, 2048, 768)
            assert found.ALONG and found.STAGES * BLOCK == TURN


def test_a_way_holds_within_its_block_only() -> None:
    with fp8_gemm.way("plain"):
        assert fp8_gemm._with_ways(UP, 2048, 768).WAYS == fp8_gemm.current_way() == PLAIN
    assert fp8_gemm.current_way() is None


@pytest.mark.parametrize(
    ("plan", "matrix_bytes", "order"),
    [
        (DA, 2048 * 768, TALL),
        (UP, 2048 * 1536, TALL),
        (replace(UP, KEEP=True, CODED=True), 2048 * 1536, TALL),
        (replace(UP, KEEP=True), 2048 * 1536, IN_GROUPS),
        (replace(UP, KEEP=True), 7168 * 4096, IN_GROUPS),
        (DOWN, 2048 * 768, IN_GROUPS),
        (DOWN, 7168 * 4096, TALL),
    ],
)
def test_tiles_come_in_the_order_that_was_fastest(plan: Plan, matrix_bytes: int, order: int) -> None:
    assert fp8_gemm.order_of_tiles(plan, matrix_bytes) == order
    share_the_gpu()
    try:
        assert fp8_gemm.order_of_tiles(plan, matrix_bytes) == IN_GROUPS
    finally:
        share_the_gpu(False)
