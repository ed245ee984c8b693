"""What `amoeba bench` says of implementations that have no time, and of names that are none."""

from __future__ import annotations

import pytest

from amoeba.bench.suite import Measurement
from amoeba.commands import bench_layers as bench


def test_those_that_share_a_reason_are_told_in_one_line():
    timed = Measurement("amoeba cpu", True, "timed")
    left_out = [Measurement(f"amoeba {name}", True, "left out", "needs a GPU") for name in ("fp8", "fp8, h recomputed")]
    refused = Measurement("eager", False, "refused", "needs a GPU")
    assert bench._untimed([timed, *left_out, refused]) == {
        ("left out", "needs a GPU"): ["amoeba fp8", "amoeba fp8, h recomputed"],
        ("refused", "needs a GPU"): ["eager"],
    }


def test_names_with_a_comma_can_be_told_apart_in_the_error():
    with pytest.raises(ValueError, match=r"--ours: expected one of: .*; fp8, weights unchanged; .*got 'fp9'"):
        bench.choose_ours(["fp8", "fp9"])
