"""A store as `amoeba pack` writes it: one read per expert, each with a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from torch import Tensor

from amoeba.errors import bad_value, one_line
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.compiled_reads import CompiledLoads, Onward
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.index import read_index
from amoeba.stream.store.reading import THREADS, Range, Reader, checksum, checksum_of
from amoeba.stream.store.store import Store, Verify
from amoeba.stream.store.tensor_files import tensors_of

_AGAIN = "copy the store again, or pack it anew with `amoeba pack`"
_CHUNK = 16 * 2**20


class PackedStore(Store):
    def __init__(
        self, folder: str | Path, *, verify: Verify = "first", threads: int = THREADS, direct: bool = True
    ) -> None:
        if verify not in get_args(Verify):
            raise bad_value("verify", f"one of {', '.join(get_args(Verify))}", repr(verify), "leave it out for first")
        self.folder = Path(folder).expanduser()
        self.index = read_index(self.folder)
        self.layers = tuple(layer.entry for layer in self.index.layers)
        for layer in self.index.layers:
            self._check_size(self.folder / layer.file, layer.entry.experts * layer.entry.expert_bytes)
        self._rest_file = self.folder / self.index.rest["file"]
        self._check_size(self._rest_file, self.index.rest["bytes"])
        self.rest = tensors_of(self._rest_file)
        self._verify = verify
        self._verified: set[tuple[int, int]] = set()
        self._reader = Reader(threads=threads, direct=direct)

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        stored, size = self.index.layers[layer], self.expert_bytes(layer)
        check = self._is_checked(layer, expert)
        path = self.folder / stored.file
        whole = Range(self._reader.file(path), expert * size, size, memory, 0, size)
        parts = self._reader.read([whole], checksums=check)
        if not check:
            return
        found, expected = checksum(parts), stored.checksums[expert]
        if found != expected:
            raise StoreError(path, f"bytes with checksum {expected:08x}", f"{found:08x}: they have changed", _AGAIN)
        self._verified.add((layer, expert))

    def holds(self, layer: int, expert: int, blob: Tensor) -> bool:
        """Whether the expert was packed with exactly these bytes. Nothing is read from the disk."""
        found = checksum_of(Memory(blob, self.expert_bytes(layer)).bytes)
        return found == self.index.layers[layer].checksums[expert]

    def place(self, layer: int, expert: int) -> tuple[int, int] | None:
        stored, size = self.index.layers[layer], self.expert_bytes(layer)
        if self._is_checked(layer, expert):
            return None
        descriptor = self._reader.file(self.folder / stored.file).direct_descriptor()
        return None if descriptor is None else (descriptor, expert * size)

    def loads(self, onward: Onward) -> CompiledLoads | None:
        return self._reader.loads(onward)

    def _is_checked(self, layer: int, expert: int) -> bool:
        return self._verify == "always" or (self._verify == "first" and (layer, expert) not in self._verified)

    def damage(self, progress: Callable[[int], None] = lambda done: None) -> list[str]:
        """Reads everything and says what is not as it was written; progress gets the bytes read so far."""
        found, done, verify = [], 0, self._verify
        self._verify = "always"
        try:
            for number, entry in enumerate(self.layers):
                blob = aligned_buffer(entry.expert_bytes)
                for expert in range(entry.experts):
                    try:
                        self.read(number, expert, blob)
                    except StoreError as error:
                        found.append(str(error))
                    done += entry.expert_bytes
                    progress(done)
        finally:
            self._verify = verify
        try:
            if crc32_of(self._rest_file) != self.index.rest["crc32"]:
                found.append(f"{self._rest_file}: its bytes have changed. {_AGAIN[0].upper()}{_AGAIN[1:]}.")
        except OSError as error:
            found.append(str(StoreError(self._rest_file, "a file that can be read", one_line(error), _AGAIN)))
        return found

    @staticmethod
    def _check_size(path: Path, expected: int) -> None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(path, "a file of the store", one_line(error), _AGAIN) from error
        if size != expected:
            raise StoreError(path, f"{expected} bytes", size, _AGAIN)


def crc32_of(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found
