"""`tasks`: the kernels of `triton`, with the backward as one scheduled kernel (docs/tasks.md). Not measured yet.

    import amoeba.backends.tasks                                  # registers it
    y_TH = amoeba.experts(x_TH, routing, weights, backend="tasks")

`auto` never takes it. Gradients have the bits of the plain Triton kernels of `triton`; on Hopper, where `triton` has
kernels in Gluon, the two differ by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends.backend import Request
from amoeba.backends.registry import register_backend
from amoeba.backends.triton import TritonBackend
from amoeba.problem import Gradients, Needs, Problem, Saved
from amoeba.torch_internals import graph_is_freed
from amoeba.weights import ExpertWeights


class TasksBackend(TritonBackend):
    name, summary, kinds = "tasks", "our kernels, the backward as one scheduled kernel", (ExpertWeights,)

    def preference(self, device: torch.device) -> int:
        return -1  # behind every other: `eager` serves all there is

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        if request.lora is not None:
            return "has no tasks for LoRA factors"
        gate_up, down, *biases = weights.tensors()
        if any(bias is not None for bias in biases):
            return "has no tasks for biases"
        if not all(weight is None or weight.is_contiguous() for weight in (gate_up, down)):
            return "needs weights in one piece, contiguous as (E, J, H) and (E, H, I)"
        return super().why_not(request)

    def _backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        from amoeba.backends.triton_rows import TritonRows
        from amoeba.tasks.kernel import scheduled_backward

        if problem.rows == 0:
            return Gradients.zeros(problem, needs)
        rows = TritonRows.dispatch(problem, saved)
        problem, weights = rows.problem, rows.problem.weights
        found = scheduled_backward(
            dy_TH.contiguous(),
            problem.x_TH.contiguous(),
            rows.hidden() if saved is None else saved.h_NJ,
            problem.expert_TK,
            problem.weight_TK,
            weights.gate_up_EJH,
            weights.down_EHI,
            weights.activation,
            (rows.order_N, rows.slot_row_N, rows.offs_E),
            overwrite_h=saved is None or graph_is_freed(),
        )
        return Gradients(**{name: value if getattr(needs, name) else None for name, value in found._asdict().items()})


BACKEND = TasksBackend()
register_backend(BACKEND)
