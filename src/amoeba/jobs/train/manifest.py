"""Hashes of a folder's files, stored with them, so that a damaged file is found and named.

    seal(folder)                # every file is on the disk, and manifest.json has its size and hash
    damages(folder)             # ["optimizer.pt is empty"]; nothing: all is as it was written
    save_file(tensors, path)    # as safetensors.torch.save_file; `seal` need not read it again

The manifest has a digest of its own, and so has any other JSON that goes through `with_digest`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from amoeba.integrations.model_folder import MODEL_FOLDER
from amoeba.stream.store.tensor_files import NAMES, save_tensors
from amoeba.system.files import sync_folder, write_whole
from amoeba.system.pipeline import CHUNK

MANIFEST = "manifest.json"
DIGEST = "digest"
_HASH = "sha256"  # of a file's entry
_PIECE_BYTES = CHUNK
_THREADS = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter's lock
# Hashes of files that this process wrote, until they are sealed, by what tells a file from another one of its name.
_hashes_of_written: dict[tuple[int, ...], str] = {}


def save_file(tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """As safetensors.torch.save_file, from tensors of any device, and whole or not at all."""
    path = Path(path)
    if any(tensor.dtype not in NAMES for tensor in tensors.values()):
        import safetensors.torch

        safetensors.torch.save_file(dict(tensors), path, None if metadata is None else dict(metadata))
        return
    digests = save_tensors(path, tensors, metadata, lambda data: hashlib.sha256(data).digest())
    _hashes_of_written[_identity(path)] = hashlib.sha256(b"".join(digests)).hexdigest()


@contextmanager
def saves_fast() -> Iterator[None]:
    """Inside, transformers' save_pretrained writes its files with `save_file`; with its own where a version calls that
    something else."""
    from transformers import modeling_utils

    theirs = getattr(modeling_utils, "safe_save_file", None)
    if theirs is None:
        yield
        return
    modeling_utils.safe_save_file = save_file
    try:
        yield
    finally:
        modeling_utils.safe_save_file = theirs


def seal(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    known = {path: _hashes_of_written.pop(_identity(path), None) for path in paths}
    _hashes_of_written.clear()  # of what was never sealed
    with ThreadPoolExecutor(_THREADS) as threads:
        synced = threads.map(_sync, paths)
        hashes = _hashes([path for path in paths if known[path] is None], threads)
        list(synced)
    hashes |= {path: known_hash for path, known_hash in known.items() if known_hash is not None}
    entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, _HASH: hashes[path]} for path in paths}
    write_whole(folder / MANIFEST, json.dumps(with_digest({"files": entries}), indent=1) + "\n")
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def damages(folder: Path) -> list[str]:
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        entries: dict[str, dict[str, Any]] = content["files"]
        if not digest_fits(content):
            return [f"{MANIFEST} holds other text than was written"]
        sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in entries}
        to_hash = [folder / name for name in entries if sizes[name] == entries[name]["bytes"]]
        with ThreadPoolExecutor(_THREADS) as threads:
            hashes = _hashes(to_hash, threads)
    except OSError as error:
        return [f"a file cannot be read ({error})"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    found = []
    for name, entry in entries.items():
        size = sizes[name]
        if size is None:
            found.append(f"{name} is missing")
        elif size != entry["bytes"]:
            wrong = f"has {size:,} bytes instead of {entry['bytes']:,}"
            found.append(f"{name} {wrong if size else 'is empty'}")
        elif hashes[folder / name] != entry.get(_HASH):
            found.append(f"{name} holds other bytes than were written")
    return found


def with_digest(content: dict[str, Any]) -> dict[str, Any]:
    return content | {DIGEST: _digest(content)}


def digest_fits(content: dict[str, Any]) -> bool:
    return content.get(DIGEST) == _digest(content)


def _digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != DIGEST}
    as_read_again = json.loads(json.dumps(rest, default=str))  # keys that were numbers are strings then
    text = json.dumps(as_read_again, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _hashes(paths: list[Path], threads: ThreadPoolExecutor) -> dict[Path, str]:
    """Of each file the hash of the hashes of its pieces, which many threads can take at once."""
    pieces = [(path, start) for path in paths for start in range(0, path.stat().st_size, _PIECE_BYTES)]
    found: dict[Path, list[bytes]] = {path: [] for path in paths}

    def hash_of_piece(piece: tuple[Path, int]) -> bytes:
        path, start = piece
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_PIECE_BYTES)).digest()

    for (path, _), digest in zip(pieces, threads.map(hash_of_piece, pieces), strict=True):
        found[path].append(digest)
    return {path: hashlib.sha256(b"".join(digests)).hexdigest() for path, digests in found.items()}


def _identity(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


class Artifact(Protocol):
    """In the folder `name` of the run at its end.

    Over ranks each calls all of these: `gather` first, which may send, then `save`, in which nothing is sent and each
    writes its part, then the first rank `finish`.
    """

    name: str

    def gather(self, model: Any) -> None: ...

    def save(self, model: Any, folder: Path) -> None: ...

    def finish(self, folder: Path) -> None: ...

    def load(self, model: Any, folder: Path) -> None: ...


class WholeModel:
    name = MODEL_FOLDER

    def __init__(self, first: bool = True) -> None:
        """first: whether this is the rank that writes."""
        self._first = first

    def gather(self, model: Any) -> None:
        """Nothing: the model is all here."""

    def save(self, model: Any, folder: Path) -> None:
        if self._first:
            with saves_fast():
                model.save_pretrained(folder)

    def finish(self, folder: Path) -> None:
        """Nothing: the folder is whole."""

    def load(self, model: Any, folder: Path) -> None:
        """Through from_pretrained: on disk experts lie one by one, and only it puts them together again."""
        stored = type(model).from_pretrained(folder, dtype=model.dtype, trust_remote_code=False)
        model.load_state_dict(stored.state_dict())
