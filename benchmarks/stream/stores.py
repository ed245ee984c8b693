"""Where the experts of the benchmark come from: resident ones that are copied, or files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.compiled_reads import CompiledLoads, Onward
from amoeba.stream.store.layers import StoredExperts
from amoeba.stream.store.reading import Range, Reader
from amoeba.stream.store.store import Store
from benchmarks.stream.problem import StreamProblem

# Files that are written at the same time, each of which is in memory meanwhile; and bytes of one write.
_WRITERS, _AT_ONCE = 4, 16 * 2**20


def write_whole(path: Path, numbers: Tensor) -> None:
    """On the disk when it returns, past the page cache where the file system allows that: written back later it would
    be in the way of what is measured."""
    data = numbers.numpy().data
    try:
        _write(path, data, getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _write(path, data, 0)


def _write(path: Path, data: memoryview, how: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | how, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(file, data[done : done + _AT_ONCE])
        os.fsync(file)
    finally:
        os.close(file)


class ResidentStore(Store):
    """Experts copied from resident ones: fills pinned memory without a disk. As many threads as like may read."""

    def __init__(self, problem: StreamProblem, resident: Sequence[StoredExperts]) -> None:
        self.folder, self.rest = Path(), {}
        self.layers = (problem.entry,) * len(resident)
        self._resident, self._thread = resident, threading.local()

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        weights, blob = self._resident[layer], self.layers[layer].weights(memory.tensor[None])
        if weights.device.type != "cuda":
            _copy(blob, weights, expert)
            return
        if not hasattr(self._thread, "stream"):
            self._thread.stream = torch.cuda.Stream(weights.device)
        with torch.cuda.stream(self._thread.stream):
            _copy(blob, weights, expert)
        self._thread.stream.synchronize()

    def close(self) -> None:
        """There are no files."""


def _copy(into: StoredExperts, weights: StoredExperts, expert: int | None = None) -> None:
    """Of all experts, or of one; they have no biases."""
    for view, tensor in zip(into.tensors(), weights.tensors(), strict=True):
        if view is not None and tensor is not None:
            view.copy_(tensor if expert is None else tensor[expert : expert + 1], non_blocking=True)


class FileStore(Store):
    """The same in files as `amoeba pack` writes them, read as a packed store is, but for checksums. Several memories
    may use it one after another; `end` closes the files."""

    def __init__(self, problem: StreamProblem, resident: Sequence[StoredExperts], folder: Path) -> None:
        entry = problem.entry
        self.folder, self.rest, self.layers = folder, {}, (entry,) * len(resident)
        self._reader = Reader()
        # a disk writes several files at a time faster than one
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="writes experts") as pool:
            list(pool.map(self._write, range(len(resident)), resident))

    def _write(self, layer: int, weights: StoredExperts) -> None:
        entry = self.layers[layer]
        blobs = torch.zeros(entry.experts, entry.expert_bytes, dtype=torch.uint8, device=weights.device)
        _copy(entry.weights(blobs), weights)
        write_whole(self._file(layer), aligned_buffer(blobs.numel()).copy_(blobs.view(-1)))

    def _file(self, layer: int) -> Path:
        return self.folder / f"{layer:05}.bin"

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        size = self.expert_bytes(layer)
        self._reader.read([Range(self._reader.file(self._file(layer)), expert * size, size, memory, 0, size)])

    def place(self, layer: int, expert: int) -> tuple[int, int] | None:
        descriptor = self._reader.file(self._file(layer)).direct_descriptor()
        return None if descriptor is None else (descriptor, expert * self.expert_bytes(layer))

    def loads(self, onward: Onward) -> CompiledLoads | None:
        return self._reader.loads(onward)

    def first(self, layers: int) -> FileStore:
        """The same files, so many layers of them."""
        found = copy(self)
        found.layers = self.layers[:layers]
        return found

    def close(self) -> None:
        """A memory that is closed closes its store; the next one goes on with it."""

    def end(self) -> None:
        self._reader.close()
