"""Slots on a device hold what they are said to hold, whatever the streams do within what events allow.

The device is simulated: copies and passes run at random moments, some of them late, so that an order which no event
enforces is broken by one of the seeds. A pass reads the bytes of its slots and compares them with the store's.
"""

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from simulated_device import CopyFailed, SimulatedDevice

from amoeba import ExpertWeights
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.loader import Loader
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.gpu.pool import SlotMap
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.placement import MemoryStore

E, H, I = 8, 4, 4


class Layers(MemoryStore):
    """The same experts in several layers: of each its number, and that of the layer, in all of its weights."""

    def __init__(self, layers: int, seed: int = 0) -> None:
        number_E = torch.arange(1.0, E + 1)[:, None, None]
        super().__init__(ExpertWeights(number_E.expand(E, 2 * I, H).clone(), number_E.expand(E, H, I).clone()))
        self.layers = self.layers * layers
        self.random, self.slow, self.failing = random.Random(seed), False, set[tuple[int, int]]()

    def _read(self, layer: int, expert: int, memory) -> None:
        memory.tensor.fill_(255)
        if self.slow:
            time.sleep(self.random.choice((0, 0, 1e-3)))
        if (layer, expert) in self.failing:
            raise OSError(f"expert {expert} cannot be read")
        super()._read(layer, expert, memory)
        self.layers[layer].views(memory.tensor).gate_up_JH.add_(100 * layer)
        if memory.on_part is not None and self.random.random() < 0.7:
            size = len(memory.bytes)
            middle = self.random.randrange(1, size)
            for part in self.random.sample([(0, middle), (middle, size - middle)], self.random.choice((1, 2))):
                memory.on_part(*part)


class Watched:
    """Passes over the layers of a memory, each of which looks at its slots when its turn in the stream comes."""

    def __init__(self, seed: int, slots: int, host_slots: int, layers: int = 2, **options) -> None:
        self.device = SimulatedDevice(seed, **options)
        self.store = Layers(layers, seed)
        self.memory = DeviceMemory(self.store, self.device, [slots] * layers, [host_slots] * layers, 64)
        self.wrong: list[str] = []

    def run(self, layer: int, ids: list[int]) -> None:
        memory = self.memory
        with memory.pool.turn(layer), closing(memory.loads.acquire(layer, ids)) as groups:
            seen: list[int] = []
            for slot_of in groups:
                seen += slot_of
                self._look(layer, slot_of)
            assert sorted(seen) == sorted(ids)

    def _look(self, layer: int, slot_of: dict[int, int]) -> None:
        slots, slot_E = self.memory.layers[layer].slots, self.memory.pool.map.slot_E(layer)

        def look() -> None:
            for expert, slot in slot_of.items():
                up, down = slots.gate_up_EJH[slot], slots.down_EHI[slot]
                if not (bool((up == expert + 1 + 100 * layer).all()) and bool((down == expert + 1).all())):
                    self.wrong.append(f"slot {slot} of layer {layer} is not expert {expert}")
            shown = {expert: slot for expert, slot in enumerate(slot_E.tolist()) if slot >= 0}
            if shown != slot_of:
                self.wrong.append(f"layer {layer}: shown {shown}, acquired {slot_of}")

        self.device.launch(look)

    def look_at_all_shown(self, layer: int) -> None:
        """What a kernel between two passes would find."""
        slots, slot_E = self.memory.layers[layer].slots, self.memory.pool.map.slot_E(layer)

        def look() -> None:
            for expert, slot in enumerate(slot_E.tolist()):
                if slot >= 0 and not bool((slots.gate_up_EJH[slot] == expert + 1 + 100 * layer).all()):
                    self.wrong.append(f"slot {slot} of layer {layer} is shown as expert {expert}")

        with self.memory.pool.turn(layer):
            self.device.launch(look)

    def close(self) -> None:
        self.memory.close()
        assert not self.wrong, self.wrong[0]


def passes(watched: Watched, seed: int, count: int, prefetches: bool = False) -> None:
    drawn = random.Random(seed)
    for number in range(count):
        layer = number % 2
        watched.run(layer, drawn.sample(range(E), drawn.choice((1, 2, 3, E))))
        watched.look_at_all_shown(layer)
        if prefetches:
            if drawn.random() < 0.5:
                watched.memory.loads.prefetch(1 - layer, drawn.sample(range(E), 4))
            else:
                watched.memory.loads.expect_all(1 - layer)
            for _ in range(drawn.choice((0, 1, 2))):
                watched.look_at_all_shown(1 - layer)


@pytest.mark.parametrize(("slots", "host_slots"), [(1, 0), (2, 3), (3, 1), (5, 2), (E, E)])
def test_slots_hold_what_they_are_said_to_hold_at_any_speed(slots: int, host_slots: int) -> None:
    for seed in range(6):
        with closing(Watched(seed, slots, host_slots)) as watched:
            watched.store.slow = seed % 3 == 0
            passes(watched, seed, 16, prefetches=seed % 2 == 0)


def test_one_sequence_waits_for_the_disk_while_another_goes_on(monkeypatch) -> None:
    with closing(Watched(0, slots=3, host_slots=2)) as watched:
        watched.run(0, [1, 2])
        go_on, reads, read = threading.Event(), threading.Event(), watched.store._read

        def held_up(layer: int, expert: int, memory) -> None:
            if layer == 1:
                reads.set()
                assert go_on.wait(20)
            read(layer, expert, memory)

        monkeypatch.setattr(watched.store, "_read", held_up)
        with ThreadPoolExecutor(1) as another:
            ahead = another.submit(watched.run, 1, [4, 5])
            assert reads.wait(20)
            for ids in ([1, 2], [2, 1]):
                watched.run(0, ids)  # what it needs is there
            assert not ahead.done()
            go_on.set()
            ahead.result(20)


def test_sequences_in_several_threads_find_their_experts_at_any_speed() -> None:
    for seed in range(3):
        with closing(Watched(seed, slots=4, host_slots=3)) as watched, ThreadPoolExecutor(3) as pool:
            watched.store.slow = True
            for each in [pool.submit(passes, watched, 10 * seed + number, 8) for number in range(3)]:
                each.result(60)


@pytest.mark.parametrize("prefetches", [False, True])
def test_copies_and_reads_that_fail_leave_nothing_wrong(prefetches: bool) -> None:
    for seed in range(10):
        with closing(Watched(seed, 3, 2, fails_at=5 + 5 * seed)) as watched:
            watched.store.failing = {(seed % 2, seed % E)}
            drawn = random.Random(seed)
            for _ in range(14):
                try:
                    passes(watched, drawn.random(), 2, prefetches)
                except (OSError, CopyFailed):
                    watched.store.failing = set()
            watched.store.failing = set()
            passes(watched, seed, 4)


def test_after_a_failed_read_nothing_is_shown_whose_copy_is_still_under_way() -> None:
    with closing(Watched(0, 3, E, layers=1)) as watched:
        device = watched.device
        for ids in ([0, 1, 2], [3, 4, 5]):
            watched.run(0, ids)
        device.run_until(device.record(device.compute))
        device.random.choice = lambda options: 0  # nothing runs by itself
        watched.store.failing = {(0, 7)}
        with pytest.raises(OSError, match="expert 7"):
            watched.run(0, [0, 1, 7])
        watched.look_at_all_shown(0)
        device.run_until(device.record(device.compute))  # with no copy that it does not wait for


def test_what_comes_back_from_the_host_waits_until_it_is_there() -> None:
    device, store = SimulatedDevice(), Layers(1)
    device.random.choice = lambda options: 0
    tiers = LayerTiers(device, store.layers[0], 2, 1)
    tiers.weights.gate_up_EJH[0] = 7
    tiers.down(slot=0, host_slot=0)
    came = tiers.up(slot=1, host_slot=0)
    device.run_until(came)
    assert bool((tiers.weights.gate_up_EJH[1] == 7).all())
    tiers.weights.gate_up_EJH[1] = 8
    tiers.up(slot=0, host_slot=0)
    tiers.down(slot=1, host_slot=0)
    tiers.blob_is_free(0)
    assert bool((tiers.weights.gate_up_EJH[0] == 7).all()), "its blob was overwritten ahead of the copy from it"


def test_between_two_layers_the_link_brings_what_the_next_will_need_first() -> None:
    with closing(Watched(0, slots=4, host_slots=E)) as watched:
        device, memory = watched.device, watched.memory
        for layer in (0, 1, 0):
            watched.run(layer, list(range(E)))
            memory.loads.expect_all(1 - layer)
        from_host, waits, copy_all, wait = [], [], device.copy_all, device.wait
        device.copy_all = lambda source, pieces: (from_host.append(len(pieces)), copy_all(source, pieces))
        device.wait = lambda stream, event: (waits.append(stream.name), wait(stream, event))
        watched.run(1, list(range(E)))
        assert from_host == []  # all four that it missed had come
        waits.clear()
        memory.loads.expect_all(0)
        assert from_host == [4] and "copies" not in waits  # in one call, which waits for nothing
        del device.copy_all, device.wait


def test_copies_up_and_down_never_overtake_each_other() -> None:
    """Copies down as late as they may: what is loaded into their slots, and from their blobs, waits for them."""
    for seed in range(6):
        with closing(Watched(seed, 3, 3)) as watched:
            late = random.Random(seed)
            watched.device.random.choice = lambda options, late=late: (
                options[late.choice((0, 0, 1, 1, 2)) if late.random() < 0.2 else late.choice((0, 1))]
                if len(options) == 3
                else late.choice((0, 3, 20))
            )
            passes(watched, seed, 16)
            assert watched.memory.cache.counters.written_bytes > 0


def test_a_copy_into_a_slot_waits_for_the_pass_that_reads_it() -> None:
    """Copies run at once, the pass as late as it may: the fence alone keeps them off."""
    with closing(Watched(0, 2, 0, layers=2)) as watched:
        watched.device.random.choice = lambda options: options[0] if options[0] is watched.device.copies else 20
        passes(watched, 1, 12)
        assert watched.device.compute.work, "passes were to be late"


def test_the_first_copy_waits_for_what_used_its_memory_before() -> None:
    """torch hands out memory again while kernels that were enqueued still read it."""
    device = SimulatedDevice()
    device.random.choice = lambda options: 0  # nothing runs by itself
    before: list[bool] = []
    device.launch(lambda: before.append(device.copies.done > 0))
    store = Layers(1)
    with closing(DeviceMemory(store, device, [2], [0], 64)) as memory:
        with memory.pool.turn(0), closing(memory.loads.acquire(0, [1])) as groups:
            next(groups)
        device.run_until(device.record(device.copies))
    assert before == [False]


def test_a_pass_whose_experts_are_there_copies_nothing_and_waits_for_no_read() -> None:
    with closing(Watched(0, 4, 0)) as watched:
        watched.run(0, [1, 2, 3])
        copied, waited = watched.device.copied, watched.memory.waited_seconds
        watched.device.waits.clear()
        watched.run(0, [3, 1])
        assert (watched.device.copied, watched.memory.waited_seconds) == (copied, waited)
        assert "copies" not in watched.device.waits


def test_what_left_the_device_comes_back_from_the_host_and_not_from_the_disk() -> None:
    with closing(Watched(0, 2, 4)) as watched:
        for ids in ([0, 1], [2, 3], [0, 1], [2, 3]):
            watched.run(0, ids)
        counters = watched.memory.cache.counters
        assert (counters.from_disk, counters.from_host) == (4, 4)


def test_a_memory_is_closed_once_and_gives_back_its_threads() -> None:
    before = threading.active_count()
    watched = Watched(0, 2, 0)
    watched.run(0, [1])
    watched.close()
    watched.close()
    assert threading.active_count() == before


class Cudart:
    def __init__(self, code: int) -> None:
        self.code, self.registered = code, list[int]()

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.registered.append(size)
        return self.code

    def cudaHostUnregister(self, place: int) -> None:
        self.registered.pop()


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said_once(code: int, monkeypatch, caplog) -> None:
    runtime = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device = CudaDevice(torch.device("cuda", 0))
    device.device = torch.device("cpu")
    for size in (4096, 8192):
        memory = device.host_memory(size)
        assert memory.shape == (size,) and memory.data_ptr() % 4096 == 0
    said = [each.message for each in caplog.records if "could not be pinned" in each.message]
    assert said == ([] if code == 0 else ["4 KiB of memory could not be pinned (CUDA error 2): copies are slower"])
    device._driver = SimpleNamespace(quick_calls=lambda: ("copy", "write", "at once"), entrance=lambda: (None, 0))
    device.copies = SimpleNamespace(cuda_stream=7)
    assert device.calls().to_device_at_once == ("at once" if code == 0 else None)
    device.close()
    assert runtime.registered == ([] if code == 0 else [4096, 8192])


# --- loader -----------------------------------------------------------------------------------------------------------


def test_what_is_needed_now_is_loaded_before_what_is_expected() -> None:
    loader, begun, order = Loader(1), Future(), []
    go_on = threading.Event()
    first = loader.submit(lambda: (begun.set_result(None), go_on.wait(5)))
    begun.result(5)
    jobs = [loader.submit(lambda name=name: order.append(name), predicted=True) for name in ("a", "b", "c")]
    jobs.append(loader.submit(lambda: order.append("needed")))
    loader.promote(jobs[2])
    go_on.set()
    for job in (first, *jobs):
        job.result(5)
    assert order == ["needed", "c", "a", "b"]
    loader.close()


def test_a_closed_loader_cancels_what_has_not_begun() -> None:
    loader, begun = Loader(1), Future()
    go_on = threading.Event()
    running = loader.submit(lambda: (begun.set_result(None), go_on.wait(5)))
    begun.result(5)
    waiting = loader.submit(lambda: None)
    threading.Timer(0.05, go_on.set).start()
    loader.close()
    assert running.done() and waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        loader.submit(lambda: None)


# --- export -----------------------------------------------------------------------------------------------------------


def export_of(device: SimulatedDevice) -> SlotMap:
    return SlotMap(device, [E, E], [4, 4], 16)


def test_ids_are_ready_when_their_event_is_and_not_before() -> None:
    device = SimulatedDevice()
    device.random.choice = lambda options: 0  # nothing runs by itself
    export = export_of(device)
    export.show(0, {5: 2, 1: 0})
    slot_TK = export.launch(0, torch.tensor([[5, 3], [1, 7]]))
    later: list[bool] = []
    device.launch(lambda: later.append(True))
    assert not export.ready(0)
    with pytest.raises(RuntimeError, match="before its ids were there"):
        export.read(0)
    export.wait(0)
    assert export.ready(0) and not later, "it waited for what comes after"
    assert export.read(0) == ([3, 7], [1, 5])
    assert slot_TK.tolist() == [[2, -1], [0, -1]]
    with pytest.raises(RuntimeError, match="nothing was exported"):
        export.wait(0)


def test_rows_of_two_passes_and_of_two_layers_do_not_mix() -> None:
    export = export_of(SimulatedDevice(3))
    export.show(1, {0: 3})
    for number in range(6):
        export.launch(0, torch.tensor([[number, 7]]))
        export.launch(1, torch.tensor([[0, number + 1]]))
        export.wait(1)
        assert export.read(1) == ([number + 1], [0])
        export.wait(0)
        assert export.read(0).missing == [number, 7]


def test_what_is_shown_comes_in_the_order_of_the_stream() -> None:
    device = SimulatedDevice()
    device.random.choice = lambda options: 0
    export = export_of(device)
    found = []
    for turn in range(7):
        export.show(0, {turn: turn % 4})
        found.append(export.launch(0, torch.tensor([[turn, (turn + 1) % E]])))
        assert export.expert_S(0).shape == (4,)
    export.wait(0)
    assert [each.tolist() for each in found] == [[[turn % 4, -1]] for turn in range(7)]
    assert export.expert_S(0).tolist() == [0, 0, 6, 0]
