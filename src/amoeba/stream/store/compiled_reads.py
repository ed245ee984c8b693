"""Ranges read by compiled threads (csrc/read.cpp), in pieces so small that Python would be the bottleneck.

reads = open_compiled_reads(threads=32)         # None where nothing can be compiled
reads.read(descriptor, offset, address, size, told)     # whether all of it was read; told(begin, bytes) of each part

loads = reads.loads(onward)                             # ranges that go on to a device (csrc/copy_to_device.h)
loads.begin(descriptor, offset, address, size)          # reads begin, and this returns
loads.open([(0, begin, bytes, target)], place, value)   # of load 0: where its bytes go; the word behind all copies
loads.end()                                             # waits; whether all of it went on, and the word too
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from amoeba.cpu.build import CoreUnavailable, load, with_library

logger = logging.getLogger("amoeba")

PIECE = 256 * 1024  # bytes of one read
_TOLD = ctypes.CFUNCTYPE(None, c_int64, c_int64)
_SIGNATURES = {
    "amoeba_readers_begin": (c_void_p, (c_int,)),
    "amoeba_readers_end": (None, (c_void_p,)),
    "amoeba_read": (c_int, (c_void_p, c_int, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "amoeba_loads_new": (c_void_p, (c_void_p, c_void_p)),
    "amoeba_loads_begin": (None, (c_void_p, c_int, c_int64, c_int64, c_void_p, c_int64)),
    "amoeba_loads_open": (None, (c_void_p, c_void_p, c_int64, c_uint64, c_uint32)),
    "amoeba_loads_cancel": (None, (c_void_p,)),
    "amoeba_loads_end": (c_int, (c_void_p, c_void_p, c_void_p)),
}


class Onward(ctypes.Structure):
    """As copy_to_device.h has it: addresses of functions of CUDA's driver, and what they are called with."""

    _fields_ = tuple((name, c_uint64) for name in ("enter", "copy", "write", "context", "stream"))


class LoadTimes(NamedTuple):
    """Of time.perf_counter_ns: reads began, the first and the last piece was there, the word behind them was called."""

    begun: int
    first: int
    last: int
    called: int


class CompiledReads:
    """part: bytes of what is told, a multiple of PIECE."""

    def __init__(self, library: ctypes.CDLL, threads: int, part: int) -> None:
        self._library, self._part = library, part
        self._readers: int | None = library.amoeba_readers_begin(threads)
        self._end = weakref.finalize(self, library.amoeba_readers_end, self._readers)  # if it is never closed
        self._changed, self._under_way = threading.Condition(), 0

    def read(
        self, descriptor: int, offset: int, address: int, size: int, told: Callable[[int, int], None] | None
    ) -> bool:
        """Python's lock is free meanwhile. What `told` raises is raised here, at the end."""
        failed: list[BaseException] = []

        def tell(begin: int, count: int) -> None:
            try:
                if told is not None and not failed:
                    told(begin, count)
            except BaseException as error:  # of a thread that Python knows nothing of
                failed.append(error)

        function = None if told is None else _TOLD(tell)
        place = None if function is None else ctypes.cast(function, c_void_p)
        arguments = descriptor, offset, size, address, PIECE, self._part, place
        with self._changed:
            readers = self._readers
            if readers is None:
                return False
            self._under_way += 1
        try:
            error = self._library.amoeba_read(readers, *arguments)
        finally:
            self._ended()
        if failed:
            raise failed[0]
        return error == 0

    def loads(self, onward: Onward) -> CompiledLoads | None:
        """None where reads are closed."""
        with self._changed:
            if self._readers is None:
                return None
            self._under_way += 1
        made = self._library.amoeba_loads_new(self._readers, ctypes.addressof(onward))
        return CompiledLoads(self._library, made, self._ended)

    def _ended(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Waits for reads that are under way; none begins after it."""
        with self._changed:
            self._readers = None
            self._changed.wait_for(lambda: not self._under_way)
        self._end()


class CompiledLoads:
    """Of one thread. `end` has to be called once, whatever happens."""

    def __init__(self, library: ctypes.CDLL, made: int, ended: Callable[[], None]) -> None:
        self._library, self._made, self._ended = library, made, ended
        self.count, self.is_open = 0, False
        self.times = LoadTimes(0, 0, 0, 0)  # of what has ended

    def begin(self, descriptor: int, offset: int, address: int, size: int) -> None:
        self._library.amoeba_loads_begin(self._made, descriptor, offset, size, address, PIECE)
        self.count += 1

    def open(self, targets: Sequence[tuple[int, int, int, int]], place: int, value: int) -> None:
        """targets: load, begin, bytes and address of each piece of memory that they go to. place: of the word, 0: there
        is none."""
        numbers = [number for target in targets for number in target]
        self._library.amoeba_loads_open(self._made, (c_uint64 * len(numbers))(*numbers), len(targets), place, value)
        self.is_open = True

    def end(self) -> bool:
        """Whether all was read and went on; where it was never opened, nothing goes on. RuntimeError: a call failed."""
        if not self.is_open:
            self._library.amoeba_loads_cancel(self._made)
        errors, times = (c_int * max(1, self.count))(), (c_int64 * 4)()
        try:
            code = self._library.amoeba_loads_end(self._made, errors, times)
        finally:
            self._ended()
        self.times = LoadTimes(*times)
        if code:
            raise RuntimeError(f"CUDA error {code}")
        return self.is_open and not any(errors)


def open_compiled_reads(threads: int, part: int) -> CompiledReads | None:
    library = _library()
    return None if library is None else CompiledReads(library, threads, part)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return with_library("read", lambda file: load(file, _SIGNATURES))
    except CoreUnavailable as error:
        logger.info("experts are read by threads of Python, in parts of a megabyte: %s", error)
        return None
