"""Experts of a request that are on the disk reach their slots without Python: right at any speed, and after any fault.

As in test_replays.py, threads stand for the GPU; the files and the threads that read them are real.
"""

import ctypes
import itertools
import json
import random
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from served_layers import Served, drawn_ids
from simulated_device import LiveDevice
from test_device_memory import E

from amoeba.core.config import Activation
from amoeba.stream.gpu.device import Calls
from amoeba.stream.gpu.reads import PASSING
from amoeba.stream.store import StoreError, compiled_reads
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.compiled_reads import CompiledLoads, Onward
from amoeba.stream.store.layers import layer_entry
from amoeba.stream.store.reading import Range, Reader
from amoeba.stream.store.store import Store
from amoeba.stream.timeline import DIRECT_ROW, Timeline, time_calls

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU")

H, I = 64, 32  # 24 KiB an expert


class Files(Store):
    """Of each expert its number in all of its weights, and that of the layer in gate and up, as served_layers.py looks.
    read_by_python: what was not read by threads of its own."""

    def __init__(self, folder: Path, layers: int = 2) -> None:
        entry = layer_entry("experts", E, H, I, Activation(), torch.float32, False)
        self.folder, self.rest, self.layers = folder, {}, (entry,) * layers
        self._reader = Reader()
        self.read_by_python: list[tuple[int, int]] = []
        for layer in range(layers):
            self.write(layer)

    def write(self, layer: int) -> None:
        blobs = torch.zeros(E, self.expert_bytes(layer), dtype=torch.uint8)
        views, number_E = self.views(layer, blobs), torch.arange(1.0, E + 1)[:, None, None]
        views.gate_up_JH.copy_(number_E + 100 * layer)
        views.down_HI.copy_(number_E)
        self.file(layer).write_bytes(blobs.numpy().tobytes())

    def file(self, layer: int) -> Path:
        return self.folder / f"{layer}.bin"

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        self.read_by_python.append((layer, expert))
        size = self.expert_bytes(layer)
        self._reader.read([Range(self._reader.file(self.file(layer)), expert * size, size, memory, 0, size)])

    def place(self, layer: int, expert: int) -> tuple[int, int] | None:
        descriptor = self._reader.file(self.file(layer)).direct_descriptor()
        return None if descriptor is None else (descriptor, expert * self.expert_bytes(layer))

    def loads(self, onward: Onward) -> CompiledLoads | None:
        return self._reader.loads(onward)


@pytest.fixture
def store(tmp_path: Path, monkeypatch) -> Files:
    if compiled_reads._library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(compiled_reads, "PIECE", 4096)
    found = Files(tmp_path)
    if found.place(0, 0) is None:
        pytest.skip("a file system without O_DIRECT")
    return found


def all_given_back(served: Served) -> bool:
    return served.memory.reads._passing.qsize() == PASSING


@pytest.mark.parametrize(("slots", "host_slots"), [(2, 0), (3, 2)])
def test_every_pass_finds_its_experts_without_python_reading_or_telling(slots, host_slots, store, monkeypatch):
    with closing(Served(1, slots, host_slots, store=store)) as served:
        served.capture()
        mailbox, drawn, told_by_python = served.memory.replays.mailbox, random.Random(1), list[int]()
        if not host_slots:  # where all that is asked for may be in host memory, Python tells
            go_on = mailbox.go_on
            monkeypatch.setattr(mailbox, "go_on", lambda serial: (told_by_python.append(serial), go_on(serial))[1])
        for _ in range(8):
            served.replay(drawn_ids(drawn, 2, 2))
        served.ended()
        served.shown_as_it_is()
        assert not store.read_by_python and not told_by_python and all_given_back(served)
        counters = served.memory.cache.counters
        assert counters.from_disk > 4 and counters.disk_bytes == counters.from_disk * store.expert_bytes(0)
        assert served.memory.waited_seconds > 0


def test_what_passed_by_has_no_host_slot_and_what_leaves_for_it_gets_one(store: Files) -> None:
    with closing(Served(0, 2, 2, store=store)) as served:
        served.capture()
        for ids in ([0, 1], [2, 3]):
            served.replay([ids, ids])
        served.ended()
        cache = served.memory.cache
        assert sorted(expert for expert, _ in cache.on_host(0)) == [0, 1]
        assert not any(cache.is_on_disk_alone(0, expert) for expert in range(4)) and cache.is_on_disk_alone(0, 4)
        served.replay([[0, 1]] * 2)
        served.ended()
        assert cache.counters.from_host == 4


def test_more_experts_than_there_is_memory_to_pass_through(store: Files) -> None:
    with closing(Served(0, PASSING + 2, 0, top_k=PASSING + 2, store=store)) as served:
        served.capture()
        served.replay([[*range(PASSING + 2)]] * 2)
        served.ended()
        assert len(store.read_by_python) == 4 and all_given_back(served)
        served.shown_as_it_is()


def test_after_a_read_that_fails_nothing_hangs_and_the_next_try_is_right(store: Files) -> None:
    with closing(Served(0, 3, 1, store=store)) as served:
        served.capture()
        served.replay([[0, 1]] * 2)
        whole = store.file(1).read_bytes()
        with open(store.file(1), "r+b") as file:
            file.truncate(5 * store.expert_bytes(1) + 4096)  # in the middle of expert 5
        with pytest.raises(StoreError, match="cut short"):
            served.replay([[4, 5]] * 2)
        assert served.device.compute.done == served.device.compute.enqueued, "the device still waits"
        served.wrong.clear()
        served.shown_as_it_is()
        with open(store.file(1), "r+b") as file:
            file.write(whole)
        for ids in ([[5, 4]] * 2, [[0, 1]] * 2):
            served.replay(ids)
        served.ended()
        assert all_given_back(served)


@pytest.mark.parametrize("fails_at", [1, 8])
def test_after_a_copy_that_fails_nothing_hangs_and_the_next_try_is_right(fails_at: int, store: Files) -> None:
    with closing(Served(0, 3, 0, store=store)) as served:
        served.capture()
        served.replay([[0, 1]] * 2)
        served.ended()
        served.device.fails_at = served.device.copied + fails_at
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            served.replay([[5, 4]] * 2)
        served.wrong.clear()
        served.shown_as_it_is()
        for ids in ([[5, 4]] * 2, [[0, 1]] * 2):
            served.replay(ids)
        served.ended()
        assert all_given_back(served)


@pytest.mark.parametrize("where", ["begin_load", "note_shown"])
def test_an_interrupt_ahead_of_the_copies_or_behind_them(where: str, store: Files, monkeypatch) -> None:
    with closing(Served(0, 3, 0, store=store)) as served:
        served.capture()
        served.replay([[0, 1]] * 2)
        with monkeypatch.context() as patched:
            owner = served.memory.replays.serving if where == "begin_load" else served.memory.pool
            patched.setattr(owner, where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                served.replay([[2, 3]] * 2)
        served.wrong.clear()
        served.shown_as_it_is()
        assert all_given_back(served)
        served.replay([[2, 3]] * 2)
        served.ended()


def test_a_timeline_has_a_row_for_them(store: Files, tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "run.json")
    with closing(Served(0, 2, 0, store=store)) as served:
        time_calls(served.memory, timeline)
        served.capture()
        for ids in ([0, 1], [0, 2]):
            served.replay([ids, ids])
        served.ended()
    timeline.close()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    row = next(each["tid"] for each in events if each["args"].get("name") == DIRECT_ROW)
    loads = [each for each in events if each["tid"] == row and each["ph"] == "X"]
    assert [each["args"]["experts"] for each in loads] == [[0, 1], [0, 1], [2], [2]]
    assert all(each["dur"] > 0 and len(each["args"]["slots"]) == len(each["args"]["experts"]) for each in loads)
    assert sum("waits for the disk" in each["name"] for each in events) == 4


def test_a_device_without_calls_by_address_has_them_read_by_python(store: Files) -> None:
    class NoCalls(LiveDevice):
        def calls(self) -> Calls | None:
            return None

    with closing(Served(0, 3, 0, device=NoCalls, store=store)) as served:
        served.capture()
        served.replay([[0, 1]] * 2)
        served.ended()
        assert len(store.read_by_python) == 4


# --- the compiled threads themselves ----------------------------------------------------------------------------------

COPY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
CONTEXTS = itertools.count(5)  # a thread enters each once


class Noted:
    """Calls of a device that copy at once, and what was called in which order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.entered: set[int] = set()
        self.lock = threading.Lock()
        self._kept = ENTER(self._enter), COPY(self._copy), WRITE(self._write)
        self._context = next(CONTEXTS)
        pointers = (ctypes.cast(call, ctypes.c_void_p).value for call in self._kept)
        self.onward = Onward(*pointers, self._context, 7)

    def _enter(self, context: int) -> int:
        with self.lock:
            self.entered.add(threading.get_native_id())
        return 0 if context == self._context else 1

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        with self.lock:
            self.calls.append("copy" if threading.get_native_id() in self.entered else "a copy that never entered")
        return 0 if stream == 7 else 1

    def _write(self, stream: int, place: int, value: int, flags: int) -> int:
        ctypes.c_uint32.from_address(place).value = value
        with self.lock:
            self.calls.append("word")
        return 0 if (stream, flags) == (7, 0) else 1


@pytest.mark.parametrize("opens_late", [False, True])
def test_bytes_go_to_their_targets_and_the_word_comes_last(opens_late: bool, store: Files) -> None:
    size, noted = store.expert_bytes(0), Noted()
    loads = store.loads(noted.onward)
    blobs, slots, word = (
        [aligned_buffer(size) for _ in range(2)],
        torch.zeros(2, size, dtype=torch.uint8),
        ctypes.c_uint32(),
    )
    for number, (layer, expert) in enumerate([(0, 3), (1, 6)]):
        loads.begin(*store.place(layer, expert), blobs[number].data_ptr(), size)
    if opens_late:
        while not all(
            torch.equal(blob, expected(store, *of)) for blob, of in zip(blobs, [(0, 3), (1, 6)], strict=True)
        ):
            pass
    cut = 4096 + 512  # in the middle of a piece
    targets = [
        (number, begin, count, slots[number].data_ptr() + begin)
        for number in range(2)
        for begin, count in ((0, cut), (cut, size - cut))
    ]
    loads.open(targets, ctypes.addressof(word), 77)
    assert loads.end() and word.value == 77
    assert torch.equal(slots[0], expected(store, 0, 3)) and torch.equal(slots[1], expected(store, 1, 6))
    assert noted.calls == ["copy"] * (2 * (size // 4096 + 1)) + ["word"]
    assert list(loads.times) == sorted(loads.times) and loads.times.begun > 0
    store.close()


def test_what_is_never_opened_goes_nowhere(store: Files) -> None:
    size, noted = store.expert_bytes(0), Noted()
    loads = store.loads(noted.onward)
    loads.begin(*store.place(0, 3), aligned_buffer(size).data_ptr(), size)
    assert not loads.end() and not noted.calls
    store.close()


def expected(store: Files, layer: int, expert: int) -> torch.Tensor:
    size = store.expert_bytes(layer)
    return torch.frombuffer(
        bytearray(store.file(layer).read_bytes()[expert * size : (expert + 1) * size]), dtype=torch.uint8
    )
