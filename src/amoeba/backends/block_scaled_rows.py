"""Sorted rows by our own kernels over block-scaled weights: those of `triton`, with other products.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amoeba.backends.low_rank import Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.backends.triton_rows import TritonRows, with_plain_rows
from amoeba.kernels.activate import activate
from amoeba.kernels.addend import Addend
from amoeba.kernels.block_scaled_product import multiply_rows
from amoeba.kernels.sort import sort_rows
from amoeba.problem import Needs, Problem, Saved


class BlockScaledRows(TritonRows):
    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> BlockScaledRows:
        problem = with_plain_rows(problem)
        kept = saved[1:] if saved else sort_rows(problem.expert_TK, problem.weights.num_experts)
        return cls(problem, *kept)

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        weights = self.problem.weights
        h_NJ = self.new_rows(weights.gate_up_EJH.shape[1]) if h_NJ is None else h_NJ
        self._multiply(self.x, weights.gate_up_EJH, h_NJ, bias_EO=weights.gate_up_bias_EJ, addend=addend)
        activate(h_NJ, weights.activation, a_NI, self.offs_E)
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
