"""Copies first, tables afterwards: the short way from a request to its copies gives what the long one gives."""

import random
from contextlib import closing
from ctypes import byref, c_int32

import pytest
import torch
from served_layers import Served, drawn_ids
from simulated_device import LiveDevice
from test_device_memory import E

from amoeba.stream.cache.slot_table import LFRU
from amoeba.stream.gpu import fast_path
from selection import each_value_once, quick

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU"),
    pytest.mark.skipif(fast_path.serving_library() is None, reason="no compiler"),
]


@pytest.fixture(params=["one by one", "at once"])
def copies(request, monkeypatch) -> None:
    if request.param == "at once":
        monkeypatch.setattr(LiveDevice, "copies_at_once", True)
        monkeypatch.setattr(fast_path, "LEAST_AT_ONCE", 0)


class NoCalls(LiveDevice):
    """One that has no calls by addresses: everything takes the long way."""

    def calls(self) -> None:
        return None


def tables(served: Served) -> list[tuple]:
    """Who is where on both tiers, who would leave, and what it cost."""
    cache = served.memory.cache
    layers = [
        (dict(here.top.slot_of), dict(here.host.slot_of), here.top._holds, here.host._holds) for here in cache._layers
    ]
    return [*layers, cache.counters, [dict(shown) for shown in served.memory.pool.shown]]


@each_value_once()
@quick(lambda slots, host_slots: (slots, host_slots) in ((4, E), (4, 5)))
@pytest.mark.parametrize(("slots", "host_slots", "tokens"), [(3, E, 1), (4, E, 2), (4, 5, 1), (3, 2, 1)])
@pytest.mark.usefixtures("copies")
def test_the_fast_path_gives_the_slots_and_the_tables_of_the_long_way(slots: int, host_slots: int, tokens: int) -> None:
    found = []
    for make in (LiveDevice, NoCalls):
        with closing(Served(3, slots, host_slots, tokens=tokens, device=make)) as served:
            served.capture()
            drawn = random.Random(slots)
            for _ in range(16):  # with repeats, so that passes hit too
                served.replay([[drawn.choice((0, 1, 2, drawn.randrange(E))) for _ in range(2 * tokens)] for _ in "ab"])
            served.ended()
            served.shown_as_it_is()
            found.append((served.seen, tables(served)))
            assert bool(served.device.quick) is (make is LiveDevice)
    assert found[0] == found[1]


@pytest.mark.usefixtures("copies")
def test_where_all_are_in_host_memory_every_miss_takes_the_fast_path() -> None:
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        served.memory.cache.restart_counters()
        served.replay([[0, 1], [0, 1]])  # takes the long way, since nothing was prepared
        served.ended()
        long, drawn = served.memory.cache.counters.from_host, random.Random(0)
        assert not served.device.quick
        for _ in range(6):
            served.replay(drawn_ids(drawn, 2, 2))
        served.ended()
        counters, parts = served.memory.cache.counters, 2
        assert served.device.quick == parts * (counters.from_host - long) > 0
        assert bool(served.device.calls_at_once) is served.device.copies_at_once
        assert counters.requested == 28 == counters.hits + counters.from_host
        assert sum(counters.misses_of_layer) == counters.from_host


def test_compiled_code_says_who_leaves_as_the_policy_does() -> None:
    library = fast_path.serving_library()
    drawn, policy = random.Random(0), LFRU()
    policy.begin(40)
    for step in range(300):
        policy.use(drawn.sample(range(40), 3))
        if step % 7:
            continue
        there = drawn.sample(range(40), 12)  # some of which were never used: of equals, the first place
        expert_in = (c_int32 * 14)(*there[:5], -1, *there[5:], -1)
        stays, wanted = drawn.sample(there, 4), drawn.randrange(1, 10)
        order, found = fast_path.order_of(policy, expert_in), (c_int32 * 14)()
        count = library.amoeba_first_to_leave(byref(order), wanted, (c_int32 * 4)(*stays), 4, found)
        expected = policy.coldest([expert for expert in there if expert not in stays], wanted)
        assert found[:count] == expected and count == min(wanted, 8)


def test_a_device_that_refuses_batched_copies_gets_single_ones(monkeypatch) -> None:
    monkeypatch.setattr(LiveDevice, "copies_at_once", True)
    monkeypatch.setattr(LiveDevice, "refuses_at_once", True)
    monkeypatch.setattr(fast_path, "LEAST_AT_ONCE", 0)
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        drawn = random.Random(0)
        for _ in range(6):
            served.replay(drawn_ids(drawn, 2, 2))
        served.ended()
        served.shown_as_it_is()
        assert served.device.calls_at_once == 1 and served.device.quick


def fill(served: Served) -> None:
    """Every expert comes by, so that all are in host memory, and no slot is free."""
    for layer in range(len(served.expert_TK)):
        with served.memory.pool.turn(layer), closing(served.memory.loads.acquire(layer, range(E))) as groups:
            for _ in groups:
                pass


@each_value_once()
@quick(lambda fails_at: fails_at != 2)
@pytest.mark.parametrize("fails_at", [1, 2, 4])
@pytest.mark.usefixtures("copies")
def test_a_quick_copy_that_fails_leaves_no_slot_that_holds_something_else(fails_at: int) -> None:
    with closing(Served(0, 3, E, layers=3)) as served:
        fill(served)
        served.capture()
        served.replay([[0, 1]] * 3)
        served.ended()
        served.replay_with_a_copy_that_fails(fails_at)
        assert served.device.quick >= fails_at
        served.wrong.clear()
        served.shown_as_it_is()
        drawn = random.Random(fails_at)
        for _ in range(6):
            served.replay(drawn_ids(drawn, 3, 2))
        served.ended()
        served.shown_as_it_is()
        for here in served.memory.cache._layers:
            assert not any(here.top._holds) and not any(here.host._holds) and not here.rising


@pytest.mark.parametrize("where", ["request", "loaded", "release"])
def test_an_interrupt_between_copies_and_tables_leaves_slots_right(where: str, monkeypatch) -> None:
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        served.replay([[0, 1]] * 2)
        served.ended()
        with monkeypatch.context() as patched:
            done = getattr(served.memory.cache, where)

            def interrupted(*arguments) -> None:
                done(*arguments)
                raise KeyboardInterrupt

            patched.setattr(served.memory.cache, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                served.replay([[5, 4]] * 2)
        assert served.device.quick
        served.wrong.clear()
        served.shown_as_it_is()
        for ids in ([[5, 4]] * 2, [[0, 1]] * 2, [[5, 2], [7, 3]]):
            served.replay(ids)
        served.ended()


def test_a_pass_outside_of_graphs_makes_the_next_question_take_the_long_way() -> None:
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        served.replay([[0, 1]] * 2)
        served.ended()
        with served.memory.pool.turn(0), closing(served.memory.loads.acquire(0, [5, 6])) as groups:
            for _ in groups:
                pass
        served.replay([[2, 3], [0, 1]])
        served.ended()
        assert not served.device.quick
        served.replay([[4, 3], [0, 1]])
        served.ended()
        assert served.device.quick
