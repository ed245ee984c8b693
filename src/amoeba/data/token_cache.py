"""What was made of a large text, kept for the next run on it: a trained tokenizer, or tokens.

    content = kept(key, make)       # what make() gave when a run had that key, else what it gives now

A key is a hash of everything that the content follows from: the texts themselves, the tokenizer, the versions of the
packages and the code of this folder. So nothing kept is ever out of date, and nothing has to be cleared by hand. Files
appear whole or not at all, begin with a hash of the rest, and can be read by their owner alone: they are the user's
text. The ones not used for longest go when all together are too large.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from amoeba.cpu.library_cache import prepared
from amoeba.system.files import default_folder

logger = logging.getLogger("amoeba")

# Characters from which on keeping pays: below, tokenising takes a fraction of a second.
WORTH_KEEPING = 1_000_000
MOST_BYTES = 4 * 2**30  # of all files together
_PACKAGES = ("tokenizers", "transformers", "torch")
_DIGEST = 32


def key_of(kind: str, texts: Iterable[str], **others: Any) -> str:
    """others: what else the content depends on, as JSON."""
    found = hashlib.blake2b(json.dumps([kind, _code(), others], sort_keys=True, default=repr).encode())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return f"{kind}-{found.hexdigest()[: 2 * _DIGEST]}"


def kept(key: str, make: Callable[[], bytes]) -> bytes:
    try:
        folder = prepared(prepared(default_folder()) / "data")
    except OSError as error:
        logger.info("the tokenised data is not cached: %s", error)
        return make()
    path = folder / key
    content = _read(path)
    if content is None:
        content = make()
        with contextlib.suppress(OSError):  # a full disk, or one that only lets itself be read
            _write(path, content)
    return content


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    if digest != _hash(content):
        logger.warning("%s is damaged: writing it again", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return content


def _write(path: Path, content: bytes) -> None:
    size = _DIGEST + len(content)
    if size > MOST_BYTES:
        return
    _make_room(path.parent, size)
    handle, staged = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_hash(content))
            file.write(content)
        os.replace(staged, path)
    finally:
        Path(staged).unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    files = [(file, file.stat()) for file in folder.iterdir() if file.is_file()]
    total = size + sum(found.st_size for _, found in files)
    for file, found in sorted(files, key=lambda each: each[1].st_mtime):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= found.st_size


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


@cache
def _code() -> list[str]:
    """What the code is that makes it: the files of this folder, and packages."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return [_hash(sources).hex(), *(_version(package) for package in _PACKAGES)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
