"""Which plans of the e4m3 products store a tile under the next one's products, when a way asks for it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from amoeba.kernels.hopper import scaled_product
from amoeba.kernels.hopper.scaled_product_plan import Plan

UP = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=True, GATED=True, KIND="silu")
DOWN = Plan(ACTIVATE=False, GATHER=False, BIAS=False, KEEP=False)


@pytest.mark.parametrize("plan", [UP, DOWN], ids=["up", "down"])
def test_a_tile_of_one_step_is_not_stored_under_the_next_one(plan: Plan) -> None:
    with scaled_product.way("under"):
        assert not scaled_product._with_ways(plan, 64).UNDER
        assert not scaled_product._with_ways(plan, 128).UNDER
        assert scaled_product._with_ways(plan, 192).UNDER


def test_only_products_whose_sums_find_registers_are_stored_so() -> None:
    without_gates = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=True)
    h_in_codes = Plan(ACTIVATE=True, GATHER=True, BIAS=False, KEEP=True, CODED=True, GATED=True)
    with scaled_product.way("deep"):
        found = {plan: scaled_product._with_ways(plan, 2048) for plan in (UP, DOWN, without_gates, h_in_codes)}
    assert [plan.UNDER for plan in found.values()] == [True, True, False, True]
    assert [plan.DEEP for plan in found.values()] == [True, False, False, False]
