"""Which variant each product in e4m3 takes, and the order of its tiles."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from amoeba.kernels.hopper import fp8_gemm
from amoeba.kernels.hopper.fp8_gemm import Plan
from amoeba.kernels.hopper.tile_order import IN_GROUPS, TALL
from amoeba.kernels.launch.persistent_grid import share_the_gpu

UP = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=False, GATED=True, KIND="silu")
DOWN = Plan(ACTIVATE=False, GATHER=False, BIAS=False, KEEP=False)
DA = replace(DOWN, GATHER=True)
KEEPING = replace(UP, KEEP=True)
CODING = replace(KEEPING, CODED=True)


@pytest.mark.parametrize(
    ("plan", "depth", "columns", "variant"),
    [
        (KEEPING, 2048, 768, "scales_in_stage"),
        (CODING, 2048, 768, "scales_in_stage"),
        (UP, 2048, 768, "scales_in_stage"),
        (UP, 7168, 2048, "scales_in_stage"),
        (KEEPING, 768, 768, "in_order"),
        (CODING, 768, 768, "in_order"),
        (UP, 768, 768, "overlapped"),
        (DA, 2048, 768, "scales_in_stage"),
        (DA, 7168, 2048, "scales_in_stage"),
        (DA, 768, 768, "in_order"),
        (DOWN, 768, 2048, "overlapped"),
        (DOWN, 1536, 2048, "overlapped"),
        (DOWN, 2048, 7168, "pingpong"),
        (DOWN, 4096, 7168, "pingpong"),
        (replace(UP, GATED=False), 2048, 768, "prefetched"),
        (replace(KEEPING, GATED=False), 2048, 768, "in_order"),
    ],
)
def test_each_product_takes_the_variant_that_was_fastest(plan: Plan, depth: int, columns: int, variant: str) -> None:
    assert fp8_gemm.variant_of(plan, depth, columns) == variant


@pytest.mark.parametrize(
    ("plan", "variant"), [(UP, "prefetched"), (DOWN, "in_order"), (DA, "in_order")], ids=["up", "down", "dA'"]
)
def test_biases_and_half_blocks_keep_the_variant_that_they_had(plan: Plan, variant: str) -> None:
    assert fp8_gemm.variant_of(plan, 2048, 704) == variant
    assert fp8_gemm.variant_of(replace(plan, BIAS=True), 2048, 768) == variant
    assert fp8_gemm.variant_of(plan, 704, 768) == variant
    assert fp8_gemm.variant_of(plan, 768, 704) == variant


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
