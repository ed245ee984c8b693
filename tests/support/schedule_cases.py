"""Schedules for tests: random small layers, and one rank's share of a layer over ranks, as its kernel runs it.

case = random_case(seed=3)
share = share_case(case)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amoeba.proof.reference.experts import experts_backward
from amoeba.tasks.graph import Counter, Gate, Graph, Kind, Signal, Task
from amoeba.tasks.rows import RankRows, divide_rows
from amoeba.tasks.sizes import Sizes, Tiling
from benchmarks.schedules.cases import MakeGraph, ScheduleCase, make_case
from benchmarks.schedules.computation import Computation, Region, Tokens
from benchmarks.schedules.simulator import Script


def random_case(seed: int) -> ScheduleCase:
    """A small one; ranks and experts without rows, tokens without experts, remote ranks: all of it now and then."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 1, 2, 2, 3))
    experts = draw.randint(1, 5)
    sizes = Sizes(draw.randint(2, 6), draw.randint(1, 5), experts, draw.randint(1, min(3, experts)))
    tiling = Tiling(
        rows=draw.randint(1, 4),
        down_columns=draw.randint(1, 4),
        up_columns=draw.randint(2, 6),
        weight_rows=draw.randint(3, 10),
        weight_columns=draw.randint(2, 6),
        router_columns=draw.randint(2, 6),
        tokens=draw.randint(1, 4),
        sent=draw.randint(1, 3),
        wave=draw.randint(1, 3),
        group=draw.randint(1, 3),
        kept=draw.randint(1, 3),
        behind=draw.choice((0, 0, 1, 3)),
        bundle=draw.choice((1, 1, 2, 3)),
        bias_columns=2 + seed % 5,
    )
    passes = draw.choice((1, 1, 3)) if ranks > 1 else 1
    tokens = [[draw.choice((0, 1, 2, 3, 5)) for _ in range(ranks)] for _ in range(passes)]
    if passes == 3:  # a rank that sends nothing for a while lets others run ahead, or runs ahead itself
        quiet = draw.randrange(ranks)
        tokens[1][quiet], tokens[2][quiet] = 0, draw.choice((0, tokens[2][quiet]))
    owners = draw.choice((range(ranks), [draw.randrange(ranks)]))  # anybody, or one rank for all
    owner = tuple(draw.choice(owners) for _ in range(experts))
    remote = frozenset(rank for rank in range(ranks) if draw.random() < 0.4)
    return make_case(
        sizes,
        tiling,
        tokens,
        owner,
        remote,
        seed=seed,
        dropped=draw.choice((0.0, 0.0, 0.3)),
        skew=draw.choice((0.0, 2.0)),
        biases=draw.random() < 0.5,
    )


class ShareGraph(Graph):
    """One rank's share of a layer over ranks, as its kernel runs it: dy starts from here and is used as it arrives.

    rows: of tokens that have a place everywhere, `divide_rows(..., everywhere=True)`.

    What goes out is a task, and a product waits for the cells that its rows come in, as in `Graph`. COMBINE sums up
    what the experts of this rank gave to each received row; the kernel writes that into the memory of the row's rank,
    and the transport adds up there (docs/parallel.md). There is one cell, not two, so what is sent waits until its
    reader has finished the pass before, with all that came in it.
    """

    def __init__(
        self, rank: int, rows: Sequence[RankRows], sizes: Sizes, tiling: Tiling, *, biases: bool = False
    ) -> None:
        super().__init__(rank, rows, sizes, tiling, router=False, biases=biases)

    @property
    def combined(self) -> int:
        return len(self.rows.received)

    def loaded(self, block: int) -> Iterator[tuple[int, int, int, int]]:
        """(this rank, row tile, received row, slot)."""
        for received in self.tokens_of(block):
            for slot in range(self.sizes.top_k):
                if (received, slot) in self.rows.tile_of_slot:
                    yield self.rank, self.rows.tile_of_slot[received, slot], received, slot

    def gates(self, task: Task, epoch: int) -> Iterator[Gate]:
        for gate in super().gates(task, epoch):
            if task.kind != Kind.ACTIVATE or gate.counter.name != "finished":  # no peer loads ds and dx from here
                yield gate
        if task.kind == Kind.COMBINE:  # also rows that no expert here reads: the next pass is sent to the same cell
            for cell in self.cells_of(self.tokens_of(task.item)):
                yield Gate(Counter(self.rank, "arrived", cell), epoch)

    def _cell_is_free(self, reader: int, epoch: int) -> Gate:
        return super()._cell_is_free(reader, epoch + 1)

    def signals(self, task: Task, epoch: int) -> Iterator[Signal]:
        return (signal for signal in super().signals(task, epoch) if signal.counter.name != "ready")


class ShareComputation(Computation):
    """dx of experts and d_weight: of each received row, what this rank's experts gave to it."""

    graph: ShareGraph

    def _cell(self, rank: int, name: str, *at: int) -> Region:
        return Region(rank, name, (0, *at), heap=True)

    def _combine(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        graph, received = self.graph, self.graph.tokens_of(task.item)
        dx_of, ds_of = self._by_slot(graph.tiles_combined(task.item), values)
        dx = self.tokens.x_TH.new_zeros(len(received), graph.sizes.hidden)
        ds = self.tokens.x_TH.new_zeros(len(received), graph.sizes.top_k)
        for owner, _, row, slot in graph.loaded(task.item):
            dx[row - received.start] += dx_of[owner, row, slot]
            ds[row - received.start, slot] = ds_of[owner, row, slot]
        return dx, ds


class ShareCase(ScheduleCase):
    """Without the router, and with what the transport adds up added up here."""

    def job(self, make_graph: MakeGraph = ShareGraph) -> list[list[Script]]:
        return super().job(make_graph)

    def _scripts(self, epoch: int, tokens_W: list[Tokens], make_graph: MakeGraph) -> list[Script]:
        expert_WTK = [tokens.expert_TK.tolist() for tokens in tokens_W]
        rows = divide_rows(expert_WTK, self.layer.owner_E, self.ranks, self.tiling.rows, everywhere=True)
        biases = self.layer.down_bias_EH is not None
        graphs = [make_graph(rank, rows, self.sizes, self.tiling, biases=biases) for rank in range(self.ranks)]
        return [Script(ShareComputation(graph, self.layer, tokens_W, epoch)) for graph in graphs]

    def _expected_of(self, tokens_W: Sequence[Tokens], logits_W: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """One entry: of all ranks."""
        x, dy, _, expert, weight = (torch.cat(each) for each in zip(*tokens_W, strict=True))
        return [experts_backward(dy, x, expert, weight, self._weights)]

    def _found(self, memory_W: list[dict[Region, Tensor]]) -> list[dict[str, Tensor]]:
        parts = [self._gradients(rank, memory) for rank, memory in enumerate(memory_W)]
        found = {name: torch.stack([part[name] for part in parts]).sum(0) for name in ("x", "weight")}
        for name in self._of_experts:
            owned = {rank: iter(part[name]) for rank, part in enumerate(parts)}
            found[name] = torch.stack([next(owned[owner]) for owner in self.layer.owner_E])
        return [found]


def share_case(case: ScheduleCase) -> ShareCase:
    return ShareCase(case.layer, case.tokens, case.logits, case.sizes, case.tiling, case.ranks)
