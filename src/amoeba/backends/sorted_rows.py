"""One pass over sorted rows, expert by expert: the flow that `eager` and `cpu` share, and torch's products in it.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    kept = forward(problem, keep_h, Groups)
    gradients = backward(problem, kept, dy_TH, needs, Groups)

A backend that multiplies or activates in its own way brings a subclass of `Groups`. Products write straight into their
place in the sorted rows; on a CPU half precision is computed in fp32 where there are no instructions for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.allocate import empty_gradient, empty_rows
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.operator import Gradients, Kept, Needs, Problem
from amoeba.backends.rowwise import activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.cpu_features import compute_dtype
from amoeba.layout import Layout, build_layout


def forward(problem: Problem, keep_h: bool, groups_type: type[Groups]) -> Kept:
    x_TH, rows = problem.x_TH, problem.rows
    layout = build_layout(problem.expert_TK, problem.gate_up_EJH.shape[0])
    groups = groups_type(layout.offs_E, rows)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]

    h_NJ = _up(problem, layout, groups)
    a_NI = empty_rows(rows, problem.down_EHI.shape[2], x_TH)
    groups.activate(h_NJ, scale_N, problem.activation, a_NI)
    y_NH = empty_rows(rows + 1, x_TH.shape[1], x_TH)
    groups.multiply_rows(a_NI, problem.down_EHI.transpose(1, 2), out=y_NH[:rows])
    low_rank.add_to_y(problem, ThinProducts(groups, layout), a_NI, y_NH[:rows])
    if problem.down_bias_EH is not None:
        for e, y, scale in groups.each(y_NH[:rows], scale_N):
            y += scale[:, None].to(y.dtype) * problem.down_bias_EH[e]
    y_TH = sum_rows(y_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Kept.all(y_TH, h_NJ, layout) if keep_h else Kept.nothing_but(y_TH)


def backward(problem: Problem, kept: Kept, dy_TH: Tensor, needs: Needs, groups_type: type[Groups]) -> Gradients:
    x_TH, rows = problem.x_TH, problem.rows
    layout = kept.layout(problem)
    groups = groups_type(layout.offs_E, rows)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = kept.h_NJ if kept.has_h() else _up(problem, layout, groups)
    intermediate = problem.down_EHI.shape[2]

    dy_NH = dy_TH.index_select(0, layout.token_N)
    da_NI = empty_rows(rows, intermediate, x_TH)
    groups.multiply_rows(dy_NH, problem.down_EHI, out=da_NI)
    thin = ThinProducts(groups, layout)
    dlow_NR = low_rank.add_to_da(problem, thin, dy_NH, da_NI)
    dh_NJ = empty_rows(rows, h_NJ.shape[1], x_TH)
    scaled_a_NI = empty_rows(rows, intermediate, x_TH) if low_rank.needs_scaled_a(needs) else None
    ds_N = groups.activate_backward(da_NI, h_NJ, scale_N, problem.activation, dh_NJ, scaled_a_NI)
    del da_NI, h_NJ

    wide = ds_N.dtype
    d_weight = d_down = d_down_bias = d_gate_up = d_gate_up_bias = d_x = None
    if needs.weight:
        if problem.down_bias_EH is not None:
            for e, ds, dy in groups.each(ds_N, dy_NH):
                ds += dy.to(wide) @ problem.down_bias_EH[e].to(wide)
        d_weight = slot_gradient(ds_N, layout, problem.weight_TK)
    d_lora = low_rank.down_gradients(problem, thin, dy_NH, dlow_NR, scaled_a_NI, needs)
    if needs.down:
        assert scaled_a_NI is not None
        d_down = groups.weight_gradient(dy_NH, scaled_a_NI, problem.down_EHI)
    if needs.down_bias:
        d_down_bias = torch.zeros_like(problem.down_bias_EH)  # type: ignore[arg-type]
        for e, dy, scale in groups.each(dy_NH, scale_N):
            d_down_bias[e] = scale.to(wide) @ dy.to(wide)
    del scaled_a_NI, dy_NH, dlow_NR
    if needs.gate_up:
        d_gate_up = groups.weight_gradient(dh_NJ, x_TH, problem.gate_up_EJH, index_N=layout.token_N)
    if needs.gate_up_bias:
        d_gate_up_bias = torch.zeros_like(problem.gate_up_bias_EJ)  # type: ignore[arg-type]
        for e, dh in groups.each(dh_NJ):
            d_gate_up_bias[e] = dh.sum(0, dtype=wide)
    dx_NH = empty_rows(rows + 1, x_TH.shape[1], x_TH) if needs.x else None
    if dx_NH is not None:
        groups.multiply_rows(dh_NJ, problem.gate_up_EJH, out=dx_NH[:rows])
    dx_own = None if dx_NH is None else dx_NH[:rows]
    d_lora |= low_rank.up_gradients(problem, thin, ByToken(x_TH), dh_NJ, dx_own, needs)
    if dx_NH is not None:
        d_x = sum_rows(dx_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Gradients(d_x, d_weight, d_gate_up, d_down, d_gate_up_bias, d_down_bias, **d_lora)


def _up(problem: Problem, layout: Layout, groups: Groups) -> Tensor:
    h_NJ = empty_rows(problem.rows, problem.gate_up_EJH.shape[1], problem.x_TH)
    up_EHJ = problem.gate_up_EJH.transpose(1, 2)
    groups.multiply_rows(problem.x_TH, up_EHJ, out=h_NJ, bias_EO=problem.gate_up_bias_EJ, index_N=layout.token_N)
    low_rank.add_to_h(problem, ThinProducts(groups, layout), ByToken(problem.x_TH), h_NJ)
    return h_NJ


class Groups:
    """The sorted rows as each expert sees them, and torch's products over them.

    Reading the row counts is the one wait for the device in a pass.
    """

    def __init__(self, offs_E: Tensor, rows: int) -> None:
        self.offs_E = offs_E
        ends = offs_E.tolist()
        self.counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self._sizes = [*self.counts, rows - ends[-1]]  # the last part: rows that belong to nobody here

    def each(self, *row_tensors: Tensor) -> Iterator[tuple]:
        """(expert, its rows of each tensor) for the experts that have rows."""
        parts = [tensor.split(self._sizes) for tensor in row_tensors]
        for e, count in enumerate(self.counts):
            if count:
                yield e, *(part[e] for part in parts)

    def rest(self, rows_NW: Tensor) -> Tensor:
        """The rows that belong to nobody here."""
        return rows_NW.split(self._sizes)[-1]

    activate = staticmethod(activate_rows)
    activate_backward = staticmethod(activate_rows_backward)

    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        """out[n] = rows[n] (or rows[index[n]]) @ matrix of n's expert (+ bias); the rest of out is left as it is."""
        rows_NI = rows if index_N is None else rows.index_select(0, index_N)
        matrices = matrix_EIO.unbind(0)
        dtype = compute_dtype(rows_NI.dtype, rows_NI.device)
        for e, part, target in self.each(rows_NI, out):
            if dtype != part.dtype:
                product = part.to(dtype) @ matrices[e].to(dtype)
                target.copy_(product if bias_EO is None else product.add_(bias_EO[e]))
            elif bias_EO is not None:
                torch.addmm(bias_EO[e], part, matrices[e], out=target)
            else:
                torch.mm(part, matrices[e], out=target)

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        """out[n] += rows[n] @ matrix of n's expert."""
        matrices = matrix_EIO.unbind(0)
        dtype = compute_dtype(rows_NI.dtype, rows_NI.device)
        for e, part, target in self.each(rows_NI, out_NO):
            if dtype != part.dtype:
                target.copy_((part.to(dtype) @ matrices[e].to(dtype)).add_(target))
            else:
                target.addmm_(part, matrices[e])

    def weight_gradient(
        self, grad_NO: Tensor, rows: Tensor, weight_EOI: Tensor, *, index_N: Tensor | None = None
    ) -> Tensor:
        """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight; zeros where no rows came."""
        rows_NI = rows if index_N is None else rows.index_select(0, index_N)
        gradient = empty_gradient(weight_EOI)
        targets = gradient.unbind(0)
        for e, count in enumerate(self.counts):
            if not count:
                targets[e].zero_()
        dtype = compute_dtype(grad_NO.dtype, grad_NO.device)
        for e, grad, part in self.each(grad_NO, rows_NI):
            if dtype != grad.dtype:
                targets[e].copy_(grad.to(dtype).t() @ part.to(dtype))
            else:
                torch.mm(grad.t(), part, out=targets[e])
        return gradient


@dataclass(frozen=True, eq=False)
class ThinProducts:
    """The products of a `Groups`, as `low_rank` asks for them."""

    groups: Groups
    layout: Layout

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        out_NO = empty_rows(self.layout.order_N.shape[0], matrix_EIO.shape[2], matrix_EIO)
        rows, index_N = self._gathered(rows)
        self.groups.multiply_rows(rows, matrix_EIO, out=out_NO, index_N=index_N)
        return out_NO

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        self.groups.add_product(rows_NI, matrix_EIO, out_NO)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        assert isinstance(grad, Tensor)
        rows, index_N = self._gathered(rows)
        return self.groups.weight_gradient(grad, rows, weight_EOI, index_N=index_N)

    def _gathered(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return (rows.rows_TW, self.layout.token_N) if isinstance(rows, ByToken) else (rows, None)
