"""Experts that are not all resident, inside a CUDA graph: what capture and replay need from a placement.

    (replays,) = replays_of(model_experts)                  # of all weights in a model, each once; two cannot be served
    with replays.rehearsing(): step()                       # as it is; all that will be captured is loaded
    with replays.capturing() as passes, torch_internals.capture(graph): step()
    replays.replay(passes, graph.replay)                    # and serves it; returns when nothing is left to serve
    replays.check()                                         # behind a wait for the step, before its results are used

A kind of weights that can do this has an attribute `replays`. The code that captures need not know where the experts
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from amoeba.core.config import RouterConfig


class CannotCapture(RuntimeError):
    """A step that has to run as it is, and why."""


class Replays(Protocol):
    def rehearsing(self) -> AbstractContextManager[None]:
        """Passes inside run as ever. CannotCapture where the same passes cannot be captured."""

    def capturing(self) -> AbstractContextManager[Any]:
        """What `replay` needs to know of the passes inside."""

    def route(
        self, layer: int, x_TH: Tensor, logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """expert_TK and weight_TK for the pass of x_TH over the layer that comes next, by one launch that requests its
        experts as well. None where that takes two launches, or is not inside of the two above."""

    def replay(self, passes: Any, launch: Callable[[], None]) -> None:
        """launch: enqueues what was captured, once."""

    def check(self) -> None:
        """RuntimeError where a replay went on without an expert; its results mean nothing, and nor do later ones."""


def replays_of(experts: Iterable[Any]) -> list[Replays]:
    """Each once, in order. Kinds of weights without any need none, or cannot be captured: that is asked elsewhere."""
    found = {id(each): each for weights in experts if (each := getattr(weights, "replays", None)) is not None}
    return list(found.values())
