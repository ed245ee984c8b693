"""What LoRA adds to a product of sorted rows, as more of its depth: out = [rows, low] · [matrix, factor]ᵀ.

N routed rows · E experts · O columns of the product · R ranks, padded (see `padded_rank`)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from amoeba.kernels.launch import cdiv


class Addend(NamedTuple):
    """out[n] += low[n] · factor of n's expert, transposed."""

    low_NR: Tensor  # sorted rows, contiguous
    factor_EOR: Tensor  # any strides, one of the last two 1
    rank: int  # before it was padded: behind it there is nothing but zeros


# The depth of a step in the kernels for Hopper. Elsewhere less would do, but a traced graph has to know how wide the
# saved rows are before it knows the GPU.
WHOLE_STEP = 64


def padded_rank(rank: int) -> int:
    return cdiv(rank, WHOLE_STEP) * WHOLE_STEP
