"""Ranges read by compiled threads (csrc/read.cpp), in pieces so small that Python would be the bottleneck.

reads = open_compiled_reads(threads=32)         # None where nothing can be compiled
reads.read(descriptor, offset, address, size, told)     # whether all of it was read; told(begin, bytes) of each part
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

from amoeba.cpu.build import CoreUnavailable, load, with_library

logger = logging.getLogger("amoeba")

PIECE = 256 * 1024  # bytes of one read
_TOLD = ctypes.CFUNCTYPE(None, c_int64, c_int64)
_SIGNATURES = {
    "amoeba_readers_begin": (c_void_p, (c_int,)),
    "amoeba_readers_end": (None, (c_void_p,)),
    "amoeba_read": (c_int, (c_void_p, c_int, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
}


class CompiledReads:
    """part: bytes of what is told, a multiple of PIECE."""

    def __init__(self, library: ctypes.CDLL, threads: int, part: int) -> None:
        self._library, self._part = library, part
        self._readers: int | None = library.amoeba_readers_begin(threads)
        self._end = weakref.finalize(self, library.amoeba_readers_end, self._readers)  # where nobody closes it
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
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
        if failed:
            raise failed[0]
        return error == 0

    def close(self) -> None:
        """Waits for reads that are under way; none begins after it."""
        with self._changed:
            self._readers = None
            self._changed.wait_for(lambda: not self._under_way)
        self._end()


def open_compiled_reads(threads: int, part: int) -> CompiledReads | None:
    library = _library()
    return None if library is None else CompiledReads(library, threads, part)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return with_library("read", lambda file: load(file, _SIGNATURES), sources=Path(__file__).parent / "csrc")
    except CoreUnavailable as error:
        logger.info("experts are read by threads of Python, in parts of a megabyte: %s", error)
        return None
