"""Ranks that are threads of this process: what each of them says when they compare what they have.

said = compare([{"--seed": 0}, {"--seed": 1}])        # one text for each rank, "" where all are the same
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from amoeba.parallel.rank_zero import RankZero


class _Group:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30.0)
        self.texts = [""] * count


class FakeRanks:
    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank, self.count = group, rank, len(group.texts)

    def gather_texts(self, text: str, what: str) -> list[str]:
        self._group.texts[self.rank] = text
        self._group.barrier.wait()
        found = list(self._group.texts)
        self._group.barrier.wait()
        return found


def compare(values: list[dict[str, Any]]) -> list[str]:
    group = _Group(len(values))

    def check(rank: int) -> str:
        try:
            RankZero(FakeRanks(group, rank)).check_same(values[rank])  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(values)) as threads:
        return list(threads.map(check, range(len(values))))
