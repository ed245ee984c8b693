"""The LoRA term of a product of sorted rows, as additional depth: out = [rows, low] · [matrix, factor]ᵀ.

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
    rank: int  # before it was padded: behind it there is nothing but zeros


# The depth of a step in the kernels for Hopper, and the least that a matrix unit multiplies.
WHOLE_STEP, SHORTEST_STEP = 64, 16


def padded_rank(rank: int) -> int:
    """Whole steps, or one that is shorter: a power of two, as the kernels' blocks are. 0 stays 0."""
    if rank > WHOLE_STEP:
        return cdiv(rank, WHOLE_STEP) * WHOLE_STEP
    return max(SHORTEST_STEP, next_power_of_2(rank)) if rank else 0
