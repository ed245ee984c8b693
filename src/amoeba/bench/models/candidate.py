"""Who takes part in a measurement of whole models: a name, and a function that prepares the work.

    Candidate("amoeba, my recipe", ours=True, kind="training", about="...", prepare=my_recipe)

    def my_recipe(problem: Problem) -> Step:          # builds the model, the optimizer, ...
        return step                                   # () -> the loss of one whole step, not waited for

    def my_decoder(problem: Problem) -> Decode:
        return decode                                 # (prompts (B, S), n) -> n new tokens (B, n), greedy

Each candidate has a process of its own, so that whatever it compiles, patches or leaves in memory is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from amoeba.bench.models.problem import Kind, Problem

Step = Callable[[], Tensor]
Decode = Callable[[Tensor, int], Tensor]


def who_computes(experts: str) -> str:
    """experts: as transformers calls an implementation of them."""
    return "amoeba" if experts == "amoeba" else f"transformers {experts}"


def _takes_all(problem: Problem) -> None:
    return None


@dataclass(frozen=True)
class Candidate:
    """bytes_per_parameter: what it holds at least of the model, its gradients and its optimizer.
    limit_seconds: for all of it, from the start of its process; it is stopped there, and that is its result."""

    name: str
    ours: bool
    kind: Kind
    about: str
    prepare: Callable[[Problem], Step] | Callable[[Problem], Decode]
    bytes_per_parameter: float
    why_not: Callable[[Problem], str | None] = _takes_all
    limit_seconds: float = 240.0
