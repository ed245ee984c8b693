"""What LoRA adds to a product of sorted rows, as more of its depth: out = [rows, low] · [matrix, factor]ᵀ.

N routed rows · E experts · O columns of the product · R ranks, padded (see `padded_rank`)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2


class Addend(NamedTuple):
    """out[n] += low[n] · factor of n's expert, transposed."""

    low_NR: Tensor  # sorted rows, contiguous
    factor_EOR: Tensor  # any strides, one of the last two 1


# The depth of a step in the kernels for Hopper, and the least that a matrix unit takes elsewhere.
WHOLE_STEP, SMALLEST_STEP = 64, 16


def padded_rank(rank: int, smallest: int) -> int:
    """A power of two of at least `smallest`, or a multiple of a whole step."""
    return max(next_power_of_2(rank), smallest) if rank <= WHOLE_STEP else cdiv(rank, WHOLE_STEP) * WHOLE_STEP
