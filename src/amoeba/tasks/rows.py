"""Which rows a rank has in one pass, and which of them each task touches, on its own rank and on others.

T tokens · K experts per token · E experts · W ranks

What it sends, what came to it, and its sorted rows cut into row tiles:

    ranks = divide_rows(expert_WTK, owner_E=(0, 0, 1), ranks=2, row_block=128)
    ranks[1].received, ranks[1].tiles

A token goes once to each rank that owns one of its experts. What came is ordered by (source rank, token), and within
an expert the rows keep that order: sums over rows are those of one process with all tokens. So a row tile may hold rows
of several ranks.

From the row tiles, cells and rows that a task touches follow its gates:

    reach = Reach(rank, rows, sizes, tiling, remote)     # rows: of all ranks, see `divide_rows`
    reach.sources(tile), reach.tiles_combined(block)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

from amoeba.tasks.sizes import Sizes, Tiling, blocks


class Row(NamedTuple):
    """A sorted row. received: of which token that came; slot: the token's k."""

    received: int
    slot: int


class RowTile(NamedTuple):
    """expert: its place among those of the rank; rows first : end of the sorted ones."""

    expert: int
    first: int
    end: int


class RankRows(NamedTuple):
    """
    tokens:       T of this rank.
    sent:         by destination, the tokens that go there; those for the rank itself do not travel.
    received:     (source, token), by both.
    first_from:   W + 1 ends: received[first_from[s] : first_from[s + 1]] came from rank s.
    rows:         sorted by expert, within an expert as received.
    tiles:        of the heaviest expert first, so that the longest sums do not begin last.
    heaviest:     the experts in that order.
    first_tile:   beginning of each of them in `tiles`, and the end.
    tile_of_slot: (received, slot) -> row tile.
    """

    tokens: int
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, int], ...]
    first_from: tuple[int, ...]
    rows: tuple[Row, ...]
    tiles: tuple[RowTile, ...]
    heaviest: tuple[int, ...]
    first_tile: tuple[int, ...]
    tile_of_slot: dict[tuple[int, int], int]

    @property
    def experts(self) -> int:
        return len(self.heaviest)


Ids = Sequence[Sequence[int]]  # (T, K) experts of one rank's tokens; an id without an owner is a sentinel


def divide_rows(
    expert_WTK: Sequence[Ids], owner_E: Sequence[int], ranks: int, row_block: int, *, everywhere: bool = False
) -> list[RankRows]:
    """everywhere: each token has its place at each rank, also where it has no expert: at its own number."""
    owned = [[expert for expert, owner in enumerate(owner_E) if owner == rank] for rank in range(ranks)]
    sent = [
        [tuple(range(len(expert_TK))) if everywhere else _tokens_for(expert_TK, set(owned[to])) for to in range(ranks)]
        for expert_TK in expert_WTK
    ]
    return [_rows_of(rank, expert_WTK, owned[rank], sent, row_block) for rank in range(ranks)]


def _tokens_for(expert_TK: Ids, experts: set[int]) -> tuple[int, ...]:
    return tuple(token for token, ids in enumerate(expert_TK) if not experts.isdisjoint(ids))


def _rows_of(
    rank: int, expert_WTK: Sequence[Ids], owned: list[int], sent: list[list[tuple[int, ...]]], row_block: int
) -> RankRows:
    received: list[tuple[int, int]] = []
    first_from = [0]
    for source, lists in enumerate(sent):
        received += [(source, token) for token in lists[rank]]
        first_from.append(len(received))
    place = {expert: index for index, expert in enumerate(owned)}
    of_expert: list[list[Row]] = [[] for _ in owned]
    for index, (source, token) in enumerate(received):
        for slot, expert in enumerate(expert_WTK[source][token]):
            if expert in place:
                of_expert[place[expert]].append(Row(index, slot))
    ends = [0]
    for rows in of_expert:
        ends.append(ends[-1] + len(rows))
    heaviest = sorted(range(len(owned)), key=lambda expert: -len(of_expert[expert]))
    tiles: list[RowTile] = []
    first_tile = [0]
    for expert in heaviest:
        for first in range(ends[expert], ends[expert + 1], row_block):
            tiles.append(RowTile(expert, first, min(first + row_block, ends[expert + 1])))
        first_tile.append(len(tiles))
    rows = [row for each in of_expert for row in each]
    tile_of_slot = {
        (rows[row].received, rows[row].slot): index
        for index, tile in enumerate(tiles)
        for row in range(tile.first, tile.end)
    }
    return RankRows(
        len(expert_WTK[rank]),
        tuple(sent[rank]),
        tuple(received),
        tuple(first_from),
        tuple(rows),
        tuple(tiles),
        tuple(heaviest),
        tuple(first_tile),
        tile_of_slot,
    )


Found = TypeVar("Found")


def _once(method: Callable[..., Found]) -> Callable[..., Found]:
    """Each column of a tile and each tile of weights asks for the same lists again, which take long to make."""
    name = f"_found_{method.__name__}"

    @wraps(method)
    def kept(self: Any, *at: int) -> Found:
        found = self.__dict__.setdefault(name, {})
        if at not in found:
            found[at] = method(self, *at)
        return found[at]

    return kept


class Reach:
    """remote: ranks that cannot load each other's memory, nor others theirs; they put and signal."""

    def __init__(
        self, rank: int, rows: Sequence[RankRows], sizes: Sizes, tiling: Tiling, remote: frozenset[int]
    ) -> None:
        self.rank, self.all_rows, self.rows, self.sizes, self.tiling = rank, rows, rows[rank], sizes, tiling
        self.remote = remote
        self.ranks = len(rows)
        self.peers = [(rank + step) % self.ranks for step in range(1, self.ranks)]  # not all begin with rank 0
        self.token_blocks = blocks(self.combined, tiling.tokens)

    @property
    def combined(self) -> int:
        """Tokens whose dx is summed up here."""
        return self.rows.tokens

    def is_remote(self, peer: int) -> bool:
        return peer != self.rank and (peer in self.remote or self.rank in self.remote)

    @_once
    def tile_range(self, expert: int) -> tuple[int, int]:
        """Of the row tiles of an expert."""
        place = self.rows.heaviest.index(expert)
        return self.rows.first_tile[place], self.rows.first_tile[place + 1]

    def tiles_of_expert(self, expert: int) -> int:
        begin, end = self.tile_range(expert)
        return end - begin

    @_once
    def sources(self, tile: int) -> list[tuple[int, int]]:
        """(source, block) of the cells in which rows of this tile arrive."""
        _, first, end = self.rows.tiles[tile]
        return self.cells_of(self.rows.rows[row].received for row in range(first, end))

    def cells_of(self, received: Iterable[int]) -> list[tuple[int, int]]:
        """(source, block) of the cells in which these of the received rows arrive; own rows are in none."""
        return _distinct(
            (source, (index - self.rows.first_from[source]) // self.tiling.sent)
            for index in received
            if (source := self.rows.received[index][0]) != self.rank
        )

    def returned_rows(self, peer: int, block: int) -> range:
        """Of `received`: those of one block that go back to a peer."""
        first, end = self.rows.first_from[peer], self.rows.first_from[peer + 1]
        return range(first + block * self.tiling.sent, min(first + (block + 1) * self.tiling.sent, end))

    @_once
    def tiles_returned(self, peer: int, block: int) -> list[int]:
        slots = ((row, slot) for row in self.returned_rows(peer, block) for slot in range(self.sizes.top_k))
        return [
            tile
            for (tile,) in _distinct(
                (self.rows.tile_of_slot[each],) for each in slots if each in self.rows.tile_of_slot
            )
        ]

    def tokens_of(self, block: int) -> range:
        return range(block * self.tiling.tokens, min((block + 1) * self.tiling.tokens, self.combined))

    def loaded(self, block: int) -> Iterator[tuple[int, int, int, int]]:
        """(owner, row tile there, token, slot) of each row of dx that is read where it was computed."""
        for owner in range(self.ranks):
            if self.is_remote(owner):
                continue
            there = self.all_rows[owner]
            for token, place in self._places(owner, block):
                for slot in range(self.sizes.top_k):
                    tile = there.tile_of_slot.get((there.first_from[self.rank] + place, slot))
                    if tile is not None:
                        yield owner, tile, token, slot

    @_once
    def tiles_combined(self, block: int) -> list[tuple[int, int]]:
        return _distinct((owner, tile) for owner, tile, _, _ in self.loaded(block))

    @_once
    def blocks_combined(self, block: int) -> list[tuple[int, int]]:
        """(owner, block) of the cells in which sums of these tokens come back."""
        return _distinct(
            (owner, place // self.tiling.sent)
            for owner in range(self.ranks)
            if self.is_remote(owner)
            for _, place in self._places(owner, block)
        )

    def _places(self, owner: int, block: int) -> Iterator[tuple[int, int]]:
        """(token, its place among what this rank sent to the owner) of the tokens of a block that went there."""
        place_of = self._sent_place[owner]
        for token in self.tokens_of(block):
            if token in place_of:
                yield token, place_of[token]

    @cached_property
    def _sent_place(self) -> list[dict[int, int]]:
        return [{token: place for place, token in enumerate(tokens)} for tokens in self.rows.sent]


def _distinct(found: Iterable[tuple[int, ...]]) -> list:
    return list(dict.fromkeys(found))
