"""Sorted rows on a GPU whose numbers do not depend on one another. The rows of `exact` there.

Within `tile_sizes.any_rows` the products of `triton` have one tile size for all numbers of rows. What is left are the
ways that differ between passes: Hopper's kernels, and an activation in the epilogue, which sees h before it is rounded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amoeba.backends.quantised_rows import QuantisedRows
from amoeba.backends.triton_rows import TritonRows, sorted_maps, with_plain_rows
from amoeba.core.problem import Problem, Saved
from amoeba.kernels.lora.epilogue import Addend


class ExactKernelRows(TritonRows):
    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        kept: Any = saved[1:] if saved else sorted_maps(problem)
        return cls(problem, *kept)

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        return self._multiply_x_then_activate(h_NJ, a_NI, addend)


class QuantisedExactKernelRows(ExactKernelRows, QuantisedRows):
    pass
