"""`eager`: one matrix product after another, expert by expert; any device, any dtype, only experts that got rows.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

The flow is `sorted_rows`'s; here is only the short way for a few tokens on a CPU. On a GPU it reads the row counts on
the host once per pass, which stalls the stream; there it is the path for what `grouped` cannot take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from amoeba.backends import sorted_rows
from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.rowwise import activate
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
            return RowsApart(_decode_rows, _combine, _decode)
        return sorted_rows.apart(TorchRows)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, TorchRows)


def _decodes(problem: Problem, save: Save) -> bool:
    few = 0 < problem.rows <= DECODE_ROWS and problem.x_TH.device.type == "cpu"
    return few and save != "h" and problem.lora is None


def _decode(problem: Problem) -> Tensor:
    """A few rows, one after another; nothing is sorted and every expert is read where it lies."""
    return _sums(_products(problem), problem)


def _decode_rows(problem: Problem, save: Save) -> tuple[Tensor, None]:
    """W2 a of each slot, and its bias beside it: y adds them up one after the other."""
    wide = torch.promote_types(problem.x_TH.dtype, torch.float32)
    parts = 1 if problem.weights.down_bias_EH is None else 2
    rows_NPH = problem.x_TH.new_empty((problem.rows, parts, problem.weights.hidden), dtype=wide)
    for slot, product, bias in _products(problem):
        rows_NPH[slot, 0] = product
        if bias is not None:
            rows_NPH[slot, 1] = bias
    return rows_NPH.flatten(1), None


def _combine(rows_NH: Tensor, problem: Problem) -> Tensor:
    experts, hidden, biased = problem.weights.num_experts, problem.weights.hidden, problem.weights.down_bias_EH is not None
    ids = problem.expert_TK.flatten().tolist()
    rows = ((slot, rows_NH[slot]) for slot, e in enumerate(ids) if 0 <= e < experts)
    return _sums(((slot, row[:hidden], row[hidden:] if biased else None) for slot, row in rows), problem)


def _sums(products: Iterable[tuple[int, Tensor, Tensor | None]], problem: Problem) -> Tensor:
    """In the order of the slots, half precision in fp32."""
    x_TH, top_k = problem.x_TH, problem.expert_TK.shape[1]
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    y_TH = torch.zeros(x_TH.shape, dtype=wide, device=x_TH.device)
    y, weight = y_TH.unbind(0), problem.weight_TK.reshape(-1, 1)
    for slot, product, bias in products:
        total = y[slot // top_k]
        total += product
        if bias is not None:
            total.addcmul_(bias, weight[slot].to(wide))
    return y_TH if wide == x_TH.dtype else y_TH.to(x_TH.dtype)


def _products(problem: Problem) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Of each slot t·K + k that has an expert: W2 a with the slot's weight in it, and b2."""
    x_TH, weights, top_k = problem.x_TH, problem.weights, problem.expert_TK.shape[1]
    gate_up, down, bias, down_bias = weights.tensors()
    product = torch.mv if compute_dtype(x_TH.dtype, x_TH.device) == x_TH.dtype else _wide_product
    ids = problem.expert_TK.flatten().tolist()
    owned = [(slot, e) for slot, e in enumerate(ids) if 0 <= e < gate_up.shape[0]]
    if not owned:
        return
    x = x_TH.unbind(0)
    rows = [product(gate_up[e], x[slot // top_k]) for slot, e in owned]
    h = torch.stack(rows if bias is None else [h + bias[e] for h, (_, e) in zip(rows, owned, strict=True)])
    weight = problem.weight_TK.reshape(-1, 1)
    if len(owned) < len(ids):
        weight = weight[[slot for slot, _ in owned]]
    wide = torch.promote_types(h.dtype, torch.float32)
    a = activate(h if h.dtype == wide else h.to(wide), weights.activation).mul_(weight)
    for a_row, (slot, e) in zip(a.unbind(0), owned, strict=True):
        yield slot, _down_product(down[e], a_row), None if down_bias is None else down_bias[e]


def _wide_product(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mv(matrix.float(), vector.float())


def _down_product(matrix: Tensor, vector: Tensor) -> Tensor:
    if compute_dtype(matrix.dtype, matrix.device) == matrix.dtype:
        return torch.mv(matrix, vector.to(matrix.dtype))
    return torch.mv(matrix.to(vector.dtype), vector)


BACKEND = EagerBackend()
