"""Which rows a rank has in one pass: what it sends, what came to it, and its sorted rows cut into row tiles.

T tokens · K experts per token · E experts · W ranks

    ranks = divide_rows(expert_WTK, owner_E=(0, 0, 1), ranks=2, row_block=128)
    ranks[1].received, ranks[1].tiles

A token goes once to each rank that owns one of its experts. What came is ordered by (source rank, token), and within
an expert the rows keep that order: sums over rows are those of one process with all tokens. So a row tile may hold rows
of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
