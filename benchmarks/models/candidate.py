"""Who takes part in a measurement of whole models: a name, and a function that prepares the work.

    Candidate("amoeba, my recipe", ours=True, kind="training", about="...", prepare=my_recipe)

    def my_recipe(problem: Problem, stage: Stage) -> Step:     # builds the model, the optimizer, ...
        stage.enter_context(whatever_is_to_be_undone())
        return step                                            # () -> the loss of one whole step, not waited for

    def my_decoder(problem: Problem, stage: Stage) -> Decode:
        return decode                                          # (prompts (B, S), n) -> n new tokens (B, n), greedy

Candidates of one `family` share a process on a GPU, one after another, see `suite`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from benchmarks.models.greedy import Agreement
from benchmarks.models.problem import Kind, Problem

Step = Callable[[], Tensor]
Decode = Callable[[Tensor, int], Tensor]


def who_computes(experts: str) -> str:
    """experts: as transformers calls an implementation of them."""
    return "amoeba" if experts == "amoeba" else f"transformers {experts}"


def _takes_all(problem: Problem) -> None:
    return None


class Stage(ExitStack):
    """What a candidate has set up and is undone once it was measured, and what it has to say about itself.

    said:    sentences for the document, as that a part of it was not possible.
    compare: (prompts, its tokens) -> whether the plain loop chooses the same; for decodes of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.compare: Callable[[Tensor, Tensor], Agreement] | None = None


@dataclass(frozen=True)
class Candidate:
    """family:  whose process it may share.
    bytes_per_parameter: what it holds at least of the model, its gradients and its optimizer.
    against: the name of the candidate that its time is given as a multiple of.
    limit_seconds: from its beginning to its last figure; it is stopped there, and that is its result."""

    name: str
    ours: bool
    kind: Kind
    about: str
    prepare: Callable[[Problem, Stage], Step] | Callable[[Problem, Stage], Decode]
    family: str
    bytes_per_parameter: float
    why_not: Callable[[Problem], str | None] = _takes_all
    against: str | None = None
    limit_seconds: float = 240.0
