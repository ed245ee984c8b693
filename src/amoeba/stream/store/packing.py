"""A model's folder packed into a store, a few experts in memory at a time.

    report = pack("models/qwen3", "models/qwen3.store", progress=print)

Each layer is a file that gets its name when it is whole and on the disk; index.json comes last. So a packing that was
killed goes on with the layer it was in, and nothing opens as a store that is not whole.

A store that is there already is read and compared with its checksums. What is damaged is packed again, and so are the
small files that have changed in the model's folder; where everything is right, nothing is written.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.integrations.gguf_files import is_gguf
from amoeba.integrations.model_folder import is_unfinished_store
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.error import DamagedIndex, StoreError
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.gguf import GgufStore
from amoeba.stream.store.index import (
    INDEX,
    REST,
    UNFINISHED,
    Index,
    StoredLayer,
    is_store,
    layer_file,
    read_index,
    written,
)
from amoeba.stream.store.packed import PackedStore
from amoeba.stream.store.reading import checksum_of, crc32_joined
from amoeba.stream.store.tensor_files import TensorEntry, header_of
from amoeba.system.files import STAGED, WholeFile, appears_whole, sync_folder, whole_file
from amoeba.system.pipeline import Segment, ahead, write_segments

# Experts that are read and summed at the same time, and that are written: a sum goes at 1 to 2 GB/s in a thread.
_READERS, _WRITERS = 4, 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a model's folder contains besides its weights: config, tokenizer, chat template, licence, code of its own.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py", "LICENSE*", "tokenizer*", "merges*")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", INDEX, UNFINISHED)
_DOCUMENTS = ("*.md", "LICENSE*")  # for people: the model says the same without them
_CHECKSUMS = ".checksums"  # no file of this name is copied from a model
SMALL_FILES = 64 * 2**20  # room for what is copied


@dataclass(frozen=True)
class Progress:
    layer: int  # being written; len(layers) for the rest of the model
    layers: int
    bytes: int  # in place, with those of an earlier run
    total: int
    seconds: float
    written: int  # by this run
    checks: bool = False  # what is there already is being read, and nothing is written


@dataclass(frozen=True)
class PackReport:
    store: str
    model: str
    layers: int
    experts: int
    expert_bytes: int  # of all blobs
    rest_bytes: int
    numbers: str  # bfloat16, or the format of codes: fp8-128
    resumed_layers: int  # that an earlier run had packed
    repaired: tuple[str, ...]  # files of a finished store that were damaged and are packed again
    updated: tuple[str, ...]  # small files of a finished store that differed from the model's
    left_out: tuple[str, ...]  # tensors of the checkpoint that the model has no place for
    seconds: float


def pack(
    model: str | Path,
    out: str | Path,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] = lambda now: None,
) -> PackReport:
    """StoreError where a file cannot be read or there is no room; called again, it continues where it stopped."""
    source = GgufStore(model) if is_gguf(model) else FolderStore(model, trust_remote_code=trust_remote_code)
    with source:
        return _Packing(source, Path(out).expanduser(), progress).run()


class _Packing:
    def __init__(self, source: FolderStore, out: Path, progress: Callable[[Progress], None]) -> None:
        self.source, self.out, self.progress = source, out, progress
        self.files = [out / layer_file(number) for number in range(len(source.layers))]
        self.sizes = [entry.experts * entry.expert_bytes for entry in source.layers]
        # the widest numbers first, so that every tensor of the file begins at a multiple of its own width
        rest = sorted(source.rest.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        self.rest: dict[str, TensorEntry] = dict(rest)
        self.header = header_of(self.rest)
        self.rest_bytes = len(self.header) + sum(entry.size for entry in self.rest.values())
        self.total = sum(self.sizes) + self.rest_bytes
        self.facts = {"folder": str(source.folder.resolve()), "fingerprint": fingerprint(source)}
        self.own_files = [path.name for path in _small_files(source.files)]
        self.done = self.written = 0
        self.began = time.monotonic()

    def run(self) -> PackReport:
        self._check_out()
        self.out.mkdir(parents=True, exist_ok=True)
        with only_one(self.out), room_for(self.out, lambda: _gib(self.total - self.done) + " of room"):
            index, resumed = self._finished(), len(self.files)
            damaged, updated = ([], []) if index is None else (self._damaged(index), self._outdated(index))
            if index is None or damaged or updated or index.files.keys() != set(filter(_is_checked, self.own_files)):
                self._begin(index, damaged, updated)
                resumed = sum(map(self._is_packed, range(len(self.files))))
                self._check_room()
                self._write_all()
            _remove(self.out / UNFINISHED, *map(_sidecar, self._weights()))
        return PackReport(
            store=str(self.out),
            model=str(self.source.folder),
            layers=len(self.files),
            experts=sum(entry.experts for entry in self.source.layers),
            expert_bytes=sum(self.sizes),
            rest_bytes=self.rest_bytes,
            numbers=self.source.layers[0].numbers,
            resumed_layers=resumed,
            repaired=tuple(damaged),
            updated=tuple(updated),
            left_out=self.source.left_out,
            seconds=round(time.monotonic() - self.began, 3),
        )

    def _write_all(self) -> None:
        layers = []
        for number, (entry, file) in enumerate(zip(self.source.layers, self.files, strict=True)):
            if self._is_packed(number):
                self.done += self.sizes[number]
            else:
                self._write_layer(number)
            layers.append(StoredLayer(entry, layer_file(number), tuple(_checksums_of(file))))
        if not self._is_rest_packed():
            self._write_rest()
        copied = copy_small_files(self.source.files, self.out)
        copied_before = set(_json(self.out / UNFINISHED)["files"]) - copied.keys()
        _remove(*(self.out / name for name in copied_before))  # by an earlier run; the model no longer has them
        rest = {"file": REST, "bytes": self.rest_bytes, "crc32": _checksums_of(self.out / REST)[0]}
        config = json.loads((self.source.files / "config.json").read_bytes())
        model = {name: config.get(name) for name in ("model_type", "architectures")}
        files = {name: crc32 for name, crc32 in copied.items() if _is_checked(name)}
        if fingerprint(self.source) != self.facts["fingerprint"]:
            remedy = "wait until nothing writes to it, remove the store and pack again"
            raise StoreError(self.source.folder, "a model that does not change while it is packed", "a change", remedy)
        sync_folder(self.out)
        with appears_whole(self.out / INDEX) as write:
            write(memoryview(written(Index(model, self.facts, rest, tuple(layers), files)).encode()))

    def _write_layer(self, number: int) -> None:
        """Experts are read and summed, several at a time, while others are written."""
        entry, free = self.source.layers[number], deque[Memory]()
        size = entry.expert_bytes

        def read(expert: int) -> tuple[int, Memory, int]:
            memory = free.popleft() if free else Memory(aligned_buffer(size), size)
            self.source.read(number, expert, memory.tensor)
            return expert, memory, checksum_of(memory.bytes)

        checksums: list[int] = []
        with self._whole_file(self.files[number], self.sizes[number], checksums) as file:

            def write(found: tuple[int, Memory, int]) -> int:
                expert, memory, checksum = found
                file.write(expert * size, memory.bytes)
                free.append(memory)
                return checksum

            packed = ahead(write, ahead(read, range(entry.experts), threads=_READERS), threads=_WRITERS)
            with closing(packed):
                for checksum in packed:
                    checksums.append(checksum)
                    self._tell(number, size)

    def _write_rest(self) -> None:
        header = Segment(len(self.header), lambda begin, into: _copy(self.header, begin, into))
        segments = [header, *(Segment(entry.size, self._read_rest(name)) for name, entry in self.rest.items())]
        checksums = [0]
        with (
            self._whole_file(self.out / REST, self.rest_bytes, checksums) as file,
            closing(write_segments(file, segments, digest=zlib.crc32, threads=_READERS)) as written,
        ):
            for size, crc32 in written:
                checksums[0] = crc32_joined(checksums[0], crc32, size)
                self._tell(len(self.files), size)

    def _read_rest(self, name: str) -> Callable[[int, memoryview], None]:
        if self.source.rest_is_stored:
            return _ReadTensor(self.rest[name])
        read = functools.cache(lambda: self.source.read_rest(name).reshape(-1).view(torch.uint8))
        return lambda begin, into: _copy(read()[begin : begin + len(into)].numpy().data, 0, into)

    @contextmanager
    def _whole_file(self, path: Path, size: int, checksums: list[int]) -> Iterator[WholeFile]:
        """A file that gets its name at the end, after a sidecar with the checksums that are known by then."""
        _remove(path, _sidecar(path))  # one that was damaged must not be taken for the one of the new sidecar
        with whole_file(path, size) as file:
            yield file
            _write_json(_sidecar(path), {"checksums": checksums})

    def _tell(self, layer: int, size: int) -> None:
        self.done += size
        self.written += size
        seconds = time.monotonic() - self.began
        self.progress(Progress(layer, len(self.files), self.done, self.total, seconds, self.written))

    def _check_out(self) -> None:
        if is_store(self.out):
            if (self.out / "experts").is_symlink():
                got = f"{str(self.out)!r}, whose experts are a link to elsewhere"
                raise bad_value("--out", "a store with its files in it", got, "choose another name")
            index = self._finished()
            if index is None and not is_unfinished_store(self.out):
                return  # a damaged index: what the store was made from is not known, and it cannot be used
            facts = _json(self.out / UNFINISHED) if index is None else index.source
            if facts.get("fingerprint") != self.facts["fingerprint"]:
                expected = f"a store of {str(self.source.folder)!r} as it is now"
                got = f"one of {facts.get('folder')!r}, or of another state of it"
                raise bad_value("--out", expected, f"{str(self.out)!r}, {got}", "choose another name, or remove it")
        elif self.out.exists() and not _is_new(self.out):
            got = f"{str(self.out)!r}, which is there and is none"
            raise bad_value("--out", "a new folder, or an unfinished store", got, "choose another name")

    def _finished(self) -> Index | None:
        """None where the store is an incomplete one, or its index is damaged."""
        if is_unfinished_store(self.out) or not is_store(self.out):
            return None
        try:
            return read_index(self.out)
        except DamagedIndex:
            return None

    def _damaged(self, index: Index) -> list[str]:
        """Files of weights that are missing or not as they were written."""

        def show(done: int) -> None:
            seconds = time.monotonic() - self.began
            self.progress(Progress(0, len(self.files), done, self.total, seconds, done, checks=True))

        with PackedStore(self.out, check_files=False) as store:
            damaged = store.damage(show)
        return [name for name in damaged if name not in index.files]

    def _outdated(self, index: Index) -> list[str]:
        """Small files that differ from the model's, and those that it no longer has."""
        own = {name: zlib.crc32((self.source.files / name).read_bytes()) for name in self.own_files}
        there = {path.name: zlib.crc32(path.read_bytes()) for path in _small_files(self.out)}
        gone = [name for name in index.files if name not in own]
        changed = [name for name, crc32 in own.items() if {there.get(name), index.files.get(name, crc32)} != {crc32}]
        return sorted(changed + gone)

    def _begin(self, index: Index | None, damaged: Collection[str], outdated: Collection[str]) -> None:
        """A store that is an incomplete one. Of a finished one the intact files stay; of one with a damaged index
        none do. Killed in between, it is still the one that it was, or an incomplete one."""
        copied_before = _json(self.out / UNFINISHED).get("files", [])
        if not is_unfinished_store(self.out):
            _remove(*map(_sidecar, self._weights()))
        facts = self.facts | {"files": sorted({*copied_before, *self.own_files})}
        _write_json(self.out / UNFINISHED, facts)
        (self.out / "experts").mkdir(exist_ok=True)
        self._remove_staged()
        if index is not None:
            intact = {layer.file: list(layer.checksums) for layer in index.layers} | {REST: [index.rest["crc32"]]}
            for name in set(intact) - set(damaged):
                _write_json(_sidecar(self.out / name), {"checksums": intact[name]})
            _remove(*(self.out / name for name in (*damaged, *outdated)))
        _remove(self.out / INDEX)

    def _weights(self) -> list[Path]:
        return [*self.files, self.out / REST]

    def _is_packed(self, number: int) -> bool:
        return _is_whole(self.files[number], self.sizes[number], self.source.layers[number].experts)

    def _is_rest_packed(self) -> bool:
        return _is_whole(self.out / REST, self.rest_bytes, 1)

    def _check_room(self) -> None:
        packed = sum(size for number, size in enumerate(self.sizes) if self._is_packed(number))
        rest = 0 if self._is_rest_packed() else self.rest_bytes
        needed, free = sum(self.sizes) - packed + rest + SMALL_FILES, shutil.disk_usage(self.out).free
        if needed > free:
            got = f"{_gib(free)} free"
            raise StoreError(self.out, f"{_gib(needed)} of room", got, "free some space, or choose another --out")

    def _remove_staged(self) -> None:
        for path in [*self.out.glob(f"*{STAGED}"), *self.out.glob(f"experts/*{STAGED}")]:
            path.unlink()


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink() or path.exists():  # a read-only disk refuses to remove even what is not there
            path.unlink()


def _small_files(folder: Path) -> list[Path]:
    """What is no weights."""
    return [
        path
        for path in sorted(folder.iterdir())
        if any(path.match(pattern) for pattern in _COPIED)
        and not any(path.match(pattern) for pattern in _WEIGHTS)
        and path.is_file()
    ]


def _is_checked(name: str) -> bool:
    return not any(Path(name).match(pattern) for pattern in _DOCUMENTS)


def copy_small_files(folder: Path, out: Path, *, but: Sequence[str] = ()) -> dict[str, int]:
    """What is no weights, nor named in `but`: the CRC-32 of each, by its name."""
    copied: dict[str, int] = {}
    for path in _small_files(folder):
        if path.name not in but:
            data = path.read_bytes()
            copied[path.name] = zlib.crc32(data)
            with appears_whole(out / path.name) as write:
                write(memoryview(data))
    return copied


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    with appears_whole(path) as write:
        write(memoryview(json.dumps(facts).encode()))


def _is_new(folder: Path) -> bool:
    """Nothing in it but what a process left that was killed as it began."""
    return folder.is_dir() and all(path.match(f"*{STAGED}") for path in folder.iterdir())


def _sidecar(path: Path) -> Path:
    """Checksums of a packed file, until they are all in the index."""
    return path.with_name(path.name + _CHECKSUMS)


def _checksums_of(path: Path) -> list[int]:
    """What the sidecar says; nothing where there is none."""
    found = _json(_sidecar(path)).get("checksums")
    return found if isinstance(found, list) and all(isinstance(each, int) for each in found) else []


def _is_whole(path: Path, size: int, checksums: int) -> bool:
    return path.is_file() and path.stat().st_size == size and len(_checksums_of(path)) == checksums


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def fingerprint(source: FolderStore) -> str:
    """Of what will be packed: which bytes of which files, and when those were last changed."""
    pieces = [piece for pieces in source.pieces for piece in pieces]
    entries = [tensor for piece in pieces for tensor in piece.tensors] + list(source.rest.values())
    files = sorted({entry.file for entry in entries})
    changed = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    ranges = [(entry.file.name, entry.start, entry.size) for entry in entries]
    blobs = [(piece.shape, piece.stride, piece.offset) for piece in pieces]
    facts = repr((changed, ranges, blobs, [repr(entry) for entry in source.layers], list(source.rest)))
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


class _ReadTensor:
    """Bytes of a checkpoint's tensor into a segment of a file."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry

    def __call__(self, begin: int, into: memoryview) -> None:
        entry, end = self._entry, begin + len(into)
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.start + begin)
            while into:
                done = file.readinto(into)
                if not done:
                    got = f"{entry.start + end - len(into)}: it was cut short"
                    raise StoreError(entry.file, f"{entry.start + entry.size} bytes", got, "copy or download it again")
                into = into[done:]


def _copy(data: bytes | memoryview, begin: int, into: memoryview) -> None:
    into[:] = data[begin : begin + len(into)]


@contextmanager
def room_for(out: Path, needed: Callable[[], str]) -> Iterator[None]:
    """A disk that is full in the middle: the layers that are whole stay, and the error says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        remedy = "free some space and run the same command again: it continues where it stopped"
        raise StoreError(out, f"{needed()} for what is left", error.strerror or "a full disk", remedy) from error


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            got = f"{str(folder)!r}, which another process is writing"
            raise bad_value(
                "--out", "a store that no other process is writing", got, "wait until it is done"
            ) from error
        yield
    finally:
        os.close(handle)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
