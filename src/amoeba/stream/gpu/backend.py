"""Experts streamed to a GPU inside torch: the backend `streamed` of that kind, which computes by `triton`'s kernels:
those for resident experts, plain or quantised.

T tokens · K experts per token · N = T·K routed rows · E experts · S slots · H hidden

**A few tokens without gradients.** A kernel behind the router turns ids into slots and tells the host which ids were
asked for. If all are there, that is all: `decode` computes with the slots. Where a layer's latest pass found all of its
experts, decoding is enqueued before the host looks, so that the GPU does not wait for it; and where all experts of a
layer are in its slots, the host does not look at all. Else the missing ones are loaded, and then it computes.

**Many tokens, and training.** They ask for nearly all experts, so all are streamed, in order, in groups of half of the
slots: one computes while the next is copied. The host never learns an id. Each group computes its rows, and these are
combined once, at the end; a few hundred tokens are decoded instead of sorted, as they are by resident experts. Backward
streams alike, and computes h again: the link is slower than that product.

**Captured in a CUDA graph**, a few tokens wait for their experts on the GPU (`replays`), and the same kernels compute.

Either way the numbers are those of the same experts resident, because tiles are chosen by the number of experts and not
of slots. Except: one to four tokens whose experts do not fit into the layer's slots, token by token, are summed up in
another order; and experts that the CPU computes inside of graphs (host_compute.py) are rounded as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from amoeba.backends import quantised_triton, triton
from amoeba.backends.backend import PassesBackend, Request
from amoeba.core.graph_replays import CannotCapture
from amoeba.core.problem import Gradients, Needs, Problem, Save
from amoeba.core.weights import LORA_NAMES
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.gpu.memory import GpuStreamedExperts


def _is_quantised(problem: Problem) -> bool:
    return isinstance(problem.weights.slots, QuantisedExperts)


def _resident(problem: Problem) -> triton.TritonBackend | quantised_triton.QuantisedTritonBackend:
    """The backend of resident experts whose kernels compute the sorted way, with the slots."""
    return quantised_triton.BACKEND if _is_quantised(problem) else triton.BACKEND


def _decodes(problem: Problem) -> bool:
    """Whether a pass without gradients is one of few tokens, of which the chosen experts alone are needed."""
    return quantised_triton.is_few(problem) if _is_quantised(problem) else triton.is_few(problem)


def _decodes_all(problem: Problem) -> bool:
    """Whether one of more tokens is decoded by expert, too, of which nearly all are needed."""
    of_each = quantised_triton.is_few_of_each if _is_quantised(problem) else triton.is_few_of_each
    return of_each(problem._replace(weights=problem.weights.slots), problem.weights.num_experts)


class GpuStreamedBackend(PassesBackend):
    name, summary, kinds = "streamed", "experts from a store, through slots on the GPU", (GpuStreamedExperts,)
    operator_name = "streamed_gpu"
    saves = False

    def why_not(self, request: Request) -> str | None:
        return triton.why_not_on(request.weights.device, request.weights.dtype)

    def why_waits(self, request: Request, trains: bool) -> str | None:
        """A few tokens without gradients wait on the GPU, see `replays`."""
        return "are streamed, and in training the host copies them group by group" if trains else None

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return triton.BACKEND.prepared(problem, gradient)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, None]:
        memory, layer, tokens = problem.weights.memory, problem.weights.layer, problem.x_TH.shape[0]
        if problem.rows == 0:
            return torch.zeros_like(problem.x_TH), None
        if memory.replays.is_capturing:
            return _captured(problem, save), None
        memory.pool.count(layer, tokens)
        if memory.recorder is not None:
            memory.recorder.add(layer, problem.expert_TK.reshape(-1).tolist(), tokens)
        with memory.pool.turn(layer):
            if save != "h" and _decodes(problem):
                return _Few(problem).decode(), None
            decodes = save != "h" and _decodes_all(problem)
            y_TH = _decoded_in_groups(problem) if decodes else _sorted_in_groups(problem)
        _expect(problem, layer + 1)
        return y_TH, None

    def backward(self, problem: Problem, saved: None, dy_TH: Tensor, needs: Needs) -> Gradients:
        layer, rows = problem.weights.layer, problem.rows
        if rows == 0:
            return Gradients.zeros(problem, needs)
        dx_NH = dy_TH.new_zeros(rows, dy_TH.shape[1]) if needs.x else None
        d_weight = torch.zeros_like(problem.weight_TK, memory_format=torch.contiguous_format) if needs.weight else None
        with problem.weights.memory.pool.turn(layer), _groups(problem) as groups:
            alone = _rows_alone(problem)
            dy_NH = dy_TH.index_select(0, _token_N(problem))
            factors, inner = _FactorGradients(problem), _resident(problem)
            for _ in groups:
                of_group = inner.backward(_in_slots(alone), None, dy_NH, needs)
                if dx_NH is not None:
                    dx_NH += _there(of_group.x)
                if d_weight is not None:
                    d_weight.view(-1).add_(_there(of_group.weight).flatten())
                factors.add(of_group)
        _expect(problem, layer - 1)
        d_x = None if dx_NH is None else _combined(dx_NH, problem, None)
        return Gradients(d_x, d_weight, **factors.of_experts())


def _sorted_in_groups(problem: Problem) -> Tensor:
    inner = _resident(problem)
    y_NH = alone = None
    with _groups(problem) as groups:
        for slot_of in groups:
            if len(slot_of) == problem.weights.num_experts:
                return inner.forward_sorted(_in_slots(problem), "nothing")[0]
            if alone is None:
                alone = _rows_alone(problem)
                alone = alone._replace(weight_TK=torch.ones_like(alone.weight_TK))
            onto = _in_slots(alone)._replace(onto_TH=y_NH)  # others' rows are zero
            y_NH = inner.forward_sorted(onto, "nothing")[0]
    return _combined(_there(y_NH), problem, problem.weight_TK)


def _decoded_in_groups(problem: Problem) -> Tensor:
    with _groups(problem) as groups:
        return _decoded(problem, groups)


def _decoded(problem: Problem, groups: Iterator[dict[int, int]]) -> Tensor:
    """By expert, as the groups come, and summed up once."""
    from amoeba.kernels.decode import Like, decode_rows, sum_rows

    weights = problem.weights
    y_NH = problem.x_TH.new_empty((problem.rows, problem.x_TH.shape[1]), dtype=torch.float32)
    for _ in groups:
        decode_rows(_in_slots(problem), y_NH, Like(problem.x_TH.shape[0], weights.num_experts))
    return sum_rows(y_NH, problem._replace(weights=weights.others))


class _Few:
    """A pass of a few tokens without gradients."""

    def __init__(self, problem: Problem) -> None:
        from amoeba.kernels.decode import Like

        self.problem = problem
        self.memory, self.layer = problem.weights.memory, problem.weights.layer
        self.like = Like(problem.x_TH.shape[0], problem.weights.num_experts)

    def decode(self) -> Tensor:
        from amoeba.kernels.index_export import MOST_IDS

        problem, memory, layer, pool = self.problem, self.memory, self.layer, self.memory.pool
        memory.replays.rehearse(layer, problem.expert_TK, _given(problem))
        if problem.rows > MOST_IDS:
            return self._with(problem, list(range(problem.weights.num_experts)))
        is_complete = pool.is_complete(layer)
        if is_complete and pool.map.ready(layer):
            pool.used(layer, pool.map.read(layer).there)  # of the pass before this
        slot_TK = pool.map.launch(layer, problem.expert_TK)
        if is_complete:
            return self._whole(problem, slot_TK)
        y_TH = self._whole(problem, slot_TK) if memory.hits_lately[layer] else None
        pool.wait_for_ids(layer)
        missing, there = pool.map.read(layer)
        memory.hits_lately[layer] = not missing
        if missing:
            return self._with(problem, [*there, *missing])
        pool.used(layer, there)
        return self._whole(problem, slot_TK) if y_TH is None else y_TH

    def _whole(self, problem: Problem, slot_TK: Tensor) -> Tensor:
        from amoeba.kernels.decode import decode

        return decode(_in_slots(problem, slot_TK), like=self.like)

    def _with(self, problem: Problem, ids: list[int]) -> Tensor:
        """Once these are there, which are all that the problem asks for."""
        memory, layer = self.memory, self.layer
        if len(ids) > memory.slots[layer]:
            return self._in_parts(problem, ids)
        with closing(memory.loads.acquire(layer, ids)) as groups:
            for _ in groups:
                y_TH = self._whole(problem, memory.pool.map.to_slots(layer, problem.expert_TK))
        return y_TH

    def _in_parts(self, problem: Problem, ids: list[int]) -> Tensor:
        from amoeba.kernels.decode import is_by_slot

        memory, layer = self.memory, self.layer
        tokens, top_k = problem.expert_TK.shape
        of_all = problem._replace(weights=problem.weights.others)
        if is_by_slot(of_all, self.like) and tokens > 1 and top_k <= memory.slots[layer]:
            return torch.cat([self._alone(problem, token) for token in range(tokens)])
        with closing(memory.loads.acquire(layer, ids)) as groups:
            return _decoded(problem, groups)

    def _alone(self, problem: Problem, token: int) -> Tensor:
        pool, layer = self.memory.pool, self.layer
        one = problem._replace(
            x_TH=problem.x_TH[token : token + 1],
            expert_TK=problem.expert_TK[token : token + 1],
            weight_TK=problem.weight_TK[token : token + 1],
        )
        pool.map.launch(layer, one.expert_TK)
        pool.wait_for_ids(layer)
        missing, there = pool.map.read(layer)
        return self._with(one, [*there, *missing])


def _captured(problem: Problem, save: Save) -> Tensor:
    """The kernels of a pass whose experts come while it is replayed."""
    from amoeba.kernels.decode import Like, decode

    memory, layer, tokens = problem.weights.memory, problem.weights.layer, problem.x_TH.shape[0]
    if save == "h" or not _decodes(problem):
        raise CannotCapture(f"{tokens} tokens of a step, or its gradients, are streamed by the host")
    given = _given(problem)
    slot_TK = memory.replays.slots_of(layer, problem.expert_TK, given)
    y_TH = decode(_in_slots(problem, slot_TK), like=Like(tokens, problem.weights.num_experts))
    if given is not None:
        memory.replays.add_computed(layer, y_TH, given)
    return y_TH


def _given(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """To whom computes experts on the host, who has no factors."""
    return (problem.x_TH, problem.weight_TK) if problem.lora is None else None


@contextmanager
def _groups(problem: Problem) -> Iterator[Iterator[dict[int, int]]]:
    """All experts, in groups, with tiles as for all of them."""
    from amoeba.kernels.tile_sizes import as_with

    weights, experts = problem.weights, problem.weights.num_experts
    with as_with(experts), closing(weights.memory.loads.acquire(weights.layer, range(experts))) as groups:
        yield groups


def _expect(problem: Problem, layer: int) -> None:
    memory = problem.weights.memory
    if 0 <= layer < len(memory.layers):
        memory.loads.expect_all(layer)


def _in_slots(problem: Problem, slot_TK: Tensor | None = None) -> Problem:
    """With the experts that are shown, numbered by their slots; all others are sentinels."""
    weights = problem.weights
    slot_map, layer = weights.memory.pool.map, weights.layer
    if slot_TK is None:
        slot_TK = slot_map.to_slots(layer, problem.expert_TK)
    expert_S = slot_map.expert_S(layer)
    lora = None if problem.lora is None else problem.lora.each(lambda factor: factor.index_select(0, expert_S))
    return problem._replace(expert_TK=slot_TK, weights=weights.slots, lora=lora)


class _FactorGradients:
    """What each slot got in each group, to be put to the expert that was in it: at the end, all of them at once."""

    def __init__(self, problem: Problem) -> None:
        self._slot_E = problem.weights.memory.pool.map.slot_E(problem.weights.layer)
        self._slots = problem.weights.slots.num_experts
        self._place_E = torch.zeros_like(self._slot_E)
        self._groups: dict[str, list[Tensor]] = {}
        self._count = 0

    def add(self, of_group: Gradients) -> None:
        """Of the experts that are shown."""
        for name in LORA_NAMES:
            if (of_factor := getattr(of_group, name)) is not None:  # of a shared A, gate's is all of it
                self._groups.setdefault(name, []).append(of_factor)
        if self._groups:
            place_E = self._slot_E + self._count * self._slots
            self._place_E = torch.where(self._slot_E >= 0, place_E, self._place_E)
        self._count += 1

    def of_experts(self) -> dict[str, Tensor]:
        return {name: torch.cat(groups).index_select(0, self._place_E) for name, groups in self._groups.items()}


def _token_N(problem: Problem) -> Tensor:
    return torch.arange(problem.rows, dtype=torch.int64, device=problem.x_TH.device) // problem.expert_TK.shape[1]


def _rows_alone(problem: Problem) -> Problem:
    """Each row as a token with one expert, so that rows come back one by one."""
    x_NH = problem.x_TH.index_select(0, _token_N(problem))
    return problem._replace(
        x_TH=x_NH, expert_TK=problem.expert_TK.reshape(-1, 1), weight_TK=problem.weight_TK.reshape(-1, 1)
    )


def _combined(rows_NH: Tensor, problem: Problem, weight_TK: Tensor | None) -> Tensor:
    from amoeba.kernels.combine import combine

    expert_TK, rows = problem.expert_TK, problem.rows
    slot_TK = torch.arange(rows, dtype=torch.int32, device=rows_NH.device).view_as(expert_TK)
    slot_TK = slot_TK.masked_fill((expert_TK < 0) | (expert_TK >= problem.weights.num_experts), rows)
    out_TH = torch.empty_like(problem.x_TH, memory_format=torch.contiguous_format)
    combine(rows_NH, slot_TK, None if weight_TK is None else weight_TK.contiguous(), out_TH)
    return out_TH


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # as it was asked for
    return tensor
