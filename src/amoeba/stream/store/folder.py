"""A Hugging Face folder read as a store: each expert in several reads, its parts put in order on the way."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from amoeba.integrations.quantised_files import weight_of
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.layers import BLOCK, LayerEntry
from amoeba.stream.store.mapping import map_experts
from amoeba.stream.store.reading import THREADS, Range, Reader
from amoeba.stream.store.store import Store
from amoeba.stream.store.tensor_files import Piece, TensorEntry, checkpoint_tensors

SAMPLE = 2048  # bytes at each end of a tensor that `holds` compares, or a row where that is longer


class FolderStore(Store):
    """safetensors files have no checksums: a file that was cut short is noticed, a changed byte is not."""

    def __init__(
        self, folder: str | Path, *, threads: int = THREADS, direct: bool = True, trust_remote_code: bool = False
    ) -> None:
        self.folder = Path(folder).expanduser()
        found = _headers(self.folder, _stamps(self.folder), trust_remote_code)
        self.layers, self.pieces, self.rest, self.left_out = found
        self._reader = Reader(threads=threads, direct=direct)
        self._scratch: deque[Tensor] = deque()  # as many as threads ever read at the same time

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        """Whole blocks around each piece are read into scratch memory, which O_DIRECT wants, and copied from there."""
        entry, pieces = self.layers[layer], self.pieces[layer]
        scratch = self._take_scratch(sum(_blocks(BLOCK + piece.size) for piece in pieces))
        try:
            from_scratch = Memory(scratch, len(scratch))
            ranges, found, end = [], [], 0
            read: dict[tuple[Path, int], Tensor] = {}  # codes and scales may lie among each other
            for piece in pieces:
                path, start = piece.range_of(expert)
                if (path, start) in read:
                    found.append(read[path, start])
                    continue
                before = start % BLOCK
                needed, size = before + piece.size, _blocks(before + piece.size)
                ranges.append(Range(self._reader.file(path), start - before, needed, from_scratch, end, size))
                read[path, start] = scratch[end + before : end + needed]
                found.append(read[path, start])
                end += size
            self._reader.read(ranges)
            blob = memory.tensor
            for begin, end in entry.gaps():
                blob[begin:end] = 0
            for piece, source in zip(pieces, found, strict=True):
                piece.put(expert, source, blob)
        finally:
            self._scratch.append(scratch)

    def holds(self, layer: int, expert: int, blob: Tensor) -> bool:
        """Whether samples of the expert, from both ends of each of its tensors, are as in this blob."""
        for piece in self.pieces[layer]:
            path, start = piece.range_of(expert)
            if not piece.shape:
                samples = [(start, piece)]
            else:
                rows, row = piece.shape[0], piece.size // piece.shape[0]
                count = min(rows, max(1, SAMPLE // row))
                samples = [(start + begin * row, piece.rows(begin, count)) for begin in {0, rows - count}]
            for begin, sample in samples:
                buffer = aligned_buffer(_blocks(sample.size))
                memory = Memory(buffer, len(buffer))
                self._reader.file(path).read(memory, 0, sample.size, begin, sample.size)
                if not sample.is_in(blob, expert, buffer[: sample.size]):
                    return False
        return True

    def scratch_bytes(self, readers: int) -> int:
        return readers * max(sum(_blocks(BLOCK + piece.size) for piece in pieces) for pieces in self.pieces)

    def _take_scratch(self, size: int) -> Tensor:
        while True:
            try:
                found = self._scratch.pop()
            except IndexError:
                return aligned_buffer(size)
            if len(found) >= size:
                return found


class _Headers(NamedTuple):
    layers: tuple[LayerEntry, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    rest: Mapping[str, TensorEntry]
    left_out: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def _headers(folder: Path, stamps: tuple, trust_remote_code: bool) -> _Headers:
    """Of 18,000 tensors they take a second or two: a plan reads them first, and then the model that is loaded."""
    tensors = checkpoint_tensors(folder)
    mapped, rest = map_experts(folder, tensors, trust_remote_code=trust_remote_code)
    pieces = tuple(tuple(layer.pieces) for layer in mapped)
    taken = {(tensor.file, tensor.start) for each in pieces for piece in each for tensor in piece.tensors}
    taken |= {(tensor.file, tensor.start) for tensor in rest.values()}
    weights = {name: tensors.get(weight_of(name), tensor) for name, tensor in tensors.items()}  # tables of scales, too
    left_out = tuple(name for name, tensor in weights.items() if (tensor.file, tensor.start) not in taken)
    return _Headers(tuple(layer.entry for layer in mapped), pieces, MappingProxyType(rest), left_out)


def _stamps(folder: Path) -> tuple:
    """What changes where a file of the folder does."""
    files = sorted(path for pattern in ("*.json", "*.safetensors", "*.py") for path in folder.glob(pattern))
    found = ((path.name, path.stat()) for path in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
