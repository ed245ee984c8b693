"""What the files of a folder hold, written down beside them, so that a damaged one is found and named.

    seal(folder)                # every file is on the disk, and manifest.json has its size and hash
    damages(folder)             # ["optimizer.pt is empty"]; nothing: all is as it was written

The manifest has a digest of its own, and so has any other JSON that goes through `with_digest`.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from amoeba.system.files import sync_folder, write_whole

MANIFEST = "manifest.json"
DIGEST = "digest"
_PIECE_BYTES = 1 << 24
_THREADS = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter's lock


def seal(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(_THREADS) as threads:
        synced = threads.map(_sync, paths)
        hashes = _hashes(paths, threads)
        list(synced)
    entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "hash": hashes[path]} for path in paths}
    write_whole(folder / MANIFEST, json.dumps(with_digest({"files": entries}), indent=1) + "\n")
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def damages(folder: Path) -> list[str]:
    """One phrase for each file that is not as `seal` found it."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        entries: dict[str, dict[str, Any]] = content["files"]
        if not digest_fits(content):
            return [f"{MANIFEST} holds other text than was written"]
        sizes = {name: _size(folder / name) for name in entries}
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
        elif hashes[folder / name] != entry["hash"]:
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


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _hashes(paths: list[Path], threads: ThreadPoolExecutor) -> dict[Path, str]:
    """Of each file the hash of the hashes of its pieces, which many threads can take at once."""
    pieces = [(path, start) for path in paths for start in range(0, path.stat().st_size, _PIECE_BYTES)]
    found = {path: hashlib.blake2b(digest_size=32) for path in paths}
    for (path, _), digest in zip(pieces, threads.map(_hash_of_piece, pieces), strict=True):
        found[path].update(digest)
    return {path: digest.hexdigest() for path, digest in found.items()}


def _hash_of_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_PIECE_BYTES), digest_size=32).digest()
