"""Ranges of files read in parallel, past the page cache where the file system allows it.

    reader = Reader()
    file = reader.file(path)
    reader.read([Range(file, offset, needed, memory, start)])

A single read of a megabyte does not use a disk fully; several at a time do. So ranges are cut into parts, which a few
threads read; Python's lock is free meanwhile. `read` returns when all parts are read or have failed.

One range that goes past the page cache is read by compiled threads, in smaller pieces (compiled_reads.py), where there
is a compiler. If that fails, for whatever reason, it is read once more as above, which finds out why.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from amoeba.core.errors import one_line
from amoeba.stream.store.buffers import Memory
from amoeba.stream.store.compiled_reads import CompiledLoads, CompiledReads, Onward, open_compiled_reads
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.layers import BLOCK

logger = logging.getLogger("amoeba")

PART = 2**20  # bytes of a read; part of the format too, since checksums are of parts
# More than an expert has parts, mostly: one of 9 MiB by eight threads takes two turns, the second with a single read.
THREADS = 16
# Compiled threads for each: pieces are smaller, and threads cost less. Two experts of 9 MiB are 72 pieces at once. With
# 32 threads one alone took two rounds: 2.8 GB/s where 128 threads reached 3.3 (an H200 machine's disk, 2026-11-16).
COMPILED_PER_THREAD = 5
_DIRECT = getattr(os, "O_DIRECT", 0)
_AGAIN = "copy or download it again"
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected


class ReadFile:
    """A file open for reads by any thread."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self._reader = path, reader
        self._direct: int | None = None
        self._can_be_direct = reader.direct
        try:
            self._buffered = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(path, "a file that can be read", one_line(error), _AGAIN) from error
        if self._can_be_direct:
            try:
                self._direct = os.open(path, os.O_RDONLY | _DIRECT)
            except OSError as error:
                self._refuse_direct(error)

    def read(self, memory: Memory, start: int, size: int, offset: int, needed: int) -> None:
        """At least `needed` bytes from `offset` on into size bytes of the memory from `start` on. O_DIRECT reads whole
        blocks, so size may reach beyond the end of the file."""
        done = 0
        while done < needed:
            into = memory.bytes[start + done : start + size]
            aligned = not (offset + done | memory.address + start + done | len(into)) % BLOCK
            direct = self._direct if aligned and self._can_be_direct else None
            try:
                got = _read_once(self._buffered if direct is None else direct, into, offset + done)
            except OSError as error:
                if direct is not None and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    self._refuse_direct(error)
                    continue
                remedy = "check the disk (dmesg), then try again"
                raise StoreError(self.path, "a file that can be read", one_line(error), remedy) from error
            if got == 0:
                expected = f"{offset + needed} bytes at least"
                raise StoreError(self.path, expected, f"{offset + done}: it was cut short", _AGAIN)
            done += got

    def direct_descriptor(self) -> int | None:
        """For reads of whole blocks into whole pages."""
        return self._direct if self._can_be_direct else None

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def _refuse_direct(self, error: OSError) -> None:
        self._can_be_direct = False
        self._reader.say_buffered(self.path, error)


class Range(NamedTuple):
    """`needed` bytes of a file from `offset` on, read into `size` bytes of the memory from `start` on."""

    file: ReadFile
    offset: int
    needed: int
    memory: Memory
    start: int
    size: int

    def parts(self) -> Iterator[Range]:
        for begin in range(0, self.needed, PART):
            whole = self._replace(offset=self.offset + begin, start=self.start + begin)
            if begin + PART < self.needed:
                yield whole._replace(needed=PART, size=PART)
            else:
                yield whole._replace(needed=self.needed - begin, size=self.size - begin)


class Reader:
    def __init__(self, *, threads: int = THREADS, direct: bool = True) -> None:
        self.direct = direct and bool(_DIRECT) and hasattr(os, "preadv")  # os.pread has memory of its own
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="amoeba-read")
        self._threads = threads
        self._compiled: CompiledReads | None = None
        self._files: dict[Path, ReadFile] = {}
        self._lock = threading.Lock()
        self._said_buffered = self._closed = False

    def file(self, path: Path) -> ReadFile:
        with self._lock:
            if self._closed:
                raise StoreError(path, "an open store", "a closed one", "open it again with open_store")
            if path not in self._files:
                self._files[path] = ReadFile(path, self)
                if self._compiled is None and self.direct:
                    self._compiled = open_compiled_reads(COMPILED_PER_THREAD * self._threads, PART)
            return self._files[path]

    def read(self, ranges: Sequence[Range], *, checksums: bool = False) -> list[int]:
        """The checksum of each part, in order, if asked for."""
        if len(ranges) == 1 and (found := self._read_compiled(ranges[0], checksums)) is not None:
            return found
        futures: list[Future[int]] = []
        last: Range | None = None  # is read by the calling thread, which would wait else
        try:
            for part in (part for whole in ranges for part in whole.parts()):
                if last is not None:
                    futures.append(self._pool.submit(_read_part, last, checksums))
                last = part
            own = [] if last is None else [_read_part(last, checksums)]
            return [future.result() for future in futures] + own
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # none writes into the caller's memory after an error

    def loads(self, onward: Onward) -> CompiledLoads | None:
        """Reads that go on to a device; None where there are no compiled threads."""
        return None if self._compiled is None else self._compiled.loads(onward)

    def _read_compiled(self, whole: Range, checksums: bool) -> list[int] | None:
        """None where it is not for compiled threads, or did not succeed."""
        memory, start, size, on_part = whole.memory, whole.start, whole.size, whole.memory.on_part
        descriptor = whole.file.direct_descriptor()
        is_whole = not (whole.offset | memory.address + start | size) % BLOCK and whole.needed == size > PART
        if self._compiled is None or descriptor is None or not is_whole:
            return None
        found = [0] * -(-size // PART)

        def told(begin: int, count: int) -> None:
            if on_part is not None:
                on_part(start + begin, count)
            if checksums:
                found[begin // PART] = zlib.crc32(memory.bytes[start + begin : start + begin + count])

        wants_to_know = told if checksums or on_part is not None else None
        is_read = self._compiled.read(descriptor, whole.offset, memory.address + start, size, wants_to_know)
        return found if is_read else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.shutdown()
        if self._compiled is not None:
            self._compiled.close()
        while self._files:
            self._files.popitem()[1].close()

    def say_buffered(self, path: Path, error: OSError) -> None:
        if not self._said_buffered:
            self._said_buffered = True
            logger.warning("%s: read through the page cache, O_DIRECT was refused (%s)", path.parent, one_line(error))


def checksum(parts: Sequence[int]) -> int:
    """Of a blob, from the CRC-32 of each of its parts of a megabyte: those are computed by the threads that read."""
    return zlib.crc32(b"".join(part.to_bytes(4, "little") for part in parts))


def checksum_of(blob: memoryview) -> int:
    return checksum([zlib.crc32(blob[begin : begin + PART]) for begin in range(0, len(blob), PART)])


def crc32_joined(first: int, second: int, size: int) -> int:
    """The CRC-32 of two pieces of bytes one after the other, from those of each; size: bytes of the second one."""
    return _times(_behind(size), first) ^ second


def crc32_of_parts(parts: Sequence[int], size: int) -> int:
    """Of `size` bytes, from the CRC-32 of each of their parts of a megabyte."""
    found = 0
    for number, part in enumerate(parts):
        found = crc32_joined(found, part, min(PART, size - number * PART))
    return found


@functools.lru_cache(maxsize=1024)
def _behind(size: int) -> int:
    """The factor by which appending `size` bytes multiplies a CRC: x to the power of 8 * size."""
    found, power = 1 << 31, 1 << 23  # 1 and x^8; the highest bit is that of x^0
    while size:
        if size & 1:
            found = _times(power, found)
        power, size = _times(power, power), size >> 1
    return found


def _times(one: int, other: int) -> int:
    """The product of two polynomials over GF(2) modulo that of CRC-32."""
    found = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            found ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found


def _read_part(part: Range, checksums: bool) -> int:
    part.file.read(part.memory, part.start, part.size, part.offset, part.needed)
    if part.memory.on_part is not None:
        part.memory.on_part(part.start, part.needed)
    return zlib.crc32(part.memory.bytes[part.start : part.start + part.needed]) if checksums else 0


def _read_once(descriptor: int, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    found = os.pread(descriptor, len(into), offset)
    into[: len(found)] = found
    return len(found)
