"""What each task reads and writes, and what is gone then.

regions = Regions(graph, epoch)
regions.reads(task), regions.writes(task), regions.replaces(task)
"""

from __future__ import annotations

from typing import NamedTuple

from amoeba.tasks.graph import Graph, Kind, Task


class Region(NamedTuple):
    """Memory that is written by one task of a pass. heap: of two cells, which the passes use in turn."""

    rank: int
    name: str
    at: tuple[int, ...]
    heap: bool = False


class Regions:
    """Of the tasks of one rank in one pass."""

    def __init__(self, graph: Graph, epoch: int) -> None:
        self.graph, self.rank, self.epoch = graph, graph.rank, epoch

    def reads(self, task: Task) -> list[Region]:
        graph, (kind, item, part) = self.graph, task
        if kind == Kind.DOWN:
            return self._dy_cells(item)
        if kind == Kind.ACTIVATE:
            return [self._here("da", item, column) for column in range(graph.tN)]
        if kind == Kind.UP:
            return [self._here("dh", item)]
        if kind == Kind.DOWN_WEIGHTS:
            tiles = range(*graph.tile_range(item))
            return [self._here("scaled_a", tile) for tile in tiles] + [
                cell for tile in tiles for cell in self._dy_cells(tile)
            ]
        if kind == Kind.UP_WEIGHTS:
            return [self._here("dh", tile) for tile in range(*graph.tile_range(item))]
        if kind == Kind.RETURN:
            return [region for tile in graph.tiles_returned(item, part) for region in self._dx(self.rank, tile)]
        if kind == Kind.COMBINE:
            found = [region for owner, tile in graph.tiles_combined(item) for region in self._dx(owner, tile)]
            for owner, block in graph.blocks_combined(item):
                found += [self._cell(self.rank, name, owner, block) for name in ("dx sums", "ds back")]
            return found
        if kind == Kind.ROUTER:
            return [self._here("dx of experts", item), self._here("d_weight", item)]
        if kind == Kind.ROUTER_WEIGHTS:
            return [self._here("d_logits", block) for block in range(graph.token_blocks)]
        return []

    def writes(self, task: Task) -> list[Region]:
        kind, item, part = task
        if kind == Kind.SEND:
            return [self._cell(item, "dy", self.rank, part)]
        if kind == Kind.ACTIVATE:
            return [self._here("dh", item), self._here("scaled_a", item), self._cell(self.rank, "ds", item)]
        if kind == Kind.UP:
            return [self._cell(self.rank, "dx", item, part)]
        if kind == Kind.RETURN:
            return [self._cell(item, name, self.rank, part) for name in ("dx sums", "ds back")]
        if kind == Kind.COMBINE:
            return [self._here("dx of experts", item), self._here("d_weight", item)]
        if kind == Kind.ROUTER:
            return [self._here("dx", item), self._here("d_logits", item)]
        if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
            name = "d_down" if kind == Kind.DOWN_WEIGHTS else "d_gate_up"
            return [self._here(name, item, tile) for tile in self.graph.bundled(task)]
        return [self._here("da" if kind == Kind.DOWN else "d_gate", item, part)]

    def replaces(self, task: Task) -> list[Region]:
        """What lay where it writes."""
        if task.kind != Kind.UP or not self.graph.takes_place(task):
            return []
        columns = (self._here("da", task.item, column) for column in range(self.graph.tN))
        return [self._here("scaled_a", task.item), *columns]

    def _here(self, name: str, *at: int) -> Region:
        return Region(self.rank, name, at)

    def _cell(self, rank: int, name: str, *at: int) -> Region:
        return Region(rank, name, (self.epoch % 2, *at), heap=True)

    def _dx(self, owner: int, tile: int) -> list[Region]:
        columns = [self._cell(owner, "dx", tile, column) for column in range(self.graph.tNx)]
        return [*columns, self._cell(owner, "ds", tile)]

    def _dy_cells(self, tile: int) -> list[Region]:
        return [self._cell(self.rank, "dy", *cell) for cell in self.graph.sources(tile)]


class NoRegions(Regions):
    """Tasks that wait for each other and touch nothing: for the order alone."""

    def reads(self, task: Task) -> list[Region]:
        return []

    def writes(self, task: Task) -> list[Region]:
        return []

    def replaces(self, task: Task) -> list[Region]:
        return []
