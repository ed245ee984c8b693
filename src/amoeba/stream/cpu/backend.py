"""Streamed experts inside torch: the backend `streamed`, which leaves the computing to that of resident experts.

T tokens · K experts per token · N = T·K routed rows · E experts · S slots · H hidden

The ids of a pass become slots, and the slots are weights like any others. Where all experts of the pass are there, it
is one call. Else each group of experts computes its rows as soon as it is there, and the rows are combined once, at the
end: `RowsApart`. Either way the numbers are those of the same experts resident.

Backward streams them again, expert after expert. What is saved between the passes is what resident experts save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.registry import backends_of
from amoeba.backends.rowwise import sum_slots
from amoeba.core.layout import build_layout
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.weights import LORA_NAMES
from amoeba.routing.router import Routing
from amoeba.stream.cpu.memory import StreamedExperts
from amoeba.stream.store.layers import StoredExperts


class StreamedBackend(PassesBackend):
    name, summary, kinds = "streamed", "experts from a store, through slots in memory", (StreamedExperts,)

    def why_not(self, request: Request) -> str | None:
        return None

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Without gradients the factors of experts that have rows are rounded one by one."""
        return super().prepared(problem, gradient) if gradient else problem

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Tensor | None]:
        _, apart = _inner(problem, save)
        ids, weights = _ids(problem), problem.weights
        asked = {each for each in ids if 0 <= each < weights.num_experts}
        one_by_one = save == "h" or problem.lora is not None
        waits = apart.at_once and len(asked) <= weights.slots.num_experts
        y_TH, rows, slots_of, there = None, _Rows(problem, save), _Slots(ids), dict[int, int]()
        with _acquired(problem, ids, problem.x_TH.shape[0]) as groups:
            for slot_of in groups:
                there = there | slot_of if waits else slot_of
                if not one_by_one and len(there) == len(asked):
                    in_slots = _in_slots(problem, weights.slots, [there.get(each, -1) for each in ids])
                    y_TH = apart.whole(in_slots, problem.expert_TK)
                elif not waits:
                    for slot_N, part in _parts(problem, slots_of, slot_of, one_by_one):
                        rows.put(slot_N, *apart.rows(part, save))
        if y_TH is None:
            of_all = problem._replace(weights=weights.others)
            y_TH = torch.zeros_like(problem.x_TH) if rows.y_NH is None else apart.combine(rows.y_NH, of_all)
        return y_TH, rows.h_NJ

    def backward(self, problem: Problem, saved: Tensor | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        inner, _ = _inner(problem, "h")
        x_TH, ids, top_k = problem.x_TH, _ids(problem), problem.expert_TK.shape[1]
        found, slots_of = Gradients.zeros(problem, needs), _Slots(ids)
        dx_NH = x_TH.new_empty(problem.rows + 1, x_TH.shape[1]) if needs.x else None
        d_weight = torch.zeros_like(problem.weight_TK) if needs.weight else None
        with _acquired(problem, ids, tokens=0) as groups:  # they were counted in the forward pass
            for slot_N, part in (each for group in groups for each in _parts(problem, slots_of, group, True)):
                h = None if saved is None else _saved(part, saved.index_select(0, slot_N))
                of_part = inner.backward(part, h, dy_TH.index_select(0, slot_N // top_k), needs)
                if dx_NH is not None:
                    dx_NH.index_copy_(0, slot_N, _there(of_part.x))
                if d_weight is not None:
                    d_weight.view(-1).index_copy_(0, slot_N, _there(of_part.weight).flatten())
                for name in LORA_NAMES:
                    if (of_all := getattr(found, name)) is not None:
                        of_all[ids[slot_N[0]]] = _there(getattr(of_part, name))[0]
        d_x = None if dx_NH is None else sum_slots(dx_NH, problem.expert_TK, problem.weights.num_experts)
        return found._replace(x=d_x, weight=d_weight)


class _Rows:
    """A row for each slot t·K + k of a pass, as they come: of y, with a spare one at the end, and of h."""

    def __init__(self, problem: Problem, save: Save) -> None:
        self._rows = problem.rows
        width = problem.weights.activation.width(problem.weights.intermediate)
        self.h_NJ = problem.x_TH.new_empty(problem.rows, width) if save == "h" else None
        self.y_NH: Tensor | None = None

    def put(self, slot_N: Tensor, y: Tensor, h: Tensor | None) -> None:
        if self.y_NH is None:
            self.y_NH = y.new_empty(self._rows + 1, y.shape[1])
        self.y_NH.index_copy_(0, slot_N, y)
        if self.h_NJ is not None:
            self.h_NJ.index_copy_(0, slot_N, _there(h))


def _saved(part: Problem, h_NJ: Tensor) -> Saved:
    return Saved.of(h_NJ, build_layout(part.expert_TK, part.weights.num_experts))


def _inner(problem: Problem, save: Save) -> tuple[PassesBackend, RowsApart]:
    """The backend that would have served the same experts resident, and its way."""
    others = problem.weights.others
    request = Request(problem.x_TH, Routing(problem.expert_TK, problem.weight_TK, trusted=True), others, problem.lora)
    for backend in backends_of(type(others), others.device):
        if isinstance(backend, PassesBackend) and backend.why_not(request) is None:
            apart = backend.rows_apart(problem._replace(weights=others), save)
            if apart is not None:
                return backend, apart
    raise AssertionError("the backend eager serves whatever a store can hold")


def _ids(problem: Problem) -> list[int]:
    return problem.expert_TK.reshape(-1).tolist()


@contextmanager
def _acquired(problem: Problem, ids: list[int], tokens: int) -> Iterator[Iterator[dict[int, int]]]:
    with closing(problem.weights.acquire(ids, tokens)) as groups:
        yield groups


class _Slots:
    """The slots t·K + k of each expert in a pass, in their order."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._of: dict[int, list[int]] = {}

    def __call__(self, expert: int) -> list[int]:
        if not self._of:
            for slot, each in enumerate(self._ids):
                self._of.setdefault(each, []).append(slot)
        return self._of[expert]


def _in_slots(problem: Problem, slots: StoredExperts, places: list[int]) -> Problem:
    place_N = torch.tensor(places, dtype=torch.int64, device=problem.expert_TK.device)
    return problem._replace(expert_TK=place_N.view_as(problem.expert_TK), weights=slots)


def _parts(
    problem: Problem, slots_of: _Slots, slot_of: dict[int, int], one_by_one: bool
) -> Iterator[tuple[Tensor, Problem]]:
    """Slots t·K + k of the pass, and these as a problem: all that belong to the group, or expert after expert. Factors
    are all in memory, so that an expert's own are a view."""
    if one_by_one:
        for expert, slot in slot_of.items():
            slot_N = torch.tensor(slots_of(expert), dtype=torch.int64, device=problem.expert_TK.device)
            yield slot_N, _of_expert(problem, slot_N, expert, slot)
        return
    found = [(slot, place) for expert, place in slot_of.items() for slot in slots_of(expert)]
    slot_N = torch.tensor([slot for slot, _ in found], dtype=torch.int64, device=problem.expert_TK.device)
    yield slot_N, _in_slots(problem.of_slots(slot_N), problem.weights.slots, [place for _, place in found])


def _of_expert(problem: Problem, slot_N: Tensor, expert: int, slot: int) -> Problem:
    """The rows of one expert, as if there were no other."""
    part, slots = problem.of_slots(slot_N), problem.weights.slots
    tensors = [None if tensor is None else tensor[slot : slot + 1] for tensor in slots.tensors()]
    weights = slots.of(tensors, slots.constants())
    lora = None if problem.lora is None else problem.lora.each(lambda factor: factor[expert : expert + 1])
    return part._replace(expert_TK=torch.zeros_like(part.expert_TK), weights=weights, lora=lora)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # as it was asked for
    return tensor
