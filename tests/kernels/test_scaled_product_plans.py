"""Which way each product in e4m3 takes, and which plans can store a tile under the next one's products."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from amoeba.kernels.hopper import scaled_product
from amoeba.kernels.hopper.scaled_product_plan import BLOCK, PLAIN, TURN, Plan

UP = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=False, GATED=True, KIND="silu")
DOWN = Plan(ACTIVATE=False, GATHER=False, BIAS=False, KEEP=False)
DA = Plan(ACTIVATE=False, GATHER=True, BIAS=False, KEEP=False, WIDE=True)
IN_BF16 = replace(DA, WIDE=False)


def taken(plan: Plan, depth: int, columns: int) -> str:
    found = scaled_product._with_ways(plan, depth, columns).WAYS
    (name,) = (name for name, ways in scaled_product.WAYS.items() if ways == found)
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
        (DA, 2048, 768, "all"),
        (IN_BF16, 2048, 768, "along threads"),
        (DOWN, 768, 2048, "under"),
        (DOWN, 2048, 7168, "under"),
        (DOWN, 4096, 7168, "plain"),
    ],
)
def test_each_product_takes_the_way_that_was_fastest(plan: Plan, depth: int, columns: int, way: str) -> None:
    assert taken(plan, depth, columns) == way


@pytest.mark.parametrize(("plan", "way"), [(UP, "all"), (DOWN, "plain")], ids=["up", "down"])
def test_biases_and_half_blocks_keep_the_way_that_they_had(plan: Plan, way: str) -> None:
    assert taken(plan, 2048, 704) == way
    assert taken(replace(plan, BIAS=True), 2048, 768) == way
    assert taken(plan, 704, 768) == way
    assert taken(plan, 768, 704) == way


def test_gathered_rows_in_bf16_take_the_plain_way_where_tiles_are_no_whole_turns_or_have_biases() -> None:
    assert taken(replace(DOWN, GATHER=True), 768, 768) == "plain"
    assert taken(replace(DOWN, GATHER=True, BIAS=True), 2048, 768) == "plain"


@pytest.mark.parametrize("plan", [UP, DOWN], ids=["up", "down"])
def test_a_tile_of_one_step_is_not_stored_under_the_next_one(plan: Plan) -> None:
    with scaled_product.way("under"):
        assert not scaled_product._with_ways(plan, 64, 768).UNDER
        assert not scaled_product._with_ways(plan, 128, 768).UNDER
        assert scaled_product._with_ways(plan, 192, 768).UNDER


@pytest.mark.parametrize("way", ["under", "all"])
def test_nothing_with_h_or_fp32_to_write_or_an_activation_without_gates_is_stored_so(way: str) -> None:
    plans = [UP, DOWN, replace(UP, KEEP=True), replace(UP, GATED=False), DA]
    with scaled_product.way(way):
        found = [scaled_product._with_ways(plan, 2048, 768).UNDER for plan in plans]
    assert found == [way == "under"] * 2 + [False] * 3


@pytest.mark.parametrize(("depth", "along"), [(512, True), (2048, True), (768, False), (576, False), (128, False)])
def test_scales_come_along_where_a_tile_is_whole_turns_of_the_ring(depth: int, along: bool) -> None:
    with scaled_product.way("along"):
        for plan in (UP, replace(UP, KEEP=True), replace(UP, KEEP=True, CODED=True)):
            assert along == scaled_product._with_ways(plan, depth, 768).ALONG


def test_scales_come_along_with_gathered_rows_but_for_an_activation_without_gates() -> None:
    with scaled_product.way("along"):
        for plan in (DOWN, replace(UP, GATED=False)):
            assert not scaled_product._with_ways(plan, 2048, 768).ALONG
        for plan in (DA, IN_BF16):
            found = scaled_product._with_ways(plan, 2048, 768)
            assert found.ALONG and found.STAGES * BLOCK == TURN


@pytest.mark.parametrize("plan", [replace(UP, KEEP=True), DA, IN_BF16], ids=["h", "fp32", "bf16"])
@pytest.mark.parametrize("way", ["along straight", "along threads"])
def test_what_threads_store_has_no_buffers_to_take_turns(way: str, plan: Plan) -> None:
    with scaled_product.way(way):
        found = scaled_product._with_ways(plan, 2048, 768)
        assert (way == "along straight", way == "along threads") == (found.STRAIGHT, found.THREADS)
        assert not found.ALTERNATE
        found = scaled_product._with_ways(plan, 768, 768)
        assert not (found.STRAIGHT or found.THREADS), "no whole turns"
    with scaled_product.way("along"):
        found = scaled_product._with_ways(plan, 2048, 768)
        assert found.ALTERNATE and found.BUFFERS == 2


def test_codes_are_stored_by_threads_where_all_are() -> None:
    for way, wanted in (("along straight", False), ("along threads", False), ("along threads all", True)):
        with scaled_product.way(way):
            found = scaled_product._with_ways(replace(UP, KEEP=True, CODED=True), 2048, 768)
            assert not (found.STRAIGHT or found.THREADS) and wanted == found.CODES_BY_THREADS


def test_a_way_holds_within_its_block_only() -> None:
    with scaled_product.way("plain"):
        assert scaled_product._with_ways(UP, 2048, 768).WAYS == scaled_product.current_way() == PLAIN
    assert scaled_product.current_way() is None
