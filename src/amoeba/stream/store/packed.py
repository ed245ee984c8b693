"""A store as `amoeba pack` writes it: one read per expert, and a checksum of everything that the model depends on.

Small files (config, tokenizer) are compared when the store is opened, experts when they are read for the first time,
and the rest of the weights when all of it has been read: by the threads that read, so that it takes the disk's time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from amoeba.core.errors import bad_value, one_line
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.compiled_reads import CompiledLoads, Onward
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.index import read_index
from amoeba.stream.store.reading import THREADS, Range, Reader, checksum, checksum_of, crc32_joined
from amoeba.stream.store.store import Store, Verify
from amoeba.stream.store.tensor_files import TensorEntry, tensors_of

_AGAIN = "copy the store again, or repack it with `amoeba pack`"
_EDITED = "change it in the model's folder and pack that again with `amoeba pack`, or copy the store again"


class PackedStore(Store):
    """check_files: False opens a store with files that are missing or damaged, to ask for its `damage`."""

    rest: dict[str, TensorEntry]

    def __init__(
        self,
        folder: str | Path,
        *,
        verify: Verify = "first",
        threads: int = THREADS,
        direct: bool = True,
        check_files: bool = True,
    ) -> None:
        if verify not in get_args(Verify):
            raise bad_value("verify", f"one of {', '.join(get_args(Verify))}", repr(verify), "leave it out for first")
        self.folder = Path(folder).expanduser()
        self.index = read_index(self.folder)
        self.layers = tuple(layer.entry for layer in self.index.layers)
        self._verify = verify
        self._verified: set[tuple[int, int]] = set()
        self._rest_checksums: dict[str, int] = {}  # of the tensors that were read
        self.rest = {}
        if check_files:
            for number in range(len(self.layers)):
                self._check_layer_file(number)
            self._open_rest()
            for name in self.index.files:
                self._check_small_file(name)
        self._reader = Reader(threads=threads, direct=direct)

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        stored, size = self.index.layers[layer], self.expert_bytes(layer)
        check = self._is_checked(layer, expert)
        path = self.folder / stored.file
        whole = Range(self._reader.file(path), expert * size, size, memory, 0, size)
        parts = self._reader.read([whole], checksums=check)
        if not check:
            return
        _compare(path, checksum(parts), stored.checksums[expert], _AGAIN)
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

    def read_rest(self, name: str) -> Tensor:
        tensor, self._rest_checksums[name] = self._read_entry(self.rest[name], checksum=self._verify != "never")
        return tensor

    def rest_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Ends with StoreError where bytes have changed: none of the tensors may be used before the end."""
        yield from super().rest_tensors()
        if self._verify != "never":
            self._check_rest()

    def _check_rest(self) -> None:
        """The file's checksum follows from those of its tensors, one after the other behind its header."""
        path, entries = self.folder / self.index.rest["file"], self.rest.items()
        tensors = sorted(entries, key=lambda item: (item[1].start, item[1].size))
        with open(path, "rb") as file:
            header = file.read(tensors[0][1].start if tensors else -1)
        found, end = zlib.crc32(header), len(header)
        for name, entry in tensors:
            if entry.start != end:
                raise StoreError(path, f"a tensor from byte {end} on", f"{name} from {entry.start} on", _AGAIN)
            if name not in self._rest_checksums:
                self.read_rest(name)
            found, end = crc32_joined(found, self._rest_checksums[name], entry.size), end + entry.size
        _compare(path, found, self.index.rest["crc32"], _AGAIN)

    def damage(self, progress: Callable[[int], None] = lambda done: None) -> dict[str, list[str]]:
        """Reads everything and says of each file what is not as it was written; progress gets the bytes read so far."""
        found: dict[str, list[str]] = {}
        done, verify = 0, self._verify

        def ends_well(file: str, check: Callable[..., None], *arguments: Any) -> bool:
            try:
                check(*arguments)
            except OSError as error:
                said = error if isinstance(error, StoreError) else StoreError(file, "a file", one_line(error), _AGAIN)
                found.setdefault(file, []).append(str(said))
                return False
            return True

        self._verify = "always"
        try:
            for number, layer in enumerate(self.index.layers):
                if ends_well(layer.file, self._check_layer_file, number):
                    blob = aligned_buffer(layer.entry.expert_bytes)
                    for expert in range(layer.entry.experts):
                        ends_well(layer.file, self.read, number, expert, blob)
                        progress(done + (expert + 1) * layer.entry.expert_bytes)
                done += layer.entry.experts * layer.entry.expert_bytes
            rest = self.index.rest["file"]
            if ends_well(rest, self._open_rest):
                self._rest_checksums.clear()
                ends_well(rest, self._check_rest)
                progress(done + self.index.rest["bytes"])
            for name in self.index.files:
                ends_well(name, self._check_small_file, name)
        finally:
            self._verify = verify
        return found

    def _check_layer_file(self, number: int) -> None:
        layer = self.index.layers[number]
        self._check_size(layer.file, layer.entry.experts * layer.entry.expert_bytes)

    def _open_rest(self) -> None:
        self._check_size(self.index.rest["file"], self.index.rest["bytes"])
        self.rest = tensors_of(self.folder / self.index.rest["file"])

    def _check_small_file(self, name: str) -> None:
        path = self._inside(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(path, "a file of the store", one_line(error), _AGAIN) from error
        _compare(path, zlib.crc32(data), self.index.files[name], _EDITED)

    def _check_size(self, name: str, expected: int) -> None:
        path = self._inside(name)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(path, "a file of the store", one_line(error), _AGAIN) from error
        if size != expected:
            raise StoreError(path, f"{expected} bytes", size, _AGAIN)

    def _inside(self, name: str) -> Path:
        """StoreError where a link leads out of the store."""
        path = self.folder / name
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise StoreError(path, "a file of the store", one_line(error), _AGAIN) from error
        if not target.is_relative_to(self.folder.resolve()):
            remedy = "copy the store with the files themselves (cp -rL)"
            raise StoreError(path, "a file inside the store", f"a link to {target}", remedy)
        return path


def _compare(path: Path, found: int, expected: int, remedy: str) -> None:
    if found != expected:
        raise StoreError(path, f"bytes with checksum {expected:08x}", f"{found:08x}: they have changed", remedy)
