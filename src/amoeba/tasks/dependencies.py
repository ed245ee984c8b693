"""Which row tiles, cells and rows each task touches, on its own rank and on others; from these follow its gates.

K experts per token · W ranks

    reach = Reach(rank, rows, sizes, tiling, remote)     # rows: of all ranks, see `divide_rows`
    reach.sources(tile), reach.tiles_combined(block)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, wraps
from typing import Any, TypeVar

from amoeba.tasks.rows import RankRows
from amoeba.tasks.sizes import Sizes, Tiling, blocks

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
