"""A job of several processes: rank zero prints and decides, and all stop if one fails.

    rank_zero = RankZero(Ranks())
    steps = rank_zero.tell(lambda: how_many_fit())         # rank 0 decides, all know
    with rank_zero.all_or_none("writing the checkpoint"):  # if one fails, all stop
        write_own_part()
    rank_zero.check_same({"--seed": seed})                 # or ValueError on every rank, with who has what
    loss = rank_zero.add_up(loss)

`ALONE` is the same for a process without others: nothing is sent and nothing waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import RankLost, bad_value, one_line
from amoeba.parallel.ranks import Ranks, spoken_ranks

_MOST_DIFFERENCES = 4  # told in one error
_MOST_CHARACTERS = 80  # of a value in it


class RankZero:
    """ranks: the processes that share the job's batches, and perhaps its experts; None for a single process."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.rank, self.count = (0, 1) if ranks is None else (ranks.rank, ranks.count)

    @property
    def here(self) -> bool:
        """Whether this process is rank zero, the one that speaks."""
        return self.rank == 0

    def tell(self, decide: Callable[[], Any], what: str = "a decision of rank 0") -> Any:
        """What rank 0 finds, in every rank: numbers, texts, lists of them, or None. Where it fails, all do."""
        found = None
        with self.all_or_none(what):
            if self.here:
                found = decide()
        if self.ranks is None or self.count == 1:
            return found
        return json.loads(self.ranks.gather_texts(json.dumps(found) if self.here else "", what)[0])

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

    def check_same(
        self, values: Mapping[str, Any], remedy: str = "give every rank the same command, files and versions"
    ) -> None:
        """ValueError on every rank, with what differs and which rank has what, unless all have the same values."""
        if self.ranks is None or self.count == 1:
            return
        told = self.ranks.gather_texts(json.dumps(values, default=str), "values to compare")
        found = [json.loads(text) for text in told]
        if any(each != found[0] for each in found):
            raise _difference(found, remedy)

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        return tensor if self.ranks is None or self.count == 1 else self.ranks.add_up(tensor, what)

    def highest(self, number: int, what: str) -> int:
        if self.ranks is None or self.count == 1:
            return number
        return max(each for (each,) in self.ranks.gather([number], torch.device("cpu"), what))

    def part(self, rows: int) -> slice:
        """This rank's share of that many rows: as many as the others', or one more."""
        begin, end = (rows * place // self.count for place in (self.rank, self.rank + 1))
        return slice(begin, end)


def _difference(values: list[dict[str, Any]], remedy: str) -> ValueError:
    """values: of each rank, by name."""
    names = [name for name in dict.fromkeys(name for each in values for name in each) if _differs(name, values)]
    told = [_who_has_what(name, values) for name in names[:_MOST_DIFFERENCES]]
    if len(names) == 1:
        return bad_value(names[0], "the same on all ranks", told[0], remedy)
    more = f"; and {len(names) - len(told)} more" if len(names) > len(told) else ""
    got = "; ".join(f"{name} {who}" for name, who in zip(names, told, strict=False))
    return bad_value(f"{names[0]} and {len(names) - 1} more", "the same on all ranks", got + more, remedy)


def _differs(name: str, values: list[dict[str, Any]]) -> bool:
    return any(name not in each or each[name] != values[0].get(name) for each in values)


def _who_has_what(name: str, values: list[dict[str, Any]]) -> str:
    who: dict[str, list[int]] = {}
    for rank, each in enumerate(values):
        said = json.dumps(each[name], ensure_ascii=False) if name in each else "nothing"
        who.setdefault(said, []).append(rank)
    return ", ".join(f"{_shortened(said)} on {spoken_ranks(ranks)}" for said, ranks in who.items())


def _shortened(said: str) -> str:
    half = _MOST_CHARACTERS // 2
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:half]} ... {said[-half:]}"


ALONE = RankZero()
