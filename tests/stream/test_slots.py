"""A layer's slots: random sequences against a simple model, and each rule by itself."""

import random
from collections import Counter

import pytest
from lru import LRU, POLICIES

from amoeba.stream.cache.slot_table import Plan, Policy, SlotsInUse, SlotTable
from selection import each_value_once


class Model:
    """What must hold of a table after every step, kept the slow way."""

    def __init__(self, slots: int, experts: int, policy: type[Policy]) -> None:
        self.table = SlotTable(slots, experts, policy())
        self.where: dict[int, int] = {}
        self.loading: set[int] = set()
        self.held: Counter[int] = Counter()

    def protected(self) -> set[int]:
        return {expert for expert in self.where if self.held[expert] or expert in self.loading}

    def take(self, plan: Plan, ids: list[int], before: set[int], *, hold: bool) -> None:
        assert not set(plan.evicted) & before, "evicted while in use or being loaded"
        assert not set(plan.evicted) & set(ids), "evicted what was asked for"
        assert plan.hits == {e: s for e, s in self.where.items() if e in ids and e not in self.loading and hold}
        assert plan.waiting == {e: s for e, s in self.where.items() if e in ids and e in self.loading and hold}
        for (_, slot), expert in zip(plan.loads, plan.evicted, strict=False):
            assert self.where[expert] == slot, "the n-th evicted left the slot of the n-th load"
        for expert in plan.evicted:
            del self.where[expert]
        for expert, slot in plan.loads:
            assert expert in ids and expert not in self.where
            assert slot not in self.where.values(), "two experts in one slot"
            self.where[expert] = slot
            self.loading.add(expert)
        if hold:
            self.held.update({*plan.hits, *plan.waiting, *(expert for expert, _ in plan.loads)})
        self.check()

    def check(self) -> None:
        table = self.table
        assert dict(table.slot_of) == self.where
        assert len(set(self.where.values())) == len(self.where) <= table.slots
        assert all(0 <= slot < table.slots for slot in self.where.values())
        assert {expert for expert in self.where if table.is_loading(expert)} == self.loading


@each_value_once()
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("slots", "experts"), [(1, 1), (1, 5), (4, 4), (7, 23), (12, 40)])
def test_random_sequences_keep_every_rule(policy, slots, experts):
    dice = random.Random(f"{policy.__name__} {slots} {experts}")
    model = Model(slots, experts, policy)
    table, requests, refused = model.table, [], 0
    for _ in range(800):
        action = dice.choice(
            ["request", "request", "some", "prefetch", "loaded", "loaded", "failed", "release", "release"]
        )
        ids = [dice.randrange(experts) for _ in range(dice.randint(0, slots))]
        before, state = model.protected(), (dict(model.where), set(model.loading))
        if action == "request":
            try:
                plan = table.request(ids)
            except SlotsInUse:
                refused += 1
                room = slots - len(before | (set(ids) & set(model.where)))
                assert len(set(ids) - set(model.where)) > room, "refused, but there was room"
                assert state == (dict(table.slot_of), model.loading), "refused, but changed"
                continue
            model.take(plan, ids, before, hold=True)
            assert set(plan.hits) | set(plan.waiting) | {expert for expert, _ in plan.loads} == set(ids)
            requests.append(list(dict.fromkeys(ids)))
        elif action == "some":
            plan = table.request_some(ids)
            model.take(plan, ids, before, hold=True)
            requests.append([*plan.hits, *plan.waiting, *(expert for expert, _ in plan.loads)])
        elif action == "prefetch":
            model.take(table.prefetch(ids), ids, before, hold=False)
        elif action == "release" and requests:
            released = requests.pop(dice.randrange(len(requests)))
            table.release(released)
            model.held.subtract(released)
        elif action in ("loaded", "failed") and model.loading:
            expert = dice.choice(sorted(model.loading))
            model.loading.discard(expert)
            getattr(table, action)(expert)
            if action == "failed":
                del model.where[expert]
                model.held[expert] = 0
                requests = [[each for each in held if each != expert] for held in requests]
        model.check()
    assert refused or slots == experts


def settle(table: SlotTable, ids: list[int]) -> Plan:
    plan = table.request(ids)
    for expert, _ in plan.loads:
        table.loaded(expert)
    table.release(ids)
    return plan


def test_hits_loads_and_evictions_are_told_apart():
    table = SlotTable(3, 10, LRU())
    assert settle(table, [4, 2]) == Plan({}, {}, [(4, 0), (2, 1)], [])
    assert settle(table, [2, 7]) == Plan({2: 1}, {}, [(7, 2)], [])
    assert settle(table, [5, 2]) == Plan({2: 1}, {}, [(5, 0)], [4])
    assert dict(table.slot_of) == {2: 1, 7: 2, 5: 0} and 7 in table and 4 not in table


def test_an_id_that_comes_twice_is_loaded_and_held_once():
    table = SlotTable(2, 10, LRU())
    assert table.request([3, 3, 5, 3]).loads == [(3, 0), (5, 1)]
    for expert in (3, 5):
        table.loaded(expert)
    table.release([3, 3, 5])
    assert table.request([3, 3]).hits == {3: 0}
    table.release([3])
    assert len(table.request([1, 2]).evicted) == 2, "nothing is held any more"


def test_a_failed_load_leaves_nothing_behind_and_can_be_tried_again():
    table = SlotTable(1, 10, LRU())
    table.request([3])
    table.failed(3)
    assert 3 not in table and not table.is_loading(3)
    with pytest.raises(RuntimeError, match="expert 3 was released, but no request holds it"):
        table.release([3])
    assert table.request([3]).loads == [(3, 0)]
    table.loaded(3)
    table.release([3])
    assert settle(table, [4]).evicted == [3]


@pytest.mark.parametrize("end", ["loaded", "failed"])
def test_the_end_of_a_load_that_never_began_is_an_error(end):
    table = SlotTable(2, 10, LRU())
    settle(table, [3])
    with pytest.raises(RuntimeError, match="expert 3 ended, but none had begun"):
        getattr(table, end)(3)


def test_a_release_without_a_hold_is_an_error_also_while_it_loads():
    table = SlotTable(2, 10, LRU())
    assert table.prefetch([3]).loads == [(3, 0)]
    with pytest.raises(RuntimeError, match="expert 3 was released"):
        table.release([3])


def test_more_experts_than_slots_are_refused_and_split_into_waves():
    table = SlotTable(3, 10, LRU())
    settle(table, [8, 9])
    with pytest.raises(ValueError, match=r"at most 3, the slots; got 5\. Split them with waves\(\)"):
        table.request([0, 1, 2, 8, 9])
    waves = table.waves([0, 1, 8, 2, 9, 1])
    assert waves == [[8, 9, 0], [1, 2]], "what is there comes first"
    assert [len(settle(table, wave).hits) for wave in waves] == [2, 0]
    assert table.waves([]) == []
    with pytest.raises(ValueError, match="slots: expected at least 1; got 0"):
        SlotTable(0, 10, LRU()).waves([1])


@pytest.mark.parametrize("expert", [-1, 10, 65535])
@pytest.mark.parametrize("how", ["request", "request_some", "prefetch"])
def test_an_id_that_is_no_expert_changes_nothing(how, expert):
    table = SlotTable(4, 10, LRU())
    settle(table, [9])
    with pytest.raises(ValueError, match=f"expert: expected 0 to 9; got {expert}"):
        getattr(table, how)([1, expert])
    assert dict(table.slot_of) == {9: 0}


def test_a_prefetch_takes_no_slot_of_the_latest_request_or_prefetch():
    table = SlotTable(4, 10, LRU())
    settle(table, [0, 1])
    settle(table, [2, 3])
    assert table.prefetch([3, 5]).evicted == [0], "3 is there"
    table.loaded(5)
    plan = table.prefetch([6, 7])
    assert (plan.loads, plan.evicted) == ([(6, 1)], [1]), "no room for 7: 2 and 3 were just used, 5 is expected"
    table.loaded(6)
    assert table.prefetch([7]) == Plan({}, {}, [], [])
    settle(table, [2, 3])
    assert table.prefetch([6, 7]).evicted == [5], "6 is expected again"
    settle(table, [2, 3])
    table.loaded(7)
    assert table.prefetch([5]).evicted == [7], "they were expected for a request that has been; of equals, by slot"


def test_what_was_prefetched_and_never_used_leaves_before_what_was_used():
    for policy in POLICIES:
        table = SlotTable(3, 10, policy())
        settle(table, [0, 1])
        table.prefetch([5])
        table.loaded(5)
        assert settle(table, [0, 4]).evicted == [5], policy.__name__


def test_where_all_experts_have_slots_ids_are_slots():
    table = SlotTable(6, 6, LRU())
    assert dict(table.request([4, 2]).loads) == {4: 4, 2: 2}
    table.failed(2)
    assert table.prefetch([5, 2, 0]).loads == [(5, 5), (2, 2), (0, 0)]


@pytest.mark.parametrize("slots", [-1, 11])
def test_slots_nobody_could_fill_are_refused(slots):
    with pytest.raises(ValueError, match="slots: expected 0 to 10, the number of experts"):
        SlotTable(slots, 10, LRU())
