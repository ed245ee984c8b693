"""Compiled libraries on disk: nothing is loaded that was not verified, and none is half written.

    folder = prepared(default_folder())      # OSError where it cannot be had, or where others could write into it
    library = find(folder, "core-0f3a-77b1") # None where it is not there, or is not what was written
    with one_at_a_time(folder, "core"):      # other processes wait, and find it then
        library = keep(built, folder, "core-0f3a-77b1", compiler)

A library has a record of its size and SHA-256 next to it. Both belong to this user or to root, and no one else may
write them or the folder: what has that hash then is what this module wrote, and what is loaded is what was verified.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("amoeba")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_SECONDS = 0.1


def prepared(folder: Path) -> Path:
    """The folder, made where it is not there. It need not be writable: what lies in it may be all that is wanted."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve(strict=True)
    if not os.environ.get("AMOEBA_CACHE"):
        _close_to_others(folder)
    found = folder.stat()
    if found.st_uid not in _trusted_owners():
        raise _refused(folder, f"belongs to user {found.st_uid}")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise _refused(folder, "is writable by others (chmod go-w closes it)")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _refused(folder, f"lies in {parent}, which is writable by everybody")
    return folder


def _close_to_others(folder: Path) -> None:
    """Our own default folder may have been made under a umask that leaves it open to the group."""
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


def _refused(folder: Path, why: str) -> OSError:
    return PermissionError(errno.EPERM, f"{folder} {why}")


def _trusted_owners() -> set[int]:
    return {os.geteuid(), 0}


_private: dict[int, Path] = {}  # by process: a fork does not have its parent's


def private_folder() -> Path:
    """In the folder for temporary files, private to this user, and removed when this process ends."""
    process = os.getpid()
    if process not in _private:
        _private[process] = Path(tempfile.mkdtemp(prefix="amoeba-"))  # with mode 700
        atexit.register(_remove, process, _private[process])
    return _private[process]


def _remove(process: int, folder: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def find(folder: Path, stem: str) -> Path | None:
    """The verified library whose name begins so, the newest if there are several."""
    try:
        candidates = sorted(folder.glob(f"{stem}*.so"), key=lambda file: file.lstat().st_mtime, reverse=True)
    except OSError:
        return None
    for library in candidates:
        reason = why_not_verified(library)
        if reason is None:
            return library
        warn_once(f"{library} is not loaded: it {reason}")
    return None


def why_not_verified(library: Path) -> str | None:
    """None for what `keep` wrote; else what is wrong, to follow "it"."""
    record_file = library.with_suffix(".json")
    try:
        for file in (library, record_file):
            found = file.lstat()
            whose = "" if file is library else "has a record that "
            if not stat.S_ISREG(found.st_mode):
                return f"{whose}is not a plain file"
            if found.st_uid not in _trusted_owners():
                return f"{whose}belongs to user {found.st_uid}"
            if found.st_mode & _OTHERS_WRITE:
                return f"{whose}is writable by others"
        record = json.loads(record_file.read_bytes())
        content = library.read_bytes()
        expected = record["library"], record["bytes"], record["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has no record that can be read ({error.__class__.__name__})"
    if (library.name, len(content)) != expected[:2]:
        return f"has {len(content)} bytes, {expected[1]} were written"
    if hashlib.sha256(content).hexdigest() != expected[2]:
        return "has changed: its SHA-256 differs"
    return None


def keep(built: Path, folder: Path, stem: str, compiler: str) -> Path:
    """The library at its place, with its record: both whole and on the disk, or not at all."""
    library = folder / f"{stem}.so"
    built.chmod(0o755)
    _to_disk(built)
    record = built.with_suffix(".json")
    content = built.read_bytes()
    facts = {
        "library": library.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "compiler": compiler,
    }
    record.write_text(json.dumps(facts, indent=1) + "\n")
    record.chmod(0o644)
    _to_disk(record)
    os.replace(built, library)
    os.replace(record, library.with_suffix(".json"))
    _to_disk(folder)
    return library


def forget(library: Path) -> None:
    """Without its record it is compiled again by the next process."""
    with contextlib.suppress(OSError):
        library.with_suffix(".json").unlink()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # a file system that cannot is asked for no more
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_at_a_time(folder: Path, name: str, timeout_seconds: float) -> Iterator[None]:
    """Other processes wait. The lock ends with its process, and no wait is longer than the timeout."""
    import fcntl  # not on Windows

    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline, waits = time.monotonic() + timeout_seconds, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # where there are no locks, both compile: the later one replaces the other's library by the same
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > deadline:
                    break
            if not waits:
                logger.info("another process is compiling %s; waiting for it", name)
                waits = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a forked child still has it open
        os.close(descriptor)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
