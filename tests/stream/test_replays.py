"""Passes inside a graph wait for their experts on the device, and the host serves them: right slots at any speed.

E experts · K experts per token

The device is simulated by threads (simulated_device.LiveDevice), a graph by a list of launches, and Triton's
interpreter runs the kernel that waits. What reads the slots compares their bytes with the store's.
"""

import random
import threading
from contextlib import closing

import pytest
import torch
from served_layers import Served, drawn_ids
from test_device_memory import E
from torch import Tensor

from amoeba.core.graph_replays import CannotCapture
from amoeba.stream.cache.trace import LayerShape
from benchmarks.stream.cache import replay
from benchmarks.stream.synthetic import Locality, synthetic_trace
from selection import quick

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU")


@quick(lambda slots, host_slots: (slots, host_slots) in ((2, 0), (5, 2)))
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
                    with (
                        memory.pool.turn(layer),
                        closing(memory.loads.acquire(layer, drawn.sample(range(E), 3))) as groups,
                    ):
                        for slot_of in groups:
                            ids = torch.tensor([[*slot_of]])
                            served.device.launch(lambda: None)
                            slots = torch.tensor([[*slot_of.values()]])
                            check(served, layer, ids, slots)
                if number % 4 == 1:
                    memory.loads.prefetch(layer, drawn.sample(range(E), 3))
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
        mailbox = served.memory.replays.mailbox
        mailbox.serial = 2**31 - 4
        mailbox._state.fill_(2**31 - 4)
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
        served.memory.pool.recorder = object()
        with pytest.raises(CannotCapture, match="recorded"):
            served.capture()
        served.memory.pool.recorder = None
        served.capture()
        served.memory.pool.recorder = object()
        with pytest.raises(RuntimeError, match="begin to record before"):
            served.replay([[0, 1], [0, 1]])
        served.memory.pool.recorder = None


# ---- Failed reads and copies, interrupts, a device that waits too long: nothing hangs, and the next try is right


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
        served.replay_with_a_copy_that_fails(fails_at)
        served.wrong.clear()
        served.shown_as_it_is()
        for ids in ([[5, 4]] * 3, [[0, 1]] * 3):
            served.replay(ids)
        served.ended()


def test_an_interrupt_in_the_middle_of_serving_lets_the_device_go_on(monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        with monkeypatch.context() as patched:
            patched.setattr(served.memory.replays.serving, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
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
        served.memory.replays.mailbox.limit = 2e-5  # 20 looks of the interpreter
        served.capture()
        replays, go_on = served.memory.replays, threading.Event()
        load = replays.serving.load

        def late(*arguments) -> None:
            go_on.wait(5)
            load(*arguments)

        monkeypatch.setattr(replays.serving, "load", late)
        served.device.launch(lambda: None)
        watch = threading.Thread(target=lambda: (until_in_trouble(replays), go_on.set()))
        watch.start()
        served.replay([[0, 1], [2, 3]])
        watch.join()
        with pytest.raises(RuntimeError, match="continued without them"):
            served.ended()
        served.wrong.clear()
        served.shown_as_it_is()
        monkeypatch.undo()
        replays.mailbox.limit = 20.0
        served.replay([[0, 1], [2, 3]])
        served.ended()


def until_in_trouble(replays) -> None:
    while not replays.mailbox.in_trouble:
        pass


def test_a_closed_memory_says_so() -> None:
    served = Served(0, 2, 0)
    served.capture()
    served.close()
    with pytest.raises(ValueError, match="Attach the model again"):
        served.replay([[0, 1], [0, 1]])
