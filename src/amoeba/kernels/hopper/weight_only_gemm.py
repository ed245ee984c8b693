"""Sorted rows times quantised expert matrices on Hopper, dequantised tile by tile on their way to the tensor cores.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    table = tile_table(offs_E, rows=N)                                          # as for `amoeba.kernels.hopper.gemm`
    up(x_TH, order_N, K, gate_up, table, activation, a, h_NJ=h)                 # gate_up: a QuantisedMatrix (E, J, H)
    multiply(a, down, table, y_NH)                                              # y[n] = a[n] · down[e]ᵀ
    multiply(dh, gate_up, table, dx_NH, transposed=True)                        # dx[n] = dh[n] · gate_up[e]

The results are those of `amoeba.kernels.hopper.gemm` on the dequantised matrices, bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.cpu.pointers import place_of
from amoeba.kernels.hopper.gemm import Operands
from amoeba.kernels.hopper.gemm_kernel import BLOCK_K, BLOCK_M, BLOCK_N, Constants
from amoeba.kernels.hopper.tile_order import IN_GROUPS, order_of_product
from amoeba.kernels.hopper.tma import descriptor
from amoeba.kernels.hopper.weight_only_gemm_kernel import (
    CODE_STAGES,
    RUN,
    WeightOnlyPlan,
    weight_only_gemm_kernel,
)
from amoeba.kernels.launch import cdiv
from amoeba.kernels.launch.persistent_grid import programs, sharing
from amoeba.kernels.lora.epilogue import Addend
from amoeba.precision.formats import Format
from amoeba.precision.quantised import QuantisedMatrix

# Rows of a block in fp8, at least. Fewer are in no file that we know, and were not tried.
_LEAST_ROWS = 64


def why_not(matrix: QuantisedMatrix) -> str | None:
    """The reason why a matrix like this cannot be decoded here. Its sizes have to be multiples of 64."""
    rows, columns = matrix.format.block
    if not _serves(matrix.format):
        return f"cannot dequantise blocks of {rows} x {columns} in {matrix.format.name}"
    if matrix.parts > 2:
        return f"supports at most two parts per matrix, not {matrix.parts}"
    if min(matrix.shape[1:]) < CODE_STAGES * BLOCK_K:
        return f"needs sizes of {CODE_STAGES * BLOCK_K} or more, this is {tuple(matrix.shape[1:])}"
    if not all(tensor[0].is_contiguous() for tensor in (matrix.data, matrix.scales) if tensor.shape[0]):
        return "needs contiguous experts and scales"
    return None


def is_in_one_piece(matrix: QuantisedMatrix) -> bool:
    """As codes have to be for this kernel; where something lies between experts, as in slots, it cannot fetch them."""
    tensors = (matrix.data, matrix.scales, matrix.matrix_scale)
    whole = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return whole and place_of(matrix.data) % 16 == 0


@cache
def _serves(format: Format) -> bool:
    rows, columns = format.block
    if format.element.bits == 8 and format.scale == "fp32":
        return rows % _LEAST_ROWS == 0 and columns % RUN == 0
    return rows == 1 and columns in (16, 32) and format.scale in ("e8m0", "e4m3")


@cache
def _bound(plan: WeightOnlyPlan) -> Any:
    return weight_only_gemm_kernel.bound(PLAN=Constants(plan), num_warps=4)


def _launch(
    matrix: QuantisedMatrix, transposed: bool, operands: Operands, activation: Activation | None, whole_table: bool
) -> None:
    _, stored_rows, stored_columns = matrix.shape
    width, depth = (stored_columns, stored_rows) if transposed else (stored_rows, stored_columns)
    block_rows, block_columns = matrix.format.block
    order = IN_GROUPS
    if whole_table and sharing() == (1, 0):
        of_expert = matrix.data.shape[1] * matrix.data.shape[2]
        order = order_of_product(of_expert, cdiv(width, BLOCK_N), activation is not None)
    plan = WeightOnlyPlan(
        B_K_MAJOR=not transposed,
        BITS=matrix.format.element.bits,
        SCALE=matrix.format.scale,
        GROUP=min(RUN, block_columns),
        ROW_BLOCK=block_rows,
        COLUMN_BLOCK=block_columns,
        MATRIX_SCALE=matrix.matrix_scale is not None,
        ORDER=order,
        **operands.plan(activation),
    )
    codes = matrix.data.view(-1, matrix.data.shape[2]).view(torch.int32)
    code_desc = descriptor(codes, plan.COPIED_CODES, plan.STORED_LAYOUT)
    scales = matrix.scales, matrix.scales if matrix.matrix_scale is None else matrix.matrix_scale
    part_rows, (_, down, across) = stored_rows // matrix.parts, matrix.scales.shape
    of_scales = part_rows, cdiv(part_rows, block_rows), across, down * across
    arguments = operands.arguments(plan, code_desc, width, depth, scales, of_scales)
    _bound(plan)[(programs(matrix.data.device),)](*arguments)


def multiply(
    rows_NW: Tensor,
    matrix: QuantisedMatrix,
    table: Tensor,
    out_NO: Tensor,
    *,
    transposed: bool = False,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
    addend: Addend | None = None,
    whole_table: bool = True,
    block_m: int = BLOCK_M,
    scales_NB: Tensor | None = None,
) -> None:
    """out[n] = rows[n] · matrix[e]ᵀ + bias[e] + addend, or rows[n] · matrix[e] where transposed; with order_N the rows
    are gathered, rows[order[n] // top_k]. whole_table: an expert's tiles follow one another in it. block_m, scales_NB:
    as for `amoeba.kernels.hopper.gemm`."""
    scaled = scales_NB is not None
    operands = Operands(rows_NW, table, out_NO, order_N, top_k, bias_EO, scales_NB, addend, block_m, scaled)
    _launch(matrix, transposed, operands, None, whole_table)


def up(
    x_TH: Tensor,
    order_N: Tensor,
    top_k: int,
    gate_up: QuantisedMatrix,
    table: Tensor,
    activation: Activation,
    a_NI: Tensor,
    *,
    h_NJ: Tensor | None = None,
    bias_EJ: Tensor | None = None,
    addend: Addend | None = None,
    whole_table: bool = True,
    block_m: int = BLOCK_M,
) -> None:
    """h = gathered x · gate_upᵀ + bias + addend and a = act(h); h is written where it is given. All gates come before
    all ups."""
    operands = Operands(x_TH, table, a_NI, order_N, top_k, bias_EJ, h_NJ, addend, block_m)
    _launch(gate_up, False, operands, activation, whole_table)
