"""Sorted rows by our own kernels over block-scaled weights: those of `triton`, with products that decode.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amoeba.backends.low_rank import Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.backends.triton_rows import (
    HopperRows,
    TritonRows,
    in_whole_pieces,
    why_not_on_hopper,
    with_plain_rows,
)
from amoeba.kernels.addend import Addend
from amoeba.kernels.block_scaled_product import multiply_rows
from amoeba.kernels.sort import sort_rows
from amoeba.problem import Needs, Problem, Saved


class BlockScaledRows(TritonRows):
    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        kept = saved[1:] if saved else sort_rows(problem.expert_TK, problem.weights.num_experts)
        if why_not_hopper(problem) is not None:
            return cls(problem, *kept)
        return HopperBlockScaledRows(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *kept)

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        return self._multiply_x_then_activate(h_NJ, a_NI, addend)

    def _multiply(
        self,
        rows: Rows,
        matrix_EOI: Any,  # a ReadInBlocks
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        addend: Addend | None = None,
    ) -> None:
        plain, order_N = self._gathered(rows)
        multiply_rows(
            plain,
            matrix_EOI.matrix,
            self.offs_E,
            out_NO,
            transposed=matrix_EOI.transposed,
            order_N=order_N,
            top_k=self.top_k,
            bias_EO=bias_EO,
            addend=addend,
        )

    def _activation_backward(self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs) -> ActivationGradients:
        return self._activation_backward_in_steps(dy_TH, h_NJ, dh_NJ, needs)


class HopperBlockScaledRows(HopperRows):
    """By Gluon's kernels, which decode on the way to the matrix unit."""

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor | None:
        from amoeba.kernels.hopper import coded_product

        weights = self.problem.weights
        if weights.activation.interleaved:
            return self._multiply_x_then_activate(h_NJ, a_NI, addend)
        x_TH, order_N = self._gathered(self.x)
        assert order_N is not None
        coded_product.up(
            x_TH,
            order_N,
            self.top_k,
            weights.gate_up_EJH.matrix,
            self.table,
            weights.activation,
            a_NI,
            h_NJ=h_NJ,
            bias_EJ=weights.gate_up_bias_EJ,
            addend=addend,
        )
        return h_NJ

    def _multiply(
        self,
        rows: Rows,
        matrix_EOI: Any,  # a ReadInBlocks
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        addend: Addend | None = None,
    ) -> None:
        from amoeba.kernels.hopper import coded_product

        plain, order_N = self._gathered(rows)
        coded_product.multiply(
            plain,
            matrix_EOI.matrix,
            self.table,
            out_NO,
            transposed=matrix_EOI.transposed,
            order_N=order_N,
            top_k=self.top_k,
            bias_EO=bias_EO,
            addend=addend,
        )


def why_not_hopper(problem: Problem) -> str | None:
    """The reason why plain Triton computes the products instead."""
    weights = problem.weights
    if (reason := why_not_on_hopper(problem)) is not None:
        return reason
    if problem.x_TH.dtype != torch.bfloat16:
        return f"decodes to bf16, x is {problem.x_TH.dtype}"
    from amoeba.kernels.hopper import coded_product

    for matrix in (weights.gate_up_EJH.matrix, weights.down_EHI.matrix):
        if (reason := coded_product.why_not(matrix)) is not None:
            return reason
    return None
