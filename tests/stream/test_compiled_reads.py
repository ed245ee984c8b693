"""Ranges read by compiled threads: bytes, checksums and errors of Python's threads, and each part told once."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from amoeba.stream.store import StoreError, aligned_buffer, compiled_reads
from amoeba.stream.store.buffers import Memory
from amoeba.stream.store.reading import PART, Range, Reader

SIZES = [PART + 4096, 2 * PART, 9 * PART, 3 * PART + compiled_reads.PIECE + 8192]


@pytest.fixture(autouse=True)
def a_compiler() -> None:
    if compiled_reads._library() is None:
        pytest.skip("no compiler")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts"
    path.write_bytes(random.Random(0).randbytes(10 * PART))
    return path


@pytest.fixture
def reader(file: Path) -> Iterator[Reader]:
    found = Reader()
    yield found
    found.close()


def range_of(reader: Reader, path: Path, offset: int, size: int, on_part=None) -> Range:
    return Range(reader.file(path), offset, size, Memory(aligned_buffer(size), size, on_part), 0, size)


def needs_direct(reader: Reader, path: Path) -> None:
    if reader.file(path).direct_descriptor() is None:
        pytest.skip("a file system without O_DIRECT")


def noted(reader: Reader, monkeypatch) -> list[bool]:
    """Whether each range was read by compiled threads."""
    found, true = [], reader._read_compiled

    def read(*arguments):
        result = true(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(reader, "_read_compiled", read)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_checksums_are_those_of_pythons_threads(size: int, file: Path, reader: Reader, monkeypatch) -> None:
    needs_direct(reader, file)
    compiled, plain = noted(reader, monkeypatch), Reader()
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(plain, "_read_compiled", lambda *_: None)
    for offset in (0, 4096, 10 * PART - size):
        told.clear()
        ranges = [range_of(each, file, offset, size, lambda *part: told.append(part)) for each in (reader, plain)]
        sums = [each.read([whole], checksums=True) for each, whole in zip((reader, plain), ranges, strict=True)]
        assert sums[0] == sums[1] and len(sums[0]) == -(-size // PART)
        expected = torch.frombuffer(bytearray(file.read_bytes()[offset : offset + size]), dtype=torch.uint8)
        assert all(torch.equal(whole.memory.tensor, expected) for whole in ranges)
        parts = [(begin, min(PART, size - begin)) for begin in range(0, size, PART)]
        assert sorted(told) == sorted(parts * 2)
    assert compiled == [True] * 3
    plain.close()


def test_a_part_is_told_when_it_is_there(file: Path, reader: Reader) -> None:
    needs_direct(reader, file)
    wanted, wrong = file.read_bytes(), []

    def told(begin: int, count: int) -> None:
        if bytes(whole.memory.bytes[begin : begin + count]) != wanted[begin : begin + count]:
            wrong.append(begin)

    for _ in range(5):
        whole = range_of(reader, file, 0, 9 * PART, told)
        reader.read([whole])
    assert not wrong


def test_many_ranges_at_the_same_time_do_not_mix(file: Path, reader: Reader) -> None:
    wanted = file.read_bytes()

    def read(number: int) -> bool:
        size, offset = SIZES[number % len(SIZES)], 4096 * (number % 7)
        whole = range_of(reader, file, offset, size)
        reader.read([whole])
        return bytes(whole.memory.bytes) == wanted[offset : offset + size]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(36)))


def test_a_file_that_was_cut_short_is_named(file: Path, reader: Reader, monkeypatch) -> None:
    compiled = noted(reader, monkeypatch)
    whole = range_of(reader, file, 0, 10 * PART)
    os.truncate(file, 5 * PART + 4096)
    with pytest.raises(StoreError, match=r"experts.*cut short"):
        reader.read([whole])
    assert compiled == [False]


def test_what_a_callback_raises_is_raised_once_all_reads_have_ended(file: Path, reader: Reader) -> None:
    needs_direct(reader, file)

    def failing(begin: int, count: int) -> None:
        raise RuntimeError(f"a copy of {count} bytes failed")

    whole = range_of(reader, file, 0, 9 * PART, failing)
    with pytest.raises(RuntimeError, match="a copy of 1048576 bytes failed"):
        reader.read([whole])
    whole.memory.tensor.zero_()
    assert not whole.memory.tensor.any()
    again = range_of(reader, file, 0, 9 * PART)
    reader.read([again])
    assert bytes(again.memory.bytes) == file.read_bytes()[: 9 * PART]


def test_closing_waits_for_reads_that_are_under_way(file: Path) -> None:
    reader, begun, go_on = Reader(), threading.Event(), threading.Event()
    needs_direct(reader, file)

    def told(begin: int, count: int) -> None:
        begun.set()
        go_on.wait(10)

    whole = range_of(reader, file, 0, 9 * PART, told)
    with ThreadPoolExecutor(2) as pool:
        read = pool.submit(reader.read, [whole])
        begun.wait(10)
        closed = pool.submit(reader.close)
        time.sleep(0.02)
        assert not closed.done()
        go_on.set()
        read.result()
        closed.result()
    assert bytes(whole.memory.bytes) == file.read_bytes()[: 9 * PART]
    descriptor = os.open(file, os.O_RDONLY)
    assert not reader._compiled.read(descriptor, 0, whole.memory.address, PART, None), "none begins after it"
    os.close(descriptor)
