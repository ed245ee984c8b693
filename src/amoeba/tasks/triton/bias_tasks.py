"""Biases in the scheduled backward: room for their gradients, and what the tasks in plain Triton compute of them.

N = T·K routed rows · E experts · H hidden · J = 2I (gated) or I

    biases = BiasTasks(gate_up_bias_EJ, down_bias_EH)                 # either may be None
    found = scheduled_backward(..., biases=biases)                    # found.gate_up_bias, found.down_bias

DOWN_BIAS and UP_BIAS sum up some columns of a bias's gradient over all rows of an expert, ACTIVATE adds <dy, down_bias>
to ds: in the order of `amoeba.kernels.expert_sums`, and so with its bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.expert_sums import CHUNK, DOT_COLUMNS, SUM_ROWS, dot_by_lanes, sum_of_chunks, sum_of_lanes
from amoeba.kernels.launch import cdiv
from amoeba.tasks.triton.arrivals import address_table, numbers_at
from amoeba.tasks.triton.tickets import DOWN_BIAS as _DOWN_BIAS

DOWN_BIAS, D_GATE_UP, D_DOWN = map(tl.constexpr, range(3))  # of the table of addresses


class BiasTasks:
    def __init__(self, gate_up_bias_EJ: Tensor | None = None, down_bias_EH: Tensor | None = None) -> None:
        self._given = gate_up_bias_EJ, down_bias_EH
        self.gradients = tuple(None if bias is None else torch.empty_like(bias) for bias in self._given)

    @property
    def of_gate_up(self) -> bool:
        return self._given[0] is not None

    @property
    def of_down(self) -> bool:
        return self._given[1] is not None

    def parts(self, columns: int) -> tuple[int, int]:
        """Tasks of an expert's bias of down and of gate_up, of so many columns each."""
        up, down = (0 if bias is None else cdiv(bias.shape[1], columns) for bias in self._given)
        return down, up

    def context(self) -> Tensor | None:
        """Addresses for the kernel, in the order of the fields above."""
        if not (self.of_gate_up or self.of_down):
            return None
        return address_table(self._given[1], *self.gradients)

    def constants(self, warps: int, rows: int, columns: int) -> Group:
        """rows: of a row tile."""
        return Group(
            OF_GATE_UP=self.of_gate_up,
            OF_DOWN=self.of_down,
            COLUMNS=columns,
            CHUNK=CHUNK,
            ROWS=SUM_ROWS,
            DOT_ROWS=min(rows, 4 * warps),
            DOT_COLUMNS=DOT_COLUMNS,
        )


NO_BIASES: Any = BiasTasks()


@triton.jit
def add_bias_dots(biases, expert, row, row_end, dy_TH, ds_N, order_N, PLAN: tl.constexpr):
    """To ds of a row tile, <dy, down_bias>: a few rows at a time, for which there are registers."""
    B: tl.constexpr = PLAN.BIASES
    bias = numbers_at(biases, DOWN_BIAS, dy_TH.dtype.element_ty) + expert.to(tl.int64) * PLAN.H
    for first in range(row, tl.minimum(row_end, row + PLAN.BLOCK_M), B.DOT_ROWS):
        row_M = first + tl.arange(0, B.DOT_ROWS)
        valid_M = row_M < row_end
        token_M = (tl.load(order_N + row_M, mask=valid_M, other=0) // PLAN.TOP_K).to(tl.int64)
        total = tl.zeros((B.DOT_ROWS, B.DOT_COLUMNS), tl.float32)
        total = dot_by_lanes(bias, dy_TH + token_M * PLAN.H, valid_M, tl.arange(0, B.DOT_COLUMNS), total, PLAN.H)
        ds_M = tl.load(ds_N + row_M, mask=valid_M, other=0.0) + sum_of_lanes(total)
        tl.store(ds_N + row_M, ds_M, mask=valid_M)


@triton.jit
def sum_bias_columns(biases, kind, expert, part, row, row_end, dy_TH, dh_NJ, weight_TK, order_N, PLAN: tl.constexpr):
    """DOWN_BIAS or UP_BIAS."""
    B: tl.constexpr = PLAN.BIASES
    column = part * B.COLUMNS + tl.arange(0, B.COLUMNS)
    dtype: tl.constexpr = dy_TH.dtype.element_ty
    if kind == _DOWN_BIAS:
        total = sum_of_chunks(
            row, row_end, column, dy_TH, order_N, weight_TK, PLAN.H, PLAN.H, PLAN.TOP_K, True, True, B.CHUNK, B.ROWS
        )
        out = numbers_at(biases, D_DOWN, dtype) + expert.to(tl.int64) * PLAN.H + column
        tl.store(out, total.to(dtype), mask=column < PLAN.H)
    else:
        total = sum_of_chunks(
            row, row_end, column, dh_NJ, None, None, PLAN.J, PLAN.J, PLAN.TOP_K, False, False, B.CHUNK, B.ROWS
        )
        out = numbers_at(biases, D_GATE_UP, dtype) + expert.to(tl.int64) * PLAN.J + column
        tl.store(out, total.to(dtype), mask=column < PLAN.J)
