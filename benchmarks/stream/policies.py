"""Eviction judged on a recorded trace: LFRU, which the engine has, against LRU, LFU and the best that is possible.

    amoeba generate runs/mine/model.store "..." --ram 1MiB --record run.trace
    python -m benchmarks.stream.policies run.trace --budget 12.5%,25%,50% --warm-up 64

The best possible evicts the expert whose next use is the furthest away: it knows the future, and shows how much any
other rule could gain at most. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from amoeba.stream.cache.expert_cache import ExpertCache
from amoeba.stream.cache.slot_table import LFRU, Policy
from amoeba.stream.cache.trace import Trace
from benchmarks.stream.cache import Setting, choose_budgets, load_trace, settle
from benchmarks.stream.synthetic import measure_locality


class LRU(Policy):
    def begin(self, experts: int) -> None:
        self.now, self.last = 0, [0] * experts

    def use(self, ids: Collection[int]) -> None:
        self.now += 1
        for expert in ids:
            self.last[expert] = self.now

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        return sorted(candidates, key=self.last.__getitem__)[:count]


class LFU(Policy):
    def begin(self, experts: int) -> None:
        self.uses: Counter[int] = Counter()

    def use(self, ids: Collection[int]) -> None:
        self.uses.update(ids)

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        return sorted(candidates, key=self.uses.__getitem__)[:count]


class Best(Policy):
    """Of one layer, whose passes it is told before. now: which of them is under way."""

    def __init__(self, passes: Sequence[Sequence[int]]) -> None:
        self.now, self.uses_of = 0, dict[int, list[int]]()
        for number, ids in reversed(list(enumerate(passes))):
            for expert in ids:
                self.uses_of.setdefault(expert, []).append(number)  # the next one last

    def begin(self, experts: int) -> None:
        pass

    def use(self, ids: Collection[int]) -> None:
        pass

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        return sorted(candidates, key=self._next_use, reverse=True)[:count]

    def _next_use(self, expert: int) -> float:
        uses = self.uses_of.get(expert, [])
        while uses and uses[-1] <= self.now:
            uses.pop()
        return uses[-1] if uses else float("inf")


def hit_rates(trace: Trace, setting: Setting, warm_up: int = 0) -> dict[str, float]:
    """By policy, over all layers, after this many tokens. Each layer is a cache of its own, as it is in the engine."""
    found: dict[str, float] = {}
    for name, kind in (("LFRU", LFRU), ("LRU", LRU), ("LFU", LFU), ("best possible", None)):
        hits = asked = 0
        for layer, shape in enumerate(trace.layers):
            passes = [each.distinct(layer) for each in trace.passes]
            best, seen = Best(passes), 0
            policy: Any = (lambda best=best: best) if kind is None else kind
            cache = ExpertCache([shape], [setting.top[layer]], policy=policy)
            for best.now, (each, ids) in enumerate(zip(trace.passes, passes, strict=True)):
                for wave in cache.waves(0, ids):
                    misses = len(settle(cache, 0, wave).from_host)
                    if seen >= warm_up:
                        hits, asked = hits + len(wave) - misses, asked + len(wave)
                seen += each.tokens
        found[name] = hits / asked if asked else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", default="12.5%,25%,50%", help="shares of each layer's experts")
    parser.add_argument("--warm-up", type=int, default=0, help="initial tokens that are not counted")
    given = parser.parse_args()
    trace, name = load_trace(given.trace, None, None)
    rows = {
        setting.name: hit_rates(trace, setting, given.warm_up)
        for setting in choose_budgets(trace, given.budget, None, None)
    }
    for budget, rates in rows.items():
        print(f"{budget:>6}  " + "  ".join(f"{policy} {100 * rate:.1f} %" for policy, rate in rates.items()))
    locality = measure_locality(trace)._asdict()
    print(json.dumps({"trace": name, "tokens": trace.tokens, "locality": locality, "hit_rates": rows}))


if __name__ == "__main__":
    main()
