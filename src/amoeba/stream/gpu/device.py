"""What streaming asks of a device: streams, events, memory that both sides reach. One file knows CUDA.

    device = CudaDevice(torch.device("cuda"))
    device.wait(device.copies, read)             # the stream of copies waits for an event, the host does not
    device.copy(device.copies, slot, blob)
    filled = device.record(device.copies)        # an event: filled.done(), filled.wait()
    device.wait(device.compute, filled)

Tests have another one, on the CPU, whose copies come late, complete in another order, or fail.

Copies go by a call of CUDA's driver: three microseconds of the host, where torch needs ten. (Not measured yet.) It also
has what torch does not have: a word that a stream writes.

    driver = open_driver(torch.device("cuda", 0))               # None where there is no such library (ROCm, Windows)
    driver.to_device(target, source, size, stream)              # addresses, bytes, a CUstream; any thread
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_uint64
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from amoeba.cpu.pointers import address
from amoeba.stream.sizes import show_size
from amoeba.stream.store.buffers import aligned_buffer

logger = logging.getLogger("amoeba")

Stream = Any  # a device's own
Piece = tuple[Tensor, int, int, int]  # flat bytes on the device, where in them, where in the source, how many

# Bytes of a copy that is called together with others. With smaller ones among them CUDA's call waits for all of them.
LEAST_AT_ONCE = 256 * 1024
# This many copies of this size in a row, so that neither their calls nor the wait after them count; the best of this
# many rows, since a link may wake up in the first, and none is started after this many seconds. Single copies, each
# waited for, told 37.6 GB/s where a run then moved 42.9 (H200, 2026-11-16).
_COPY, _IN_A_ROW = 32 * 2**20, 8
_ROWS, _MOST_COPY_SECONDS = 5, 0.1


class Event(Protocol):
    """A place in a stream."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """The host waits, for what is ahead of that place alone."""


class Calls(NamedTuple):
    """CUDA's own, in the stream of copies, without checks: arguments are ctypes' numbers, made ahead. Each returns 0 or
    the number of an error."""

    to_device: Any  # (target, source, bytes, stream)
    write_word: Any  # (stream, place, value, flags)
    to_device_at_once: Any  # many, by arrays of these (see serve.cpp); None: there is no such call
    stream: Any
    enter: Any = None  # (context): by a thread that has not called any of these yet; None: needs none
    context: int = 0


class Device(ABC):
    """
    device: where the slots are.
    copies: the stream of all copies of experts to the device: they come to pass in the order of their calls.
    downs:  that of copies back to the host, for which nothing that is needed now should wait.
    """

    device: torch.device
    copies: Stream
    downs: Stream

    def why_not_captured(self) -> str | None:
        """Why passes that wait for copies cannot be captured here, or None."""
        return None

    def calls(self) -> Calls | None:
        """For threads that have launched something; None where copies are called in another way."""
        return None

    @property
    @abstractmethod
    def compute(self) -> Stream:
        """Where a pass of the calling thread runs."""

    @abstractmethod
    def host_memory(self, size: int) -> Tensor:
        """Bytes on the host that begin at a page, pinned where the system allows it."""

    @abstractmethod
    def mapped(self, *shape: int) -> Tensor:
        """int32 zeros on the host that kernels can write."""

    @abstractmethod
    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None: ...

    def copy_bytes(self, stream: Stream, target: Tensor, at: int, source: Tensor, source_at: int, size: int) -> None:
        """Of flat tensors of bytes, one on the host, one on the device."""
        self.copy(stream, target[at : at + size], source[source_at : source_at + size])

    def copy_all(self, source: Tensor, pieces: Sequence[Piece]) -> None:
        """Pieces of flat host memory to the device, in the stream of copies; in one call where that can be."""
        for target, at, source_at, size in pieces:
            self.copy_bytes(self.copies, target, at, source, source_at, size)

    @abstractmethod
    def write_word(self, stream: Stream, word: Tensor, value: int) -> None:
        """One int32 on the device, behind all copies ahead of it, also for a kernel that looks at it meanwhile."""

    @abstractmethod
    def launch(self, kernel: Callable[[], None]) -> None:
        """In the stream that computes."""

    @abstractmethod
    def record(self, stream: Stream) -> Event: ...

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What comes after in the stream waits; the host does not."""

    @abstractmethod
    def close(self) -> None:
        """Waits for copies that are under way, and lets go of the memory."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # torch hands the same 32 streams out again and again: those of another priority are not where passes run
        self.copies, self.downs = (torch.cuda.Stream(self.device, priority=-1) for _ in range(2))
        self._driver = open_driver(self.device)
        self._registered: list[tuple[int, Tensor]] = []
        self._said_pageable = False

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def why_not_captured(self) -> str | None:
        return "it needs the driver of an NVIDIA GPU" if self._driver is None else None

    def host_memory(self, size: int) -> Tensor:
        """Registered rather than allocated as pinned: torch's own pinned memory is rounded up to a power of two."""
        memory = aligned_buffer(size)
        place = address("host memory", memory, torch.uint8, (size,))
        failed = ""
        try:
            code = torch.cuda.cudart().cudaHostRegister(place, size, 0)
            failed = "" if int(code) == 0 else f"CUDA error {int(code)}"
        except RuntimeError as error:
            failed = str(error)
        if not failed:
            self._registered.append((place, memory))
        elif not self._said_pageable:
            self._said_pageable = True
            with contextlib.suppress(RuntimeError):  # CUDA reports an error again at the next launch
                torch.zeros(1, dtype=torch.int32, device=self.device)
            logger.warning("%s of memory could not be pinned (%s): copies are slower", show_size(size), failed)
        return memory

    def mapped(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=True)

    def copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def copy_bytes(
        self, stream: torch.cuda.Stream, target: Tensor, at: int, source: Tensor, source_at: int, size: int
    ) -> None:
        if self._driver is None:
            super().copy_bytes(stream, target, at, source, source_at, size)
        else:
            copy = self._driver.to_device if target.is_cuda else self._driver.to_host
            copy(target.data_ptr() + at, source.data_ptr() + source_at, size, stream.cuda_stream)

    def copy_all(self, source: Tensor, pieces: Sequence[Piece]) -> None:
        # where memory could not be pinned such copies wait for the host, together or alone
        can = self._driver is not None and not self._said_pageable and len(pieces) > 1
        if not can or min(size for *_, size in pieces) < LEAST_AT_ONCE:
            super().copy_all(source, pieces)
            return
        assert self._driver is not None
        first = source.data_ptr()
        targets, sources, sizes = zip(
            *((target.data_ptr() + at, first + source_at, size) for target, at, source_at, size in pieces), strict=True
        )
        self._driver.to_device_at_once(targets, sources, sizes, self.copies.cuda_stream)

    def write_word(self, stream: torch.cuda.Stream, word: Tensor, value: int) -> None:
        if self._driver is None:
            raise RuntimeError("words are written by CUDA's driver, which this machine does not have")
        self._driver.write_word(word.data_ptr(), value, stream.cuda_stream)

    def calls(self) -> Calls | None:
        if self._driver is None:
            return None
        copy, write, at_once = self._driver.quick_calls()
        if self._said_pageable:  # such copies wait for the host, together or alone
            at_once = None
        return Calls(copy, write, at_once, ctypes.c_uint64(self.copies.cuda_stream), *self._driver.entrance())

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def record(self, stream: torch.cuda.Stream) -> _CudaEvent:
        return _CudaEvent(stream)

    def wait(self, stream: torch.cuda.Stream, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        stream.wait_event(event.event)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)  # passes may still read slots and rows that go away now
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop()[0])


class Rate(NamedTuple):
    bytes_per_second: float
    bytes: int  # from which it follows


def copy_rate(device: Device) -> Rate:
    """What the link to a GPU gives at best: bytes/s from pinned memory to the device, found out by a short copy."""
    source = device.host_memory(_COPY)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device.device)
    device.wait(device.copies, device.record(device.compute))  # of whom torch may have got this memory
    taken: list[float] = []
    while len(taken) < _ROWS and sum(taken) < _MOST_COPY_SECONDS:
        began = time.perf_counter()
        for _ in range(_IN_A_ROW):
            device.copy(device.copies, target, source)
        device.record(device.copies).wait()
        taken.append(time.perf_counter() - began)
    moved = _IN_A_ROW * _COPY
    return Rate(moved / min(taken), moved)


_NOT_HERE = (1, 801)  # invalid value, not supported


class Driver:
    """quick: the same library, whose calls keep Python's lock."""

    def __init__(self, library: Any, device: int, quick: Any = None) -> None:
        self._library, self._quick, self._thread = library, quick or library, threading.local()
        self._context = ctypes.c_void_p()
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._up, self._down = library.cuMemcpyHtoDAsync_v2, library.cuMemcpyDtoHAsync_v2
        for call in (self._up, self._down):
            call.argtypes, call.restype = [pointer, pointer, size, pointer], ctypes.c_int
        self._write = library.cuStreamWriteValue32_v2
        self._write.argtypes, self._write.restype = [pointer, pointer, ctypes.c_uint32, ctypes.c_uint], ctypes.c_int
        self._at_once = getattr(library, "cuMemcpyBatchAsync_v2", None)
        if self._at_once is not None:
            pointers = [ctypes.c_void_p] * 3 + [size] + [ctypes.c_void_p] * 2 + [size, pointer]
            self._at_once.argtypes, self._at_once.restype = pointers, ctypes.c_int
        library.cuCtxSetCurrent.argtypes, library.cuCtxSetCurrent.restype = [ctypes.c_void_p], ctypes.c_int
        # torch's own context: kept for as long as the process lives, as torch keeps it
        _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ctypes.c_int(device)))

    def to_device(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter()
        _check(self._up(target, source, size, stream))

    def to_device_at_once(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Many copies; in one call where the driver has that."""
        self._enter()
        count, numbers = len(targets), c_uint64 * len(targets)
        if self._at_once is not None:
            # sources are read when the stream comes to them, the first of these attributes says
            attributes, first = (ctypes.c_int32 * 6)(1), c_uint64(0)
            arrays = numbers(*targets), numbers(*sources), numbers(*sizes)
            code = self._at_once(*arrays, count, attributes, ctypes.byref(first), 1, stream)
            if code not in _NOT_HERE:
                _check(code)
                return
            self._at_once = None  # this device does not do it
        for target, source, size in zip(targets, sources, sizes, strict=True):
            _check(self._up(target, source, size, stream))

    def to_host(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter()
        _check(self._down(target, source, size, stream))

    def write_word(self, place: int, value: int, stream: int) -> None:
        self._enter()
        _check(self._write(stream, place, value % 2**32, 0))  # 0: with a fence ahead of it

    def quick_calls(self) -> tuple[Any, Any, Any]:
        """Copy to the device and write a word, by arguments that are ctypes' numbers already: a third of the time, and
        no other thread takes Python's lock in between. And many copies in one call, or None: drivers have that from
        580 (CUDA 13) on."""
        self._enter()
        quick = self._quick
        at_once = getattr(quick, "cuMemcpyBatchAsync_v2", None)
        return quick.cuMemcpyHtoDAsync_v2, quick.cuStreamWriteValue32_v2, at_once

    def entrance(self) -> tuple[Any, int]:
        """What threads that are not Python's call first, and with what."""
        return self._library.cuCtxSetCurrent, self._context.value or 0

    def _enter(self) -> None:
        """A thread that never called CUDA has no context."""
        if not getattr(self._thread, "entered", False):
            _check(self._library.cuCtxSetCurrent(self._context))
            self._thread.entered = True


def open_driver(device: torch.device) -> Driver | None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"), device.index, ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")
