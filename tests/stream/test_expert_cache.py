"""Two tiers over a disk: a played machine whose memory is looked at, and each rule by itself."""

import random
from dataclasses import replace

import pytest
from lru import LRU, POLICIES

from amoeba.stream.cache.expert_cache import Counters, ExpertCache, Fetch
from amoeba.stream.cache.slot_table import Policy, SlotsInUse
from amoeba.stream.cache.trace import LayerShape
from benchmarks.stream import cache as replayed
from selection import each_value_once


class Machine:
    """One layer of a cache, and what really is in its slots; copies end late and in any order."""

    def __init__(self, experts: int, top: int, host: int | None, policy: type[Policy], dice: random.Random) -> None:
        shape = LayerShape(experts, 1, 100)
        self.cache = ExpertCache([shape], [top], None if host is None else [host], policy)
        self.top: dict[int, int | None] = {}
        self.host: dict[int, int | None] = {expert: expert for expert in range(experts)} if host is None else {}
        self.down: dict[int, tuple[int, int | None]] = {}  # expert -> host slot, what was in the slot that it left
        self.up: dict[int, tuple[str, int | None, int]] = {}
        self.held: list[list[int]] = []
        self.dice, self.failures = dice, 0

    def begin(self, fetch: Fetch) -> None:
        for expert, slot, host_slot in fetch.writes:
            assert self.top[slot] == expert, "writes back what is not there"
            self.down[expert] = (host_slot, self.top[slot])
            self.host[host_slot] = None
        for expert, host_slot, slot in fetch.from_host:
            assert expert in self.down or expert in self.up or self.host[host_slot] == expert
            self.up[expert] = ("host", host_slot, slot)
            self.top[slot] = None
        for expert, into, slot in fetch.from_disk:
            self.up[expert] = ("disk", into, slot)
            self.top[slot] = None
            if into is not None:
                self.host[into] = None
        for expert, slot in fetch.hits.items():
            assert self.top[slot] == expert, "a hit on something else"
        assert all(expert in self.up for expert in fetch.waiting)

    def end_one(self) -> None:
        if self.down and self.dice.random() < 0.5:
            expert = self.dice.choice(sorted(self.down))
            host_slot, content = self.down.pop(expert)
            if self.dice.random() < 0.1:
                self.cache.dropped(0, expert)
                if expert in self.up:
                    self.fail(expert)
                return
            self.host[host_slot] = content
            self.cache.arrived(0, expert)
        elif self.up:
            expert = self.dice.choice(sorted(self.up))
            source, host_slot, slot = self.up[expert]
            if self.dice.random() < 0.1:
                self.fail(expert)
                return
            if source == "host" and expert in self.down:
                return  # still on its way down
            del self.up[expert]
            if source == "disk" and host_slot is not None:
                self.host[host_slot] = expert
                if self.dice.random() < 0.5:
                    self.cache.arrived(0, expert)
            elif source == "host":
                assert self.host[host_slot] == expert, "its host slot was given away before it was copied up"
            self.top[slot] = expert
            self.cache.loaded(0, expert)

    def fail(self, expert: int) -> None:
        del self.up[expert]
        self.failures += 1
        self.cache.failed(0, expert)
        self.held = [[each for each in ids if each != expert] for ids in self.held]


@each_value_once()
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("top", "host"), [(4, 6), (4, 1), (6, 0), (5, 20), (3, None), (1, 2)])
def test_whatever_ends_when_every_slot_holds_what_the_cache_says(top, host, policy):
    experts, dice = 20, random.Random(f"{policy.__name__} {top} {host}")
    machine = Machine(experts, top, host, policy, dice)
    cache, asked, prefetched = machine.cache, 0, 0
    for _ in range(1500):
        # some are more popular, so that every path is taken
        ids = list({min(dice.randrange(experts), dice.randrange(experts)) for _ in range(dice.randint(1, top))})
        action = dice.random()
        if action < 0.2:
            try:
                fetch = cache.request(0, ids)
            except SlotsInUse:
                continue
            machine.begin(fetch)
            machine.held.append(ids)
            asked += len(ids)
        elif action < 0.3:
            machine.begin(expected := cache.prefetch(0, ids))
            prefetched += len(expected.from_host) + len(expected.from_disk)
        elif action < 0.5 and machine.held:
            cache.release(0, machine.held.pop())
        else:
            machine.end_one()
    counters = cache.counters
    assert counters.requested == asked
    assert asked == counters.hits + counters.waited + counters.from_host + counters.from_disk
    assert counters.misses_of_layer == [counters.from_host + counters.from_disk]
    loads = counters.from_host + counters.from_disk + prefetched
    assert counters.host_bytes + counters.disk_bytes == 100 * loads
    assert machine.failures and counters.hits
    # reads come before writes, so a host of one slot has none left for these
    assert bool(counters.written_bytes) == (host not in (0, 1, None, experts))


def settle(cache: ExpertCache, ids: list[int], layer: int = 0) -> Fetch:
    return replayed.settle(cache, layer, ids)


def lru(top: int, host: int | None) -> ExpertCache:
    return ExpertCache([LayerShape(10, 2, 100)], [top], None if host is None else [host], LRU)


def test_what_is_where_and_what_is_written_where():
    cache = lru(2, 3)
    assert settle(cache, [0, 1]) == Fetch({}, {}, [], [], [(0, 0, 0), (1, 1, 1)])
    assert settle(cache, [0, 2]) == Fetch({0: 0}, {}, [], [], [(2, 2, 1)]), "1 leaves, and has a copy on the host"
    # The host is full: it gives up its copy of 0, which the top tier has too. 2 leaves and has a copy.
    assert settle(cache, [0, 3]) == Fetch({0: 0}, {}, [], [], [(3, 0, 1)])
    # 0 leaves without a copy, so it is written back, over the copy of 3 that the top tier has too.
    assert settle(cache, [3, 1]) == Fetch({3: 1}, {}, [(0, 0, 0)], [(1, 1, 0)], [])
    assert settle(cache, [0, 2]).from_disk == [], "four experts on two and three slots"


def test_of_the_copies_on_the_host_the_hottest_gives_its_place_up_first():
    cache = lru(3, 3)
    settle(cache, [0, 1, 2])
    settle(cache, [2])
    settle(cache, [1])
    # 0 leaves the top tier. Of 1 and 2, which are on both tiers, 1 will stay on the top for longer.
    assert settle(cache, [3]).from_disk == [(3, 1, 0)]


def test_with_all_experts_in_host_memory_nothing_is_written():
    cache = lru(2, None)
    assert settle(cache, [7, 4]).from_host == [(7, 7, 0), (4, 4, 1)]
    assert settle(cache, [7, 5]) == Fetch({7: 0}, {}, [], [(5, 5, 1)], [])
    with pytest.raises(RuntimeError, match="where all experts are"):
        cache.arrived(0, 5)
    with pytest.raises(RuntimeError, match="expert 5 was dropped, but was not being written back"):
        cache.dropped(0, 5)


def test_without_a_host_tier_everything_comes_from_the_disk_by_no_slot():
    cache = lru(2, 0)
    assert settle(cache, [7, 4]).from_disk == [(7, None, 0), (4, None, 1)]
    assert settle(cache, [5]) == Fetch({}, {}, [], [], [(5, None, 0)])


def test_counters_begin_anew():
    cache = lru(2, 3)
    settle(cache, [0, 1])
    cache.count_tokens(1)
    assert (cache.restart_counters().from_disk, cache.counters) == (2, Counters(misses_of_layer=[0]))
    settle(cache, [0, 1])
    assert cache.counters.hits == cache.counters.requested == 2


def test_a_prefetch_evicts_nothing_that_the_latest_request_used():
    cache = lru(4, None)
    settle(cache, [8, 9])
    settle(cache, [0, 1])
    fetch = cache.prefetch(0, [5, 6, 7])
    assert [expert for expert, _, _ in fetch.from_host] == [5, 6], "no room for 7 beside 0 and 1"
    for expert in (5, 6):
        cache.loaded(0, expert)
    assert settle(cache, [0, 1]).from_host == []
    assert settle(cache, [5, 7]).hits.keys() == {5}
    assert (cache.counters.requested, cache.counters.hits) == (8, 3)


def test_layers_do_not_touch_each_other():
    layers = [LayerShape(10, 2, 100), LayerShape(4, 1, 7)]
    cache = ExpertCache(layers, [2, 1], [3, 0])
    settle(cache, [1, 2], layer=0)
    settle(cache, [3], layer=1)
    assert settle(cache, [1, 2], layer=0).hits == {1: 0, 2: 1}
    assert cache.counters.misses_of_layer == [2, 1]
    assert cache.counters.disk_bytes == 207
    assert cache.waves(1, [3, 0, 1]) == [[3], [0], [1]]


def test_rates_and_the_floor_follow_from_the_counters():
    counters = Counters(
        tokens=10, requested=100, hits=80, from_host=15, from_disk=5, host_bytes=1500, disk_bytes=500, written_bytes=400
    )
    assert counters.top_hit_rate == 0.8 and counters.host_hit_rate == 0.75
    assert counters.per_token(counters.disk_bytes) == 50
    assert counters.floor_seconds(link=100, disk=1000) == 2.0, "what comes from the disk crosses the link too"
    assert counters.floor_seconds(link=1000, disk=10) == 5.0
    assert replace(counters, written_bytes=5000).floor_seconds(link=100, disk=1000) == 5.0, "copies down take time too"
    assert Counters().top_hit_rate == Counters().host_hit_rate == Counters().floor_seconds(1, 1) == 0


def test_slots_for_another_number_of_layers_are_an_error():
    with pytest.raises(ValueError, match="host: expected slots of 2 layers; got 1"):
        ExpertCache([LayerShape(10, 2)] * 2, [2, 2], [1])
