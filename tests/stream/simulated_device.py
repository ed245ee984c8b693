"""A device on the CPU whose streams run when the test's random numbers say so, within what events allow.

    device = SimulatedDevice(seed=3)                    # everything enqueued runs late, at random moments
    device = SimulatedDevice(seed=3, inline=True)       # what computes runs at once; copies only when they have to

`inline` is for backends, which compute by calling torch: a copy that nobody waited for has then not happened, and its
slot holds what was there before (at first NaN). Late or early, an order that events allow has to give right numbers.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.stream.gpu.device import Calls, Device, Event
from amoeba.stream.gpu.graphs import GpuReplays
from amoeba.stream.store.buffers import aligned_buffer

# as CUDA's driver has them
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
_COPIES = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.POINTER(ctypes.c_uint64)] * 3,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.POINTER(ctypes.c_uint64),
    *[ctypes.c_uint64] * 2,
)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


class CopyFailed(RuntimeError):
    pass


@dataclass(eq=False)
class SimulatedStream:
    name: str
    work: deque = field(default_factory=deque)  # functions, and events to wait for
    enqueued: int = 0
    done: int = 0


@dataclass(eq=False)
class SimulatedEvent:
    device: SimulatedDevice
    stream: SimulatedStream
    place: int

    def done(self) -> bool:
        with self.device.lock:
            return self.stream.done >= self.place

    def wait(self) -> None:
        with self.device.lock:
            self.device.waits.append(self.stream.name)
            self.device.run_until(self)


class SimulatedDevice(Device):
    """
    waits:      the streams of events that the host waited for.
    fails_at:   the number of the copy whose call raises.
    quick:      copies that were called by addresses; calls_at_once: calls of several of these.
    """

    copies_at_once = refuses_at_once = False  # whether there is such a call, and whether it is of use

    def __init__(self, seed: int = 0, *, inline: bool = False, fails_at: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.copies, self._compute = SimulatedStream("copies"), SimulatedStream("compute")
        self.downs = SimulatedStream("downs")
        self.streams = self.copies, self._compute, self.downs
        self.lock, self.inline, self.fails_at = threading.RLock(), inline, fails_at
        self.random = random.Random(seed)
        self.waits: list[str] = []
        self.copied = self.words = self.quick = self.calls_at_once = 0
        self.closed = False

    @property
    def compute(self) -> SimulatedStream:
        return self._compute

    def host_memory(self, size: int) -> Tensor:
        return aligned_buffer(size)

    def mapped(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def copy(self, stream: SimulatedStream, target: Tensor, source: Tensor) -> None:
        if stream is not self._compute:
            self.copied += 1
            if self.copied == self.fails_at:
                raise CopyFailed("a copy failed")
        self._enqueue(stream, lambda: target.copy_(source))

    def calls(self) -> Calls | None:
        at_once = _COPIES(self._copies_at) if self.copies_at_once else None
        return Calls(_COPY(self._copy_at), _WRITE(self._write_at), at_once, ctypes.c_uint64(7))

    def _copy_at(self, target: int, source: int, size: int, stream: int) -> int:
        self.quick += 1
        self.copied += 1
        if self.copied == self.fails_at:
            return 700
        self._enqueue(self.copies, lambda: ctypes.memmove(target, source, size))
        return 0 if stream == 7 else 1

    def _copies_at(self, targets, sources, sizes, count, attributes, first, attributes_count, stream) -> int:
        """In any order."""
        if list(attributes[:6]) != [1, 0, 0, 0, 0, 0] or (first[0], attributes_count) != (0, 1):
            return 1
        self.calls_at_once += 1
        if self.refuses_at_once:
            return 801
        for number in self.random.sample(range(count), count):
            if code := self._copy_at(targets[number], sources[number], sizes[number], stream):
                return code
        return 0

    def _write_at(self, stream: int, place: int, value: int, flags: int) -> int:
        self.words += 1
        self._enqueue(self.copies, lambda: ctypes.memmove(place, ctypes.byref(ctypes.c_uint32(value)), 4))
        return 0 if (stream, flags) == (7, 0) else 1

    def write_word(self, stream: SimulatedStream, word: Tensor, value: int) -> None:
        self.words += 1
        self._enqueue(stream, lambda: word.fill_(value))

    def launch(self, kernel: Callable[[], None]) -> None:
        self._enqueue(self._compute, kernel)

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        with self.lock:
            return SimulatedEvent(self, stream, stream.enqueued)

    def wait(self, stream: SimulatedStream, event: Event) -> None:
        self._enqueue(stream, event)

    def close(self) -> None:
        with self.lock:
            for stream in self.streams:
                self.run_until(self.record(stream))
            self.closed = True

    def _enqueue(self, stream: SimulatedStream, work: Callable[[], object] | Event) -> None:
        with self.lock:
            assert not self.closed, "enqueued on a device that was closed"
            stream.work.append(work)
            stream.enqueued += 1
            if self.inline:
                if stream is self._compute:
                    self.run_until(self.record(stream))
            else:
                for _ in range(self.random.choice((0, 0, 1, 2, 20))):
                    self._step(self.random.choice(self.streams))

    def _step(self, stream: SimulatedStream) -> bool:
        if not stream.work:
            return False
        work = stream.work[0]
        if isinstance(work, SimulatedEvent):
            if not work.done():
                return False
        else:
            work()
        stream.work.popleft()
        stream.done += 1
        return True

    def run_until(self, event: SimulatedEvent) -> None:
        """With as little else as it takes: what the event's stream waits for."""
        others = [stream for stream in self.streams if stream is not event.stream]
        while not event.done():
            moved = any(self._step(stream) for stream in (event.stream, *others))
            assert moved, "the streams wait for each other"


class LiveDevice(SimulatedDevice):
    """Each stream runs in a thread of its own, so that a kernel may wait for what the host does meanwhile.

        graph = LiveGraph(device)
        with graph: device.launch(kernel)       # is not run
        graph.replay()                          # is

    inline: nothing that the host launches runs beside it, as Triton's interpreter wants it.
    errors: of work that failed, raised by close(). Nobody waits longer than `patience` seconds.
    """

    patience = 30.0

    def __init__(
        self, seed: int = 0, *, inline: bool = False, fails_at: int | None = None, latest: float = 1e-3
    ) -> None:
        super().__init__(seed, inline=inline, fails_at=fails_at)
        self.latest, self.graph, self.errors = latest, None, []
        self._moved, self._ends = threading.Condition(self.lock), False
        self._threads = [threading.Thread(target=self._work, args=(stream,), daemon=True) for stream in self.streams]
        for thread in self._threads:
            thread.start()

    def launch(self, kernel: Callable[[], None]) -> None:
        if threading.current_thread() is self._threads[self.streams.index(self._compute)]:
            kernel()  # of a RepeatedFunction
        elif self.graph is not None:
            self.graph.kernels.append(kernel)
        else:
            super().launch(kernel)
            if self.inline:
                self.record(self._compute).wait()

    def enqueue_call(self, function: Callable[[], None]) -> None:
        self._enqueue(self._compute, function)

    def close(self) -> None:
        super().close()
        with self.lock:
            self._ends = True
            self._moved.notify_all()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def run_until(self, event: SimulatedEvent) -> None:
        assert self._moved.wait_for(event.done, self.patience), f"the stream of {event.stream.name} hangs"

    def _enqueue(self, stream: SimulatedStream, work: Callable[[], object] | Event) -> None:
        with self.lock:
            assert not self.closed, "enqueued on a device that was closed"
            stream.work.append(work)
            stream.enqueued += 1
            self._moved.notify_all()

    def _work(self, stream: SimulatedStream) -> None:
        while True:
            with self.lock:
                self._moved.wait_for(lambda: stream.work or self._ends)
                if not stream.work:
                    return
                work = stream.work[0]
                delay = self.random.choice((0, 0, self.latest * self.random.random()))
                if isinstance(work, SimulatedEvent):
                    self._moved.wait_for(work.done)
            if not isinstance(work, SimulatedEvent):
                time.sleep(delay)
                try:
                    work()
                except BaseException as error:
                    self.errors.append(error)
            with self.lock:
                stream.work.popleft()
                stream.done += 1
                self._moved.notify_all()


class LiveGraph:
    """Stands for a CUDA graph: launches in order, with the tensors that they had."""

    def __init__(self, device: LiveDevice) -> None:
        self.device, self.kernels = device, list[Callable[[], None]]()

    def __enter__(self) -> None:
        self.device.graph = self

    def __exit__(self, *_: object) -> None:
        self.device.graph = None

    def replay(self) -> None:
        for kernel in self.kernels:
            self.device.launch(kernel)


class RepeatedFunction:
    """Stands for the graph of a function that computes by torch: at a replay it is called again, by the device."""

    def __init__(self, device: LiveDevice, replays: GpuReplays, function: Callable[[], object]) -> None:
        self.device, self._replays, self._function = device, replays, function
        with replays.rehearsing():
            function()
        with replays.capturing() as self.passes, LiveGraph(device):  # nothing waits, and the numbers mean nothing
            function()

    def replay(self) -> None:
        self._replays.replay(self.passes, self.launch)

    def launch(self) -> None:
        self.device.enqueue_call(self._call)

    def _call(self) -> None:
        with self._replays.capturing():
            self._function()
