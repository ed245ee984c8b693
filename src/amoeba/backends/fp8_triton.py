"""`triton` for experts that train in fp8: our kernels for Hopper, forward and backward without a host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amoeba.backends import fp8, fp8_saved, sorted_rows, triton
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.precision.recipes import Fp8Experts
from amoeba.problem import Gradients, Needs, Problem, Save, Saved

# What H and I have to be multiples of: half of the numbers that share a scale.
WIDTH = 64


class Fp8TritonBackend(PassesBackend):
    """Importing this file does not import Triton: the first pass does."""

    name, summary, kinds = "triton", "products in fp8 by our kernels for Hopper", (Fp8Experts,)
    operator_name = "fp8_triton"
    traced = SavedRows(map_dtype=torch.int32, h=fp8_saved.fake_h)

    def preference(self, device: torch.device) -> int:
        return triton.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        reason = fp8.BACKEND.why_not(request)
        if reason is not None:
            return reason
        if weights.device.type != "cuda" or torch.cuda.get_device_capability(weights.device)[0] != 9:
            return f"needs a Hopper GPU (compute capability 9.0), these weights are on {weights.device}"
        if (reason := triton.why_not_on(weights.device, weights.dtype)) is not None:
            return reason
        return why_not_shaped(weights)

    def rows(self, weights: Fp8Experts) -> type[sorted_rows.SortedRows]:
        """By which `amoeba.proof.stages` proves one product after the other."""
        from amoeba.backends.fp8_kernel_rows import ROWS

        return ROWS[weights.recipe]

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(problem, save, self.rows(problem.weights))

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, self.rows(problem.weights))


def why_not_shaped(weights: Any) -> str | None:
    """Why the kernels do not take experts of these sizes, dtype and layout, on whatever GPU; or None."""
    if weights.dtype != torch.bfloat16:
        return f"computes in bf16 beside fp8, these weights are {weights.dtype}"
    for name, width in (("H", weights.hidden), ("I", weights.intermediate)):
        if width % WIDTH:
            return f"needs {name} to be a multiple of {WIDTH}, it is {width}"
    if weights.activation.interleaved:
        return "needs all gates before all ups, here their rows take turns"
    for name, weight in (("gate_up", weights.gate_up_EJH), ("down", weights.down_EHI)):
        if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
            return f"needs {name} in one piece, its strides are {weight.stride()}"
    return None


BACKEND = Fp8TritonBackend()
