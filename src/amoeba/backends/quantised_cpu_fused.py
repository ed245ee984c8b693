"""`cpu-fused`, by name: bf16 passes over quantised experts by the C++ core, which dequantises panels as it goes.

T tokens · K experts per token · N = T·K routed rows · E experts

    y_TH = experts(x_TH, routing, weights, lora=lora, backend="cpu-fused")

Forward and backward, with LoRA factors, as `cpu` runs resident experts in bf16 where the CPU multiplies it
(`cpu_fused`): each weight is code · scale in fp32, rounded to bf16 as it is packed. Nothing is kept of a weight but its
codes. Any CPU computes it; where there are no bf16 products, in fp32 on the rounded weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import cpu_fused, read_quantised
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import constant_when_traced
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.node_library import load_node
from amoeba.precision.quantised_experts import QuantisedExperts


class QuantisedFusedBackend(PassesBackend):
    name, summary, kinds = (
        "cpu-fused",
        "the C++ core's fused passes, which dequantise weights as they go",
        (QuantisedExperts,),
    )
    operator_name = "quantised_cpu_fused"
    traced = SavedRows(has_maps=lambda problem: False)

    def preference(self, device: torch.device) -> int:
        return 5  # `cpu` takes these passes itself where they are faster

    def why_not(self, request: Request) -> str | None:
        if request.weights.dtype != torch.bfloat16:
            return f"computes in bf16; x is {request.weights.dtype}"
        return read_quantised.why_not(request.weights) or _why_no_node()

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return cpu_fused.forward(problem, save)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return cpu_fused.backward(problem, saved, dy_TH, needs)


@constant_when_traced
def _why_no_node() -> str | None:
    try:
        load_node()
    except CoreUnavailable as reason:
        return str(reason)
    return None


BACKENDS = (QuantisedFusedBackend(),)
