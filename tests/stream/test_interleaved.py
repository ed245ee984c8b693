"""Captured steps of several groups in turns: right slots at any speed, each layer's requests in the groups' order.

E experts · K experts per token

The device is simulated by threads, one for each stream, so that groups really run beside each other. Triton's
interpreter runs one kernel at a time; so the kernel that asks is played by a function that does the same word by word
(`asks`); tests/kernels/test_expert_request.py has the kernel itself.
"""

import random
import threading
import time
from contextlib import closing, contextmanager

import pytest
import torch
from simulated_device import LiveDevice, LiveGraph, SimulatedStream
from test_device_memory import E, Layers
from test_fast_path import tables
from torch import Tensor

from amoeba.core.graph_replays import CannotCapture, Member
from amoeba.kernels import expert_request
from amoeba.stream.gpu import fast_path
from amoeba.stream.gpu.memory import DeviceMemory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU")

IDS = 16


def asks(expert_TK, slot_TK, shown, experts, mailbox, due, limit, buffer=None, x_TH=None, weight_TK=None, turn=None):
    """kernels/expert_request.py, for misses that are moved; limit: seconds."""
    serial = mailbox.state[0].item() + 1
    place, most = serial % mailbox.requests.shape[0], (mailbox.answers.shape[1] - 3) // 2
    until = time.monotonic() + limit

    def wait(is_there) -> bool:
        while not is_there() and mailbox.trouble[0] == 0 and time.monotonic() < until:
            time.sleep(1e-5)
        return is_there()

    mine = turn is None or turn.word[0] < 0 or wait(lambda: turn.word[0] == turn.mine)
    asked = sorted({each for each in expert_TK.flatten().tolist() if 0 <= each < experts})
    missing = [each for each in asked if shown[each] < 0]
    row = mailbox.requests[place]
    ids = [*missing, *(each for each in asked if each not in missing)]
    row[3 : 3 + len(ids)] = torch.tensor(ids, dtype=torch.int32)
    row[0], row[1] = len(missing), len(asked)
    row[2] = serial
    mailbox.state[0] = serial
    is_served = True
    if missing:
        answer = mailbox.answers[place]
        is_served = wait(lambda: answer[0] == serial) and wait(lambda: mailbox.state[1] - serial >= 0)
        for at in range(int(answer[1]) if is_served else 0):
            expert, slot = answer[3 + at].item(), answer[3 + most + at].item()
            shown[expert] = slot
            if slot >= 0:
                shown[experts + slot] = expert
    for at, expert in enumerate(expert_TK.flatten().tolist()):
        slot_TK.view(-1)[at] = shown[expert] if 0 <= expert < experts else -1
    if not (mine and is_served):
        mailbox.trouble[0] = serial
    if turn is not None and turn.word[0] == turn.mine:
        turn.word[0] = (turn.mine + 1) % turn.groups


class SeveralStreams(LiveDevice):
    """groups: streams beside the one that computes."""

    def __init__(self, seed: int, groups: int, **options) -> None:
        self.of_groups = [SimulatedStream(f"group {number}") for number in range(groups)]
        self._here = threading.local()
        super().__init__(seed, **options)

    @property
    def streams(self) -> tuple[SimulatedStream, ...]:
        return (*self._streams, *self.of_groups)

    @streams.setter
    def streams(self, streams: tuple[SimulatedStream, ...]) -> None:
        self._streams = streams

    @property
    def compute(self) -> SimulatedStream:
        return getattr(self._here, "stream", self._compute)

    def launch(self, kernel) -> None:
        if self.graph is not None:
            self.graph.kernels.append(kernel)
        else:
            self._enqueue(self.compute, kernel)

    @contextmanager
    def inside(self, stream: SimulatedStream):
        before, self._here.stream = self.compute, stream
        try:
            yield
        finally:
            self._here.stream = before


class InTurns:
    """A graph of each group, over all layers; each step is told its ids."""

    def __init__(self, seed: int, slots: int, host_slots: int, layers: int = 3, groups: int = 2, **options) -> None:
        self.device, self.store = SeveralStreams(seed, groups, **options), Layers(layers, seed)
        self.memory = DeviceMemory(self.store, self.device, [slots] * layers, [host_slots] * layers, IDS)
        self.wrong: list[str] = []
        self.seen: list[list[list[int]]] = [[] for _ in range(groups)]
        self.order: list[list[int]] = [[] for _ in range(layers)]  # groups, as they looked at a layer's slots
        self.ids: list[list[list[list[int]]]] = [[] for _ in range(groups)]  # of each group the steps to come
        self.members = []

    def capture(self, top_k: int = 2) -> None:
        replays, layers, groups = self.memory.replays, len(self.store.layers), len(self.seen)
        for number in range(groups):
            expert_TK, graph = [torch.zeros(1, top_k, dtype=torch.int64) for _ in range(layers)], LiveGraph(self.device)
            with replays.as_group(number, groups):
                replays.mailbox.limit = 20.0
                with replays.rehearsing():
                    for layer, ids in enumerate(expert_TK):
                        replays.rehearse(layer, ids)
                with replays.capturing() as passes, graph:
                    for layer in range(layers):
                        self._look(number, layer, expert_TK[layer], replays.slots_of(layer, expert_TK[layer]))
            stream = self.device.of_groups[number]

            def launch(number=number, expert_TK=expert_TK, graph=graph, stream=stream) -> None:
                ids = self.ids[number].pop(0)
                given = [torch.tensor([row]) for row in ids]
                with self.device.inside(stream):
                    self.device.launch(lambda: [each.copy_(row) for each, row in zip(expert_TK, given, strict=True)])
                    graph.replay()

            self.members.append(Member(passes, launch, stream))

    def _look(self, number: int, layer: int, expert_TK: Tensor, slot_TK: Tensor) -> None:
        slots = self.memory.layers[layer].slots

        def look() -> None:
            asked, found = expert_TK.flatten().tolist(), slot_TK.flatten().tolist()
            self.seen[number].append(found)
            self.order[layer].append(number)
            for _ in range(2):  # it takes a while, and they stay what they are
                for expert, slot in zip(asked, found, strict=True):
                    up, down = slots.gate_up_EJH[slot], slots.down_EHI[slot]
                    if not (bool((up == expert + 1 + 100 * layer).all()) and bool((down == expert + 1).all())):
                        self.wrong.append(f"slot {slot} of layer {layer} is not expert {expert}")
                time.sleep(1e-3 * self.device.random.random())

        self.device.launch(look)

    def run(self, ids: list[list[list[list[int]]]]) -> None:
        """ids: of each group, of each step, of each layer."""
        self.ids = [list(each) for each in ids]
        self.memory.replays.interleave(self.members, len(ids[0]))

    def ended(self) -> None:
        self.device.record(self.device.compute).wait()
        self.memory.replays.check()
        for layer in range(len(self.store.layers)):
            found = {e: slot for e, slot in enumerate(self.memory.pool.map.slot_E(layer).tolist()) if slot >= 0}
            assert found == self.memory.pool.shown[layer]

    def close(self) -> None:
        self.memory.close()
        assert not self.wrong, self.wrong[0]


@pytest.fixture(autouse=True)
def played(monkeypatch) -> None:
    monkeypatch.setattr(expert_request, "request_experts", asks)


def drawn_steps(seed: int, groups: int, steps: int, layers: int, count: int = 2) -> list[list[list[list[int]]]]:
    drawn = random.Random(seed)

    def some() -> list[int]:
        return drawn.sample((0, 1, 2), count) if drawn.random() < 0.4 else drawn.sample(range(E), count)

    return [[[some() for _ in range(layers)] for _ in range(steps)] for _ in range(groups)]


def fill(given: InTurns) -> None:
    for layer in range(len(given.store.layers)):
        with given.memory.pool.turn(layer), closing(given.memory.loads.acquire(layer, range(E))) as groups:
            for _ in groups:
                pass


@pytest.mark.parametrize(("slots", "host_slots", "groups"), [(4, E, 2), (5, 2, 2), (4, 0, 2), (6, E, 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pass_of_every_group_finds_its_experts(slots, host_slots, groups, seed, monkeypatch):
    monkeypatch.setattr(LiveDevice, "copies_at_once", seed == 1)
    monkeypatch.setattr(fast_path, "LEAST_AT_ONCE", 0)
    with closing(InTurns(seed, slots, host_slots, groups=groups)) as given:
        given.store.slow = seed == 1
        if host_slots == E:
            fill(given)
        given.capture()
        given.memory.cache.restart_counters()
        for part in range(2):  # a second time, behind the first
            given.run(drawn_steps(seed + part, groups, 3, 3))
        given.ended()
        assert [len(each) for each in given.seen] == [2 * 3 * 3] * groups
        counters = given.memory.cache.counters
        assert counters.tokens == 2 * 3 * groups and counters.requested == 2 * 2 * 3 * 3 * groups
        if host_slots == E:
            assert given.device.quick, "nothing took the fast path"


def test_slots_do_not_depend_on_time() -> None:
    found = []
    for seed, slow in ((0, False), (1, True)):
        with closing(InTurns(seed, 4, 2)) as given:
            given.store.slow = slow
            given.capture()
            given.run(drawn_steps(7, 2, 8, 3))
            given.ended()
            found.append((given.seen, tables(given)))
    assert found[0] == found[1]


@pytest.mark.parametrize("compiled", [True, False])
def test_what_another_group_may_be_reading_does_not_leave(compiled: bool, monkeypatch) -> None:
    """Group 0 has asked for 0 and 1. For group 1 the favourites 2 and 3 leave, which are worth more."""
    if not compiled:
        monkeypatch.setattr(fast_path, "serving_library", lambda: None)
    elif fast_path.serving_library() is None:
        pytest.skip("no compiler")
    with closing(InTurns(0, 4, E, layers=1)) as given:
        fill(given)
        given.capture()
        given.run([[[[2, 3]]] * 9] * 2)
        given.ended()
        before = given.device.quick
        given.run([[[[0, 1]]], [[[4, 5]]]])
        given.ended()
        assert {*given.memory.pool.shown[0]} == {0, 1, 4, 5} and (given.device.quick > before) is compiled


def test_while_one_group_waits_for_the_disk_another_goes_on(monkeypatch) -> None:
    with closing(InTurns(0, 6, 0, layers=3)) as given:
        given.capture()
        given.run([[[[0, 1]] * 3], [[[2, 3]] * 3]])
        given.ended()
        read, go_on = given.store._read, threading.Event()

        def slow_read(layer: int, expert: int, memory) -> None:
            if (layer, expert) == (2, 7):  # until the other one has come as far as it can
                assert go_on.wait(10)
            read(layer, expert, memory)

        monkeypatch.setattr(given.store, "_read", slow_read)
        for each in given.order:
            each.clear()
        watch = threading.Thread(target=lambda: (until(lambda: given.order[1] == [0, 1]), go_on.set()))
        watch.start()
        given.run([[[[0, 1], [0, 1], [0, 7]]], [[[5, 6], [2, 6], [2, 3]]]])
        watch.join()
        given.ended()
        assert given.order[:2] == [[0, 1]] * 2
        assert sorted(given.order[2]) == [0, 1], "who looks first, once both are answered, is open"


def until(is_so, seconds: float = 10.0) -> None:
    ends = time.monotonic() + seconds
    while not is_so() and time.monotonic() < ends:
        time.sleep(1e-4)


def test_after_a_failed_read_nothing_hangs_and_the_next_try_is_right() -> None:
    with closing(InTurns(0, 5, 1)) as given:
        given.capture()
        given.run([[[[0, 1]] * 3], [[[0, 2]] * 3]])
        given.store.failing = {(1, 5)}
        with pytest.raises(OSError, match="expert 5 cannot be read"):
            given.run([[[[0, 1]] * 3] * 3, [[[5, 2]] * 3] * 3])
        for stream in given.device.of_groups:
            assert stream.done == stream.enqueued, "a group still waits"
        given.wrong.clear()
        given.store.failing = set()
        given.run(drawn_steps(0, 2, 4, 3))
        given.ended()


@pytest.mark.parametrize("fails_at", [1, 3])
def test_after_a_failed_copy_nothing_hangs_and_the_next_try_is_right(fails_at: int) -> None:
    with closing(InTurns(0, 4, E)) as given:
        fill(given)
        given.capture()
        given.run(drawn_steps(3, 2, 2, 3))
        given.ended()
        given.device.fails_at = given.device.copied + fails_at
        with pytest.raises(RuntimeError, match=r"a copy failed|CUDA error 700"):
            given.run([[[[6, 7]] * 3] * 2, [[[5, 4]] * 3] * 2])
        given.wrong.clear()
        given.run(drawn_steps(0, 2, 4, 3))
        given.ended()


def test_a_group_runs_alone_with_passes_outside_of_graphs_between() -> None:
    with closing(InTurns(0, 4, 2)) as given:
        given.capture()
        for number in range(4):
            given.run(drawn_steps(number, 2, 2, 3))
            member = given.members[number % 2]
            given.ids[number % 2] = drawn_steps(number + 9, 1, 1, 3)[0]
            with given.device.inside(member.stream):
                given.memory.replays.replay(member.passes, member.launch)
            with given.memory.pool.turn(1), closing(given.memory.loads.acquire(1, [number, number + 3])) as groups:
                for _ in groups:
                    pass
        given.ended()


def test_what_cannot_be_in_turns_is_refused() -> None:
    with closing(InTurns(0, 3, 0)) as given, pytest.raises(CannotCapture, match=r"2 tokens may ask for 4.*3 slots"):
        given.capture()
    with closing(InTurns(0, 4, 0)) as given:
        given.capture()
        with pytest.raises(CannotCapture, match="the first, the second"):
            given.memory.replays.interleave(given.members[::-1], 1)
