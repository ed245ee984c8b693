"""`grouped`: torch's grouped matrix product over the sorted rows. On a GPU it needs no host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

Row buffers carry one spare row at the end, which stands for slots that belong to nobody here (see `sum_rows`).
Rows past offs_E[-1] are left uninitialised by the product and read by nobody.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends.allocate import empty_rows
from amoeba.backends.operator import Gradients, Kept, Needs, Problem, define_operator
from amoeba.backends.rowwise import activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.layout import Layout, build_layout


def forward(problem: Problem, keep_h: bool) -> Kept:
    x_TH, rows = problem.x_TH, problem.rows
    layout = build_layout(problem.expert_TK, problem.gate_up_EJH.shape[0])
    if rows == 0:
        y_TH, h_NJ = torch.zeros_like(x_TH), x_TH.new_empty((0, problem.gate_up_EJH.shape[1]))
        return Kept.all(y_TH, h_NJ, layout) if keep_h else Kept.nothing_but(y_TH)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = _up(problem, layout)
    a_NI = empty_rows(rows + 1, problem.down_EHI.shape[2], x_TH)
    activate_rows(h_NJ, scale_N, problem.activation, a_NI[:rows])
    y_NH = F.grouped_mm(a_NI, problem.down_EHI.transpose(1, 2), offs=layout.offs_E)
    if problem.down_bias_EH is not None:
        y_NH[:rows] += scale_N[:, None].to(y_NH.dtype) * bias_of_row(problem.down_bias_EH, rows, layout.offs_E)
    y_TH = sum_rows(y_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Kept.all(y_TH, h_NJ, layout) if keep_h else Kept.nothing_but(y_TH)


def backward(problem: Problem, kept: Kept, dy_TH: Tensor, needs: Needs) -> Gradients:
    x_TH, rows = problem.x_TH, problem.rows
    layout = kept.layout(problem)
    if rows == 0:
        return Gradients.zeros(problem, needs)
    offs_E, scale_N = layout.offs_E, problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = kept.h_NJ if kept.has_h() else _up(problem, layout)
    intermediate, width = problem.down_EHI.shape[2], h_NJ.shape[1]

    dy_NH = dy_TH.index_select(0, layout.token_N)
    da_NI = F.grouped_mm(dy_NH, problem.down_EHI, offs=offs_E)
    dh_NJ = empty_rows(rows + 1, width, x_TH)
    scaled_a_NI = empty_rows(rows, intermediate, x_TH) if needs.down else None
    ds_N = activate_rows_backward(da_NI, h_NJ, scale_N, problem.activation, dh_NJ[:rows], scaled_a_NI)
    del da_NI, h_NJ

    d_weight = d_down = d_down_bias = d_gate_up = d_gate_up_bias = d_x = None
    if needs.weight:
        if problem.down_bias_EH is not None:
            ds_N += (dy_NH * bias_of_row(problem.down_bias_EH, rows, layout.offs_E)).sum(-1, dtype=ds_N.dtype)
        d_weight = slot_gradient(ds_N, layout, problem.weight_TK)
    if needs.down:
        assert scaled_a_NI is not None
        d_down = weight_gradient(dy_NH, scaled_a_NI, offs_E, problem.down_EHI)
    if needs.down_bias:
        d_down_bias = sum_per_expert(dy_NH, offs_E, scale_N, x_TH.dtype)
    del scaled_a_NI, dy_NH
    if needs.gate_up:
        x_NH = x_TH.index_select(0, layout.token_N)
        d_gate_up = weight_gradient(dh_NJ[:rows], x_NH, offs_E, problem.gate_up_EJH)
        del x_NH
    if needs.gate_up_bias:
        d_gate_up_bias = sum_per_expert(dh_NJ[:rows], offs_E, None, x_TH.dtype)
    if needs.x:
        dx_NH = F.grouped_mm(dh_NJ, problem.gate_up_EJH, offs=offs_E)
        d_x = sum_rows(dx_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Gradients(d_x, d_weight, d_gate_up, d_down, d_gate_up_bias, d_down_bias)


def _up(problem: Problem, layout: Layout) -> Tensor:
    x_NH = problem.x_TH.index_select(0, layout.token_N)
    h_NJ = F.grouped_mm(x_NH, problem.gate_up_EJH.transpose(1, 2), offs=layout.offs_E)
    if problem.gate_up_bias_EJ is not None:
        h_NJ += bias_of_row(problem.gate_up_bias_EJ, problem.rows, layout.offs_E)
    return h_NJ


def weight_gradient(grad_NO: Tensor, rows_NI: Tensor, offs_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight."""
    if weight_EOI.stride(-1) != 1:  # stored as (E, I, O)
        return F.grouped_mm(rows_NI.t(), grad_NO, offs=offs_E).transpose(1, 2)
    return F.grouped_mm(grad_NO.t(), rows_NI, offs=offs_E)


def sum_per_expert(rows_NW: Tensor, offs_E: Tensor, scale_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums the rows of each expert without atomics: one product with the one-hot matrix of the layout."""
    wide = torch.promote_types(rows_NW.dtype, torch.float32)
    experts = torch.arange(offs_E.shape[0], device=rows_NW.device)
    expert_N = expert_of_row(rows_NW.shape[0], offs_E)
    share_EN = (experts[:, None] == expert_N).to(wide)
    if scale_N is not None:
        share_EN *= scale_N.to(wide)
    tail_N1 = (expert_N >= offs_E.shape[0])[:, None]  # uninitialised rows: 0 · NaN must not reach the sum
    return (share_EN @ rows_NW.to(wide).masked_fill(tail_N1, 0)).to(dtype)


def expert_of_row(rows: int, offs_E: Tensor) -> Tensor:
    """Expert of each sorted row; E for rows past the last expert's."""
    row_N = torch.arange(rows, device=offs_E.device, dtype=torch.int32)
    return torch.searchsorted(offs_E, row_N, right=True)


def bias_of_row(bias_EW: Tensor, rows: int, offs_E: Tensor) -> Tensor:
    """Each sorted row's bias; rows past the last expert's get some bias or other, and are read by nobody."""
    return bias_EW[expert_of_row(rows, offs_E).clamp_(max=offs_E.shape[0] - 1)]


operator = define_operator("grouped", forward, backward)
