"""`cpu` for block-scaled experts in fp8: the C++ core reads one byte a number, and makes numbers of codes as it does.

T tokens · K experts per token · N = T·K routed rows · E experts

Few rows without gradients are decoded from the codes where they lie: sums and scales in fp32, no weight is rounded.
All else is the flow of `eager` with its bits: one expert after the other is dequantised, by the core instead of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import cpu, cpu_decode, read_codes, sorted_rows
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.torch_rows import TorchRows
from amoeba.cpu.core import why_no_core
from amoeba.precision.experts import BlockScaledExperts
from amoeba.problem import Gradients, Needs, Problem, Save, Saved

DECODE_ROWS = 128


class BlockScaledCpuBackend(PassesBackend):
    name, summary, kinds = "cpu", "the C++ core, which reads codes", (BlockScaledExperts,)
    operator_name = "block_scaled_cpu"
    traced = SavedRows()

    def preference(self, device: torch.device) -> int:
        return cpu.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        dtype = request.weights.dtype
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the C++ core takes fp32 and bf16, x is {dtype}"
        return read_codes.why_not(request.weights) or why_no_core()

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Decoding rounds the factors that it meets, as for resident experts."""
        if not gradient and problem.lora is not None and not torch.compiler.is_compiling() and _decodes(problem):
            return problem
        return super().prepared(problem, gradient)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if save != "h" and _decodes(problem):
            return cpu_decode.decode(problem), None
        return sorted_rows.forward(_dequantised_by_core(problem), save, TorchRows)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(_dequantised_by_core(problem), saved, dy_TH, needs, TorchRows)


def _decodes(problem: Problem) -> bool:
    return cpu_decode.serves(problem, DECODE_ROWS)


def _dequantised_by_core(problem: Problem) -> Problem:
    return problem._replace(weights=read_codes.read_by_core(problem.weights))


BACKEND = BlockScaledCpuBackend()
