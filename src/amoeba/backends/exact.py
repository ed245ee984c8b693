"""`exact`, by name: each row's result depends on that row alone. For `amoeba.exact`.

T tokens · K experts per token · N = T·K routed rows · E experts · I intermediate · J = 2I or I

On a CPU all products are `ops.exact`'s: in fp32, with one order of summation for one row and for thousands. Rows are
rounded to the dtype of the weights where `cpu` rounds them. On a GPU they are those of `triton`, with one tile size for
all numbers of rows. Backward is that of `cpu` and of `triton`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from amoeba.backends import cpu, quantised_cpu, quantised_triton, sorted_rows, triton
from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.cpu import CoreGroups, CoreRows
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.rowwise import activate_rows
from amoeba.backends.sorted_rows import SortedRows
from amoeba.backends.torch_rows import Groups, TorchRows
from amoeba.core.config import Activation
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.cpu.core import load_core
from amoeba.kernels.tile_sizes import any_rows
from amoeba.ops import exact as ops
from amoeba.ops.exact import ExactOperators, product
from amoeba.precision.quantised_experts import QuantisedExperts


class ExactBackend(cpu.CpuBackend):
    name, summary = "exact", "each row by itself, for the same bits in training and generation"
    traced = SavedRows()
    on_gpu: ClassVar[PassesBackend] = triton.BACKEND  # whose weights it takes there

    def preference(self, device: torch.device) -> int:
        return 15  # `cpu` and `triton` serve the same

    def why_not(self, request: Request) -> str | None:
        on_cpu = ops.kernels_on(request.weights.device) is None
        return super().why_not(request) if on_cpu else self.on_gpu.why_not(request)

    @staticmethod
    def kernel_rows() -> type[SortedRows]:
        from amoeba.backends.triton_rows import ExactKernelRows

        return ExactKernelRows

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """On a GPU factors are rounded where they are read."""
        on_cpu = ops.kernels_on(problem.x_TH.device) is None
        return problem.with_factors_as_weights() if on_cpu else problem

    def run(self, request: Request) -> Tensor:
        with ops.OUTSIDE:  # the operator's way through the dispatcher is 0.2 ms on the host, twice
            return super().run(request)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if ops.kernels_on(problem.x_TH.device) is not None:
            from amoeba.kernels.launch.plan import planned

            what = ("forward", self.operator_name or self.name, save, *self.pass_constants(problem))
            return planned(what, triton.pass_tensors(problem), lambda: self._forward_on_gpu(problem, save))
        return sorted_rows.forward(self.sorted_rows(problem)[0], save, ExactRows)

    def _forward_on_gpu(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        with any_rows():
            return sorted_rows.forward(problem, save, self.kernel_rows())

    @staticmethod
    def pass_constants(problem: Problem) -> tuple:
        return triton.pass_constants(problem)

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        return None

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        if ops.kernels_on(problem.x_TH.device) is None:
            return super().backward(problem, saved, dy_TH, needs)
        if saved is not None:
            return self.on_gpu.backward(problem, saved, dy_TH, needs)
        with any_rows():
            return sorted_rows.backward(problem, saved, dy_TH, needs, self.kernel_rows())


class QuantisedExactBackend(ExactBackend):
    kinds = (QuantisedExperts,)
    operator_name = "quantised_exact"
    on_gpu = quantised_triton.BACKEND

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        assert isinstance(weights, QuantisedExperts)
        if ops.kernels_on(weights.device) is None:
            return quantised_cpu.BACKEND.why_not(request)
        if weights.products == "w8a8":
            return "quantises no rows; these experts ask for w8a8"
        return self.on_gpu.why_not(request)

    @staticmethod
    def kernel_rows() -> type[SortedRows]:
        from amoeba.backends.quantised_rows import QuantisedExactKernelRows

        return QuantisedExactKernelRows

    @staticmethod
    def pass_constants(problem: Problem) -> tuple:
        return quantised_triton.pass_constants(problem)

    def sorted_rows(self, problem: Problem, save: Save = "h") -> tuple[Problem, type[TorchRows]]:
        return quantised_cpu.BACKEND.sorted_rows(problem)  # whose rows the passes above do not take


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
        if bias_EO is None and _at_once(matrix_EIO):
            self._multiply(rows_NI, matrix_EIO, out)
            return
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
        if _at_once(matrix_EIO):
            out_NO = out_NO[: self.rows]  # behind them, a spare one
            added = torch.empty(out_NO.shape, dtype=torch.float32, device=out_NO.device)
            self._multiply(rows_NI, matrix_EIO, added)
            out_NO.copy_(added.add_(out_NO))
            return
        for e, part, target in self.each(rows_NI, out_NO):
            target.copy_(product(part[None], matrix_EIO[e][None])[0].add_(target))

    def _multiply(self, rows_NI: Tensor, matrix_EIO: Tensor, out: Tensor) -> None:
        """Of all experts by one call; rows of sentinels hold anything."""
        direct = out.dtype == torch.float32 and out.is_contiguous()
        found = out if direct else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        load_core().multiply_rows_exactly(self.offs_E, rows_NI[: self.rows], matrix_EIO.detach(), out=found)
        if not direct:
            out.copy_(found)


def _at_once(matrix_EIO: object) -> bool:
    return isinstance(matrix_EIO, Tensor) and 1 in matrix_EIO.stride()[1:] and matrix_EIO.dtype in ops.DTYPES[:2]


BACKENDS = ExactBackend(), QuantisedExactBackend()
