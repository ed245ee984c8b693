"""Which expert of a layer is in which slot of a tier, and whose slot may be taken. No tensors, no I/O.

table = SlotTable(slots=12, experts=128, policy=LFRU())
plan = table.request([3, 5, 9])     # Plan(hits={3: 0}, waiting={}, loads=[(5, 4), (9, 7)], evicted=[40, 2])
table.loaded(5)                     # the copy is there
table.release([3, 5, 9])            # readers are done

From `request` to `release` an expert is held, from its load to `loaded` it is being loaded; neither is ever evicted.
Two requests may hold the same expert. The running engine and the simulator use this same object. It is not
thread-safe: one lock around a layer's tables is enough.

The least frequently and recently used expert is evicted:

    policy = LFRU()
    policy.begin(experts=128)
    policy.use([3, 5, 9])                     # one pass over the layer used these
    policy.coldest([3, 5, 9, 40], count=1)    # [40]: the first of the four to be evicted

A policy also remembers experts that are not cached: one that comes back is not a stranger. What it remembers are arrays
that stay where they are, so that compiled code can rank by them too (gpu/csrc/ranking.h).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from amoeba.core.errors import bad_value

_EMPTY = -1


class SlotsInUse(RuntimeError):
    """There are enough slots, but others hold them: wait for a `release` or a `loaded`, then request again."""


class Plan(NamedTuple):
    """hits: there and whole. waiting: an earlier request or prefetch is loading them. loads: yours to load."""

    hits: dict[int, int]  # expert -> slot
    waiting: dict[int, int]  # expert -> slot
    loads: list[tuple[int, int]]  # (expert, slot)
    evicted: list[int]  # experts; the n-th left the slot of the n-th load


class SlotTable:
    def __init__(self, slots: int, experts: int, policy: Policy) -> None:
        if not 0 <= slots <= experts:
            raise bad_value("slots", f"0 to {experts}, the number of experts", slots, "more slots would stay empty")
        self.slots, self.experts = slots, experts
        self.policy = policy
        policy.begin(experts)
        self._slot_of: dict[int, int] = {}
        self._expert_in = [_EMPTY] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._holds = [0] * experts  # by requests, and one by the load
        self._loading: set[int] = set()
        self._recent: Collection[int] = ()  # of the latest request
        self._expected: set[int] = set()  # by prefetches since then

    @property
    def slot_of(self) -> Mapping[int, int]:
        """Expert -> slot, of those that are being loaded too."""
        return MappingProxyType(self._slot_of)

    def __contains__(self, expert: int) -> bool:
        """Whether it is there or on its way."""
        return expert in self._slot_of

    def is_loading(self, expert: int) -> bool:
        return expert in self._loading

    def request(self, ids: Iterable[int], computed: Sequence[int] = ()) -> Plan:
        """All of them, held until `release`. ValueError where there are not that many slots (see `waves`), SlotsInUse
        where others hold too many; both leave everything as it was. An id that comes twice is held once.
        computed: used by the same pass without a slot."""
        slot_of = self._slot_of
        ids = ids if isinstance(ids, Sequence) else list(ids)
        try:
            hits = {expert: slot_of[expert] for expert in ids}
        except KeyError:
            return self._request_with_misses(dict.fromkeys(ids), computed)
        holds = self._holds
        for expert in hits:
            holds[expert] += 1
        self.policy.use([*hits, *computed])
        self._note_use(hits)
        return self._split(hits, [], [])

    def use(self, ids: Sequence[int]) -> bool:
        """As a request of distinct experts that is released at once. False: nothing was done, some are not there."""
        slot_of = self._slot_of
        if self._loading or not all(expert in slot_of for expert in ids):
            return False
        self.policy.use(ids)
        self._note_use(ids)
        return True

    @property
    def is_full(self) -> bool:
        """And nothing is held or being loaded: who comes next evicts the coldest."""
        return not (self._free or self._loading or any(self._holds))

    def request_some(self, ids: Iterable[int]) -> Plan:
        """As many of them as there is room for, those that are there first; the others are not in the plan."""
        distinct = dict.fromkeys(ids)
        return self._take(distinct, distinct, all_or_none=False)

    def prefetch(self, ids: Iterable[int]) -> Plan:
        """Loads of as many as there is room for, the first first. They are not held, and take no slot of an expert that
        the latest request used or that is expected since. Experts that are there already are expected, not loaded."""
        expected = dict.fromkeys(ids)
        missing = {expert: None for expert in expected if expert not in self._slot_of}
        spared = self._expected.union(self._recent, expected)
        plan = self._take(missing, spared, all_or_none=False)
        for expert, _ in plan.loads:
            self._holds[expert] -= 1
        self._expected.update(expected)
        return plan

    def waves(self, ids: Iterable[int]) -> list[list[int]]:
        """The distinct ids in groups that fit, those that are there first, so that none is evicted before its use."""
        if not self.slots:
            raise bad_value("slots", "at least 1", 0, "give the layer a larger budget")
        distinct = sorted(dict.fromkeys(ids), key=lambda expert: expert not in self._slot_of)
        return [distinct[first : first + self.slots] for first in range(0, len(distinct), self.slots)]

    def loaded(self, expert: int) -> None:
        self._end_load(expert)
        self._holds[expert] -= 1

    def failed(self, expert: int) -> None:
        """Its load ended without a copy: its slot is free, and it is no longer held (so it is not released)."""
        self._end_load(expert)
        self._holds[expert] = 0
        slot = self._slot_of.pop(expert)
        self._expert_in[slot] = _EMPTY
        self._free.append(slot)

    def release(self, ids: Iterable[int]) -> None:
        """Ends one request's hold on each of the distinct ids."""
        holds, loading = self._holds, self._loading
        for expert in dict.fromkeys(ids):
            if expert not in self._slot_of or holds[expert] <= (expert in loading):
                raise RuntimeError(f"expert {expert} was released, but no request holds it")
            holds[expert] -= 1

    def _request_with_misses(self, distinct: dict[int, None], computed: Sequence[int]) -> Plan:
        if len(distinct) > self.slots:
            remedy = "split them with waves(), or give the layer a larger budget"
            raise bad_value("experts of one request", f"at most {self.slots}, the slots", len(distinct), remedy)
        plan = self._take(distinct, distinct, all_or_none=True)
        self.policy.use([*distinct, *computed])
        self._note_use(distinct)
        return plan

    def _take(self, distinct: dict[int, None], spared: Collection[int], all_or_none: bool) -> Plan:
        slot_of, holds, free = self._slot_of, self._holds, self._free
        present = {expert: slot_of[expert] for expert in distinct if expert in slot_of}
        missing = [expert for expert in distinct if expert not in slot_of]
        for expert in missing:
            if not 0 <= expert < self.experts:
                raise bad_value("expert", f"0 to {self.experts - 1}", expert, "leave out ids without an expert")
        evicted: list[int] = []
        if len(missing) > len(free):
            candidates = [each for each in self._expert_in if each != _EMPTY and not holds[each] and each not in spared]
            room = len(free) + len(candidates)
            if len(missing) > room:
                if all_or_none:
                    raise SlotsInUse(f"{len(missing)} slots are needed, {room} of {self.slots} are not in use")
                missing = missing[:room]
            evicted = self.policy.coldest(candidates, len(missing) - len(free))
        for expert in evicted:
            free.append(slot_of.pop(expert))
        for expert in present:
            holds[expert] += 1
        loads = []
        for expert in missing:
            slot = self._free_slot(expert)
            slot_of[expert], self._expert_in[slot] = slot, expert
            holds[expert] = 2  # the request's and the load's
            self._loading.add(expert)
            loads.append((expert, slot))
        # the last slot that became free is the first that is taken
        return self._split(present, loads, evicted[::-1])

    def _free_slot(self, expert: int) -> int:
        if self.slots < self.experts:
            return self._free.pop()
        self._free.remove(expert)  # where all have slots, each has that of its number: ids are slots then
        return expert

    def _split(self, present: dict[int, int], loads: list[tuple[int, int]], evicted: list[int]) -> Plan:
        loading = self._loading
        if not loading or not any(expert in loading for expert in present):
            return Plan(present, {}, loads, evicted)
        waiting = {expert: slot for expert, slot in present.items() if expert in loading}
        return Plan({each: slot for each, slot in present.items() if each not in loading}, waiting, loads, evicted)

    def _note_use(self, ids: Collection[int]) -> None:
        self._recent = ids
        if self._expected:
            self._expected.clear()

    def _end_load(self, expert: int) -> None:
        if expert not in self._loading:
            raise RuntimeError(f"the load of expert {expert} ended, but none had begun")
        self._loading.discard(expert)


# Counts are rescaled by this power of two, which costs no accuracy, before they leave the range of a float.
_DOUBLINGS = 512


class Policy(ABC):
    @abstractmethod
    def begin(self, experts: int) -> None:
        """Nothing was used yet."""

    @abstractmethod
    def use(self, ids: Collection[int]) -> None:
        """One pass used these distinct experts."""

    @abstractmethod
    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        """The first to be evicted comes first; of equals, the one that comes first in `candidates`."""


class LFRU(Policy):
    """The expert with the lowest uses / (passes since the last use)² is evicted. A use is worth half as much after
    `half_life` more passes, so that the favourites of a past subject do not stay.

    All counts fade at the same rate, so instead of lowering all of them at every pass, a use adds more than the one
    before it. The rule and its half-life come from replaying traces, see dev/log/streaming.md.

    now: passes; uses, last: of each expert its uses, and the latest pass that used it.
    """

    half_life = 128

    def begin(self, experts: int) -> None:
        self.now, self.uses, self.last = array("q", [0]), array("d", [0.0]) * experts, array("q", [0]) * experts

    def use(self, ids: Collection[int]) -> None:
        self.now[0] += 1
        if self.now[0] == _DOUBLINGS * self.half_life:
            self._rescale()
        now, uses, last = self.now[0], self.uses, self.last
        worth = 2.0 ** (now / self.half_life)
        for expert in ids:
            uses[expert] += worth
            last[expert] = now

    def coldest(self, candidates: Sequence[int], count: int) -> list[int]:
        # For every miss, so it has to be quick: this takes two thirds of the time of heapq with a key.
        after, uses, last = self.now[0] + 1, self.uses, self.last
        scores = [uses[expert] / ((age := after - last[expert]) * age) for expert in candidates]
        return [candidates[index] for index in sorted(range(len(scores)), key=scores.__getitem__)[:count]]

    def _rescale(self) -> None:
        self.last[:] = array("q", [last - self.now[0] for last in self.last])
        self.uses[:] = array("d", [uses * 2.0**-_DOUBLINGS for uses in self.uses])
        self.now[0] = 0
