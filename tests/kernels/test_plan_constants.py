"""Compiled kernels are kept under what a plan says of itself: all that they were made from has to be in it."""

from dataclasses import fields, replace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")
from amoeba.kernels.hopper import fp8_gemm, gemm_kernel
from amoeba.kernels.hopper.gemm_kernel import Constants, Plan
from amoeba.kernels.hopper.weight_only_gemm_kernel import WeightOnlyPlan

COMMON: dict[str, Any] = {"ACTIVATE": True, "GATHER": True, "BIAS": False, "KEEP": True}
PLANS = {
    "bf16": Plan(B_K_MAJOR=True, LOW=0, **COMMON),
    "codes": WeightOnlyPlan(B_K_MAJOR=True, LOW=16, **COMMON),
    "e4m3": fp8_gemm.Plan(**COMMON),
}
by_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def properties_of(plan: Any) -> set[str]:
    found = {name for kind in type(plan).__mro__ for name, value in vars(kind).items() if isinstance(value, property)}
    return set(filter(str.isupper, found))


def other_than(value: Any) -> Any:
    """Of the same kind, as far as other constants are made of it."""
    if isinstance(value, tuple | list):
        return type(value)(2 * number for number in value)
    if isinstance(value, bool):
        return not value
    return value + type(value)(1) if isinstance(value, int | float | str) else "another"


@by_plan
def test_every_constant_of_a_plan_is_told_with_its_value(plan: Any) -> None:
    told, properties = repr(Constants(plan)), properties_of(plan)
    assert len(properties) > 5
    for name in {field.name for field in fields(plan)} | properties:
        assert f"{name}={getattr(plan, name)!r}" in told
    assert str(Constants(plan)) == told, "which Triton asks for"


@by_plan
def test_plans_that_differ_in_one_field_are_told_apart(plan: Any) -> None:
    for field in fields(plan):
        changed = replace(plan, **{field.name: other_than(getattr(plan, field.name))})
        assert repr(Constants(changed)) != repr(Constants(plan)), field.name


@by_plan
def test_a_property_that_was_written_anew_makes_another_kernel(plan: Any) -> None:
    """The fields stay as they are, and so does the source of the kernel itself."""
    before = repr(Constants(plan))
    for name in properties_of(plan):
        other = other_than(getattr(plan, name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(plan), name, property(lambda self, other=other: other))
            assert repr(Constants(plan)) != before, name
    assert repr(Constants(plan)) == before


def test_another_depth_of_a_stage_makes_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: repr(Constants(PLANS[name])) for name in ("bf16", "codes")}
    monkeypatch.setattr(gemm_kernel, "BLOCK_K", 128)
    for name, told in before.items():
        assert repr(Constants(PLANS[name])) != told
