"""`cpu`: the C++ core; all experts of a pass in one job list, rows gathered while they are packed.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

In fp32 the flow is `sorted_rows`'s with the core's products; weights without a contiguous dimension go to torch.
In bf16 it is `cpu_fused` where the CPU multiplies bf16, torch elsewhere. Few rows without gradients go to `cpu_decode`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from amoeba.backends import cpu_decode, cpu_fused, sorted_rows
from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.rowwise import activate_rows, activate_rows_backward, in_chunks
from amoeba.backends.torch_rows import Groups, TorchRows, empty_gradient
from amoeba.core.config import Activation
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.weights import ExpertWeights
from amoeba.cpu.core import load_core, why_no_core
from amoeba.cpu.pointers import has_lines

# Up to this many routed rows a pass without gradients decodes: no sorted rows, each weight read once for up to four.
# Decoding against sorting, ms, H=512 I=256 E=32 K=4: fp32 0.26/0.85 at 4 rows, 2.65/3.49 at 128, 5.02/4.06 at 256; bf16
# by torch 1.82/3.60 at 128, 3.29/3.90 at 256 (2-core Xeon, 2026-11-15).
DECODE_ROWS = 128
# The same against `cpu_fused`: 0.79/1.11 at 16 rows, 2.59/2.30 at 64, 4.42/2.52 at 128; H=2048 I=768 E=64 K=8:
# 23.4/27.8 at 32, 31.5/32.8 at 128, 41.2/33.0 at 256 (2-core Xeon with AMX, 2026-11-15).
DECODE_ROWS_FUSED = 64


class CpuBackend(PassesBackend):
    name, summary = "cpu", "the C++ core, compiled for this machine"
    kinds: ClassVar[tuple[type, ...]] = (ExpertWeights,)
    traced = SavedRows(has_maps=lambda problem: not cpu_fused.serves(problem))

    def preference(self, device: torch.device) -> int:
        return 40 if device.type == "cpu" else 10

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        if weights.device.type != "cpu":
            return f"computes on the CPU; these weights are on {weights.device}"
        if weights.dtype not in (torch.float32, torch.bfloat16):
            return f"the C++ core takes fp32 and bf16; these weights are {weights.dtype}"
        return why_no_core()

    def decodes(self, problem: Problem) -> bool:
        """Whether few enough rows without gradients to be decoded."""
        return cpu_decode.serves(problem, DECODE_ROWS_FUSED if cpu_fused.serves(problem) else DECODE_ROWS)

    def sorted_rows(self, problem: Problem, save: Save = "h") -> tuple[Problem, type[TorchRows]]:
        """By what other rows are multiplied, and the weights as it reads them."""
        return problem, CoreRows

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Decoding takes factors in fp32 and rounds those that it meets: rounding all of them beforehand would take
        longer than the experts. Asked while tracing, it would tie the graph to this number of tokens."""
        if not gradient and problem.lora is not None and not torch.compiler.is_compiling() and self.decodes(problem):
            return problem
        return super().prepared(problem, gradient)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if save != "h" and self.decodes(problem):
            return cpu_decode.decode(problem), None
        if cpu_fused.serves(problem):
            return cpu_fused.forward(problem, save)
        problem, rows = self.sorted_rows(problem, save)
        return sorted_rows.forward(problem, save, rows)

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        if save != "h" and self.decodes(problem):
            return cpu_decode.APART
        if cpu_fused.serves(problem):
            return cpu_fused.apart()
        apart = sorted_rows.apart(self.sorted_rows(problem, save)[1])
        return apart._replace(
            rows=lambda problem, save: apart.rows(self.sorted_rows(problem, save)[0], save),
            whole=lambda problem, expert_TK: apart.whole(self.sorted_rows(problem)[0], expert_TK),
        )

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        if cpu_fused.serves(problem):
            return cpu_fused.backward(problem, saved, dy_TH, needs)
        problem, rows = self.sorted_rows(problem)
        return sorted_rows.backward(problem, saved, dy_TH, needs, rows)


def _activate(h_NJ: Tensor, scale_N: Tensor, activation: Activation, out_NI: Tensor) -> Tensor:
    """The core computes each row by itself; torch's vectors may end where a thread's share of the rows does."""
    core = load_core()
    if not core.activates(activation, out_NI.shape[1]):
        return activate_rows(h_NJ, scale_N, activation, out_NI)
    scale_N = scale_N.to(torch.float32)
    if h_NJ.dtype == torch.float32:
        core.activate(h_NJ, scale_N, activation, out=out_NI)
        return out_NI
    for h, scale, out in in_chunks(h_NJ, scale_N, out_NI):
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        core.activate(h.to(torch.float32), scale, activation, out=wide)
        out.copy_(wide)
    return out_NI


def _activate_backward(
    da_NI: Tensor, h_NJ: Tensor, scale_N: Tensor, activation: Activation, dh_NJ: Tensor, scaled_a_NI: Tensor | None
) -> Tensor:
    core = load_core()
    if h_NJ.dtype != torch.float32 or not core.activates(activation, da_NI.shape[1]):
        return activate_rows_backward(da_NI, h_NJ, scale_N, activation, dh_NJ, scaled_a_NI)
    return core.activate_backward(da_NI, h_NJ, scale_N.to(torch.float32), activation, dh_NJ, scaled_a_NI)


class CoreRows(TorchRows):
    activate = staticmethod(_activate)
    activate_backward = staticmethod(_activate_backward)

    @staticmethod
    def groups_of(offs_E: Tensor, rows: int) -> Groups:
        return CoreGroups(offs_E, rows)


class CoreGroups(Groups):
    """Products over the sorted rows by the core."""

    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        if 1 not in matrix_EIO.stride()[1:] or matrix_EIO.dtype != torch.float32:
            super().multiply_rows(rows, matrix_EIO, out=out, bias_EO=bias_EO, index_N=index_N)
            return
        if index_N is not None and matrix_EIO.stride(1) != 1:  # those rows are broadcast six at a time, not packed
            rows, index_N = rows.index_select(0, index_N), None
        bias_EO = bias_EO if bias_EO is None else bias_EO.contiguous()
        load_core().multiply_rows(self.offs_E, _rowwise(rows), matrix_EIO, out=out, bias_EO=bias_EO, index_N=index_N)

    def weight_gradient(
        self, grad_NO: Tensor, rows: Tensor, weight_EOI: Tensor, *, index_N: Tensor | None = None
    ) -> Tensor:
        if weight_EOI.dtype != torch.float32:
            return super().weight_gradient(grad_NO, rows, weight_EOI, index_N=index_N)
        gradient = empty_gradient(weight_EOI)
        grad_NO, rows = _rowwise(grad_NO), _rowwise(rows)
        if has_lines(gradient):
            load_core().weight_gradient(self.offs_E, grad_NO, rows, out=gradient, right_index_N=index_N)
        elif has_lines(gradient.mT):  # stored as (E, I, O)
            load_core().weight_gradient(self.offs_E, rows, grad_NO, out=gradient.mT, left_index_N=index_N)
        else:
            plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
            load_core().weight_gradient(self.offs_E, grad_NO, rows, out=plain, right_index_N=index_N)
            gradient.copy_(plain)
        return gradient


def _rowwise(rows: Tensor) -> Tensor:
    return rows if has_lines(rows) else rows.contiguous()


BACKEND = CpuBackend()
