"""The matrix products of one pass over sorted rows, as a backend asks for them: plain Triton, or Gluon on Hopper.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    products = products_for(problem, Sorted(order_N, slot_row_N, offs_E))
    products.up(h_NJ, a_NI)
    y_NH = products.down(a_NI)
    scaled_a_NI, ds_N, _ = products.activation_backward(dy_TH, h_NJ, dh_NJ, want_scaled_a=True)
    d_down, dx_NH, d_gate_up = products.down_gradient(...), products.rows_gradient(...), products.up_gradient(...)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.operator import Problem
from amoeba.kernels import activation_backward_product, grouped_product, weight_gradient
from amoeba.kernels.activate import activate, activate_backward

# What H and I have to be multiples of in the kernels for Hopper.
HOPPER_WIDTH = 64


class Sorted(NamedTuple):
    """Routed rows sorted by expert, see `amoeba.layout.Layout`; int32."""

    order_N: Tensor
    slot_row_N: Tensor
    offs_E: Tensor


@dataclass(frozen=True, eq=False)
class Products:
    """Plain Triton: any dtype, any strides, any GPU that Triton serves, and the interpreter."""

    problem: Problem
    rows: Sorted

    def new_rows(self, width: int) -> Tensor:
        x_TH = self.problem.x_TH
        return torch.empty((self.problem.rows, width), dtype=x_TH.dtype, device=x_TH.device)

    def readable(self, rows_TH: Tensor) -> Tensor:
        """The same rows where these products can read them."""
        return rows_TH

    @property
    def top_k(self) -> int:
        return self.problem.expert_TK.shape[1]

    def up(self, h_NJ: Tensor | None, a_NI: Tensor) -> None:
        """h = gathered x · gate_upᵀ + bias (+ LoRA) where it is wanted, and a = act(h)."""
        problem = self.problem
        if problem.lora is not None:
            self._up_in_steps(h_NJ, a_NI)
            return
        grouped_product.multiply_rows_activated(
            problem.x_TH,
            problem.gate_up_EJH,
            self.rows.offs_E,
            problem.activation,
            h_NJ,
            a_NI,
            order_N=self.rows.order_N,
            top_k=self.top_k,
            bias_EJ=problem.gate_up_bias_EJ,
        )

    def _up_in_steps(self, h_NJ: Tensor | None, a_NI: Tensor) -> None:
        """One after the other what `up` fuses, for what comes between the product and the activation."""
        h_NJ = self.new_rows(self.problem.gate_up_EJH.shape[1]) if h_NJ is None else h_NJ
        self.hidden(h_NJ)
        low_rank.add_to_h(self.problem, self.thin, ByToken(self.problem.x_TH), h_NJ)
        activate(h_NJ, self.problem.activation, a_NI, self.rows.offs_E)

    def hidden(self, h_NJ: Tensor) -> None:
        """h = gathered x · gate_upᵀ + bias."""
        problem = self.problem
        matrix_EHJ = problem.gate_up_EJH.transpose(1, 2)
        grouped_product.multiply_rows(
            problem.x_TH,
            matrix_EHJ,
            self.rows.offs_E,
            h_NJ,
            order_N=self.rows.order_N,
            top_k=self.top_k,
            bias_EO=problem.gate_up_bias_EJ,
        )

    def down(self, a_NI: Tensor) -> Tensor:
        """y = a · downᵀ + bias (+ LoRA)."""
        y_NH = self.new_rows(self.problem.down_EHI.shape[1])
        matrix_EIH = self.problem.down_EHI.transpose(1, 2)
        grouped_product.multiply_rows(a_NI, matrix_EIH, self.rows.offs_E, y_NH, bias_EO=self.problem.down_bias_EH)
        low_rank.add_to_y(self.problem, self.thin, a_NI, y_NH)
        return y_NH

    @property
    def thin(self) -> ThinProducts:
        return ThinProducts(self)

    def activation_backward(
        self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, want_scaled_a: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """dA' = gathered dy · down (+ LoRA); from it dh (which may be h), s·a where it is wanted, and ds = <dA', a>.

        Returns s·a, ds and what `low_rank.add_to_da` gives.
        """
        if self.problem.lora is not None:
            return self._activation_backward_in_steps(dy_TH, h_NJ, dh_NJ, want_scaled_a)
        scaled_a_NI = self.new_rows(self.problem.down_EHI.shape[2]) if want_scaled_a else None
        ds_N = activation_backward_product.down_backward(
            dy_TH,
            self.problem.down_EHI,
            self.rows.offs_E,
            h_NJ,
            self.problem.weight_TK,
            self.problem.activation,
            dh_NJ,
            scaled_a_NI,
            self.rows.order_N,
            top_k=self.top_k,
        )
        return scaled_a_NI, ds_N, None

    def _activation_backward_in_steps(
        self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, want_scaled_a: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        problem, rows = self.problem, self.rows
        da_NI = self.activated_gradient(dy_TH)
        dlow_NR = low_rank.add_to_da(problem, self.thin, ByToken(dy_TH), da_NI)
        scaled_a_NI = da_NI if want_scaled_a else None
        ds_N = activate_backward(
            da_NI, h_NJ, problem.weight_TK, rows.order_N, problem.activation, dh_NJ, scaled_a_NI, rows.offs_E
        )
        return scaled_a_NI, ds_N, dlow_NR

    def activated_gradient(self, dy_TH: Tensor) -> Tensor:
        """dA' = gathered dy · down."""
        da_NI = self.new_rows(self.problem.down_EHI.shape[2])
        grouped_product.multiply_rows(
            dy_TH, self.problem.down_EHI, self.rows.offs_E, da_NI, order_N=self.rows.order_N, top_k=self.top_k
        )
        return da_NI

    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        """dx of each row = dh · gate_up."""
        dx_NH = self.new_rows(self.problem.x_TH.shape[1])
        grouped_product.multiply_rows(dh_NJ, self.problem.gate_up_EJH, self.rows.offs_E, dx_NH)
        return dx_NH

    def down_gradient(self, dy_TH: Tensor, scaled_a_NI: Tensor) -> Tensor:
        """Σ over each expert's rows of dyᵀ · (s·a)."""
        gradient = torch.empty_like(self.problem.down_EHI)
        weight_gradient.weight_gradient(
            dy_TH,
            scaled_a_NI,
            self.rows.offs_E,
            gradient,
            left_order_N=self.rows.order_N,
            top_k=self.top_k,
            heaviest_E=self.heaviest_E,
        )
        return gradient

    def up_gradient(self, dh_NJ: Tensor) -> Tensor:
        """Σ over each expert's rows of dhᵀ · x."""
        gradient = torch.empty_like(self.problem.gate_up_EJH)
        weight_gradient.weight_gradient(
            dh_NJ,
            self.problem.x_TH,
            self.rows.offs_E,
            gradient,
            right_order_N=self.rows.order_N,
            top_k=self.top_k,
            heaviest_E=self.heaviest_E,
        )
        return gradient

    @cached_property
    def heaviest_E(self) -> Tensor:
        return weight_gradient.heaviest_first(self.rows.offs_E)


@dataclass(frozen=True, eq=False)
class HopperProducts(Products):
    """Gluon's kernels. dA' is written before its activation is taken back: fused into one kernel the two took 1.9 ms
    where one after the other takes 1.2 + 0.6 (H200, T=32768 H=2048 I=768 E=128 K=8, 2026-11-15)."""

    def readable(self, rows_TH: Tensor) -> Tensor:
        return _in_whole_pieces(rows_TH)

    def up(self, h_NJ: Tensor | None, a_NI: Tensor) -> None:
        from amoeba.kernels.hopper import product as hopper_product

        problem, rows = self.problem, self.rows
        if problem.lora is not None or problem.activation.interleaved or problem.gate_up_EJH.stride(2) != 1:
            self._up_in_steps(h_NJ, a_NI)
            return
        hopper_product.up(
            problem.x_TH,
            rows.order_N,
            self.top_k,
            problem.gate_up_EJH,
            self.table,
            problem.activation,
            a_NI,
            h_NJ=h_NJ,
            bias_EJ=problem.gate_up_bias_EJ,
        )

    def hidden(self, h_NJ: Tensor) -> None:
        from amoeba.kernels.hopper import product as hopper_product

        problem, order_N = self.problem, self.rows.order_N
        matrix, bias_EJ = problem.gate_up_EJH, problem.gate_up_bias_EJ
        hopper_product.multiply(
            problem.x_TH, matrix, self.table, h_NJ, order_N=order_N, top_k=self.top_k, bias_EO=bias_EJ
        )

    def down(self, a_NI: Tensor) -> Tensor:
        from amoeba.kernels.hopper import product as hopper_product

        y_NH = self.new_rows(self.problem.down_EHI.shape[1])
        hopper_product.multiply(a_NI, self.problem.down_EHI, self.table, y_NH, bias_EO=self.problem.down_bias_EH)
        low_rank.add_to_y(self.problem, self.thin, a_NI, y_NH)
        return y_NH

    def activation_backward(
        self, dy_TH: Tensor, h_NJ: Tensor, dh_NJ: Tensor, want_scaled_a: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        return self._activation_backward_in_steps(dy_TH, h_NJ, dh_NJ, want_scaled_a)

    def activated_gradient(self, dy_TH: Tensor) -> Tensor:
        from amoeba.kernels.hopper import product as hopper_product

        da_NI = self.new_rows(self.problem.down_EHI.shape[2])
        matrix, order_N = self.problem.down_EHI.transpose(1, 2), self.rows.order_N
        hopper_product.multiply(dy_TH, matrix, self.table, da_NI, order_N=order_N, top_k=self.top_k)
        return da_NI

    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        from amoeba.kernels.hopper import product as hopper_product

        dx_NH = self.new_rows(self.problem.x_TH.shape[1])
        hopper_product.multiply(dh_NJ, self.problem.gate_up_EJH.transpose(1, 2), self.table, dx_NH)
        return dx_NH

    def down_gradient(self, dy_TH: Tensor, scaled_a_NI: Tensor) -> Tensor:
        gradient = torch.empty_like(self.problem.down_EHI)
        self._weight_gradient(dy_TH, scaled_a_NI, gradient)
        return gradient

    def up_gradient(self, dh_NJ: Tensor) -> Tensor:
        gradient = torch.empty_like(self.problem.gate_up_EJH)
        self._weight_gradient(self.problem.x_TH, dh_NJ, gradient.transpose(1, 2))
        return gradient

    def _weight_gradient(self, left_TH: Tensor, right_NW: Tensor, out_EHW: Tensor) -> None:
        from amoeba.kernels.hopper import gradient as hopper_gradient

        rows = self.rows
        hopper_gradient.weight_gradient(
            left_TH, rows.order_N, self.top_k, right_NW, rows.offs_E, self.heaviest_E, out_EHW
        )

    @cached_property
    def table(self) -> Tensor:
        from amoeba.kernels.hopper import product as hopper_product

        return hopper_product.tile_table(self.rows.offs_E, self.problem.rows)


@dataclass(frozen=True, eq=False)
class ThinProducts:
    """Plain Triton's products, as `low_rank` asks for them: any rank, on Hopper too."""

    of: Products

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        out_NO = self.of.new_rows(matrix_EIO.shape[2])
        rows, order_N = self._gathered(rows)
        top_k = self.of.top_k if order_N is not None else 1
        grouped_product.multiply_rows(rows, matrix_EIO, self.of.rows.offs_E, out_NO, order_N=order_N, top_k=top_k)
        return out_NO

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        out_NO += self.multiply(rows_NI, matrix_EIO)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        gradient = torch.empty_like(weight_EOI)
        grad, left_order_N = self._gathered(grad)
        rows, right_order_N = self._gathered(rows)
        return weight_gradient.weight_gradient(
            grad,
            rows,
            self.of.rows.offs_E,
            gradient,
            left_order_N=left_order_N,
            right_order_N=right_order_N,
            top_k=self.of.top_k,
            heaviest_E=self.of.heaviest_E,
        )

    def _gathered(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return (rows.rows_TW, self.of.rows.order_N) if isinstance(rows, ByToken) else (rows, None)


def products_for(problem: Problem, rows: Sorted) -> Products:
    if why_not_hopper(problem) is not None:
        return Products(problem, rows)
    return HopperProducts(problem._replace(x_TH=_in_whole_pieces(problem.x_TH)), rows)


def _in_whole_pieces(rows_TH: Tensor) -> Tensor:
    """A copy, unless the compiler can see that 16 bytes at a time may be read: from the address and the row stride."""
    whole = rows_TH.stride(1) == 1 and rows_TH.stride(0) % 16 == 0 and rows_TH.data_ptr() % 16 == 0
    return rows_TH if whole else rows_TH.clone(memory_format=torch.contiguous_format)


def why_not_hopper(problem: Problem) -> str | None:
    """The reason why plain Triton computes the products instead."""
    x_TH = problem.x_TH
    if x_TH.device.type != "cuda" or torch.cuda.get_device_capability(x_TH.device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9.0)"
    if x_TH.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, x is {x_TH.dtype}"
    for name, width in (("H", x_TH.shape[1]), ("I", problem.down_EHI.shape[2])):
        if width % HOPPER_WIDTH:
            return f"needs {name} to be a multiple of {HOPPER_WIDTH}, it is {width}"
    for name, weight in (("gate_up", problem.gate_up_EJH), ("down", problem.down_EHI)):
        if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()) or weight.data_ptr() % 16:
            return f"needs {name} in one piece, its strides are {weight.stride()}"
    return None
