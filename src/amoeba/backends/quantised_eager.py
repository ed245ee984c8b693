"""`eager` for quantised experts: those that got rows are dequantised one after the other, each for its product.

T tokens · K experts per token · N = T·K routed rows · E experts

Any device, any dtype, any format. One dequantised expert is in memory at a time. On a GPU it reads the row counts on
the host once per pass; there it is the path for what the kernels do not take. Where rows are to be quantised as well
(products="w8a8") these are the numbers that kernels have to agree with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import eager, fp8_choice, sorted_rows
from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.fp8 import W8a8Rows
from amoeba.backends.fp8_choice import takes_w8a8, with_products_for
from amoeba.backends.torch_rows import TorchRows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.precision.formats import Format
from amoeba.precision.quantised_experts import QuantisedExperts


class QuantisedEagerBackend(PassesBackend):
    name, summary, kinds = "eager", "experts dequantised one after the other", (QuantisedExperts,)
    operator_name = "quantised_eager"
    traced = SavedRows()
    waits_on_gpu = True

    def preference(self, device: torch.device) -> int:
        return eager.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        return eager.BACKEND.why_not(request)

    def row_format(self, request: Request) -> Format | None:
        return fp8_choice.row_format(request)

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return super().prepared(with_products_for(problem, gradient), gradient)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(problem, save, _rows_of(problem, save))

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        return sorted_rows.apart(_rows_of(problem, save))

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, TorchRows)


def _rows_of(problem: Problem, save: Save) -> type[TorchRows]:
    return W8a8Rows if problem.weights.products == "w8a8" and takes_w8a8(problem, save) else TorchRows


BACKEND = QuantisedEagerBackend()
