"""Packed experts inside torch: the backend `cpu` for the kind of weights PackedExperts.

T tokens · K experts per token · H hidden

The weights are no tensors, so the operator gets a handle by which it finds them. A GPU's x comes through pinned memory,
and y, dx and the gradient of the routing weights go back.
"""

from __future__ import annotations

from torch import Tensor

from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import Whole
from amoeba.core.problem import Gradients, Needs, Problem, Save
from amoeba.core.weights import LoraFactors
from amoeba.cpu import passes
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.transfer import deliver, to_host


class PackedBackend(PassesBackend):
    name, summary, kinds = "cpu", "the CPU's matrix units, where the experts are packed", (PackedExperts,)
    operator_name = "packed"

    def why_not(self, request: Request) -> str | None:
        return None

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return problem  # copies of the factors are packed and kept, see `FactorCopies`

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, tuple | None]:
        x_TH = problem.x_TH
        rows_TH, id_TK, scale_TK = to_host(x_TH, problem.expert_TK, problem.weight_TK)
        lora = problem.lora or LoraFactors()
        y_TH, left = passes.forward(problem.weights, lora, rows_TH.contiguous(), id_TK, scale_TK, save)
        saved = None if left is None else (left.caches, Whole(left.factors))
        return deliver(y_TH, x_TH.dtype, x_TH.device), saved

    def backward(self, problem: Problem, saved: tuple | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        assert saved is not None  # with save="inputs", too: x stays on the host
        caches, factors = saved
        (rows_TH,) = to_host(dy_TH)
        left, lora = passes.Left(caches, factors.value), problem.lora or LoraFactors()
        found = passes.backward(problem.weights, lora, left, rows_TH.contiguous(), needs)
        x_TH, weight_TK = problem.x_TH, problem.weight_TK
        return found._replace(
            x=None if found.x is None else deliver(found.x, x_TH.dtype, x_TH.device),
            weight=None if found.weight is None else deliver(found.weight, weight_TK.dtype, weight_TK.device),
        )


BACKEND = PackedBackend()
