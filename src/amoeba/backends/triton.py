"""`triton`: our own kernels on the GPU, forward and backward without a host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

Rows are sorted by a counting sort on the device. The up projection gathers the rows of x as it loads them and activates
in its epilogue; the routing weights enter in the gather-and-sum at the end, in fp32. Backward starts from dA' = dy ·
down: one pass over it and h gives dh, s·a and ds, so that y is never kept. A few tokens without gradients are decoded
by kernels that read each weight once and sort nothing. With LoRA factors the up projection and dA' are not fused with
the activation, their low-rank terms come between; such passes do not decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.low_rank import ByToken
from amoeba.backends.operator import Gradients, Kept, Needs, Problem, define_operator

if TYPE_CHECKING:
    from amoeba.backends.triton_products import Sorted

# Up to this many tokens a pass without gradients decodes. Not measured yet beyond 64.
DECODE_TOKENS = 64


def forward(problem: Problem, keep_h: bool) -> Kept:
    from amoeba.backends.triton_products import products_for
    from amoeba.kernels.combine import combine
    from amoeba.kernels.decode import decode

    problem = _with_plain_rows(problem)
    x_TH, width = problem.x_TH, problem.gate_up_EJH.shape[1]
    if not keep_h and 0 < x_TH.shape[0] <= DECODE_TOKENS and problem.lora is None:
        return Kept.nothing_but(decode(problem), torch.int32)
    rows = _sorted(problem)
    h_NJ = x_TH.new_empty((problem.rows, width)) if keep_h else None
    if problem.rows:
        products = products_for(problem, rows)
        a_NI = products.new_rows(problem.down_EHI.shape[2])
        products.up(h_NJ, a_NI)
        y_NH = products.down(a_NI)
        del a_NI
        y_TH = torch.empty_like(x_TH)
        combine(y_NH, rows.slot_row_N.view_as(problem.expert_TK), problem.weight_TK, y_TH)
    else:
        y_TH = torch.zeros_like(x_TH)
    if h_NJ is None:
        return Kept.nothing_but(y_TH, torch.int32)
    return Kept(y_TH, h_NJ, *rows)


def backward(problem: Problem, kept: Kept, dy_TH: Tensor, needs: Needs) -> Gradients:
    from amoeba.backends.triton_products import Sorted, products_for
    from amoeba.kernels.combine import combine, slot_gradient
    from amoeba.kernels.expert_sums import bias_dot, sum_per_expert

    problem = _with_plain_rows(problem)
    if problem.rows == 0:
        return Gradients.zeros(problem, needs)
    rows = Sorted(kept.order_N, kept.slot_row_N, kept.offs_E) if kept.has_h() else _sorted(problem)
    slot_row_TK = rows.slot_row_N.view_as(problem.expert_TK)
    products = products_for(problem, rows)
    dy_TH = products.readable(dy_TH)
    if kept.has_h():
        h_NJ = kept.h_NJ
        dh_NJ = h_NJ if _is_read_for_the_last_time() else torch.empty_like(h_NJ)
    else:
        h_NJ = dh_NJ = products.new_rows(problem.gate_up_EJH.shape[1])
        products.up(h_NJ, products.new_rows(problem.down_EHI.shape[2]))

    d_weight = d_down = d_down_bias = d_gate_up = d_gate_up_bias = d_x = None
    want_scaled_a = low_rank.needs_scaled_a(needs)
    scaled_a_NI, ds_N, dlow_NR = products.activation_backward(dy_TH, h_NJ, dh_NJ, want_scaled_a)
    del h_NJ
    if needs.weight:
        through_bias = None
        if problem.down_bias_EH is not None:
            through_bias = bias_dot(dy_TH, problem.down_bias_EH, problem.expert_TK)
        d_weight = torch.empty_like(problem.weight_TK, memory_format=torch.contiguous_format)
        slot_gradient(ds_N, slot_row_TK, through_bias, d_weight)
    d_lora = low_rank.down_gradients(problem, products.thin, ByToken(dy_TH), dlow_NR, scaled_a_NI, needs)
    if needs.down:
        assert scaled_a_NI is not None
        d_down = products.down_gradient(dy_TH, scaled_a_NI)
    del scaled_a_NI, dlow_NR
    if needs.down_bias:
        d_down_bias = torch.empty_like(problem.down_bias_EH)  # type: ignore[arg-type]
        sum_per_expert(
            dy_TH, rows.offs_E, d_down_bias, order_N=rows.order_N, weight_TK=problem.weight_TK, by_token=True
        )
    if needs.gate_up_bias:
        d_gate_up_bias = torch.empty_like(problem.gate_up_bias_EJ)  # type: ignore[arg-type]
        sum_per_expert(dh_NJ, rows.offs_E, d_gate_up_bias)
    dx_NH = products.rows_gradient(dh_NJ) if needs.x else None
    d_lora |= low_rank.up_gradients(problem, products.thin, ByToken(products.problem.x_TH), dh_NJ, dx_NH, needs)
    if dx_NH is not None:
        d_x = torch.empty_like(problem.x_TH)
        combine(dx_NH, slot_row_TK, None, d_x)
        del dx_NH
    if needs.gate_up:
        d_gate_up = products.up_gradient(dh_NJ)
    return Gradients(d_x, d_weight, d_gate_up, d_down, d_gate_up_bias, d_down_bias, **d_lora)


def _sorted(problem: Problem) -> Sorted:
    from amoeba.backends.triton_products import Sorted
    from amoeba.kernels.sort import sort_rows

    return Sorted(*sort_rows(problem.expert_TK, problem.gate_up_EJH.shape[0]))


def _with_plain_rows(problem: Problem) -> Problem:
    """The rows of x contiguous in themselves, the small tensors as a whole."""
    x, gate_up_bias, down_bias = problem.x_TH, problem.gate_up_bias_EJ, problem.down_bias_EH
    return problem._replace(
        x_TH=x if x.stride(1) == 1 else x.contiguous(),
        weight_TK=problem.weight_TK.contiguous(),
        expert_TK=problem.expert_TK.contiguous(),
        gate_up_bias_EJ=None if gate_up_bias is None else gate_up_bias.contiguous(),
        down_bias_EH=None if down_bias is None else down_bias.contiguous(),
    )


def _is_read_for_the_last_time() -> bool:
    """Whether h may be overwritten: this backward runs inside autograd, and the graph is not kept for another one."""
    return torch._C._current_graph_task_id() != -1 and not torch._C._autograd._get_current_graph_task_keep_graph()


operator = define_operator("triton", forward, backward, map_dtype=torch.int32)
