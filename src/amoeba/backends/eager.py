"""`eager`: one matrix product after another, expert by expert; any device, any dtype, only experts that got rows.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

On a CPU this is the fast path: products write straight into their place in the sorted rows, and half precision is
computed in fp32 where the CPU has no instructions for it. On a GPU it reads the row counts on the host once per pass,
which stalls the stream; there it is the path for what `grouped` cannot take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends.allocate import empty_gradient, empty_rows
from amoeba.backends.operator import Gradients, Kept, Needs, Problem, define_operator
from amoeba.backends.rowwise import activate, activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.cpu_features import compute_dtype
from amoeba.layout import Layout, build_layout

# Up to this many routed rows on a CPU, inference multiplies matrix by vector row by row and never sorts.
# (2-core Xeon, H=512 I=256 E=32 K=4, fp32: 0.17 ms at 4 rows where sorting and grouping take 0.33 ms, 2026-11-15.)
DECODE_ROWS = 16

Groups = list[tuple[int, int, int]]  # expert, first row, end row; experts without rows are left out


def forward(problem: Problem, keep_h: bool) -> Kept:
    x_TH, rows = problem.x_TH, problem.rows
    if not keep_h and 0 < rows <= DECODE_ROWS and x_TH.device.type == "cpu":
        return _no_layout(_decode(problem), problem)
    layout = build_layout(problem.expert_TK, problem.gate_up_EJH.shape[0])
    groups = occupied_groups(layout.offs_E)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]

    h_NJ = _up(problem, layout, groups)
    intermediate = problem.down_EHI.shape[2]
    a_NI = activate_rows(h_NJ, scale_N, problem.activation, empty_rows(rows, intermediate, x_TH))
    y_NH = empty_rows(rows + 1, x_TH.shape[1], x_TH)
    for e, start, end in groups:
        multiply(a_NI[start:end], problem.down_EHI[e].t(), out=y_NH[start:end])
        if problem.down_bias_EH is not None:
            y_NH[start:end] += scale_N[start:end, None].to(y_NH.dtype) * problem.down_bias_EH[e]
    y_TH = sum_rows(y_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Kept(y_TH, h_NJ if keep_h else x_TH.new_empty(0), layout.order_N, layout.slot_row_N, layout.offs_E)


def backward(problem: Problem, kept: Kept, dy_TH: Tensor, needs: Needs) -> Gradients:
    x_TH, rows, hidden = problem.x_TH, problem.rows, problem.x_TH.shape[1]
    layout = kept.layout(problem.expert_TK.shape[1])
    groups = occupied_groups(layout.offs_E)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = kept.h_NJ if kept.h_NJ.dim() == 2 else _up(problem, layout, groups)
    intermediate, width = problem.down_EHI.shape[2], h_NJ.shape[1]

    dy_NH = dy_TH.index_select(0, layout.token_N)
    da_NI = empty_rows(rows, intermediate, x_TH)
    for e, start, end in groups:
        multiply(dy_NH[start:end], problem.down_EHI[e], out=da_NI[start:end])
    dh_NJ = empty_rows(rows, width, x_TH)
    scaled_a_NI = empty_rows(rows, intermediate, x_TH) if needs.down else None
    ds_N = activate_rows_backward(da_NI, h_NJ, scale_N, problem.activation, dh_NJ, scaled_a_NI)
    del da_NI, h_NJ

    d_weight = d_down = d_down_bias = d_gate_up = d_gate_up_bias = d_x = None
    if needs.weight:
        if problem.down_bias_EH is not None:
            for e, start, end in groups:
                ds_N[start:end] += dy_NH[start:end].to(ds_N.dtype) @ problem.down_bias_EH[e].to(ds_N.dtype)
        d_weight = slot_gradient(ds_N, layout, problem.weight_TK)
    if needs.down:
        assert scaled_a_NI is not None
        d_down = zero_empty(empty_gradient(problem.down_EHI), groups)
        for e, start, end in groups:
            multiply(dy_NH[start:end].t(), scaled_a_NI[start:end], out=d_down[e])
    if needs.down_bias:
        assert problem.down_bias_EH is not None
        d_down_bias = torch.zeros_like(problem.down_bias_EH)
        for e, start, end in groups:
            wide = torch.promote_types(x_TH.dtype, torch.float32)
            d_down_bias[e] = scale_N[start:end].to(wide) @ dy_NH[start:end].to(wide)
    del scaled_a_NI, dy_NH
    if needs.gate_up:
        d_gate_up = zero_empty(empty_gradient(problem.gate_up_EJH), groups)
        x_NH = x_TH.index_select(0, layout.token_N)
        for e, start, end in groups:
            multiply(dh_NJ[start:end].t(), x_NH[start:end], out=d_gate_up[e])
        del x_NH
    if needs.gate_up_bias:
        assert problem.gate_up_bias_EJ is not None
        d_gate_up_bias = torch.zeros_like(problem.gate_up_bias_EJ)
        for e, start, end in groups:
            d_gate_up_bias[e] = dh_NJ[start:end].sum(0, dtype=torch.promote_types(x_TH.dtype, torch.float32))
    if needs.x:
        dx_NH = empty_rows(rows + 1, hidden, x_TH)
        for e, start, end in groups:
            multiply(dh_NJ[start:end], problem.gate_up_EJH[e], out=dx_NH[start:end])
        d_x = sum_rows(dx_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Gradients(d_x, d_weight, d_gate_up, d_down, d_gate_up_bias, d_down_bias)


def multiply(left: Tensor, right: Tensor, *, out: Tensor, bias: Tensor | None = None) -> None:
    """out = left @ right (+ bias), in the dtype that this device computes fast."""
    dtype = compute_dtype(left.dtype, left.device)
    if dtype != left.dtype:
        product = left.to(dtype) @ right.to(dtype)
        out.copy_(product if bias is None else product.add_(bias))
    elif bias is not None:
        torch.addmm(bias, left, right, out=out)
    else:
        torch.mm(left, right, out=out)


def _up(problem: Problem, layout: Layout, groups: Groups) -> Tensor:
    x_NH = problem.x_TH.index_select(0, layout.token_N)
    h_NJ = empty_rows(problem.rows, problem.gate_up_EJH.shape[1], problem.x_TH)
    bias = problem.gate_up_bias_EJ
    for e, start, end in groups:
        multiply(
            x_NH[start:end],
            problem.gate_up_EJH[e].t(),
            out=h_NJ[start:end],
            bias=None if bias is None else bias[e],
        )
    return h_NJ


def occupied_groups(offs_E: Tensor) -> Groups:
    ends = offs_E.tolist()
    starts = [0, *ends[:-1]]
    return [(e, start, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def zero_empty(gradient: Tensor, groups: Groups) -> Tensor:
    """Zeroes the gradient of every expert without rows; the others are about to be overwritten."""
    busy = {e for e, _, _ in groups}
    for e in range(gradient.shape[0]):
        if e not in busy:
            gradient[e].zero_()
    return gradient


def _decode(problem: Problem) -> Tensor:
    """A few rows, one after another; nothing is sorted and every expert is read where it lies."""
    x_TH, dtype = problem.x_TH, compute_dtype(problem.x_TH.dtype, problem.x_TH.device)
    experts = problem.gate_up_EJH.shape[0]
    slots = [
        (t, k, e)
        for t, chosen in enumerate(problem.expert_TK.tolist())
        for k, e in enumerate(chosen)
        if 0 <= e < experts
    ]
    x_rows = x_TH.to(dtype).unbind(0)
    y_TH = torch.zeros(x_TH.shape, dtype=torch.promote_types(dtype, torch.float32))
    if not slots:
        return y_TH.to(x_TH.dtype)
    h = torch.empty((len(slots), problem.gate_up_EJH.shape[1]), dtype=dtype)
    for row, (t, _, e) in zip(h.unbind(0), slots, strict=True):
        torch.mv(problem.gate_up_EJH[e].to(dtype), x_rows[t], out=row)
        if problem.gate_up_bias_EJ is not None:
            row += problem.gate_up_bias_EJ[e]
    a = activate(h.to(y_TH.dtype), problem.activation).to(dtype)
    y = torch.empty((len(slots), x_TH.shape[1]), dtype=dtype)
    for row, a_row, (_, _, e) in zip(y.unbind(0), a.unbind(0), slots, strict=True):
        torch.mv(problem.down_EHI[e].to(dtype), a_row, out=row)
        if problem.down_bias_EH is not None:
            row += problem.down_bias_EH[e]
    if len(slots) == x_TH.shape[0] * problem.expert_TK.shape[1]:
        grouped = y.to(y_TH.dtype).view(x_TH.shape[0], -1, x_TH.shape[1])
        weight = problem.weight_TK.to(y_TH.dtype)
        return torch.bmm(weight[:, None], grouped)[:, 0].to(x_TH.dtype)
    weights = problem.weight_TK.tolist()
    for row, (t, k, _) in zip(y.unbind(0), slots, strict=True):
        y_TH[t].add_(row, alpha=weights[t][k])
    return y_TH.to(x_TH.dtype)


def _no_layout(y_TH: Tensor, problem: Problem) -> Kept:
    nothing = y_TH.new_empty(0, dtype=torch.int64)
    return Kept(y_TH, y_TH.new_empty(0), nothing, nothing, nothing.to(torch.int32))


operator = define_operator("eager", forward, backward)
