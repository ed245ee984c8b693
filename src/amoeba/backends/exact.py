"""`exact`, by name: each row's result depends on that row alone. For `amoeba.exact`.

T tokens · K experts per token · N = T·K routed rows · E experts · I intermediate · J = 2I or I

All products are `ops.exact`'s: in fp32, with one order of summation for one row and for thousands. Rows are rounded to
the dtype of the weights where `cpu` rounds them. Backward is that of `cpu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import cpu, quantised_cpu, sorted_rows
from amoeba.backends.backend import Request, RowsApart
from amoeba.backends.cpu import CoreGroups, CoreRows
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.rowwise import activate_rows
from amoeba.backends.torch_rows import Groups, TorchRows
from amoeba.core.config import Activation
from amoeba.core.problem import Problem, Save, Saved
from amoeba.cpu.core import load_core
from amoeba.ops.exact import ExactOperators, product
from amoeba.precision.quantised_experts import QuantisedExperts


class ExactBackend(cpu.CpuBackend):
    name, summary = "exact", "each row by itself, for the same bits in training and generation"
    traced = SavedRows()

    def preference(self, device: torch.device) -> int:
        return 15  # `cpu` serves the same

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return problem.with_factors_as_weights()

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(self.sorted_rows(problem)[0], save, ExactRows)

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        return None


class QuantisedExactBackend(ExactBackend):
    kinds = (QuantisedExperts,)
    operator_name = "quantised_exact"

    def why_not(self, request: Request) -> str | None:
        return quantised_cpu.BACKEND.why_not(request)

    def sorted_rows(self, problem: Problem) -> tuple[Problem, type[TorchRows]]:
        return quantised_cpu.BACKEND.sorted_rows(problem)


class ExactRows(CoreRows):
    @staticmethod
    def activate(h_NJ: Tensor, scale_N: Tensor, activation: Activation, out_NI: Tensor) -> Tensor:
        if load_core().activates(activation, out_NI.shape[1]):
            return CoreRows.activate(h_NJ, scale_N, activation, out_NI)
        with ExactOperators():
            return activate_rows(h_NJ, scale_N, activation, out_NI)

    @staticmethod
    def groups_of(offs_E: Tensor, rows: int) -> Groups:
        return ExactGroups(offs_E, rows)


class ExactGroups(CoreGroups):
    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        rows_NI = rows if index_N is None else rows.index_select(0, index_N)
        if isinstance(matrix_EIO, Tensor) and 1 in matrix_EIO.stride()[1:]:  # all experts by one call
            found = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            load_core().multiply_rows_exactly(self.offs_E, rows_NI, matrix_EIO.detach(), out=found)
            parts = self.each(out, found)
        else:
            one_by_one = self.each(out, rows_NI)
            parts = ((e, target, product(part[None], matrix_EIO[e][None])[0]) for e, target, part in one_by_one)
        for e, target, found in parts:
            target.copy_(found if bias_EO is None else found.add_(bias_EO[e]))

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        for e, part, target in self.each(rows_NI, out_NO):
            target.copy_(product(part[None], matrix_EIO[e][None])[0].add_(target))


BACKENDS = ExactBackend(), QuantisedExactBackend()
