"""What `amoeba bench` has beside bf16: experts in eight and four bits, and the recipes that train."""

from dataclasses import replace

import pytest
import torch

from amoeba.bench import implementations as implementations_module
from amoeba.bench.implementations import implementations, names_of_ours
from amoeba.bench.workload import Shape, make_workload

SHAPE = Shape("few", 3, 64, 32, 4, 2, forward_only=True)
CODES = ["fp8-weights", "mxfp4-weights", "nvfp4-weights"]


def test_experts_are_quantised_once_for_all_the_steps_of_a_graph() -> None:
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=False, peers=[], ours=CODES)
    assert [each.name for each in found] == [f"amoeba {name}" for name in CODES]
    assert "amoeba mxfp8-weights" in left_out
    first = dict(workload.placed)
    shifted = replace(workload, expert_TK=(workload.expert_TK + 1) % SHAPE.experts)
    again, _ = implementations(shifted, training=False, peers=[], ours=CODES)
    assert shifted.placed == first and set(first) == set(CODES)
    assert not torch.equal(again[0].run(), found[0].run()), "of other experts"


def test_bytes_that_codes_are_read_in_count_their_scales() -> None:
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, _ = implementations(workload, training=False, peers=[], ours=CODES)
    assert [each.itemsize for each in found] == [1 + 4 / 128**2, 0.5 + 1 / 32, 0.5 + 1 / 16]


def test_each_recipe_has_a_row_with_codes_kept_and_one_that_computes_h_again() -> None:
    for recipe in ("fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4"):
        assert {recipe, f"{recipe}, weights unchanged", f"{recipe}, h recomputed"} <= set(names_of_ours())


def test_rows_in_e4m3_are_timed_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fp8-weights`, with the products of the kernels for Hopper."""
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=False, peers=[], ours=["w8a8"])
    assert not found and "is plain torch here" in left_out["amoeba w8a8"]
    monkeypatch.setattr(implementations_module.fp8_triton, "why_not_on", lambda *given: None)
    found, _ = implementations(workload, training=False, peers=[], ours=["w8a8", "fp8-weights"])
    w8a8 = next(each for each in found if each.name == "amoeba w8a8")
    assert workload.placed["w8a8"].products == "w8a8" and w8a8.itemsize == 1 + 4 / 128**2
    with torch.no_grad():
        y, plain = w8a8.run(), next(each for each in found if each is not w8a8).run()
    assert 0.01 < float((y - plain).norm() / plain.norm()) < 0.1
