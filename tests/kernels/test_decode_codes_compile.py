"""The kernels that decode four-bit codes for few tokens compile for Hopper, here without one: all in registers, and the
order that their instructions give numbers in is the one that they count on.

    TRITON_CACHE_DIR=cubins python tests/kernels/test_decode_codes_compile.py      # a line of JSON
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import triton
from test_decode_compiles import CompileOnly
from test_hopper_compiles import compiled_by

pytestmark = pytest.mark.thorough  # compiles for twenty seconds


# Bytes of a thread's stack and accesses to it that a version of Triton leaves.
SPILLED = {"3.6": {"down_by_expert mxfp4": (8, 4)}}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


def test_nothing_is_spilled_but_what_is_known(kernels):
    assert len(kernels) == 8
    known = SPILLED.get(triton.__version__.rpartition(".")[0], {})
    for name, found in kernels.items():
        stack, accesses = known.get(name, (0, 0))
        assert found["stack_bytes"] <= stack and found["local_accesses"] <= accesses, (name, found)


def test_four_bytes_side_by_side_are_decoded_together(kernels):
    """`scaled_lanes_e2m1` gives the eight numbers of a word in an order of its own: the word has to be the bytes 4i to
    4i + 3 of a row."""
    decoding = [found for name, found in kernels.items() if not name.startswith("list_slots")]
    assert all(found["four_side_by_side"] for found in decoding), kernels


class WithOrder(CompileOnly):
    def keep(self, name: str, made: Any) -> None:
        super().keep(name, made)
        # of codes and scales; another one takes scales alone
        (layout,) = re.findall(r"packed_element = 4 .*? : tensor<\d+x\d+xi8, (.*?)>>, tensor<", made.asm["ttgir"])
        self.found[name]["four_side_by_side"] = "dot_op" in layout and "kWidth = 4" in layout


def main() -> dict[str, dict[str, int]]:
    """64 tokens through Qwen3-30B's layers."""
    from amoeba.kernels.decode import block_scaled
    from amoeba.kernels.decode import block_scaled_by_expert as kernels
    from amoeba.precision import MXFP4, NVFP4, Format, QuantisedMatrix
    from amoeba.precision.experts import BlockScaledExperts
    from amoeba.precision.quantised import block_counts
    from amoeba.problem import Problem

    T, E, K, H, I = 64, 128, 8, 2048, 768
    found: dict[str, dict[str, int]] = {}
    up, down, listing = kernels._up_by_expert, kernels._down_by_expert, kernels._list_slots
    block_scaled.sum_of_slots = lambda problem: lambda *tensors: None

    def empty(format: Format, rows: int, columns: int) -> QuantisedMatrix:
        data = torch.empty(E, rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(E, *block_counts(rows, columns, format), dtype=torch.uint8)
        return QuantisedMatrix(data, scales, format, columns, 1, torch.empty(E) if format.has_matrix_scale else None)

    for format, listed in ((MXFP4, False), (NVFP4, True), (MXFP4, True)):
        of_format: dict[str, dict[str, int]] = {}
        kernels._up_by_expert, kernels._down_by_expert = WithOrder(up, of_format), WithOrder(down, of_format)
        kernels._list_slots = CompileOnly(listing, of_format)
        with torch.device("meta"):
            weights = BlockScaledExperts.holding(empty(format, 2 * I, H), empty(format, H, I))
            x_TH = torch.empty(T, H, dtype=torch.bfloat16)
            problem = Problem(x_TH, torch.empty(T, K, dtype=torch.int64), torch.empty(T, K), weights)
            chosen = block_scaled.by_expert(problem)._replace(overlap=True, by_lanes=True, listed=listed)
            block_scaled.decode(problem, configuration=chosen)
        found |= {f"{name} {format.name}{' listed' * listed}": figures for name, figures in of_format.items()}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
