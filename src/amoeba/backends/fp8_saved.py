"""h as the recipe fp8-saved keeps it between the passes: e4m3 numbers and their scales in one tensor of bytes.

N routed rows · J = 2I or I

    saved = empty_saved(N, J, device)           # bytes, for codes and scales that a kernel will write
    h_NJ = saved_rows(saved, N, J)              # a QuantisedMatrix over the same memory
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.core.problem import Problem, Saved
from amoeba.precision.formats import FP8_TRAINING_ROWS
from amoeba.precision.quantised import QuantisedMatrix, block_counts, quantise_again

RECIPE = "fp8-saved"
# Codes begin at a multiple of it, behind the scales: the bulk copy engine reads and writes them.
_ALIGNED = 128


def bytes_of(rows: int, width: int) -> int:
    return _bytes_of_scales(rows, width) + rows * width


def _bytes_of_scales(rows: int, width: int) -> int:
    down, across = block_counts(rows, width, FP8_TRAINING_ROWS)
    return -(-4 * down * across // _ALIGNED) * _ALIGNED


def empty_saved(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.empty(bytes_of(rows, width), dtype=torch.uint8, device=device)


def saved_rows(saved: Tensor, rows: int, width: int) -> QuantisedMatrix:
    counts, of_scales = block_counts(rows, width, FP8_TRAINING_ROWS), _bytes_of_scales(rows, width)
    scales = saved[: 4 * counts[0] * counts[1]].view(torch.float32).view(counts)
    return QuantisedMatrix(saved[of_scales:].view(rows, width), scales, FP8_TRAINING_ROWS, width)


def quantised_in_torch(h_NJ: Tensor) -> Tensor:
    rows, width = h_NJ.shape
    saved = empty_saved(rows, width, h_NJ.device)
    quantise_again(h_NJ, saved_rows(saved, rows, width))
    return saved


def save(problem: Problem, saved: Tensor, maps: tuple[Tensor, Tensor, Tensor]) -> Saved:
    return Saved(saved, *maps, problem.x_TH.new_empty(0), problem.x_TH.new_empty(0))


def fake_h(problem: Problem) -> Tensor:
    """As it is saved, for a traced graph: in x's dtype, or by this recipe."""
    x_TH, weights = problem.x_TH, problem.weights
    width = weights.activation.width(weights.intermediate)
    if weights.recipe == RECIPE:
        return x_TH.new_empty(bytes_of(problem.rows, width), dtype=torch.uint8)
    return x_TH.new_empty((problem.rows, width))
