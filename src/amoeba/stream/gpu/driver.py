"""Copies between host and device by a call of CUDA's driver: three microseconds of the host, where torch needs ten.
(Not measured yet.) And what torch does not have: a word that a stream writes.

driver = open_driver(torch.device("cuda", 0))               # None where there is no such library (ROCm, Windows)
driver.to_device(target, source, size, stream)              # addresses, bytes, a CUstream; any thread
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_uint64
from typing import Any

import torch

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
