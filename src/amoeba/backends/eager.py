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
from amoeba.backends.rowwise import activate, sum_slots
from amoeba.backends.torch_rows import TorchRows
from amoeba.cpu_features import compute_dtype
from amoeba.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.weights import ExpertWeights

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
            return f"serves fp64, fp32, bf16 and fp16, these weights are {dtype}"
        return None

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if _decodes(problem, save):
            return _decode(problem), None
        return sorted_rows.forward(problem, save, TorchRows)

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        if _decodes(problem, save):
            return RowsApart(_decode, lambda part, save: (_decode_rows(part)[:-1], None), _combine_wide)
        return sorted_rows.apart(TorchRows)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, TorchRows)


def _decodes(problem: Problem, save: Save) -> bool:
    few = 0 < problem.rows <= DECODE_ROWS and problem.x_TH.device.type == "cpu"
    return few and save != "h" and problem.lora is None


def _decode(problem: Problem) -> Tensor:
    """A few rows, one after another; nothing is sorted and every expert is read where it lies."""
    rows_TKH = _decode_rows(problem)[:-1].view(*problem.expert_TK.shape, -1)
    experts, expert_TK = problem.weights.num_experts, problem.expert_TK
    if (nobody_TK := (expert_TK < 0) | (expert_TK >= experts)).any():
        rows_TKH.masked_fill_(nobody_TK[..., None], 0)
    first_TH, *others = rows_TKH.unbind(1)
    y_TH = first_TH.clone(memory_format=torch.contiguous_format)
    for row_TH in others:
        y_TH += row_TH
    return y_TH.to(problem.x_TH.dtype)


def _combine_wide(rows_NH: Tensor, problem: Problem) -> Tensor:
    return sum_slots(rows_NH, problem.expert_TK, problem.weights.num_experts).to(problem.x_TH.dtype)


def _decode_rows(problem: Problem) -> Tensor:
    """A row for each slot t·K + k, in fp32 or wider, and a spare one; those of sentinels are not written."""
    x_TH, weights, top_k = problem.x_TH, problem.weights, problem.expert_TK.shape[1]
    gate_up, down, bias = weights.gate_up_EJH, weights.down_EHI, weights.gate_up_bias_EJ
    dtype = compute_dtype(x_TH.dtype, x_TH.device)
    product = torch.mv if dtype == x_TH.dtype else _wide_product
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    y_NH = torch.empty((problem.rows + 1, weights.hidden), dtype=wide, device=x_TH.device)
    ids = problem.expert_TK.flatten().tolist()
    owned = [(n, e) for n, e in enumerate(ids) if 0 <= e < gate_up.shape[0]]
    if not owned:
        return y_NH
    x, y = x_TH.unbind(0), y_NH.unbind(0)
    rows = [product(gate_up[e], x[n // top_k]) for n, e in owned]
    h = torch.stack(rows if bias is None else [h + bias[e] for h, (_, e) in zip(rows, owned, strict=True)])
    scale = problem.weight_TK.reshape(-1, 1)
    if len(owned) < len(ids):
        scale = scale[[n for n, _ in owned]]
    a = activate(h if h.dtype == wide else h.to(wide), weights.activation).mul_(scale)
    plain = dtype == wide and x_TH.dtype == wide
    for (n, e), a_row, scale_row in zip(owned, a.unbind(0), scale.unbind(0), strict=True):
        if plain:
            torch.mv(down[e], a_row, out=y[n])
        else:
            y[n].copy_(_down_product(down[e], a_row, wide))
        if weights.down_bias_EH is not None:
            y[n].addcmul_(weights.down_bias_EH[e], scale_row.to(wide))
    return y_NH


def _wide_product(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mv(matrix.float(), vector.float())


def _down_product(matrix: Tensor, vector: Tensor, wide: torch.dtype) -> Tensor:
    if compute_dtype(matrix.dtype, matrix.device) == matrix.dtype:
        return torch.mv(matrix, vector.to(matrix.dtype))
    return torch.mv(matrix.to(wide), vector)


BACKEND = EagerBackend()
