"""A job that several processes do together: one of them speaks and decides, and none goes on where another failed.

    together = Together(Ranks())
    steps = together.tell(lambda: how_many_fit())         # rank 0 decides, all know
    with together.all_or_none("writing the checkpoint"):  # what one cannot do, nobody has done
        write_own_part()
    loss = together.add_up(loss)

`ALONE` is the same for a process without others: nothing is sent, and nobody is waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amoeba.errors import RankLost, bad_value, one_line
from amoeba.parallel.ranks import Ranks


class Together:
    """ranks: over which the experts are; None where each process that there is has all of them."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.rank, self.count = (0, 1) if ranks is None else (ranks.rank, ranks.count)

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks."""
        return self.rank == 0

    def tell(self, decide: Callable[[], Any], what: str = "a decision of rank 0") -> Any:
        """What rank 0 finds, in every rank: numbers, texts, lists of them, or None. Where it fails, all do."""
        found = None
        with self.all_or_none(what):
            if self.first:
                found = decide()
        if self.ranks is None or self.count == 1:
            return found
        return json.loads(self.ranks.gather_texts(json.dumps(found) if self.first else "", what)[0])

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Each rank does what is inside, in which nothing is sent; where one fails, all stop and know who it was."""
        if self.ranks is None or self.count == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.ranks.gather_texts("" if failure is None else one_line(failure), what)
        if failure is not None:
            raise failure
        failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(said) if text]
        if failed:
            raise RankLost(f"rank {self.rank} stopped at {what}, since {'; '.join(failed)}.")

    def check_same(self, what: str, value: Any) -> None:
        """ValueError on every rank where one has another value."""
        if self.ranks is None or self.count == 1:
            return
        values = self.ranks.gather_texts(json.dumps(value, sort_keys=True, default=str), what)
        others = [rank for rank, found in enumerate(values) if found != values[0]]
        if others:
            got = f"another on rank {others[0]}"
            raise bad_value(what, "the same on all ranks", got, "give every rank the same command, files and versions")

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        return tensor if self.ranks is None or self.count == 1 else self.ranks.add_up(tensor, what)

    def highest(self, number: int, what: str) -> int:
        if self.ranks is None or self.count == 1:
            return number
        return max(each for (each,) in self.ranks.gather([number], torch.device("cpu"), what))

    def part(self, rows: int) -> slice:
        """Of so many rows those of this rank: as many as the others', or one more."""
        begin, end = (rows * place // self.count for place in (self.rank, self.rank + 1))
        return slice(begin, end)


ALONE = Together()
