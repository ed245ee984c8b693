"""Stages that work at the same time, each in threads of its own, with few items in flight.

    blobs = ahead(read, experts, threads=2)
    with closing(ahead(write, ahead(quantise, blobs))) as written:
        for name in written:        # in the order of the experts
            show(name)
    with whole_file(path, size) as file:        # chunks that are filled, digested and written at the same time
        digests = [found for _, found in write_segments(file, segments, digest=zlib.crc32)]

An error of any stage is raised where the results are taken, and so is Ctrl-C; by then no thread works on anything any
more, and what had not begun never will.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from amoeba.system.files import WholeFile

CHUNK = 16 * 2**20
_WRITERS = 2  # chunks on their way to the disk at the same time

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    stage: Callable[[Item], Result], items: Iterable[Item], *, threads: int = 1, most: int | None = None
) -> Generator[Result, None, None]:
    """stage(item) of each, in order. At most `most` of them, default one more than threads, are begun, waiting or done
    before the first of these is taken: that bounds memory."""
    source: Any = iter(items)
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"amoeba-{getattr(stage, '__name__', 'stage').strip('_')}")
    try:
        for item in source:
            waiting.append(pool.submit(stage, item))
            if len(waiting) >= (most or threads + 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if hasattr(source, "close"):
            source.close()


class Segment(NamedTuple):
    """Bytes of a file that follow each other. fill(begin, into): puts those from `begin` on into all of `into`; called
    by several threads."""

    size: int
    fill: Callable[[int, memoryview], None]


def write_segments(
    file: WholeFile,
    segments: Sequence[Segment],
    *,
    digest: Callable[[memoryview], Any] = lambda data: None,
    threads: int = 2,
    memory: Callable[[int], memoryview] = lambda size: memoryview(mmap.mmap(-1, size)),
) -> Generator[tuple[int, Any], None, None]:
    """The segments one after another. The bytes and the digest of each chunk of the file, in order, as it is written.

    memory: for a chunk, beginning at a page.
    """
    free: deque[memoryview] = deque()

    def fill(chunk: tuple[int, int, list[tuple[Segment, int, int]]]) -> tuple[int, memoryview, memoryview, Any]:
        offset, size, pieces = chunk
        whole = free.popleft() if free else memory(CHUNK)
        data, end = whole[:size], 0
        for segment, begin, count in pieces:
            segment.fill(begin, data[end : end + count])
            end += count
        return offset, whole, data, digest(data)

    def write(filled: tuple[int, memoryview, memoryview, Any]) -> tuple[int, Any]:
        offset, whole, data, found = filled
        file.write(offset, data)
        free.append(whole)
        return len(data), found

    with closing(ahead(write, ahead(fill, _chunks(segments), threads=threads), threads=_WRITERS)) as written:
        yield from written


def _chunks(segments: Iterable[Segment]) -> Iterator[tuple[int, int, list[tuple[Segment, int, int]]]]:
    offset, size = 0, 0
    pieces: list[tuple[Segment, int, int]] = []
    for segment in segments:
        begin = 0
        while begin < segment.size:
            count = min(segment.size - begin, CHUNK - size)
            pieces.append((segment, begin, count))
            begin, size = begin + count, size + count
            if size == CHUNK:
                yield offset, size, pieces
                offset, size, pieces = offset + size, 0, []
    if size:
        yield offset, size, pieces
