"""What a backend is: a name, the kinds of weights it supports, the reason why it refuses a request, and `run`.

class MyBackend(PassesBackend):
    name, summary, kinds = "mine", "one expert at a time", (MyExperts,)

    def why_not(self, request): return None
    def forward(self, problem, save): ...                        # y_TH, saved
    def backward(self, problem, saved, dy_TH, needs): ...        # Gradients

amoeba.register_backend(MyBackend())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from amoeba.backends.experts_operator import ExpertsOperator, SavedRows
from amoeba.backends.submitted import Ticket
from amoeba.core.problem import Gradients, Needs, OverlappedDispatch, Problem, Save
from amoeba.core.weights import AnyExperts, LoraFactors
from amoeba.precision.formats import Format
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.routing.router import Routing


@dataclass(frozen=True, eq=False)
class Request:
    """One call of `experts`, as a backend sees it.

    lora:      low-rank updates of the projections.
    recompute: save x alone for backward and compute the up projection again there.
    overlapped:    the dispatch, if rows of x are still arriving.
    quantised_x:   x, if it arrived quantised; x_TH then has its shape, and no numbers.
    """

    x_TH: Tensor
    routing: Routing
    weights: AnyExperts
    lora: LoraFactors | None = None
    recompute: bool = False
    overlapped: OverlappedDispatch | None = None
    quantised_x: QuantisedMatrix | None = None


class RowsApart(NamedTuple):
    """How a pass is computed where its experts are not all there at once, with the very numbers of a pass in one go.

    rows:    of a problem with one expert per token, each token's row as `combine` wants it; and where save is "h" that
             of `Saved`, sorted by expert. LoRA factors may be in fp32.
    combine: y_TH of a problem, from a row for each of its slots t·K + k and a spare one at the end; the rows of
             sentinels hold anything.
    whole:   y_TH of a problem in one call, without LoRA and with nothing saved for backward. Its experts are numbered
             by their slots; their own numbers, which may decide the order of summation, are passed with it.
    at_once: whether `whole` is worth waiting for all experts: where a product of BLAS adds to y, rows apart may differ
             in the last bit.

    Rows of an expert have to come in one call, in their order.
    """

    rows: Callable[[Problem, Save], tuple[Tensor, Tensor | None]]
    combine: Callable[[Tensor, Problem], Tensor]
    whole: Callable[[Problem, Tensor], Tensor]
    at_once: bool = False


class Backend(ABC):
    """One way to compute experts.

    kinds:           the kinds of weights it supports; it is not asked about others.
    preference:      of the backends that support a request, the one with the highest preference is chosen.
    waits_on_gpu:    whether the host waits for the GPU in each pass; a warning says so when it is chosen. `why_waits`
                     names other waits of the host.
    starts_early:    whether its backward accepts a dy whose rows are still arriving (`amoeba.tasks.triton.arrivals`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    kinds: ClassVar[tuple[type, ...]]
    waits_on_gpu: ClassVar[bool] = False
    starts_early: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def preference(self, device: torch.device) -> int:
        """device: where the weights are."""
        return 0

    @abstractmethod
    def why_not(self, request: Request) -> str | None:
        """Why it cannot handle this request, as the rest of a sentence that begins with its name; or None."""

    def why_waits(self, request: Request, trains: bool) -> str | None:
        """What the host has to do during such a pass, as the rest of a sentence that begins with "its experts"; None
        if a CUDA graph can capture the pass. trains: including its backward."""
        if self.waits_on_gpu and request.weights.device.type == "cuda":
            return "are computed one after another, and the host waits for the number of rows of each"
        return None

    def row_format(self, request: Request) -> Format | None:
        """The format that x is quantised to, if nothing in this pass and its backward reads x otherwise: then x may
        arrive quantised (`Request.quantised_x`)."""
        return None

    @abstractmethod
    def run(self, request: Request) -> Tensor:
        """y_TH, differentiable."""

    def submit(self, request: Request) -> Ticket:
        """Begins a pass whose y_TH is taken later; here it is computed, or launched, at once."""
        y_TH = self.run(request)
        return Ticket(lambda: y_TH)


class PassesBackend(Backend):
    """A backend made of a forward and a backward (see `ExpertsOperator`), for one kind of weights.

    operator_name: of `torch.ops.amoeba`; the backend's own name, unless it is taken.
    traced:        what forward saves in a traced graph; None: backward calls forward again there.
    saves:         whether forward saves anything; False: backward always gets None.
    adds_onto:     whether forward adds to a problem's onto_TH.
    overlaps:      whether its passes start before all rows have arrived (see `OverlappedDispatch`).
    """

    operator_name: ClassVar[str | None] = None
    traced: ClassVar[SavedRows | None] = None
    saves: ClassVar[bool] = True
    adds_onto: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    def __init__(self) -> None:
        (kind,) = self.kinds
        name = self.operator_name or self.name
        self.operator = ExpertsOperator(
            name,
            kind,
            self.forward,
            self.backward,
            traced=self.traced,
            saves=self.saves,
            adds_onto=self.adds_onto,
        )

    @abstractmethod
    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Any]:
        """Returns y_TH, and what backward needs if save is "h"."""

    @abstractmethod
    def backward(self, problem: Problem, saved: Any, dy_TH: Tensor, needs: Needs) -> Gradients:
        """saved: what forward returned, or None if save was not "h"."""

    def rows_apart(self, problem: Problem, save: Save) -> RowsApart | None:
        """The way that `forward` takes for this problem, with combining apart; None where it cannot be."""
        return None

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Runs before the pass, visible to autograd: casts factors to the dtype of the weights."""
        return problem.with_factors_as_weights()

    def run(self, request: Request) -> Tensor:
        return self.operator(*self.problem_of(request))

    def problem_of(self, request: Request) -> tuple[Problem, Save]:
        routing = request.routing
        problem = Problem(
            request.x_TH, routing.expert_TK, routing.weight_TK, request.weights, request.lora, routing.most_rows,
            overlapped=request.overlapped, quantised_x=request.quantised_x,
        )  # fmt: skip
        gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in problem.tensors())
        save: Save = "nothing" if not gradient else "inputs" if request.recompute else "h"
        return self.prepared(problem, gradient), save
