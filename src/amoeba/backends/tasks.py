"""`tasks`: the kernels of `triton`, with the backward as one scheduled kernel (docs/tasks.md).

    y_TH = amoeba.experts(x_TH, routing, weights, backend="tasks")

`auto` takes it where it was measured to be faster (`registry.py`). Gradients have the bits of `triton`.
Where the Gluon kernel for Hopper does not serve a layer that `triton` does (`amoeba.tasks.hopper.backward.why_not`),
the plain kernel does, and the two differ by rounding.

It needs more memory than `triton` (`amoeba.tasks.sizes.extra_bytes`). Where there is none, the kernels of `triton` do
this backward, and those of layers that would need as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.backends.backend import Request
from amoeba.backends.triton import BACKEND as APART
from amoeba.backends.triton import TritonBackend
from amoeba.core.problem import Gradients, Needs, Problem, Saved
from amoeba.core.torch_internals import graph_is_freed
from amoeba.core.weights import ExpertWeights
from amoeba.tasks.sizes import Sizes, extra_bytes

if TYPE_CHECKING:
    from amoeba.tasks.triton.arrivals import Arrival
    from amoeba.tasks.triton.backward import Scheduled

_no_room: dict[torch.device, int] = {}  # of each, the extra bytes for which there was none last


class TasksBackend(TritonBackend):
    name, summary, kinds = "tasks", "our kernels, the backward as one scheduled kernel", (ExpertWeights,)
    overlaps, starts_early = False, True  # rows of dy alone, and not by an `OverlappedDispatch`

    def preference(self, device: torch.device) -> int:
        return -1  # behind every other: `eager` serves all there is

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        if request.lora is not None:
            return "has no tasks for LoRA factors"
        gate_up, down, *_ = weights.tensors()
        if not all(weight is None or weight.is_contiguous() for weight in (gate_up, down)):
            return "needs contiguous weights of shapes (E, J, H) and (E, H, I)"
        return super().why_not(request)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        from amoeba.tasks.triton.arrivals import announced

        arrival = announced(dy_TH)
        if arrival is None:
            found = self._backward_with_room(problem, saved, dy_TH, needs)
            return APART.backward(problem, saved, dy_TH, needs) if found is None else found
        found = self._backward(problem, saved, dy_TH, needs, arrival)
        arrival.close()
        assert found.x is not None  # nothing is sent early unless it is needed
        return found._replace(x=arrival.keep(found.x))

    def _backward_with_room(
        self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs
    ) -> Gradients | None:
        """None if there is no memory for it, of which nothing is launched then."""
        if (least := _no_room.get(dy_TH.device)) is not None and extra_bytes_of(problem) >= least:
            return None
        try:
            return super().backward(problem, saved, dy_TH, needs)
        except torch.OutOfMemoryError:
            _no_room[dy_TH.device] = extra_bytes_of(problem)
        return None

    def _backward(
        self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs, arrival: Arrival | None = None
    ) -> Gradients:
        from amoeba.backends.triton_rows import TritonRows
        from amoeba.tasks.triton.bias_tasks import BiasTasks

        if problem.rows == 0:
            return Gradients.zeros(problem, needs)
        rows = TritonRows.dispatch(problem, saved)
        problem, weights = rows.problem, rows.problem.weights
        found = kernel_for(problem)(
            rows.gather(dy_TH.contiguous()).rows_TW if arrival is None else dy_TH,
            problem.x_TH.contiguous(),
            rows.hidden() if saved is None else saved.h_NJ,
            problem.expert_TK,
            problem.weight_TK,
            weights.gate_up_EJH,
            weights.down_EHI,
            weights.activation,
            (rows.order_N, rows.slot_row_N, rows.offs_E),
            biases=BiasTasks(weights.gate_up_bias_EJ, weights.down_bias_EH),
            overwrite_h=saved is None or graph_is_freed(),
            **({} if arrival is None else {"arrival": arrival}),
        )
        return Gradients(**{name: value if getattr(needs, name) else None for name, value in found._asdict().items()})


def extra_bytes_of(problem: Problem) -> int:
    weights = problem.weights
    sizes = Sizes(weights.hidden, weights.intermediate, weights.num_experts, problem.expert_TK.shape[1])
    rows = problem.rows if problem.most_rows is None else min(problem.rows, problem.most_rows)
    return extra_bytes(sizes, rows, problem.x_TH.element_size())


def kernel_for(problem: Problem) -> Callable[..., Scheduled]:
    """The scheduled backward in Gluon where it serves, else the plain one."""
    from amoeba.backends.triton_rows import why_not_hopper

    if why_not_hopper(problem) is None:
        from amoeba.tasks.hopper.backward import hopper_backward, why_not

        if why_not(problem.expert_TK.shape[1], problem.weights.activation) is None:
            return hopper_backward
    from amoeba.tasks.triton.backward import scheduled_backward

    return scheduled_backward


BACKENDS = (TasksBackend(),)
