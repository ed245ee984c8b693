"""Sorted rows by our own kernels over quantised weights: those of `triton`, with products that dequantise.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.backends.low_rank import Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.backends.triton_rows import (
    ExactKernelRows,
    HopperRows,
    TritonRows,
    in_whole_pieces,
    why_not_on_hopper,
    with_plain_rows,
)
from amoeba.core.problem import Needs, Problem, Saved
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.sort import sort_rows
from amoeba.kernels.weight_only_gemm import multiply_rows
from amoeba.precision.quantised import QuantisedMatrix

# Rows of an expert, on average, from which on a product with dequantised experts is faster, dequantising included: by
# an H200's times for 512 rows (2026-11-17, dev/log). NVFP4 takes most instructions to decode.
MANY_ROWS, MANY_ROWS_OF_NVFP4 = 640, 320
# Of dequantised experts at a time.
DEQUANTISED_BYTES = 512 << 20


class QuantisedRows(TritonRows):
    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        kept = saved[1:] if saved else sort_rows(problem.expert_TK, problem.weights.num_experts)
        if why_not_hopper(problem) is not None:
            return cls(problem, *kept)
        return HopperQuantisedRows(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *kept)

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


class QuantisedExactKernelRows(ExactKernelRows, QuantisedRows):
    pass


class HopperQuantisedRows(HopperRows):
    """By Gluon's kernels: codes are decoded on their way to the matrix unit, once for each tile of rows; where experts
    have many rows, lie in slots with something between them, or are in blocks of GGUF files, some of them are
    dequantised at a time, to the same bits."""

    _depth_as_read = 0

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor | None:
        from amoeba.kernels.hopper import gemm, weight_only_gemm

        weights = self.problem.weights
        if weights.activation.interleaved:
            return self._multiply_x_then_activate(h_NJ, a_NI, addend)
        matrix, bias_EJ = weights.gate_up_EJH.matrix, weights.gate_up_bias_EJ
        if not self._is_dequantised(matrix):
            added = {"bias_EJ": bias_EJ, "addend": addend, "block_m": self.block_m}
            self._up(weight_only_gemm, matrix, self.product_table, h_NJ, a_NI, added)
            return h_NJ
        for part in self._dequantised(matrix, bias_EJ, addend):
            added = {"bias_EJ": part.bias_EO, "addend": part.addend}
            self._up(gemm, part.matrix_EOI, part.table, h_NJ, a_NI, added)
        return h_NJ

    def _multiply(
        self,
        rows: Rows,
        matrix_EOI: Any,  # a ReadInBlocks
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        addend: Addend | None = None,
        scales_NB: Tensor | None = None,
    ) -> None:
        from amoeba.kernels.hopper import gemm, weight_only_gemm

        plain, order_N = self._gathered(rows)
        matrix, transposed = matrix_EOI.matrix, matrix_EOI.transposed
        order: dict[str, Any] = {"order_N": order_N, "top_k": self.top_k, "scales_NB": scales_NB}
        if not self._is_dequantised(matrix):
            order |= {"transposed": transposed, "block_m": self.block_m}
            table = self.product_table
            weight_only_gemm.multiply(plain, matrix, table, out_NO, bias_EO=bias_EO, addend=addend, **order)
            return
        for part in self._dequantised(matrix, bias_EO, addend):
            dense = part.matrix_EOI.mT if transposed else part.matrix_EOI
            gemm.multiply(plain, dense, part.table, out_NO, bias_EO=part.bias_EO, addend=part.addend, **order)

    def _is_dequantised(self, matrix: QuantisedMatrix) -> bool:
        from amoeba.kernels.hopper.weight_only_gemm import is_in_one_piece

        if matrix.format.scale == "inside" or not is_in_one_piece(matrix):
            return True
        many = MANY_ROWS_OF_NVFP4 if matrix.format.scale == "e4m3" else MANY_ROWS
        return self.order_N.shape[0] >= many * matrix.shape[0]

    def _dequantised(
        self, matrix: QuantisedMatrix, bias_EO: Tensor | None, addend: Addend | None
    ) -> Iterator[_SomeExperts]:
        """As many experts at a time as `DEQUANTISED_BYTES` hold, in one buffer that the next ones reuse."""
        from amoeba.kernels.dequantise import dequantise
        from amoeba.kernels.hopper.gemm import tile_table

        experts, rows, columns = matrix.shape
        x_TH = self.problem.x_TH
        at_once = min(experts, max(1, DEQUANTISED_BYTES // (rows * columns * x_TH.element_size())))
        place = torch.empty((at_once, rows, columns), dtype=x_TH.dtype, device=x_TH.device)
        for first in range(0, experts, at_once):
            last = min(first + at_once, experts)
            if (first, last) not in self._tables:
                self._tables[first, last] = tile_table(self.offs_E, self.order_N.shape[0], first, last)
            yield _SomeExperts(
                dequantise(matrix, first, last, place[: last - first]),
                self._tables[first, last],
                None if bias_EO is None else bias_EO[first:last],
                None if addend is None else addend._replace(factor_EOR=addend.factor_EOR[first:last]),
            )

    @cached_property
    def _tables(self) -> dict[tuple[int, int], Tensor]:
        """Of tiles, by the experts that they have."""
        return {}


class _SomeExperts(NamedTuple):
    matrix_EOI: Tensor
    table: Tensor
    bias_EO: Tensor | None
    addend: Addend | None


def why_not_hopper(problem: Problem) -> str | None:
    """The reason why plain Triton computes the products instead."""
    weights = problem.weights
    if (reason := why_not_on_hopper(problem)) is not None:
        return reason
    if problem.x_TH.dtype != torch.bfloat16:
        return f"dequantises to bf16; x is {problem.x_TH.dtype}"
    from amoeba.kernels.hopper import weight_only_gemm

    for matrix in (weights.gate_up_EJH.matrix, weights.down_EHI.matrix):
        if matrix.format.scale != "inside" and (reason := weight_only_gemm.why_not(matrix)) is not None:
            return reason
    return None
