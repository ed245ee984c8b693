"""`grouped`: torch's grouped matrix product over the sorted rows. On a GPU it needs no host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

Row buffers carry one spare row at the end, which stands for slots that belong to nobody here (see `sum_rows`).
Rows past offs_E[-1] are left uninitialised by the product and read by nobody. The product wants rows of a multiple of
16 bytes; LoRA factors of another rank are padded with zeros to the next one, for the length of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.allocate import empty_rows
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.operator import Gradients, Kept, Needs, Problem, define_operator
from amoeba.backends.rowwise import activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.cpu.pointers import place_of
from amoeba.layout import Layout, build_layout
from amoeba.weights import LoraFactors


def forward(problem: Problem, keep_h: bool) -> Kept:
    x_TH, rows = problem.x_TH, problem.rows
    layout = build_layout(problem.expert_TK, problem.gate_up_EJH.shape[0])
    if rows == 0:
        y_TH, h_NJ = torch.zeros_like(x_TH), x_TH.new_empty((0, problem.gate_up_EJH.shape[1]))
        return Kept.all(y_TH, h_NJ, layout) if keep_h else Kept.nothing_but(y_TH)
    problem = _with_whole_ranks(problem)
    scale_N = problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = _up(problem, layout)
    a_NI = empty_rows(rows + 1, problem.down_EHI.shape[2], x_TH)
    activate_rows(h_NJ, scale_N, problem.activation, a_NI[:rows])
    y_NH = F.grouped_mm(a_NI, problem.down_EHI.transpose(1, 2), offs=layout.offs_E)
    low_rank.add_to_y(problem, ThinProducts(layout), a_NI, y_NH)
    if problem.down_bias_EH is not None:
        y_NH[:rows] += scale_N[:, None].to(y_NH.dtype) * bias_of_row(problem.down_bias_EH, rows, layout.offs_E)
    y_TH = sum_rows(y_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Kept.all(y_TH, h_NJ, layout) if keep_h else Kept.nothing_but(y_TH)


def backward(problem: Problem, kept: Kept, dy_TH: Tensor, needs: Needs) -> Gradients:
    x_TH, rows = problem.x_TH, problem.rows
    layout = kept.layout(problem)
    if rows == 0:
        return Gradients.zeros(problem, needs)
    given, problem = problem, _with_whole_ranks(problem)
    offs_E, scale_N = layout.offs_E, problem.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = kept.h_NJ if kept.has_h() else _up(problem, layout)
    intermediate, width = problem.down_EHI.shape[2], h_NJ.shape[1]

    dy_NH = dy_TH.index_select(0, layout.token_N)
    da_NI = F.grouped_mm(dy_NH, problem.down_EHI, offs=offs_E)
    thin = ThinProducts(layout)
    dlow_NR = low_rank.add_to_da(problem, thin, dy_NH, da_NI)
    dh_NJ = empty_rows(rows + 1, width, x_TH)
    scaled_a_NI = empty_rows(rows, intermediate, x_TH) if low_rank.needs_scaled_a(needs) else None
    ds_N = activate_rows_backward(da_NI, h_NJ, scale_N, problem.activation, dh_NJ[:rows], scaled_a_NI)
    del da_NI, h_NJ

    d_weight = d_down = d_down_bias = d_gate_up = d_gate_up_bias = d_x = None
    if needs.weight:
        if problem.down_bias_EH is not None:
            ds_N += (dy_NH * bias_of_row(problem.down_bias_EH, rows, layout.offs_E)).sum(-1, dtype=ds_N.dtype)
        d_weight = slot_gradient(ds_N, layout, problem.weight_TK)
    d_lora = low_rank.down_gradients(problem, thin, dy_NH, dlow_NR, scaled_a_NI, needs)
    if needs.down:
        assert scaled_a_NI is not None
        d_down = weight_gradient(dy_NH, scaled_a_NI, offs_E, problem.down_EHI)
    if needs.down_bias:
        d_down_bias = sum_per_expert(dy_NH, offs_E, scale_N, x_TH.dtype)
    del scaled_a_NI, dy_NH, dlow_NR
    if needs.gate_up:
        x_NH = x_TH.index_select(0, layout.token_N)
        d_gate_up = weight_gradient(dh_NJ[:rows], x_NH, offs_E, problem.gate_up_EJH)
        del x_NH
    if needs.gate_up_bias:
        d_gate_up_bias = sum_per_expert(dh_NJ[:rows], offs_E, None, x_TH.dtype)
    dx_NH = F.grouped_mm(dh_NJ, problem.gate_up_EJH, offs=offs_E) if needs.x else None
    dx_own = None if dx_NH is None else dx_NH[:rows]
    d_lora |= low_rank.up_gradients(problem, thin, ByToken(x_TH), dh_NJ[:rows], dx_own, needs)
    if dx_NH is not None:
        d_x = sum_rows(dx_NH, layout.slot_row_N.view_as(problem.expert_TK))
    return Gradients(d_x, d_weight, d_gate_up, d_down, d_gate_up_bias, d_down_bias, **_with_own_ranks(d_lora, given))


def _up(problem: Problem, layout: Layout) -> Tensor:
    x_NH = problem.x_TH.index_select(0, layout.token_N)
    h_NJ = F.grouped_mm(x_NH, problem.gate_up_EJH.transpose(1, 2), offs=layout.offs_E)
    if problem.gate_up_bias_EJ is not None:
        h_NJ += bias_of_row(problem.gate_up_bias_EJ, problem.rows, layout.offs_E)
    low_rank.add_to_h(problem, ThinProducts(layout), x_NH, h_NJ)
    return h_NJ


@dataclass(frozen=True, eq=False)
class ThinProducts:
    """torch's grouped products, as `low_rank` asks for them."""

    layout: Layout

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        return F.grouped_mm(self._sorted(rows), matrix_EIO, offs=self.layout.offs_E)

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        out_NO += self.multiply(rows_NI, matrix_EIO)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        return weight_gradient(self._sorted(grad), self._sorted(rows), self.layout.offs_E, weight_EOI)

    def _sorted(self, rows: Rows) -> Tensor:
        if isinstance(rows, ByToken):
            return rows.rows_TW.index_select(0, self.layout.token_N)
        return rows if rows.stride(1) == 1 else rows.contiguous()


def _with_whole_ranks(problem: Problem) -> Problem:
    """LoRA factors as the product takes them: ranks of a multiple of 16 bytes, rows without gaps."""
    if problem.lora is None:
        return problem
    unit = 16 // problem.x_TH.dtype.itemsize
    factors: dict[str, Tensor] = {}
    for name, factor in problem.lora.tensors().items():
        missing = -factor.shape[1 if name.endswith("a") else 2] % unit
        if missing:
            factors[name] = F.pad(factor, (0, 0, 0, missing) if name.endswith("a") else (0, missing))
        else:
            apart = factor.stride(2) == 1 and factor.stride(1) >= factor.shape[2]
            whole = apart and factor.stride(1) % unit == 0 and place_of(factor) % 16 == 0
            factors[name] = factor if whole else factor.clone(memory_format=torch.contiguous_format)
    return problem._replace(lora=LoraFactors(**factors, scaling=problem.lora.scaling))


def _with_own_ranks(gradients: dict[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """The gradients of padded factors as those of the factors themselves, in their layout."""
    factors = problem.lora.tensors() if problem.lora is not None else {}
    return {
        name: gradient
        if gradient.shape == factors[name].shape and gradient.stride() == factors[name].stride()
        else torch.empty_like(factors[name]).copy_(gradient[:, : factors[name].shape[1], : factors[name].shape[2]])
        for name, gradient in gradients.items()
    }


def weight_gradient(grad_NO: Tensor, rows_NI: Tensor, offs_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight."""
    if weight_EOI.stride(-1) != 1:  # stored as (E, I, O)
        return F.grouped_mm(rows_NI.t(), grad_NO, offs=offs_E).transpose(1, 2)
    return F.grouped_mm(grad_NO.t(), rows_NI, offs=offs_E)


def sum_per_expert(rows_NW: Tensor, offs_E: Tensor, scale_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums the rows of each expert without atomics: one product with the one-hot matrix of the layout.

    In that product 0 · NaN would reach every expert: what is not finite is left out, and a second product tells whose
    sums it belongs to. Rows past the last expert's are uninitialised.
    """
    wide = torch.promote_types(rows_NW.dtype, torch.float32)
    experts = torch.arange(offs_E.shape[0], dtype=torch.int64, device=rows_NW.device)
    own_EN = experts[:, None] == expert_of_row(rows_NW.shape[0], offs_E)
    share_EN = own_EN.to(wide)
    if scale_N is not None:
        share_EN = torch.where(own_EN, scale_N.to(wide), share_EN)
    strange_NW = ~rows_NW.isfinite()
    total_EW = share_EN @ rows_NW.to(wide).masked_fill(strange_NW, 0)
    met_EW = own_EN.to(wide) @ strange_NW.to(wide)
    return total_EW.masked_fill_(met_EW > 0, float("nan")).to(dtype)


def expert_of_row(rows: int, offs_E: Tensor) -> Tensor:
    """Expert of each sorted row; E for rows past the last expert's."""
    row_N = torch.arange(rows, device=offs_E.device, dtype=torch.int32)
    return torch.searchsorted(offs_E, row_N, right=True)


def bias_of_row(bias_EW: Tensor, rows: int, offs_E: Tensor) -> Tensor:
    """Each sorted row's bias; rows past the last expert's get some bias or other, and are read by nobody."""
    return bias_EW[expert_of_row(rows, offs_E).clamp_(max=offs_E.shape[0] - 1)]


operator = define_operator("grouped", forward, backward)
