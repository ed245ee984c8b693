"""The pass that all backends that sort rows share: dispatch, two products, combine; and the backward.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    y_TH, saved = forward(problem, save, TorchRows)
    gradients = backward(problem, saved, dy_TH, needs, TorchRows)

A backend brings its `SortedRows`: how it sorts rows by expert (dispatch), what it computes with them, and how it brings
them back to their tokens (combine). Rows past the last expert's, those of sentinels, are not computed and hold
anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.backends.backend import RowsApart
from amoeba.backends.low_rank import Rows
from amoeba.backends.rowwise import sum_slots
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import graph_is_freed


class ActivationGradients(NamedTuple):
    dh_NJ: Tensor
    scaled_a_NI: Tensor | None  # routing weight · a, where something still reads it
    ds_N: Tensor  # gradient of the routing weights, <dA', a>
    dlow_NR: Tensor | None  # of LoRA: see `low_rank.add_to_da`


class SortedRows(ABC):
    """The routed rows of one problem, sorted by expert, and what one pass does with them.

    problem: as these rows read it; x, for one, may be a copy that lies better in memory.
    weights_first: the gradient of gate_up before dx, while dh is in the cache (T=512 H=512 I=256 E=32 K=4 in fp32: a
        step takes 109 ms, 111 the other way round; Neoverse-N1, 2026-11-15). Else last, so that it is not in memory
        together with the rows of dx.
    """

    problem: Problem
    weights_first = False

    @classmethod
    @abstractmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> SortedRows:
        """Sorts the rows by expert, or takes over how forward sorted them."""

    @abstractmethod
    def save(self, h_NJ: Tensor) -> Saved: ...

    def shorten(self, most_rows: int) -> None:
        """Buffers made from here on have this many rows: fewer than before, and as many as there are."""
        raise NotImplementedError

    @abstractmethod
    def gather(self, rows_TH: Tensor) -> Rows:
        """Rows of tokens as the products below take them: sorted now, or as they are read."""

    @property
    @abstractmethod
    def x(self) -> Rows: ...

    @abstractmethod
    def hidden(self) -> Tensor:
        """h = x · gate_upᵀ + bias (+ LoRA)."""

    @abstractmethod
    def up(self, want_h: bool) -> tuple[Tensor | None, Any]:
        """h where it is wanted, and a = act(h), times the routing weight unless `combine` applies that: a tensor, or
        whatever `down` takes for one."""

    @abstractmethod
    def down(self, a_NI: Any) -> Tensor:
        """y of each row = a · downᵀ + bias (+ LoRA), as `combine` takes it."""

    @abstractmethod
    def combine(self, rows_NH: Tensor, *, weighted: bool) -> Tensor:
        """Each token's sum over its rows; weighted: a sum of experts' outputs, which the routing weights scale."""

    def overlapped_output(self, a_NI: Any) -> Tensor:
        """y of each token, where those of other processes leave."""
        y_TH = self.combine(self.down(a_NI), weighted=True)
        assert self.problem.overlapped is not None
        self.problem.overlapped.leave(y_TH)
        return y_TH

    def overlapped_input_gradient(self, dx_NH: Tensor, d_weight_TK: Tensor | None) -> Tensor:
        """dx of each token, where those of other processes leave."""
        d_x = self.combine(dx_NH, weighted=False)
        assert self.problem.overlapped is not None
        self.problem.overlapped.leave(d_x, d_weight_TK)
        return d_x

    @abstractmethod
    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        """dA' = dy · down (+ LoRA), without the routing weight, and what follows from it and h."""

    @abstractmethod
    def slot_gradient(self, ds_N: Tensor, dy: Rows) -> Tensor:
        """The gradient of weight_TK: ds, and what came through the bias of down; 0 for sentinels."""

    @abstractmethod
    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight; zeros where no rows came."""

    @abstractmethod
    def bias_gradient(self, grad: Rows, bias_EO: Tensor, *, weighted: bool) -> Tensor:
        """Σ over each expert's rows of grad, each times its routing weight if weighted."""

    @abstractmethod
    def down_factor_gradients(
        self, dy: Rows, dlow_NR: Tensor | None, scaled_a_NI: Tensor | None, needs: Needs
    ) -> dict[str, Tensor]:
        """Of the LoRA factors of down, by name, those that are needed."""

    @abstractmethod
    def up_backward(self, dh_NJ: Tensor, needs: Needs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """dx of each row = dh · gate_up (+ LoRA), as `combine` takes it, and the gradients of the LoRA factors of gate
        and up by name: those that are needed."""


def forward(problem: Problem, save: Save, rows_type: type[SortedRows]) -> tuple[Tensor, Saved | None]:
    rows = rows_type.dispatch(problem, None)
    if problem.rows == 0:
        width = problem.weights.gate_up_EJH.shape[1]
        h_NJ: Tensor | None = problem.x_TH.new_empty((0, width))
        y_TH = torch.zeros_like(problem.x_TH) if problem.onto_TH is None else problem.onto_TH.clone()
    else:
        h_NJ, a_NI = rows.up(save == "h")
        if problem.overlapped is not None:
            if (room := problem.overlapped.room(problem.most_rows)) != problem.most_rows:
                assert room is not None
                rows, h_NJ, a_NI = _with_room(room, problem, rows_type, rows, h_NJ, a_NI)
            y_TH = rows.overlapped_output(a_NI)
        else:
            y_NH = rows.down(a_NI)
            del a_NI
            y_TH = rows.combine(y_NH, weighted=True)
    if save != "h":
        return y_TH, None
    assert h_NJ is not None
    return y_TH, rows.save(h_NJ)


def _with_room(
    room: int, problem: Problem, rows_type: type[SortedRows], rows: SortedRows, h_NJ: Tensor | None, a_NI: Any
) -> tuple[SortedRows, Tensor | None, Any]:
    """Where most_rows was a guess: the same rows without what was too much, or, if it was too few, computed anew. What
    is saved has the same shape either way, as checkpointing wants it."""
    assert problem.most_rows is not None
    if room < problem.most_rows:
        rows.shorten(room)
        return rows, None if h_NJ is None else h_NJ[:room], a_NI[:room]
    want_h = h_NJ is not None
    del h_NJ, a_NI
    rows = rows_type.dispatch(problem._replace(most_rows=room), None)
    return rows, *rows.up(want_h)


def apart(rows_type: type[SortedRows]) -> RowsApart:
    """A row alone is combined into itself, so rows and their sums have the numbers of `forward`."""

    def whole(problem: Problem, expert_TK: Tensor) -> Tensor:
        return forward(problem, "nothing", rows_type)[0]

    def rows(problem: Problem, save: Save) -> tuple[Tensor, Tensor | None]:
        y_NH, saved = forward(problem.with_factors_as_weights(), save, rows_type)
        return y_NH, None if saved is None else saved.h_NJ

    def combine(rows_NH: Tensor, problem: Problem) -> Tensor:
        return sum_slots(rows_NH, problem.expert_TK, problem.weights.num_experts)

    return RowsApart(rows, combine, whole)


def backward(
    problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs, rows_type: type[SortedRows]
) -> Gradients:
    if problem.rows == 0:
        if problem.overlapped is not None:
            problem.overlapped.rows_read()
        return Gradients.zeros(problem, needs)
    rows, weights = rows_type.dispatch(problem, saved), problem.weights
    dy = rows.gather(dy_TH)
    h_NJ = rows.hidden() if saved is None else saved.h_NJ
    overwrite = saved is None or graph_is_freed()
    dh_NJ, scaled_a_NI, ds_N, dlow_NR = rows.activation_backward(dy, h_NJ, needs, overwrite_h=overwrite)
    del h_NJ, saved

    found: dict[str, Tensor] = {}
    d_x = d_weight = None
    if needs.weight:
        d_weight = rows.slot_gradient(ds_N, dy)
    found |= rows.down_factor_gradients(dy, dlow_NR, scaled_a_NI, needs)
    if needs.down:
        assert scaled_a_NI is not None
        found["down"] = rows.weight_gradient(dy, scaled_a_NI, weights.down_EHI)
    del scaled_a_NI, dlow_NR
    if needs.down_bias:
        found["down_bias"] = rows.bias_gradient(dy, weights.down_bias_EH, weighted=True)
    del dy
    if problem.overlapped is not None:
        problem.overlapped.rows_read()
    if needs.gate_up and rows.weights_first:
        found["gate_up"] = rows.weight_gradient(dh_NJ, rows.x, weights.gate_up_EJH)
    if needs.gate_up_bias:
        found["gate_up_bias"] = rows.bias_gradient(dh_NJ, weights.gate_up_bias_EJ, weighted=False)
    dx_NH, of_factors = rows.up_backward(dh_NJ, needs)
    found |= of_factors
    if dx_NH is not None:
        if problem.overlapped is not None:
            d_x = rows.overlapped_input_gradient(dx_NH, d_weight)
        else:
            d_x = rows.combine(dx_NH, weighted=False)
        del dx_NH
    if needs.gate_up and not rows.weights_first:
        found["gate_up"] = rows.weight_gradient(dh_NJ, rows.x, weights.gate_up_EJH)
    return Gradients(d_x, d_weight, **found)
