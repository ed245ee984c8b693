"""Streamed experts inside torch: the backend `streamed`, which leaves the computing to that of resident experts.

T tokens · K experts per token · N = T·K routed rows · E experts · S slots · H hidden

The ids of a pass become slots, and the slots are weights like any others. Where all experts of the pass are there, it
is one call. Else each group of experts computes its rows as soon as it is there, and the rows are combined once, at the
end: `RowsApart`. Either way the numbers are those of the same experts resident.

Backward streams them again and computes h again. Nothing is saved between the passes but the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from amoeba.backends.backend import PassesBackend, Request, RowsApart
from amoeba.backends.rowwise import sum_slots
from amoeba.problem import Gradients, Needs, Problem, Save
from amoeba.routing import Routing
from amoeba.stream.experts import StreamedExperts
from amoeba.weights import LORA_NAMES, ExpertWeights, LoraFactors


class StreamedBackend(PassesBackend):
    name, summary, kinds = "streamed", "experts from a store, through slots in memory", (StreamedExperts,)

    def why_not(self, request: Request) -> str | None:
        return None

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Without gradients the factors of experts that have rows are rounded one by one."""
        return super().prepared(problem, gradient) if gradient else problem

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, None]:
        inner = _inner(problem)
        weights = problem.weights
        stood_in = problem._replace(weights=weights.others)
        apart = inner.rows_apart(stood_in, save)
        assert apart is not None  # `_inner` found one that has it
        ids_N = _ids(problem)
        distinct = len({*ids_N.tolist()} - {weights.num_experts})
        y_TH = rows_NH = None
        with _lent(problem, ids_N) as groups:
            for slot_of in groups:
                if problem.lora is None and len(slot_of) == distinct:
                    y_TH = apart.whole(_in_slots(problem, weights.slots, _places(ids_N, slot_of, weights)))
                else:
                    rows_NH = _add_rows(problem, ids_N, slot_of, apart, inner, rows_NH)
        if y_TH is None:
            y_TH = torch.zeros_like(problem.x_TH) if rows_NH is None else apart.combine(rows_NH, stood_in)
        return y_TH, None

    def backward(self, problem: Problem, saved: None, dy_TH: Tensor, needs: Needs) -> Gradients:
        inner, weights, x_TH = _inner(problem), problem.weights, problem.x_TH
        ids_N, top_k = _ids(problem), problem.expert_TK.shape[1]
        found = Gradients.zeros(problem, needs)
        dx_NH = x_TH.new_empty(problem.rows + 1, x_TH.shape[1]) if needs.x else None
        d_weight = torch.zeros_like(problem.weight_TK) if needs.weight else None
        with _lent(problem, ids_N) as groups:
            for expert, slot in (pair for group in groups for pair in group.items()):
                slot_N = (ids_N == expert).nonzero().flatten()
                alone = _of_expert(problem, slot_N, expert, slot)
                part = inner.backward(alone, None, dy_TH.index_select(0, slot_N // top_k), needs)
                if dx_NH is not None:
                    dx_NH.index_copy_(0, slot_N, _there(part.x))
                if d_weight is not None:
                    d_weight.view(-1).index_copy_(0, slot_N, _there(part.weight).flatten())
                for name in LORA_NAMES:
                    if (whole := getattr(found, name)) is not None:
                        whole[expert] = getattr(part, name)[0]
        d_x = None if dx_NH is None else sum_slots(dx_NH, problem.expert_TK, weights.num_experts)
        return found._replace(x=d_x, weight=d_weight)


def _inner(problem: Problem) -> PassesBackend:
    """The backend that would have served the same experts resident."""
    from amoeba.backends.registry import explain

    routing = Routing(problem.expert_TK, problem.weight_TK, trusted=True)
    found = explain(Request(problem.x_TH, routing, problem.weights.others, problem.lora)).backend
    assert isinstance(found, PassesBackend)  # eager serves whatever a store can hold
    return found


def _ids(problem: Problem) -> Tensor:
    """int64, E for sentinels."""
    ids_N, experts = problem.expert_TK.reshape(-1).to(torch.int64), problem.weights.num_experts
    return ids_N.masked_fill((ids_N < 0) | (ids_N >= experts), experts)


@contextmanager
def _lent(problem: Problem, ids_N: Tensor) -> Iterator[Iterator[dict[int, int]]]:
    with closing(problem.weights.lend(ids_N.tolist(), problem.x_TH.shape[0])) as groups:
        yield groups


def _places(ids_N: Tensor, slot_of: dict[int, int], weights: StreamedExperts) -> Tensor:
    """The slot of each row's expert, -1 for one that is not in the group."""
    place_E = torch.full((weights.num_experts + 1,), -1, dtype=torch.int64, device=ids_N.device)
    for expert, slot in slot_of.items():
        place_E[expert] = slot
    return place_E[ids_N]


def _in_slots(problem: Problem, slots: ExpertWeights, place_N: Tensor) -> Problem:
    return problem._replace(expert_TK=place_N.view_as(problem.expert_TK), weights=slots)


def _add_rows(
    problem: Problem,
    ids_N: Tensor,
    slot_of: dict[int, int],
    apart: RowsApart,
    inner: PassesBackend,
    rows_NH: Tensor | None,
) -> Tensor:
    """A row for each slot of the problem and a spare one, those of this group's experts written now."""
    weights = problem.weights
    for slot_N, part in _parts(problem, ids_N, slot_of):
        found = apart.rows(inner.prepared(part, False))
        if rows_NH is None:
            rows_NH = found.new_empty(problem.rows + 1, weights.hidden)
        rows_NH.index_copy_(0, slot_N, found)
    assert rows_NH is not None
    return rows_NH


def _parts(problem: Problem, ids_N: Tensor, slot_of: dict[int, int]) -> Iterator[tuple[Tensor, Problem]]:
    """Slots t·K + k of the pass, and these as a problem. Factors are all there: each expert's are a view, so with them
    experts come one by one."""
    if problem.lora is None:
        place_N = _places(ids_N, slot_of, problem.weights)
        slot_N = (place_N >= 0).nonzero().flatten()
        yield slot_N, _in_slots(problem.of_slots(slot_N), problem.weights.slots, place_N[slot_N])
        return
    for expert, slot in slot_of.items():
        slot_N = (ids_N == expert).nonzero().flatten()
        yield slot_N, _of_expert(problem, slot_N, expert, slot)


def _of_expert(problem: Problem, slot_N: Tensor, expert: int, slot: int) -> Problem:
    """The rows of one expert, as if there were no other."""
    part = problem.of_slots(slot_N)
    slots = problem.weights.slots
    own = ExpertWeights(*(None if t is None else t[slot : slot + 1] for t in slots.tensors()), slots.activation)
    lora = problem.lora
    if lora is not None:
        six = [None if factor is None else factor[expert : expert + 1] for factor in lora.six()]
        if lora.shares_a:
            six[2] = six[0]
        lora = LoraFactors(*six, lora.scaling)  # type: ignore[arg-type]
    return part._replace(expert_TK=torch.zeros_like(part.expert_TK), weights=own, lora=lora)


def _there(gradient: Tensor | None) -> Tensor:
    assert gradient is not None  # as it was asked for
    return gradient


BACKEND = StreamedBackend()
