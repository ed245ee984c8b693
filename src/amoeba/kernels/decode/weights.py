"""Weights as the kernels for few tokens take them: strided tensors, or quantised ones with their scales.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    of_up, of_down = stored(weights, x_TH)                      # of both: weights, scales, matrix_scale, bias
    kernel(..., *of_up, ..., *numbers_of(problem, weights.gate_up_EJH), MATRIX=stored_up(problem, tile))

Sizes and strides of strided weights are numbers of a launch, those of quantised ones compile-time constants: the
compiler has to see that 16 bytes side by side are inside or outside of a row together, or it reads them one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.problem import Problem
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.configuration import Tile
from amoeba.kernels.dequantise import block_constants
from amoeba.kernels.tile_sizes import capability_of
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.precision.quantised_experts import QuantisedExperts


def is_quantised(weights: Any) -> bool:
    return isinstance(weights, QuantisedExperts)


def stored(weights: Any, x_TH: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Of both matrices. A kernel without a bias looks at none, whatever stands in its place."""

    def given(matrix: Any, bias_EO: Tensor | None) -> tuple[Tensor | None, ...]:
        if isinstance(matrix, Tensor):
            return matrix, None, None, x_TH if bias_EO is None else bias_EO.contiguous()
        kept: QuantisedMatrix = matrix.matrix
        return kept.data, kept.scales, kept.matrix_scale, x_TH if bias_EO is None else _in_lines(bias_EO)

    up = given(weights.gate_up_EJH, weights.gate_up_bias_EJ)
    return up, given(weights.down_EHI, weights.down_bias_EH)


def numbers_of(problem: Problem, matrix: Any) -> tuple[int | None, ...]:
    """Strides of an expert, a row and a column, and E, H and I."""
    if is_quantised(problem.weights):
        return (None,) * 6
    return (*matrix.stride(), *problem.weights.down_EHI.shape)


def stored_up(problem: Problem, tile: Tile) -> Group:
    weights = problem.weights
    return _constants(problem, weights.gate_up_EJH, weights.gate_up_bias_EJ, tile, weights.intermediate, weights.hidden)


def stored_down(problem: Problem, tile: Tile) -> Group:
    weights = problem.weights
    return _constants(problem, weights.down_EHI, weights.down_bias_EH, tile, weights.hidden, weights.intermediate)


def _constants(problem: Problem, matrix: Any, bias_EO: Tensor | None, tile: Tile, columns: int, depth: int) -> Group:
    """columns: of the result; depth: what is summed over."""
    weights, has_bias = problem.weights, bias_EO is not None
    if not is_quantised(weights):
        even_rows, even_depth = columns % tile.columns == 0, depth % tile.depth == 0
        return Group(QUANTISED=False, EVEN_ROWS=even_rows, EVEN_DEPTH=even_depth, HAS_BIAS=has_bias)
    kept: QuantisedMatrix = matrix.matrix
    return Group(
        QUANTISED=True,
        E=weights.num_experts,
        H=weights.hidden,
        I=weights.intermediate,
        K=problem.expert_TK.shape[1],
        REDUCTION=kept.columns,
        **block_constants(kept),
        STRIDE_ROW=kept.data.stride(1),
        STRIDE_EXPERT=kept.data.stride(0),
        STRIDE_SCALE_ROW=kept.scales.stride(1),
        STRIDE_SCALE_EXPERT=kept.scales.stride(0),
        STRIDE_MATRIX_SCALE=0 if kept.matrix_scale is None else kept.matrix_scale.stride(0),
        HARDWARE=_converts_e4m3(problem.x_TH.device),
        HAS_BIAS=has_bias,
        STRIDE_BIAS=0 if bias_EO is None else _in_lines(bias_EO).stride(0),
    )


def _converts_e4m3(device: torch.device) -> bool:
    return (capability_of(device) or (0, 0)) >= (8, 9)


def _in_lines(tensor: Tensor) -> Tensor:
    """Whose rows are contiguous, whatever lies between them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def bias_row(bias_EO, expert, outputs, MATRIX: tl.constexpr):
    """Where the expert's begins."""
    if MATRIX.QUANTISED:
        return bias_EO + expert * MATRIX.STRIDE_BIAS
    else:
        return bias_EO + expert * outputs
