"""A policy whose order can be seen at a glance, for tests of the tables: least recently used."""

from collections.abc import Collection, Sequence

from amoeba.stream.cache.slot_table import LFRU, Policy


class LRU(Policy):
    def begin(self, experts: int) -> None:
        self.now, self.last = 0, [0] * experts

    def use(self, ids: Collection[int]) -> None:
        self.now += 1
        for expert in ids:
            self.last[expert] = self.now

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        return sorted(candidates, key=self.last.__getitem__)[:count]


POLICIES: tuple[type[Policy], ...] = (LFRU, LRU)
