"""`eager`: one matrix product after another, expert by expert; any device, any dtype, only experts that got rows.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

The flow is `sorted_rows`'s; here is only the short way for a few tokens on a CPU. On a GPU it reads the row counts on
the host once per pass, which stalls the stream; there it is the path for what `grouped` cannot take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import sorted_rows
from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.rowwise import activate
from amoeba.backends.torch_rows import TorchRows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.weights import ExpertWeights
from amoeba.system.cpu_features import compute_dtype

# Up to this many routed rows on a CPU, inference multiplies matrix by vector row by row and never sorts. Row by row
# against sorted, ms, fp32, H=512 I=256 E=32 K=4: 0.27/0.60 at 4 rows, 0.90/1.14 at 16, 1.47/1.34 at 32 (2-core Xeon,
# 2026-11-15).
DECODE_ROWS = 16


class EagerBackend(PassesBackend):
    name, summary, kinds = "eager", "one matrix product after another", (ExpertWeights,)
    traced = SavedRows()
    waits_on_gpu = True

    def preference(self, device: torch.device) -> int:
        return 30 if device.type == "cpu" else 20  # on a GPU it has to wait for the device

    def why_not(self, request: Request) -> str | None:
        dtype = request.weights.dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return f"supports fp64, fp32, bf16 and fp16; these weights are {dtype}"
        return None

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if _decodes(problem, save):
            return _decode(problem).to(problem.x_TH.dtype), None
        return sorted_rows.forward(problem, save, TorchRows)

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        if not _decodes(problem, save):
            return sorted_rows.apart(TorchRows)
        return RowsApart(_decode_rows, _combine, lambda problem, _: self.forward(problem, save)[0], at_once=True)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, TorchRows)


def _decodes(problem: Problem, save: Save) -> bool:
    few = 0 < problem.rows <= DECODE_ROWS and problem.x_TH.device.type == "cpu"
    return few and save != "h" and problem.lora is None


def _decode_rows(problem: Problem, save: Save) -> tuple[Tensor, None]:
    """Each with its bias, if there is one: `_decode` adds it separately, to the sum over the slots before it."""
    *others, bias = problem.weights.tensors()
    without = ExpertWeights.unchecked(*others, None, problem.weights.activation)
    rows_NH = _decode(problem._replace(weights=without))
    if bias is not None:
        rows_NH = torch.cat((rows_NH, bias.index_select(0, problem.expert_TK.flatten()).to(rows_NH.dtype)), 1)
    return rows_NH, None


def _combine(rows_NH: Tensor, problem: Problem) -> Tensor:
    x_TH, hidden, weight = problem.x_TH, problem.weights.hidden, problem.weight_TK.reshape(-1, 1).to(rows_NH.dtype)
    y_TH = torch.zeros(x_TH.shape, dtype=rows_NH.dtype, device=x_TH.device)
    for slot, e in enumerate(problem.expert_TK.flatten().tolist()):
        if 0 <= e < problem.weights.num_experts:
            y = y_TH[slot // problem.expert_TK.shape[1]]
            y += rows_NH[slot, :hidden]
            if problem.weights.down_bias_EH is not None:
                y.addcmul_(rows_NH[slot, hidden:], weight[slot])
    return y_TH.to(x_TH.dtype)


def _decode(problem: Problem) -> Tensor:
    """A few rows, one after another, in fp32 or wider; nothing is sorted and every expert is read where it lies."""
    x_TH, weights = problem.x_TH, problem.weights
    gate_up, down = weights.gate_up_EJH, weights.down_EHI
    dtype = compute_dtype(x_TH.dtype, x_TH.device)
    product = torch.mv if dtype == x_TH.dtype else _wide_product
    experts, bias = gate_up.shape[0], weights.gate_up_bias_EJ
    owner: list[tuple[int, int]] = []
    rows: list[Tensor] = []
    for t, chosen in enumerate(problem.expert_TK.tolist()):
        x = x_TH[t]
        for e in chosen:
            if 0 <= e < experts:
                h = product(gate_up[e], x)
                rows.append(h if bias is None else h + bias[e])
                owner.append((t, e))
    if not rows:
        return torch.zeros_like(x_TH, dtype=torch.promote_types(x_TH.dtype, torch.float32))
    weight = problem.weight_TK.reshape(-1, 1)
    if len(rows) < weight.shape[0]:
        weight = weight[((problem.expert_TK >= 0) & (problem.expert_TK < experts)).reshape(-1)]
    h = torch.stack(rows)
    wide = torch.promote_types(h.dtype, torch.float32)
    a = activate(h if h.dtype == wide else h.to(wide), weights.activation).mul_(weight)
    y_TH = torch.zeros(x_TH.shape, dtype=wide, device=x_TH.device)
    # fp32 and fp64 add up inside the product; half precision is added up in fp32
    add_up = Tensor.addmv_ if dtype == wide and x_TH.dtype == wide else _add_product
    for a_row, w_row, (t, e) in zip(a.unbind(0), weight.unbind(0), owner, strict=True):
        y = y_TH[t]
        add_up(y, down[e], a_row)
        if weights.down_bias_EH is not None:
            y.addcmul_(weights.down_bias_EH[e], w_row.to(wide))
    return y_TH


def _wide_product(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mv(matrix.float(), vector.float())


def _add_product(total: Tensor, matrix: Tensor, vector: Tensor) -> None:
    if compute_dtype(matrix.dtype, matrix.device) == matrix.dtype:
        total += torch.mv(matrix, vector.to(matrix.dtype))
    else:
        total += torch.mv(matrix.to(total.dtype), vector)


BACKEND = EagerBackend()
