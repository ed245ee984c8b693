"""The variants of the e4m3 products have the bits of the plain one, in whole layers; so do passes from launch plans."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from test_fp8_kernels import gradients, on_gpu, on_hopper

from amoeba.kernels.hopper import fp8_gemm
from amoeba.kernels.launch import plan as launch_plan

pytestmark = [pytest.mark.gpu, on_hopper]
# (tokens, H, I): many tiles with halves that have no rows; half blocks; fewer rows than a tile; whole turns of the ring
# of stages, of which tiles are one or two
SIZES = [(1500, 256, 384), (300, 192, 320), (5, 128, 128), (1500, 1024, 384), (300, 512, 320)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8-ste", "fp8-saved", "fp8-all"])
def test_the_variants_that_are_chosen_have_the_bits_of_the_plain_one(
    recipe: str, bias: bool, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = on_gpu(*sizes, bias=bias)
    found = gradients(layer, recipe, "triton")
    without_h = gradients(layer, recipe, "triton", recompute=True)
    launch_plan.forget_plans()
    monkeypatch.setattr(fp8_gemm, "variant_of", lambda *facts: "in_order")
    expected = gradients(layer, recipe, "triton")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(without_h[name], value), f"{name}, h not kept"


@pytest.mark.parametrize("recipe", ["fp8", "fp8-ste", "fp8-saved", "fp8-all"])
def test_steps_from_launch_plans_have_the_bits_of_one_that_is_computed(recipe: str) -> None:
    layer = on_gpu()
    launch_plan.forget_plans()
    expected = gradients(layer, recipe, "triton")
    for _ in range(3):
        found = gradients(layer, recipe, "triton")
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert len([plan for plan in launch_plan._plans.values() if plan not in (None, launch_plan._SEEN)]) == 2
