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

from amoeba.files import sync_folder, write_whole

MANIFEST = "manifest.json"
DIGEST = "digest"
_BYTES_AT_ONCE = 1 << 22
_THREADS = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter's lock


def seal(folder: Path) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        files = list(threads.map(_synced_entry, _files(folder)))
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    content = with_digest({"files": dict(zip(names, files, strict=True))})
    write_whole(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def damages(folder: Path) -> list[str]:
    """One phrase for each file that is not as `seal` found it. ValueError where there is no manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        entries: dict[str, dict[str, Any]] = content["files"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    if not digest_fits(content):
        return [f"{MANIFEST} holds other text than was written"]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _damage(folder / name, entries[name]), entries)
        return [f"{name} {what}" for name, what in zip(entries, found, strict=True) if what]


def with_digest(content: dict[str, Any]) -> dict[str, Any]:
    return content | {DIGEST: _digest(content)}


def digest_fits(content: dict[str, Any]) -> bool:
    return content.get(DIGEST) == _digest(content)


def _digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != DIGEST}
    as_read_again = json.loads(json.dumps(rest, default=str))  # keys that were numbers are strings then
    text = json.dumps(as_read_again, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _synced_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "blake2b": _hash(path)}


def _damage(path: Path, entry: dict[str, Any]) -> str | None:
    if not path.is_file():
        return "is missing"
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return "is empty" if size == 0 else f"has {size:,} bytes instead of {entry['bytes']:,}"
        return None if _hash(path) == entry["blake2b"] else "holds other bytes than were written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _hash(path: Path) -> str:
    found = hashlib.blake2b(digest_size=32)
    buffer = bytearray(_BYTES_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(memoryview(buffer)[:size])
    return found.hexdigest()
