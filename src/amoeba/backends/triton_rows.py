"""Sorted rows by our own kernels: plain Triton, or Gluon on Hopper. The rows of `triton`.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

Rows are gathered as the products load them, so `gather` and `x` copy nothing; the routing weights enter in `combine`,
in fp32. What LoRA adds: see `LowRank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.sorted_rows import ActivationGradients, SortedRows
from amoeba.backends.triton_low_rank import LowRank
from amoeba.core.layout import check_most_rows
from amoeba.core.problem import Needs, Problem, Saved
from amoeba.cpu.pointers import place_of
from amoeba.kernels import down_backward, grouped_gemm, weight_gradient
from amoeba.kernels.activate import activate, activate_backward, new_scales
from amoeba.kernels.combine import combine, slot_gradient
from amoeba.kernels.expert_sums import bias_dot, sum_per_expert
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.sort import sort_rows

# What H and I have to be multiples of in the kernels for Hopper.
HOPPER_WIDTH = 64
# Sorted rows from which on an exact pass takes them.
EXACT_HOPPER_ROWS = 1024


class TritonRows(SortedRows):
    """Plain Triton: any dtype, any strides, any GPU that Triton serves, and the interpreter."""

    def __init__(
        self, problem: Problem, order_N: Tensor, slot_row_N: Tensor, offs_E: Tensor, *of_lora: Tensor | None
    ) -> None:
        """of_lora: what forward saved of it, see `LowRank`."""
        self.problem = problem
        self.order_N, self.slot_row_N, self.offs_E = order_N, slot_row_N, offs_E  # int32, see `core.layout.Layout`
        self.low_rank = None if problem.lora is None else LowRank(self, problem.lora, *of_lora)

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        kept: Sequence[Tensor] = saved[1:] if saved else sorted_maps(problem)
        if why_not_hopper(problem) is not None:
            return TritonRows(problem, *kept)
        return HopperRows(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *kept)

    def save(self, h_NJ: Tensor) -> Saved:
        of_lora = (None, None) if self.low_rank is None else self.low_rank.saved()
        nothing = (h_NJ.new_empty(0) if low_NP is None else low_NP for low_NP in of_lora)
        return Saved(h_NJ, self.order_N, self.slot_row_N, self.offs_E, *nothing)

    def shorten(self, most_rows: int) -> None:
        self.order_N = self.order_N[:most_rows]

    def gather(self, rows_TH: Tensor) -> ByToken:
        return ByToken(rows_TH)

    @property
    def x(self) -> ByToken:
        return ByToken(self.problem.x_TH)

    @property
    def top_k(self) -> int:
        return self.problem.expert_TK.shape[1]

    def new_rows(self, width: int) -> Tensor:
        x_TH = self.problem.x_TH
        return torch.empty((self.order_N.shape[0], width), dtype=x_TH.dtype, device=x_TH.device)

    def hidden(self) -> Tensor:
        h_NJ, a_NI = self.up(True)
        assert h_NJ is not None
        if self.low_rank is not None:
            self.low_rank.add_to_y(a_NI)  # of which backward reads what forward would have saved
        return h_NJ

    def up(self, want_h: bool) -> tuple[Tensor | None, Any]:
        weights = self.problem.weights
        h_NJ = self.new_rows(weights.gate_up_EJH.shape[1]) if want_h else None
        a_NI = self.new_rows(weights.intermediate)
        addend = None if self.low_rank is None else self.low_rank.add_to_h()
        return self._multiply_x_and_activate(h_NJ, a_NI, addend), a_NI

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor | None:
        """Returns h, if it was written."""
        weights = self.problem.weights
        grouped_gemm.multiply_rows_activated(
            self.problem.x_TH,
            weights.gate_up_EJH,
            self.offs_E,
            weights.activation,
            h_NJ,
            a_NI,
            order_N=self.order_N,
            top_k=self.top_k,
            bias_EJ=weights.gate_up_bias_EJ,
            addend=addend,
        )
        return h_NJ

    def _multiply_x_then_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        """... by two kernels."""
        weights = self.problem.weights
        h_NJ = self.new_rows(weights.gate_up_EJH.shape[1]) if h_NJ is None else h_NJ
        self._multiply(self.x, weights.gate_up_EJH, h_NJ, bias_EO=weights.gate_up_bias_EJ, addend=addend)
        activate(h_NJ, weights.activation, a_NI, self.offs_E)
        return h_NJ

    def down(self, a_NI: Any) -> Tensor:
        y_NH, weights = self.new_rows(self.problem.weights.hidden), self.problem.weights
        addend = None if self.low_rank is None else self.low_rank.add_to_y(a_NI)
        self._multiply(a_NI, weights.down_EHI, y_NH, bias_EO=weights.down_bias_EH, addend=addend)
        return y_NH

    def _multiply(
        self,
        rows: Rows,
        matrix_EOI: Tensor,
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        addend: Addend | None = None,
    ) -> None:
        """out = rows · matrixᵀ + bias + addend."""
        plain, order_N = self._gathered(rows)
        grouped_gemm.multiply_rows(
            plain,
            matrix_EOI.transpose(1, 2),
            self.offs_E,
            out_NO,
            order_N=order_N,
            top_k=self.top_k,
            bias_EO=bias_EO,
            addend=addend,
        )

    def combine(self, rows_NH: Tensor, *, weighted: bool) -> Tensor:
        out_TH = torch.empty_like(self.problem.x_TH)
        weight_TK, onto_TH = (self.problem.weight_TK, self.problem.onto_TH) if weighted else (None, None)
        combine(rows_NH, self.slot_row_TK, weight_TK, out_TH, onto_TH)
        return out_TH

    def overlapped_output(self, a_NI: Any) -> Tensor:
        overlapped = self.problem.overlapped
        if overlapped is None or not overlapped.straight:
            return super().overlapped_output(a_NI)
        y_NH = self.down(a_NI)
        overlapped.send_sums(y_NH, self.slot_row_TK, self.problem.weight_TK)
        return overlapped.add_sums(y_NH, self.slot_row_TK, self.problem.weight_TK)

    def overlapped_input_gradient(self, dx_NH: Tensor, d_weight_TK: Tensor | None) -> Tensor:
        overlapped = self.problem.overlapped
        if overlapped is None or not overlapped.straight:
            return super().overlapped_input_gradient(dx_NH, d_weight_TK)
        overlapped.send_sums(dx_NH, self.slot_row_TK, None)
        return overlapped.keep_sums(dx_NH, self.slot_row_TK, d_weight_TK)

    @property
    def slot_row_TK(self) -> Tensor:
        return self.slot_row_N.view_as(self.problem.expert_TK)

    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        dh_NJ = h_NJ if overwrite_h else torch.empty_like(h_NJ)
        return self._activation_backward(_rows_of_tokens(dy), h_NJ, dh_NJ, needs)

    def _activation_backward(self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs) -> ActivationGradients:
        if self.problem.lora is not None:
            return self._activation_backward_in_steps(dy_TH, h_NJ, dh_NJ, needs)
        weights = self.problem.weights
        scaled_a_NI = self.new_rows(weights.intermediate) if needs.scaled_a else None
        ds_N = down_backward.down_backward(
            dy_TH,
            weights.down_EHI,
            self.offs_E,
            h_NJ,
            self.problem.weight_TK,
            weights.activation,
            dh_NJ,
            scaled_a_NI,
            self.order_N,
            top_k=self.top_k,
        )
        return ActivationGradients(dh_NJ, scaled_a_NI, ds_N, None)

    def _activation_backward_in_steps(
        self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs
    ) -> ActivationGradients:
        problem = self.problem
        da_NI = self.new_rows(problem.weights.intermediate)
        addend = None if self.low_rank is None else self.low_rank.add_to_da(dy_TH)
        scales_NB = self._new_scales(da_NI)
        self._multiply_dy(dy_TH, da_NI, addend, scales_NB)
        if (found := self._with_low_rank(da_NI, h_NJ, dh_NJ, needs)) is not None:
            return found
        scaled_a_NI = da_NI if needs.scaled_a else None
        activation = problem.weights.activation
        given = da_NI, h_NJ, problem.weight_TK, self.order_N, activation, dh_NJ, scaled_a_NI, self.offs_E
        ds_N = activate_backward(*given, da_scales_NB=scales_NB)
        return ActivationGradients(dh_NJ, scaled_a_NI, ds_N, None)

    def _new_scales(self, da_NI: Tensor) -> Tensor | None:
        """Where dA' is kept in fp16, see `kernels.activate.new_scales`."""
        return None

    def _multiply_dy(self, dy_TH: Tensor, da_NI: Tensor, addend: Addend | None, scales_NB: Tensor | None) -> None:
        scaled = {} if scales_NB is None else {"scales_NB": scales_NB}
        self._multiply(ByToken(dy_TH), self.problem.weights.down_EHI.mT, da_NI, addend=addend, **scaled)

    def _with_low_rank(self, da_NI: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs) -> ActivationGradients | None:
        """The activation's backward together with LoRA's part in it, where one kernel does both."""
        return None

    def slot_gradient(self, ds_N: Tensor, dy: Rows) -> Tensor:
        problem, bias_EH = self.problem, self.problem.weights.down_bias_EH
        through_bias = None if bias_EH is None else bias_dot(_rows_of_tokens(dy), bias_EH, problem.expert_TK)
        d_weight = torch.empty_like(problem.weight_TK, memory_format=torch.contiguous_format)
        slot_gradient(ds_N, self.slot_row_TK, through_bias, d_weight)
        return d_weight

    def bias_gradient(self, grad: Rows, bias_EO: Tensor, *, weighted: bool) -> Tensor:
        gradient = torch.empty_like(bias_EO, memory_format=torch.contiguous_format)
        if not weighted:
            assert isinstance(grad, Tensor)
            sum_per_expert(grad, self.offs_E, gradient)
        else:
            weight_TK = self.problem.weight_TK
            sum_per_expert(
                _rows_of_tokens(grad), self.offs_E, gradient, order_N=self.order_N, weight_TK=weight_TK, by_token=True
            )
        return gradient

    def down_factor_gradients(
        self, dy: Rows, dlow_NR: Tensor | None, scaled_a_NI: Tensor | None, needs: Needs
    ) -> dict[str, Tensor]:
        return {} if self.low_rank is None else self.low_rank.down_gradients(dy, scaled_a_NI, needs)

    def up_backward(self, dh_NJ: Tensor, needs: Needs) -> tuple[Tensor | None, dict[str, Tensor]]:
        low_rank, dx_NH = self.low_rank, None
        addend = None if low_rank is None else low_rank.add_to_dx(dh_NJ)
        if needs.x:
            dx_NH = self.new_rows(self.problem.weights.hidden)
            self._multiply(dh_NJ, self.problem.weights.gate_up_EJH.mT, dx_NH, addend=addend)
        found = {} if low_rank is None else low_rank.up_gradients(dh_NJ, needs)
        return dx_NH, found

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        return self.factor_gradient(grad, rows, torch.empty_like(weight_EOI))

    def factor_gradient(self, grad: Rows, rows: Rows, gradient: Tensor, more: Tensor | None = None) -> Tensor:
        """The same into `gradient`, whatever its shape; `more` gets the columns of grad that are left."""
        grad, left_order_N = self._gathered(grad)
        rows, right_order_N = self._gathered(rows)
        return weight_gradient.weight_gradient(
            grad,
            rows,
            self.offs_E,
            gradient,
            more_EOI=more,
            left_order_N=left_order_N,
            right_order_N=right_order_N,
            top_k=self.top_k,
            heaviest_E=self.heaviest_E,
        )

    def _gathered(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return (rows.rows_TW, self.order_N) if isinstance(rows, ByToken) else (rows, None)

    @cached_property
    def heaviest_E(self) -> Tensor:
        return weight_gradient.heaviest_first(self.offs_E)


class HopperRows(TritonRows):
    """Gluon's kernels. dA' is written before its activation is taken back: fused into one kernel the two took 1.9 ms
    where one after the other takes 1.2 + 0.6 (H200, T=32768 H=2048 I=768 E=128 K=8, 2026-11-15)."""

    def gather(self, rows_TH: Tensor) -> ByToken:
        return ByToken(in_whole_pieces(rows_TH))

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor | None:
        from amoeba.kernels.hopper import gemm

        weights = self.problem.weights
        if weights.activation.interleaved or weights.gate_up_EJH.stride(2) != 1:
            return self._multiply_x_then_activate(h_NJ, a_NI, addend)
        options = {"whole_table": self.whole_table, "block_m": self.block_m}
        added = {"bias_EJ": weights.gate_up_bias_EJ, "addend": addend}
        self._up(gemm, weights.gate_up_EJH, self.product_table, h_NJ, a_NI, added | options)
        return h_NJ

    def _up(
        self, kernels: Any, matrix: Any, table: Tensor, h_NJ: Tensor | None, a_NI: Tensor, added: dict[str, Any]
    ) -> None:
        """kernels: the module whose `up` takes such a matrix."""
        x_TH, order_N = self._gathered(self.x)
        activation = self.problem.weights.activation
        kernels.up(x_TH, order_N, self.top_k, matrix, table, activation, a_NI, h_NJ=h_NJ, **added)

    def _multiply(
        self,
        rows: Rows,
        matrix_EOI: Tensor,
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        addend: Addend | None = None,
        scales_NB: Tensor | None = None,
    ) -> None:
        from amoeba.kernels.hopper import gemm

        plain, order_N = self._gathered(rows)
        gemm.multiply(
            plain,
            matrix_EOI,
            self.product_table,
            out_NO,
            order_N=order_N,
            top_k=self.top_k,
            bias_EO=bias_EO,
            addend=addend,
            whole_table=self.whole_table,
            block_m=self.block_m,
            scales_NB=scales_NB,
        )

    def _activation_backward(self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs) -> ActivationGradients:
        return self._activation_backward_in_steps(dy_TH, h_NJ, dh_NJ, needs)

    def _new_scales(self, da_NI: Tensor) -> Tensor | None:
        return new_scales(da_NI) if self.low_rank is None and da_NI.dtype == torch.bfloat16 else None

    def _with_low_rank(self, da_NI: Tensor, h_NJ: Tensor, dh_NJ: Tensor, needs: Needs) -> ActivationGradients | None:
        if self.low_rank is None:
            return None
        return self.low_rank.activation_backward(da_NI, h_NJ, dh_NJ, self.table, needs)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        from amoeba.kernels.hopper import wgrad

        gradient = torch.empty_like(weight_EOI)
        # the kernel gathers its left side and writes (left, right)
        if isinstance(grad, ByToken):
            left, right, out = grad, rows, gradient
        else:
            left, right, out = rows, grad, gradient.transpose(1, 2)  # type: ignore[assignment]
        assert isinstance(right, Tensor)
        wgrad.weight_gradient(_rows_of_tokens(left), self.order_N, self.top_k, right, self.offs_E, self.heaviest_E, out)
        return gradient

    @property
    def whole_table(self) -> bool:
        """Whether all of an expert's tiles are in the table."""
        return True

    @cached_property
    def table(self) -> Tensor:
        """Of tiles of BLOCK_M rows."""
        from amoeba.kernels.hopper import gemm

        return gemm.tile_table(self.offs_E, self.order_N.shape[0])

    @cached_property
    def block_m(self) -> int:
        """Rows of a tile in products; with any of them the bits are the same."""
        from amoeba.kernels.hopper import gemm

        return gemm.rows_of_tile(self.order_N.shape[0], self.offs_E.shape[0], self._depth_as_read)

    @property
    def _depth_as_read(self) -> int:
        """Of products with weights that are multiplied as they are; 0 for others."""
        return self.problem.weights.hidden

    @cached_property
    def product_table(self) -> Tensor:
        from amoeba.kernels.hopper import gemm

        if self.block_m == gemm.BLOCK_M:
            return self.table
        return gemm.tile_table(self.offs_E, self.order_N.shape[0], block_m=self.block_m)


class ExactKernelRows(TritonRows):
    """Whose numbers do not depend on one another: the rows of `exact` on a GPU.

    Within `tile_sizes.any_rows` products have the same bits for all numbers of rows. Left out is what differs between
    passes: an activation in the epilogue, which sees h before it is rounded."""

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        kept: Sequence[Tensor] = saved[1:] if saved else sorted_maps(problem)
        if cls is ExactKernelRows and problem.rows >= EXACT_HOPPER_ROWS and why_not_hopper(problem) is None:
            return ExactHopperRows(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *kept)
        return cls(problem, *kept)

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        return self._multiply_x_then_activate(h_NJ, a_NI, addend)


class ExactHopperRows(HopperRows):
    """With the bits of `ExactKernelRows`: a step of the reduction is 16 numbers there, too."""

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor:
        return self._multiply_x_then_activate(h_NJ, a_NI, addend)


def sorted_maps(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """order_N, slot_row_N and offs_E; where fewer rows have an expert, order_N and all row buffers are as long."""
    order_N, slot_row_N, offs_E = sort_rows(problem.expert_TK, problem.weights.num_experts)
    if problem.most_rows is not None and problem.most_rows < problem.rows:
        check_most_rows(problem.most_rows, offs_E)
        order_N = order_N[: problem.most_rows]
    return order_N, slot_row_N, offs_E


def _rows_of_tokens(rows: Rows) -> Tensor:
    assert isinstance(rows, ByToken)
    return rows.rows_TW


def with_plain_rows(problem: Problem) -> Problem:
    """The rows of x contiguous in themselves, the small tensors as a whole."""
    x_TH, weights = problem.x_TH, problem.weights
    *matrices, gate_up_bias, down_bias = weights.tensors()
    if not all(bias is None or bias.is_contiguous() for bias in (gate_up_bias, down_bias)):
        biases = (None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
        weights = type(weights).of((*matrices, *biases), weights.constants())
    return problem._replace(
        x_TH=x_TH if x_TH.stride(1) == 1 else x_TH.contiguous(),
        weight_TK=problem.weight_TK.contiguous(),
        expert_TK=problem.expert_TK.contiguous(),
        weights=weights,
    )


def in_whole_pieces(rows_TH: Tensor) -> Tensor:
    """A copy, unless the compiler can see that 16 bytes at a time may be read: from the address and the row stride."""
    whole = rows_TH.stride(1) == 1 and rows_TH.stride(0) % 16 == 0 and place_of(rows_TH) % 16 == 0
    return rows_TH if whole else rows_TH.clone(memory_format=torch.contiguous_format)


def why_not_hopper(problem: Problem) -> str | None:
    """The reason why plain Triton computes the products instead."""
    if (reason := why_not_on_hopper(problem)) is not None:
        return reason
    for name, weight in (("gate_up", problem.weights.gate_up_EJH), ("down", problem.weights.down_EHI)):
        if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()) or place_of(weight) % 16:
            return f"needs {name} to be contiguous; its strides are {weight.stride()}"
    return None


def why_not_on_hopper(problem: Problem) -> str | None:
    """... whatever kind of weights there are."""
    x_TH = problem.x_TH
    if x_TH.device.type != "cuda" or torch.cuda.get_device_capability(x_TH.device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9.0)"
    if x_TH.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16; x is {x_TH.dtype}"
    for name, width in (("H", x_TH.shape[1]), ("I", problem.weights.down_EHI.shape[2])):
        if width % HOPPER_WIDTH:
            return f"needs {name} to be a multiple of {HOPPER_WIDTH}; it is {width}"
    return None
