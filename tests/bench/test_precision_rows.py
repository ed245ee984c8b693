"""What `amoeba bench` has beside bf16: experts in eight and four bits, and the recipes that train."""

from __future__ import annotations

from dataclasses import replace

import torch

from amoeba.bench.implementations import implementations, names_of_ours
from amoeba.bench.shapes import Shape
from amoeba.bench.workload import make_workload

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
    for recipe in ("fp8", "fp8-ste", "fp8-saved", "fp8-all"):
        assert {recipe, f"{recipe}, weights unchanged", f"{recipe}, h recomputed"} <= set(names_of_ours())
