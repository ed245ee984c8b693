"""One rank's share of a layer over ranks, as its kernel runs it: dy starts from here and is used as it arrives.

T tokens · K experts per token · W ranks

    rows = divide_rows(expert_WTK, owner_E, ranks=W, row_block=128, everywhere=True)
    graph = ShareGraph(rank, rows, sizes, tiling)
    Script(ShareComputation(graph, layer, tokens_W, epoch))

What goes out is a task, and a product waits for the cells that its rows come in, as in `Graph`. COMBINE sums up what
the experts of this rank gave to each received row; the kernel writes that into the memory of the row's rank, and adding
up there is the transport's (docs/parallel.md). There is one cell, not two, so what is sent waits until its reader has
finished the pass before, with all that came in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from amoeba.tasks.computation import Computation
from amoeba.tasks.graph import Counter, Gate, Graph, Kind, Signal, Task
from amoeba.tasks.regions import Region
from amoeba.tasks.rows import RankRows
from amoeba.tasks.sizes import Sizes, Tiling


class ShareGraph(Graph):
    """rows: of tokens that have a place everywhere."""

    def __init__(
        self, rank: int, rows: Sequence[RankRows], sizes: Sizes, tiling: Tiling, *, remote: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(rank, rows, sizes, tiling, router=False)

    @property
    def in_place(self) -> bool:
        return self.tiling.in_place

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
            if task.kind != Kind.ACTIVATE or gate.counter.name != "finished":  # nobody loads ds and dx from here
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
