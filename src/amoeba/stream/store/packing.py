"""A model's folder packed into a store, one expert in memory at a time.

    report = pack("models/qwen3", "models/qwen3.store", progress=print)

Each layer is a file that gets its name when it is whole and on the disk; index.json comes last. So a packing that was
killed goes on with the layer it was in, and nothing opens as a store that is not whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amoeba.errors import bad_value
from amoeba.files import sync_folder
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.folder import FolderStore
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
from amoeba.stream.store.reading import checksum_of
from amoeba.stream.store.tensor_files import TensorEntry, header_of

_STAGED = ".writing"
_CHUNK = 16 * 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a model's folder has beside its weights: config, tokenizer, chat template, licence, code of its own.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py", "LICENSE*", "tokenizer*", "merges*")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", INDEX, UNFINISHED)
SMALL_FILES = 64 * 2**20  # room for what is copied


@dataclass(frozen=True)
class Progress:
    layer: int  # being written; len(layers) for the rest of the model
    layers: int
    bytes: int  # in place, with those of an earlier run
    total: int
    seconds: float
    written: int  # by this run


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
    left_out: tuple[str, ...]  # tensors of the checkpoint that the model has no place for
    seconds: float


def pack(
    model: str | Path,
    out: str | Path,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] = lambda now: None,
) -> PackReport:
    """StoreError where a file cannot be read or there is no room; called again, it goes on where it was."""
    with FolderStore(model, trust_remote_code=trust_remote_code) as source:
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
        self.done = self.written = 0
        self.began = time.monotonic()

    def run(self) -> PackReport:
        self._check_out()
        self.out.mkdir(parents=True, exist_ok=True)
        with only_one(self.out), room_for(self.out, lambda: _gib(self.total - self.done) + " of room"):
            resumed = [number for number in range(len(self.files)) if self._is_packed(number)]
            if not (self.out / INDEX).is_file():
                _write_json(self.out / UNFINISHED, self.facts)
                (self.out / "experts").mkdir(exist_ok=True)
                self._remove_staged()
                self._check_room()
                self._write_all()
            self._remove(UNFINISHED, *(_sidecar(file) for file in [*self.files, self.out / REST]))
        return PackReport(
            store=str(self.out),
            model=str(self.source.folder),
            layers=len(self.files),
            experts=sum(entry.experts for entry in self.source.layers),
            expert_bytes=sum(self.sizes),
            rest_bytes=self.rest_bytes,
            numbers=self.source.layers[0].numbers,
            resumed_layers=len(resumed),
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
            layers.append(StoredLayer(entry, layer_file(number), tuple(_told(file)["checksums"])))
        if not self._is_whole(self.out / REST, self.rest_bytes):
            self._write_rest()
        copy_small_files(self.source.folder, self.out)
        rest = {"file": REST, "bytes": self.rest_bytes} | _told(self.out / REST)
        config = json.loads((self.source.folder / "config.json").read_bytes())
        model = {name: config.get(name) for name in ("model_type", "architectures")}
        sync_folder(self.out)
        with appears_whole(self.out / INDEX) as write:
            write(memoryview(written(Index(model, self.facts, rest, tuple(layers))).encode()))

    def _write_layer(self, number: int) -> None:
        entry, checksums = self.source.layers[number], []
        memory = Memory(aligned_buffer(entry.expert_bytes), entry.expert_bytes)
        with self._whole_file(self.files[number], number) as (write, facts):
            for expert in range(entry.experts):
                self.source.read(number, expert, memory.tensor)
                checksums.append(checksum_of(memory.bytes))
                write(memory.bytes)
            facts["checksums"] = checksums

    def _write_rest(self) -> None:
        with self._whole_file(self.out / REST, len(self.files)) as (write, facts):
            write(memoryview(self.header))
            found = zlib.crc32(self.header)
            for entry in self.rest.values():
                for chunk in _chunks(entry):
                    found = zlib.crc32(chunk, found)
                    write(memoryview(chunk))
            facts["crc32"] = found

    @contextmanager
    def _whole_file(self, path: Path, layer: int) -> Iterator[tuple[Callable[[memoryview], None], dict[str, Any]]]:
        """A file that gets its name at the end, after a sidecar with the facts that are known by then."""
        facts: dict[str, Any] = {}
        with appears_whole(path) as write:

            def write_and_tell(data: memoryview) -> None:
                write(data)
                self.done += len(data)
                self.written += len(data)
                seconds = time.monotonic() - self.began
                self.progress(Progress(layer, len(self.files), self.done, self.total, seconds, self.written))

            yield write_and_tell, facts
            _write_json(_sidecar(path), facts)

    def _check_out(self) -> None:
        if is_store(self.out):
            index = self.out / INDEX
            facts = read_index(self.out).source if index.is_file() else _json(self.out / UNFINISHED)
            if facts.get("fingerprint") != self.facts["fingerprint"]:
                expected = f"a store of {str(self.source.folder)!r} as it is now"
                got = f"one of {facts.get('folder')!r}, or of another state of it"
                raise bad_value("--out", expected, f"{str(self.out)!r}, {got}", "choose another name, or remove it")
        elif self.out.exists() and not _is_new(self.out):
            got = f"{str(self.out)!r}, which is there and is none"
            raise bad_value("--out", "a new folder, or a store to go on with", got, "choose another name")

    def _is_packed(self, number: int) -> bool:
        return self._is_whole(self.files[number], self.sizes[number])

    def _is_whole(self, path: Path, size: int) -> bool:
        return path.is_file() and path.stat().st_size == size and ((self.out / INDEX).is_file() or bool(_told(path)))

    def _check_room(self) -> None:
        packed = sum(size for number, size in enumerate(self.sizes) if self._is_packed(number))
        rest = 0 if self._is_whole(self.out / REST, self.rest_bytes) else self.rest_bytes
        needed, free = sum(self.sizes) - packed + rest + SMALL_FILES, shutil.disk_usage(self.out).free
        if needed > free:
            got = f"{_gib(free)} free"
            raise StoreError(self.out, f"{_gib(needed)} of room", got, "free some space, or choose another --out")

    def _remove_staged(self) -> None:
        for path in [*self.out.glob(f"*{_STAGED}"), *self.out.glob(f"experts/*{_STAGED}")]:
            path.unlink()

    def _remove(self, *names: str | Path) -> None:
        for name in names:
            (self.out / name).unlink(missing_ok=True)


def copy_small_files(folder: Path, out: Path, *, but: Sequence[str] = ()) -> None:
    """What is no weights, nor named in `but`."""
    for path in sorted(folder.iterdir()):
        wanted = any(path.match(pattern) for pattern in _COPIED) and not any(path.match(each) for each in _WEIGHTS)
        if path.is_file() and wanted and path.name not in but:
            with appears_whole(out / path.name) as write:
                write(memoryview(path.read_bytes()))


@contextmanager
def appears_whole(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """Gets its name when all of it is on the disk; a process killed before leaves a file that the next one removes."""
    staged = path.with_name(path.name + _STAGED)
    try:
        with open(staged, "wb", buffering=0) as file:

            def write(data: memoryview) -> None:
                while data:
                    data = data[file.write(data) :]

            yield write
            os.fsync(file.fileno())
        os.replace(staged, path)
        sync_folder(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    with appears_whole(path) as write:
        write(memoryview(json.dumps(facts).encode()))


def _is_new(folder: Path) -> bool:
    """Nothing in it but what a process left that was killed as it began."""
    return folder.is_dir() and all(path.match(f"*{_STAGED}") for path in folder.iterdir())


def _sidecar(path: Path) -> Path:
    """Checksums of a packed file, until they are all in the index."""
    return path.with_suffix(".json")


def _told(path: Path) -> dict[str, Any]:
    """What the sidecar says; nothing where there is none."""
    return _json(_sidecar(path))


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


def _chunks(entry: TensorEntry) -> Iterator[bytes]:
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        left = entry.size
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                got = f"{entry.start + entry.size - left}: it was cut short"
                raise StoreError(entry.file, f"{entry.start + entry.size} bytes", got, "copy or download it again")
            left -= len(chunk)
            yield chunk


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
        remedy = "free some space and run the same command again: it goes on where it was"
        raise StoreError(out, f"{needed()} for what is left", error.strerror or "a full disk", remedy) from error


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            got = f"{str(folder)!r}, which another process is writing"
            raise bad_value("--out", "a store of this process's own", got, "wait until it is done") from error
        yield
    finally:
        os.close(handle)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
