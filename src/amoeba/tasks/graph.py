"""The scheduled backward of one layer: kinds of tasks, what each waits for, and the order of its tickets.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I · W ranks

    graph = Graph(rank, rows, sizes, tiling)             # rows: of all ranks, see `divide_rows`
    task = graph.decode(ticket)                          # 0 <= ticket < graph.tickets
    graph.gates(task, epoch), graph.signals(task, epoch)

Workers draw tickets from one counter per rank. A ticket becomes a task by arithmetic over the table of row tiles: no
list of tasks is in memory. A worker waits at its task's gates, computes, and signals. Each task's gates are opened by
tasks with smaller tickets, so the worker with the smallest unfinished ticket can go on: nothing gets stuck, with any
number of workers, also with one. Between ranks the order is: everything sent, everything returned, then whatever waits
for a peer's; a rank that waits at its smallest ticket waits for one that a peer is at or before.

Counters belong to one rank and one pass, and begin at 0. Flags are all that ranks see of each other: they hold the
number of a pass, only grow, and are never cleared. What travels lies in cells of which there are two, for even and odd
passes; so before anything is written there, its readers have to be done with the pass before the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from amoeba.tasks.rows import RankRows, Reach
from amoeba.tasks.sizes import Sizes, Tiling, blocks


class Kind(IntEnum):
    SEND = 0  # dy of some tokens, to a rank that owns experts of theirs
    DOWN = 1  # a tile of dA' = dy · down
    ACTIVATE = 2  # of a row tile: dh = act'(h) ∘ (s·dA'), s·a, ds = <dA', a> + <dy, down_bias>
    UP = 3  # a tile of each row's dx = dh · gate_up
    DOWN_WEIGHTS = 4  # a tile of an expert's d_down = Σ dyᵀ · s·a
    UP_WEIGHTS = 5  # a tile of an expert's d_gate_up = Σ dhᵀ · x
    RETURN = 6  # Σ over the experts here of some tokens' dx, and their ds, back to their rank
    COMBINE = 7  # dx of a block of tokens = Σ over ranks, slots; d_weight
    ROUTER = 8  # of a block of tokens: d_logits, dx += d_logits · gate
    ROUTER_WEIGHTS = 9  # a tile of d_gate = Σ d_logitsᵀ · x
    DOWN_BIAS = 10  # some columns of an expert's d_down_bias = Σ s·dy
    UP_BIAS = 11  # some columns of an expert's d_gate_up_bias = Σ dh


BIAS_OF = {Kind.DOWN_WEIGHTS: Kind.DOWN_BIAS, Kind.UP_WEIGHTS: Kind.UP_BIAS}  # handed out behind an expert's matrix
OF_EXPERT = (*BIAS_OF, *BIAS_OF.values())


class Task(NamedTuple):
    """
    item: SEND, RETURN: the other rank; DOWN, ACTIVATE, UP: the row tile; DOWN_WEIGHTS, UP_WEIGHTS, DOWN_BIAS, UP_BIAS:
          the expert's place on its rank; COMBINE, ROUTER: the block of tokens.
    part: SEND, RETURN: the block of rows; otherwise the tile of columns, or of the expert's matrix.
    """

    kind: Kind
    item: int
    part: int = 0


class Counter(NamedTuple):
    """
    rows (a row tile):   its tiles of dA', its row pass, its tiles of dx.
    expert:              row passes of an expert.
    tokens (a block):    1 as soon as its dx is combined.
    router:              blocks of tokens whose d_logits are there.
    done:                tasks of the rank.

    Flags: arrived (source, block) rows of dy, here; ready (row tile): dx and ds of the tile may be loaded by peers;
    returned (owner, block) rows of dx and ds, here; finished: the last pass of which the rank has done everything.
    """

    rank: int
    name: str
    at: tuple[int, ...] = ()


FLAGS = ("arrived", "ready", "returned", "finished")


class Gate(NamedTuple):
    counter: Counter
    at_least: int


class Signal(NamedTuple):
    """A counter grows by one, a flag rises to the epoch. once: only by the task that opens this gate."""

    counter: Counter
    once: Gate | None = None


class Lane(NamedTuple):
    """The tasks of a kind that belong to a wave of experts, from the first-th on; wave 0 for kinds without waves."""

    kind: Kind
    wave: int
    size: int
    first: int = 0


class Graph(Reach):
    """The tasks of one rank in one pass. router: whether its backward is part of it. biases: whether there are any."""

    def __init__(
        self,
        rank: int,
        rows: Sequence[RankRows],
        sizes: Sizes,
        tiling: Tiling,
        *,
        remote: frozenset[int] = frozenset(),
        router: bool = True,
        biases: bool = False,
    ) -> None:
        super().__init__(rank, rows, sizes, tiling, remote)
        self.router, self.biases = router, biases

    # --- sizes ---

    @property
    def down_tiles(self) -> int:
        return blocks(self.sizes.intermediate, self.tiling.down_columns)

    @property
    def up_tiles(self) -> int:
        return blocks(self.sizes.hidden, self.tiling.up_columns)

    @property
    def activated(self) -> int:
        """What a row tile's counter shows after its row pass."""
        return self.down_tiles + 1

    @property
    def complete(self) -> int:
        """What it shows after the last tile of dx."""
        return self.down_tiles + 1 + self.up_tiles

    def parts(self, kind: Kind) -> int:
        """Tiles of columns of a row tile, or bundles of tiles of an expert's matrix."""
        tiling = self.tiling
        if kind in (Kind.DOWN, Kind.UP):
            return self.down_tiles if kind == Kind.DOWN else self.up_tiles
        if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
            return blocks(self.matrix_tiles(kind), tiling.bundle)
        if kind in (Kind.DOWN_BIAS, Kind.UP_BIAS):
            width = self.sizes.hidden if kind == Kind.DOWN_BIAS else self.sizes.width
            return blocks(width, tiling.bias_columns) if self.biases else 0
        return blocks(self.sizes.hidden, tiling.router_columns) if kind == Kind.ROUTER_WEIGHTS else 1

    def expert_parts(self, kind: Kind) -> int:
        """Tasks of an expert's matrix and of its bias."""
        return self.parts(kind) + self.parts(BIAS_OF[kind])

    def matrix_tiles(self, kind: Kind) -> int:
        """Of an expert's gradient of down or of gate_up."""
        tiling, (hidden, intermediate, _, _) = self.tiling, self.sizes
        height, width = (hidden, intermediate) if kind == Kind.DOWN_WEIGHTS else (self.sizes.width, hidden)
        return blocks(height, tiling.weight_rows) * blocks(width, tiling.weight_columns)

    def bundled(self, task: Task) -> range:
        """The tiles of a weight's gradient that a task computes."""
        first, tiles = task.part * self.tiling.bundle, self.matrix_tiles(task.kind)
        return range(first, min(first + self.tiling.bundle, tiles))

    # --- order ---

    def runs(self) -> list[tuple[Lane, ...]]:
        """The order of the tickets. Lanes that stand together are merged evenly.

        Row passes are bound by memory and run with the next wave's products; the last waves' weights with the sums over
        tokens. By the time that a wave's dx is handed out, its row passes are done.
        """
        waves, first_kept = self._waves
        runs: list[tuple[Lane, ...]] = [(self._lane(Kind.SEND),)]
        for wave in range(-1, waves):
            runs.append((self._lane(Kind.ACTIVATE, wave), self._lane(Kind.DOWN, wave + 1)))
            runs += [(self._lane(Kind.UP, wave),), (self._lane(Kind.DOWN_WEIGHTS, wave),)]
            if wave < first_kept:
                runs.append((self._lane(Kind.UP_WEIGHTS, wave),))
        runs.append((self._lane(Kind.RETURN),))  # before all that waits for what peers return
        kept = self._lane(Kind.UP_WEIGHTS, first_kept)
        merged_size = kept.size - min(self.tiling.behind, kept.size)
        runs.append((kept._replace(size=merged_size), self._lane(Kind.COMBINE)))
        runs.append((kept._replace(size=kept.size - merged_size, first=merged_size),))
        runs.append((self._lane(Kind.ROUTER),))
        runs.append((self._lane(Kind.ROUTER_WEIGHTS),))
        return [run for run in runs if any(lane.size for lane in run)]

    @property
    def _waves(self) -> tuple[int, int]:
        """How many there are, and the first of those whose gradients of gate_up are kept for the end."""
        waves = blocks(self.rows.experts, self.tiling.wave)
        return waves, max(waves - max(self.tiling.kept, 1), 0)

    def _lane(self, kind: Kind, wave: int = 0) -> Lane:
        return Lane(kind, wave, self.lane_size(kind, wave))

    def lane_size(self, kind: Kind, wave: int) -> int:
        if kind in (Kind.SEND, Kind.RETURN):
            return self._first_block(kind)[-1]
        if kind in (Kind.COMBINE, Kind.ROUTER):
            return self.token_blocks if kind == Kind.COMBINE or self.router else 0
        if kind == Kind.ROUTER_WEIGHTS:
            return self.parts(kind) if self.router else 0
        begin, end = self._experts_of(kind, wave)
        if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
            return (end - begin) * self.expert_parts(kind)  # also without rows: its gradient is zero, and written
        return (self.rows.first_tile[end] - self.rows.first_tile[begin]) * self.parts(kind)

    @cached_property
    def _starts(self) -> tuple[list[tuple[Lane, ...]], list[int]]:
        runs = self.runs()
        return runs, list(accumulate((sum(lane.size for lane in run) for run in runs), initial=0))

    @property
    def tickets(self) -> int:
        return self._starts[1][-1]

    def decode(self, ticket: int) -> Task:
        runs, starts = self._starts
        place = bisect_right(starts, ticket) - 1
        lane, index = merged(runs[place], ticket - starts[place])
        return self.lane_task(lane.kind, lane.wave, lane.first + index)

    def lane_task(self, kind: Kind, wave: int, index: int) -> Task:
        if kind in (Kind.SEND, Kind.RETURN):
            first = self._first_block(kind)
            place = bisect_right(first, index) - 1
            return Task(kind, self.peers[place], index - first[place])
        if kind in (Kind.COMBINE, Kind.ROUTER):
            return Task(kind, index)
        if kind == Kind.ROUTER_WEIGHTS:
            return Task(kind, 0, index)
        begin, end = self._experts_of(kind, wave)
        if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
            place, part = divmod(index, self.expert_parts(kind))
            expert, of_matrix = self.rows.heaviest[begin + place], self.parts(kind)
            return Task(kind, expert, part) if part < of_matrix else Task(BIAS_OF[kind], expert, part - of_matrix)
        tiles = self.rows.first_tile[end] - self.rows.first_tile[begin]
        tile, part = grouped(index, tiles, self.parts(kind), self.tiling.group)
        return Task(kind, self._local_first(begin, end, tile), part)

    def _experts_of(self, kind: Kind, wave: int) -> tuple[int, int]:
        """Places in `heaviest`; none for a wave before the first or after the last."""
        begin, end = wave * self.tiling.wave, (wave + 1) * self.tiling.wave
        if kind == Kind.UP_WEIGHTS and wave == self._waves[1]:  # the lane at the end has all that were kept for it
            end = self.rows.experts
        return min(max(begin, 0), self.rows.experts), min(max(end, 0), self.rows.experts)

    def _first_block(self, kind: Kind) -> list[int]:
        """Per peer where its blocks begin, and the end."""
        counts = [
            0 if kind == Kind.RETURN and not self.is_remote(peer) else self._travels(kind, peer) for peer in self.peers
        ]
        return list(accumulate((blocks(count, self.tiling.sent) for count in counts), initial=0))

    def _travels(self, kind: Kind, peer: int) -> int:
        return len(self.rows.sent[peer]) if kind == Kind.SEND else len(self.all_rows[peer].sent[self.rank])

    @cached_property
    def _own(self) -> tuple[list[int], list[int]]:
        """For each place in `heaviest`: the first tile of own rows alone, and how many such tiles came before."""
        first, before = [], [0]
        for begin, end in pairwise(self.rows.first_tile):
            own = [tile for tile in range(begin, end) if not self.sources(tile)]
            first.append(own[0] if own else end)
            before.append(before[-1] + len(own))
        return first, before

    def _local_first(self, begin: int, end: int, index: int) -> int:
        """The index-th row tile of these experts: tiles of own rows, then those that wait for rows of peers."""
        first, before = self._own
        own = before[end] - before[begin]
        if index < own:
            place = bisect_right(before, before[begin] + index) - 1
            return first[place] + before[begin] + index - before[place]
        others = [tile - local_before for tile, local_before in zip(self.rows.first_tile, before, strict=True)]
        index += others[begin] - own
        place = bisect_right(others, index) - 1
        tile = self.rows.first_tile[place] + index - others[place]
        return tile if tile < first[place] else tile + before[place + 1] - before[place]

    # --- gates ---

    def gates(self, task: Task, epoch: int) -> Iterator[Gate]:
        kind, item, part = task
        if kind == Kind.SEND:
            yield self._cell_is_free(item, epoch)
        elif kind == Kind.DOWN:
            for source, block in self.sources(item):
                yield Gate(Counter(self.rank, "arrived", (source, block)), epoch)
        elif kind == Kind.ACTIVATE:
            yield self._at("rows", item, self.down_tiles)
            for peer in self.peers:
                if not self.is_remote(peer):  # and may still load the ds and dx that this tile overwrites
                    yield self._cell_is_free(peer, epoch)
        elif kind == Kind.UP:
            yield self._at("rows", item, self.activated)
        elif kind in OF_EXPERT:
            yield self._at("expert", item, self.tiles_of_expert(item))
        elif kind == Kind.RETURN:  # to a cell that is free: its owner has begun this pass, or would not have sent
            for tile in self.tiles_returned(item, part):
                yield self._at("rows", tile, self.complete)
        elif kind == Kind.COMBINE:
            for owner, tile in self.tiles_combined(item):
                if owner == self.rank:
                    yield self._at("rows", tile, self.complete)
                else:
                    yield Gate(Counter(owner, "ready", (tile,)), epoch)
            for owner, block in self.blocks_combined(item):
                yield Gate(Counter(self.rank, "returned", (owner, block)), epoch)
        elif kind == Kind.ROUTER:
            yield self._at("tokens", item, 1)
        elif kind == Kind.ROUTER_WEIGHTS:
            yield Gate(Counter(self.rank, "router"), self.token_blocks)

    def _at(self, name: str, index: int, count: int) -> Gate:
        return Gate(Counter(self.rank, name, (index,)), count)

    def _cell_is_free(self, reader: int, epoch: int) -> Gate:
        return Gate(Counter(reader, "finished"), epoch - 2)

    def signals(self, task: Task, epoch: int) -> Iterator[Signal]:
        kind, item, part = task
        if kind == Kind.SEND:
            yield Signal(Counter(item, "arrived", (self.rank, part)))
        elif kind in (Kind.DOWN, Kind.ACTIVATE, Kind.UP):
            rows = Counter(self.rank, "rows", (item,))
            yield Signal(rows)
            if kind == Kind.ACTIVATE:
                yield Signal(Counter(self.rank, "expert", (self.rows.tiles[item].expert,)))
            if kind == Kind.UP:
                yield Signal(Counter(self.rank, "ready", (item,)), once=Gate(rows, self.complete))
        elif kind == Kind.RETURN:
            yield Signal(Counter(item, "returned", (self.rank, part)))
        elif kind == Kind.COMBINE:
            yield Signal(Counter(self.rank, "tokens", (item,)))
        elif kind == Kind.ROUTER:
            yield Signal(Counter(self.rank, "router"))
        yield Signal(Counter(self.rank, "done"))
        yield Signal(Counter(self.rank, "finished"), once=Gate(Counter(self.rank, "done"), self.tickets))

    def totals(self) -> dict[Counter, int]:
        """What every counter of the rank shows at the end of a pass."""
        found = {Counter(self.rank, "rows", (tile,)): self.complete for tile in range(len(self.rows.tiles))}
        experts = range(self.rows.experts)
        found |= {Counter(self.rank, "expert", (expert,)): self.tiles_of_expert(expert) for expert in experts}
        found |= {Counter(self.rank, "tokens", (block,)): 1 for block in range(self.token_blocks)}
        found[Counter(self.rank, "router")] = self.token_blocks if self.router else 0
        found[Counter(self.rank, "done")] = self.tickets
        return found


def merged(run: Sequence[Lane], index: int) -> tuple[Lane, int]:
    """The lane of a run's index-th ticket and the place in that lane. Of two lanes with a and b tickets, the first has
    floor(i · a / (a + b)) among the first i."""
    if len(run) == 1:
        return run[0], index
    first, second = run
    before, after = (each * first.size // (first.size + second.size) for each in (index, index + 1))
    return (first, before) if after > before else (second, index - before)


def grouped(index: int, tiles: int, columns: int, group: int) -> tuple[int, int]:
    """Row tile and column tile: `group` row tiles sweep the columns together. The kernels' `grouped_order`."""
    begin = index // (group * columns) * group
    size = min(tiles - begin, group)
    within = index % (group * columns)
    return begin + within % size, within // size
