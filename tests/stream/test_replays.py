"""Passes inside a graph wait for their experts on the device, and the host serves them: right slots at any speed.

E experts · K experts per token

The device is simulated by threads (simulated_device.LiveDevice), a graph by a list of launches, and Triton's
interpreter runs the kernel that waits. What reads the slots compares their bytes with the store's.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import closing
from ctypes import byref, c_int32
from types import SimpleNamespace

import pytest
import torch
from simulated_device import LiveDevice, LiveGraph
from test_device_memory import E, Layers
from torch import Tensor

from amoeba.replays import CannotCapture
from amoeba.stream.gpu import fast_path
from amoeba.stream.gpu.long_way import load
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.policies import POLICIES, make_policy
from amoeba.stream.simulate import replay
from amoeba.stream.synthetic import Locality, synthetic_trace
from amoeba.stream.trace import LayerShape
from selection import each_value_once, quick

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU")

IDS = 16


class Served:
    """A graph of one pass over each layer; each replay is told its ids."""

    def __init__(
        self,
        seed: int,
        slots: int | list[int],
        host_slots: int,
        layers: int = 2,
        top_k: int = 2,
        tokens: int = 1,
        device: type[LiveDevice] = LiveDevice,
        store=None,
        **options,
    ) -> None:
        self.device, self.store = device(seed, **options), Layers(layers, seed) if store is None else store
        each = [slots] * layers if isinstance(slots, int) else slots
        self.memory = DeviceMemory(self.store, self.device, each, [host_slots] * layers, IDS)
        self.memory.replays.channel.limit = 20.0
        self.wrong: list[str] = []
        self.graph = LiveGraph(self.device)
        self.expert_TK = [torch.zeros(tokens, top_k, dtype=torch.int64) for _ in range(layers)]
        self.seen: list[list[int]] = []

    def capture(self, layers: list[int] | None = None) -> None:
        replays = self.memory.replays
        with replays.rehearsing():
            for layer, ids in enumerate(self.expert_TK):
                replays.rehearse(layer, ids)
        with replays.capturing() as self.passes, self.graph:
            for layer in layers or range(len(self.expert_TK)):
                self._look(layer, replays.slots_of(layer, self.expert_TK[layer]))

    def _look(self, layer: int, slot_TK: Tensor) -> None:
        slots = self.memory.layers[layer].slots

        def look() -> None:
            asked, found = self.expert_TK[layer].flatten().tolist(), slot_TK.flatten().tolist()
            self.seen.append(found)
            for expert, slot in zip(asked, found, strict=True):
                if not 0 <= expert < E:
                    continue
                if slot < 0:
                    self.wrong.append(f"layer {layer}: expert {expert} has no slot")
                    continue
                up, down = slots.gate_up_EJH[slot], slots.down_EHI[slot]
                if not (bool((up == expert + 1 + 100 * layer).all()) and bool((down == expert + 1).all())):
                    self.wrong.append(f"slot {slot} of layer {layer} is not expert {expert}")

        self.device.launch(look)

    def replay(self, ids: list[list[int]]) -> None:
        def launch() -> None:
            for target, row in zip(self.expert_TK, ids, strict=True):
                given = torch.tensor(row).view(target.shape)
                self.device.launch(lambda target=target, given=given: target.copy_(given))
            self.graph.replay()

        self.memory.replays.replay(self.passes, launch)

    def ended(self) -> None:
        """The host waits for all passes, as for their tokens."""
        self.device.record(self.device.compute).wait()
        self.memory.replays.check()

    def shown_as_it_is(self) -> None:
        """The map on the device is what the host believes it is, and the slots hold it."""
        self.device.record(self.device.compute).wait()
        for layer in range(len(self.expert_TK)):
            found = {e: slot for e, slot in enumerate(self.memory.export.slot_E(layer).tolist()) if slot >= 0}
            assert found == self.memory._shown[layer]
            self.memory.device.record(self.device.copies).wait()
            for expert, slot in found.items():
                assert bool((self.memory.layers[layer].slots.gate_up_EJH[slot] == expert + 1 + 100 * layer).all())

    def close(self) -> None:
        self.memory.close()
        assert not self.wrong, self.wrong[0]


def drawn_ids(drawn: random.Random, layers: int, count: int) -> list[list[int]]:
    return [drawn.sample(range(E), count) for _ in range(layers)]


@quick(lambda slots, host_slots: host_slots < 3 or slots == 3)
@pytest.mark.parametrize(("slots", "host_slots"), [(2, 0), (2, 3), (3, E), (5, 2), (E - 1, 0)])
def test_every_pass_finds_its_experts_at_any_speed(slots: int, host_slots: int) -> None:
    for seed in range(2):
        with closing(Served(seed, slots, host_slots)) as served:
            served.store.slow = seed == 1
            served.capture()
            drawn = random.Random(seed)
            for _ in range(6):
                served.replay(drawn_ids(drawn, 2, 2))
            served.ended()
            served.shown_as_it_is()
            assert len(served.seen) == 12


@quick(lambda host_slots: host_slots == 2)
@pytest.mark.parametrize("host_slots", [E, 2], ids=["all in host memory", "over a disk"])
def test_captured_passes_hit_as_often_as_the_simulator_says(host_slots: int) -> None:
    with closing(Served(0, 4, host_slots)) as served:
        served.capture()
        shape = LayerShape(E, 2, served.store.expert_bytes(0))
        trace = synthetic_trace(Locality(next_token=0.45, within_window=0.95), [shape, shape], 40)
        for each in trace.passes:
            served.replay([each.distinct(layer) for layer in range(2)])
        served.ended()
        measured = served.memory.cache.counters
    simulated = replay(trace, [4, 4], [host_slots] * 2)
    assert measured.requested == simulated.requested and measured.tokens == simulated.tokens
    assert abs(measured.top_hit_rate - simulated.top_hit_rate) <= 0.02
    assert abs(measured.host_hit_rate - simulated.host_hit_rate) <= 0.05  # of few


def test_a_batch_of_tokens_shares_experts_and_sentinels_ask_for_nothing() -> None:
    with closing(Served(0, 6, 2, tokens=3)) as served:
        served.capture()
        for ids in ([0, 1, 0, 1, 1, 0], [2, 3, 4, 5, 6, 7], [2, 7, 7, 2, 0, 1], [-1, 3, E, 3, 3, 4], [-1] * 6):
            served.replay([ids, ids[::-1]])
        served.ended()
        assert served.seen[-1] == [-1] * 6 and served.seen[-3].count(-1) == 2


def test_a_pass_whose_experts_are_there_is_not_waited_for_and_copies_nothing() -> None:
    with closing(Served(0, 4, 0)) as served:
        served.capture()
        served.replay([[1, 2], [3, 4]])
        served.ended()
        before = served.device.copied, served.device.words
        for _ in range(3):
            served.replay([[2, 1], [4, 3]])
        served.ended()
        assert (served.device.copied, served.device.words) == before
        counters = served.memory.cache.counters
        assert (counters.tokens, counters.requested, counters.hits) == (4, 16, 12)


def test_layers_with_all_of_their_experts_never_ask() -> None:
    with closing(Served(0, [E, 3], 0)) as served:
        served.capture()
        assert served.passes.layers == [1]
        served.replay([[7, 2], [3, 4]])
        served.ended()
        assert served.seen[0] == [7, 2]


def test_passes_inside_and_outside_of_graphs_take_turns() -> None:
    for seed in range(2):
        with closing(Served(seed, 3, 2)) as served:
            served.capture()
            drawn, memory = random.Random(seed), served.memory
            for number in range(8):
                served.replay(drawn_ids(drawn, 2, 2))
                layer = number % 2
                if number % 3:
                    with memory.turn(layer), closing(memory.lend(layer, drawn.sample(range(E), 3))) as groups:
                        for slot_of in groups:
                            ids = torch.tensor([[*slot_of]])
                            served.device.launch(lambda: None)
                            slots = torch.tensor([[*slot_of.values()]])
                            check(served, layer, ids, slots)
                if number % 4 == 1:
                    memory.prefetch(layer, drawn.sample(range(E), 3))
            served.ended()
            served.shown_as_it_is()


def check(served: Served, layer: int, ids: Tensor, slots: Tensor) -> None:
    up = served.memory.layers[layer].slots.gate_up_EJH

    def look() -> None:
        for expert, slot in zip(ids[0].tolist(), slots[0].tolist(), strict=True):
            if not bool((up[slot] == expert + 1 + 100 * layer).all()):
                served.wrong.append(f"slot {slot} of layer {layer} is not expert {expert}, outside of a graph")

    served.device.launch(look)


def test_a_layer_that_is_passed_over_twice() -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture([0, 0])
        drawn = random.Random(0)
        for _ in range(5):
            served.replay(drawn_ids(drawn, 2, 2))
        served.ended()
        with pytest.raises(CannotCapture, match="more than once"):
            served.capture([0, 0, 0])


def test_serials_wrap_as_32_bits_do() -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        served.ended()  # the rehearsal
        channel = served.memory.replays.channel
        channel.serial = 2**31 - 4
        channel._state.fill_(2**31 - 4)
        drawn = random.Random(0)
        for _ in range(5):
            served.replay(drawn_ids(drawn, 2, 2))
        served.ended()


def test_who_has_too_few_slots_is_told_so() -> None:
    with (
        closing(Served(0, 1, 0)) as served,
        pytest.raises(CannotCapture, match=r"1 token may ask for 2 experts.*1 slots"),
    ):
        served.capture()


def test_what_is_recorded_is_not_captured() -> None:
    with closing(Served(0, 2, 0)) as served:
        served.memory.recorder = object()
        with pytest.raises(CannotCapture, match="recorded"):
            served.capture()
        served.memory.recorder = None
        served.capture()
        served.memory.recorder = object()
        with pytest.raises(RuntimeError, match="begin to record before"):
            served.replay([[0, 1], [0, 1]])
        served.memory.recorder = None


# --- faults -----------------------------------------------------------------------------------------------------------


def test_after_a_failed_read_nothing_hangs_and_the_next_try_is_right() -> None:
    for seed in (0, 2):
        with closing(Served(seed, 3, 1, layers=3)) as served:
            served.capture()
            served.replay([[0, 1]] * 3)
            served.store.failing = {(seed, 5)}
            with pytest.raises(OSError, match="expert 5 cannot be read"):
                served.replay([[5, 4]] * 3)
            assert served.device.compute.done == served.device.compute.enqueued, "the device still waits"
            served.wrong.clear()
            served.shown_as_it_is()
            served.store.failing = set()
            for ids in ([[5, 4]] * 3, [[0, 1]] * 3, [[5, 2], [5, 3], [5, 6]]):
                served.replay(ids)
            served.ended()


@pytest.mark.parametrize("fails_at", [1, 9])
def test_after_a_failed_copy_nothing_hangs_and_the_next_try_is_right(fails_at: int) -> None:
    with closing(Served(0, 3, E, layers=3)) as served:
        served.capture()
        served.replay([[0, 1]] * 3)
        served.ended()
        served.device.fails_at = served.device.copied + fails_at
        with pytest.raises(RuntimeError, match=r"a copy failed|CUDA error 700"):
            served.replay([[5, 4]] * 3)
        served.wrong.clear()
        served.shown_as_it_is()
        for ids in ([[5, 4]] * 3, [[0, 1]] * 3):
            served.replay(ids)
        served.ended()


def test_an_interrupt_in_the_middle_of_serving_lets_the_device_go_on(monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        with monkeypatch.context() as patched:
            patched.setattr("amoeba.stream.gpu.serving.load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                served.replay([[0, 1], [2, 3]])
        served.wrong.clear()
        served.replay([[0, 1], [2, 3]])
        served.ended()


@pytest.mark.parametrize("when", ["launch", "behind it"])
def test_an_interrupt_around_the_launch_leaves_both_sides_counting_alike(when: str, monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        with monkeypatch.context() as patched:
            if when == "launch":
                patched.setattr(served.graph, "replay", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            else:
                patched.setattr(
                    served.memory.replays.serving, "serve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
                )
            with pytest.raises(KeyboardInterrupt):
                served.replay([[0, 1], [2, 3]])
        served.wrong.clear()
        for ids in ([[0, 1], [2, 3]], [[4, 5], [6, 7]]):
            served.replay(ids)
        served.ended()


def test_a_device_that_waited_too_long_goes_on_and_says_so(monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.memory.replays.channel.limit = 2e-5  # 20 looks of the interpreter
        served.capture()
        replays, go_on = served.memory.replays, threading.Event()

        def late(*arguments) -> None:
            go_on.wait(5)
            load(*arguments)

        monkeypatch.setattr("amoeba.stream.gpu.serving.load", late)
        served.device.launch(lambda: None)
        watch = threading.Thread(target=lambda: (until_in_trouble(replays), go_on.set()))
        watch.start()
        served.replay([[0, 1], [2, 3]])
        watch.join()
        with pytest.raises(RuntimeError, match="went on without them"):
            served.ended()
        served.wrong.clear()
        served.shown_as_it_is()
        monkeypatch.undo()
        replays.channel.limit = 20.0
        served.replay([[0, 1], [2, 3]])
        served.ended()


def until_in_trouble(replays) -> None:
    while not replays.channel.in_trouble:
        pass


def test_a_closed_memory_says_so() -> None:
    served = Served(0, 2, 0)
    served.capture()
    served.close()
    with pytest.raises(ValueError, match="Attach the model again"):
        served.replay([[0, 1], [0, 1]])


# --- copies first, tables afterwards ----------------------------------------------------------------------------------


@pytest.fixture(params=["compiled", "compiled, copies at once", "in Python"])
def language(request, monkeypatch) -> None:
    """Of what answers questions."""
    if request.param == "compiled, copies at once":
        monkeypatch.setattr(LiveDevice, "copies_at_once", True)
        monkeypatch.setattr(fast_path, "LEAST_AT_ONCE", 0)
    if request.param == "in Python":
        monkeypatch.setattr(fast_path, "serving_library", lambda: None)
    elif fast_path.serving_library() is None:
        pytest.skip("no compiler")


class NoCalls(LiveDevice):
    """One that has no calls by addresses: everything takes the long way."""

    def calls(self) -> None:
        return None


def tables(served: Served) -> list[tuple]:
    """Who is where on both tiers, who would leave, and what it cost."""
    cache = served.memory.cache
    layers = [
        (dict(here.top.slot_of), dict(here.host.slot_of), here.top.rank(), here.top._holds, here.host._holds)
        for here in cache._layers
    ]
    return [*layers, cache.counters, [dict(shown) for shown in served.memory._shown]]


@each_value_once()
@quick(lambda slots, host_slots: (slots, host_slots) in ((4, E), (4, 5)))
@pytest.mark.parametrize(("slots", "host_slots", "tokens"), [(3, E, 1), (4, E, 2), (4, 5, 1), (3, 2, 1)])
@pytest.mark.usefixtures("language")
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


@pytest.mark.usefixtures("language")
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


@pytest.mark.parametrize("name", POLICIES)
def test_compiled_code_says_who_leaves_as_the_policy_does(name: str) -> None:
    if (library := fast_path.serving_library()) is None:
        pytest.skip("no compiler")
    drawn, policy = random.Random(0), make_policy(name)
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


def test_small_copies_are_called_one_by_one(monkeypatch) -> None:
    if fast_path.serving_library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(LiveDevice, "copies_at_once", True)
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        for _ in range(2):
            served.replay([[0, 1], [0, 1]])
            served.replay([[2, 3], [2, 3]])
        served.ended()
        assert served.device.quick and not served.device.calls_at_once


def test_a_device_that_refuses_copies_at_once_is_asked_once_and_gets_them_one_by_one(monkeypatch) -> None:
    if fast_path.serving_library() is None:
        pytest.skip("no compiler")
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


def test_who_waits_for_a_question_looks_again_at_once(monkeypatch) -> None:
    """`time.sleep(0)` takes 60 us in some Pythons: a GPU that asks meanwhile would wait."""
    if fast_path.serving_library() is None:
        pytest.skip("no compiler")
    rests, rest = [], os.sched_yield
    monkeypatch.setattr(fast_path, "os", SimpleNamespace(sched_yield=lambda: (rests.append(1), rest())))
    monkeypatch.setattr(fast_path, "time", SimpleNamespace(sleep=lambda _: pytest.fail("slept")))
    with closing(Served(0, 3, E)) as served:
        fill(served)
        served.capture()
        served.replay([[0, 1], [2, 3]])
        served.replay([[4, 5], [6, 7]])
        served.ended()
    assert rests


def fill(served: Served) -> None:
    """Every expert comes by, so that all are in host memory, and no slot is free."""
    for layer in range(len(served.expert_TK)):
        with served.memory.turn(layer), closing(served.memory.lend(layer, range(E))) as groups:
            for _ in groups:
                pass


@each_value_once()
@quick(lambda fails_at: fails_at != 2)
@pytest.mark.parametrize("fails_at", [1, 2, 4])
@pytest.mark.usefixtures("language")
def test_a_quick_copy_that_fails_leaves_no_slot_that_holds_something_else(fails_at: int) -> None:
    with closing(Served(0, 3, E, layers=3)) as served:
        fill(served)
        served.capture()
        served.replay([[0, 1]] * 3)
        served.ended()
        served.device.fails_at = served.device.copied + fails_at
        with pytest.raises(RuntimeError, match=r"a copy failed|CUDA error 700"):
            served.replay([[5, 4]] * 3)
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
def test_an_interrupt_while_tables_follow_leaves_no_slot_that_holds_something_else(where: str, monkeypatch) -> None:
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
        with served.memory.turn(0), closing(served.memory.lend(0, [5, 6])) as groups:
            for _ in groups:
                pass
        served.replay([[2, 3], [0, 1]])
        served.ended()
        assert not served.device.quick
        served.replay([[4, 3], [0, 1]])
        served.ended()
        assert served.device.quick
