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
from amoeba.kernels.activation import constants
from amoeba.kernels.hopper.gemm_kernel import BLOCK_K, BLOCK_M, BLOCK_N, Constants
from amoeba.kernels.hopper.tile_order import IN_GROUPS, list_tiles, order_of_product
from amoeba.kernels.hopper.tma import descriptor
from amoeba.kernels.hopper.weight_only_gemm_kernel import (
    CODE_STAGES,
    RUN,
    WeightOnlyPlan,
    weight_only_gemm_kernel,
)
from amoeba.kernels.launch import cdiv
from amoeba.kernels.launch.persistent_grid import programs, sharing
from amoeba.kernels.lora.epilogue import Addend, padded_rank
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
    rows: Tensor,
    matrix: QuantisedMatrix,
    transposed: bool,
    table: Tensor,
    out: Tensor,
    order_N: Tensor | None,
    top_k: int,
    bias_EO: Tensor | None,
    h: Tensor | None,
    addend: Addend | None,
    activation: Activation | None,
    whole_table: bool,
    block_m: int,
) -> None:
    _, stored_rows, stored_columns = matrix.shape
    width, depth = (stored_columns, stored_rows) if transposed else (stored_rows, stored_columns)
    block_rows, block_columns = matrix.format.block
    order = IN_GROUPS
    if whole_table and sharing() == (1, 0):
        of_expert = matrix.data.shape[1] * matrix.data.shape[2]
        order = order_of_product(of_expert, cdiv(width, BLOCK_N), activation is not None)
    plan = WeightOnlyPlan(
        ACTIVATE=activation is not None,
        GATHER=order_N is not None,
        B_K_MAJOR=not transposed,
        BIAS=bias_EO is not None,
        KEEP=h is not None,
        LOW=0 if addend is None else min(BLOCK_K, padded_rank(addend.rank)),
        BITS=matrix.format.element.bits,
        SCALE=matrix.format.scale,
        GROUP=min(RUN, block_columns),
        ROW_BLOCK=block_rows,
        COLUMN_BLOCK=block_columns,
        MATRIX_SCALE=matrix.matrix_scale is not None,
        ORDER=order,
        BLOCK_M=block_m,
        **({} if activation is None else constants(activation, fast=True)),  # type: ignore[arg-type]
    )
    if plan.ORDER > 0:
        table = list_tiles(table, cdiv(width, BLOCK_N), plan.ORDER, block_m)
    codes = matrix.data.view(-1, matrix.data.shape[2]).view(torch.int32)
    part_rows = stored_rows // matrix.parts
    row_desc = None if plan.GATHER else descriptor(rows, (block_m, BLOCK_K))
    h_desc = None if h is None else descriptor(h, plan.STAGED)
    low_desc = factor_desc = None
    if addend is not None:
        factor = (addend.factor_EOR.mT if transposed else addend.factor_EOR).contiguous()
        low_desc = descriptor(addend.low_NR, (block_m, BLOCK_K))
        layout = plan.MATRIX_LAYOUT
        factor_desc = descriptor(factor.view(-1, factor.shape[2]), plan.COPIED, layout)
    h = out if h is None else h
    _bound(plan)[(programs(out.device),)](
        row_desc,
        descriptor(codes, plan.COPIED_CODES, plan.STORED_LAYOUT),
        low_desc,
        factor_desc,
        h_desc,
        descriptor(out, plan.STAGED),
        rows,
        table if order_N is None else order_N,  # the table stands for what this plan does not read
        table,
        matrix.scales,
        matrix.scales if matrix.matrix_scale is None else matrix.matrix_scale,
        table if bias_EO is None else bias_EO,
        h,
        out,
        depth,
        0 if addend is None else addend.low_NR.shape[1],
        width,
        width // 2 if plan.PAIRED else width,
        part_rows,
        cdiv(part_rows, block_rows),
        matrix.scales.shape[2],
        matrix.scales.shape[1] * matrix.scales.shape[2],
        rows.stride(0),
        h.stride(0),
        out.stride(0),
        top_k,
    )


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
) -> None:
    """out[n] = rows[n] · matrix[e]ᵀ + bias[e] + addend, or rows[n] · matrix[e] where transposed; with order_N the rows
    are gathered, rows[order[n] // top_k]. whole_table: an expert's tiles follow one another in it. block_m: as for
    `amoeba.kernels.hopper.gemm`."""
    _launch(
        rows_NW, matrix, transposed, table, out_NO, order_N, top_k, bias_EO, None, addend, None, whole_table, block_m
    )


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
    _launch(x_TH, gate_up, False, table, a_NI, order_N, top_k, bias_EJ, h_NJ, addend, activation, whole_table, block_m)
