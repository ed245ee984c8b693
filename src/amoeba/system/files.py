"""Files and folders that appear whole or not at all, and numbers that JSON can hold.

write_whole(path, text)         # over what was there
file = WholeFile(path)          # of any size, written at any offset; `finish` gives it its name
write_new(path, text)           # FileExistsError where something is there
replace_folder(staged, target)  # over what was there
default_folder()                # for what is kept between processes
sampled_hash(path)              # of a file too large to be read for that
model_folder("models/base")      # of this machine, or an error that tells how to get one
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value

STAGED = ".writing"  # behind the name of a file that is not whole yet
_BLOCK, _DIRECT_FROM = 4096, 2**20  # bytes: what a disk writes at once, and of a file worth the trouble
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def model_folder(model: str | Path) -> Path:
    name, folder = str(model), Path(model).expanduser()
    if not name or not (folder.is_dir() or (folder.is_file() and folder.suffix.lower() == ".gguf")):
        got = f"the file {name!r}" if folder.is_file() else f"{name!r}, which is not here"
        remedy = "download a model of the hub first: hf download NAME --local-dir FOLDER"
        raise bad_value("MODEL", "a folder or a GGUF file", got, remedy)
    return folder


def write_whole(path: Path, text: str) -> None:
    with _staged(path, text) as staged:
        os.replace(staged, path)


def write_new(path: Path, text: str) -> None:
    with _staged(path, text) as staged:
        os.link(staged, path)  # unlike a rename, fails where the name is taken


class WholeFile:
    """A file that gets its name when all of it is on the disk. A process killed before leaves a staged file, which the
    next writer of the same path overwrites. Any thread may write.

    size: of the whole file. Where it is known and the file system allows it, whole blocks of memory go past the page
    cache: that takes a tenth of the processor's time, and nothing is left to wait for at the end.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path, self._staged = path, path.with_name(path.name + STAGED)
        self._handles = [self._open(os.O_TRUNC)]
        try:
            if size >= _DIRECT_FROM and hasattr(os, "O_DIRECT"):
                with suppress(OSError):  # a file system without O_DIRECT
                    self._handles.append(self._open(os.O_DIRECT))
            if len(self._handles) > 1:
                os.posix_fallocate(self._handles[0], 0, size)
        except BaseException:
            self.discard()
            raise

    def _open(self, how: int) -> int:
        return os.open(self._staged, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | how, 0o666)

    def write(self, offset: int, data: memoryview) -> None:
        while data:
            done = self._write_direct(offset, data) or os.pwrite(self._handles[0], data, offset)
            data, offset = data[done:], offset + done

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """The bytes that were written, 0 where they have to go through the page cache."""
        if len(self._handles) == 1 or (offset | len(data)) % _BLOCK:
            return 0
        try:
            return os.pwrite(self._handles[1], data, offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # such as of memory that begins anywhere
                raise
            return 0

    def finish(self) -> None:
        os.fsync(self._handles[0])
        self._close()
        os.replace(self._staged, self._path)
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Nothing of it stays, unless it is finished."""
        self._close()
        self._staged.unlink(missing_ok=True)

    def _close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


@contextmanager
def whole_file(path: Path, size: int = 0) -> Iterator[WholeFile]:
    file = WholeFile(path, size)
    try:
        yield file
        file.finish()
    finally:
        file.discard()


@contextmanager
def appears_whole(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """A whole file written from its beginning to its end."""
    end = 0

    def write(data: memoryview) -> None:
        nonlocal end
        file.write(end, data)
        end += len(data)

    with whole_file(path) as file:
        yield write


def check_can_write(path: Path) -> None:
    """OSError where `write_new` would raise one for the folder's sake."""
    with _staged(path, ""):
        pass


@contextmanager
def _staged(path: Path, text: str) -> Iterator[str]:
    """A temporary file with the text next to its final place, removed at the end unless it was renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, staged = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # or a rename may reach the disk before the text does
            os.chmod(staged, 0o644)  # mkstemp makes files for the owner alone
            yield staged
        finally:
            Path(staged).unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None:
            raise
        # a full disk names no file, and the temporary one means nothing to users
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_folder(staged: Path, target: Path) -> None:
    """Renames `staged` to `target`. What was there is moved aside first and removed last, so that at every moment one
    of the two is whole; `put_back` undoes a replacement that was killed half-way."""
    earlier = _aside(target)
    if target.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        os.replace(target, earlier)
    os.replace(staged, target)
    sync_folder(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def put_back(target: Path) -> None:
    """The folder as it was, where `replace_folder` was killed before the new one had its name."""
    earlier = _aside(target)
    if earlier.exists() and not target.exists():
        os.replace(earlier, target)
    shutil.rmtree(earlier, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.earlier")


def sync_folder(folder: Path) -> None:
    """Names are on the disk when this returns, not the contents of the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sampled_hash(path: Path) -> dict[str, Any]:
    """Its size, and a hash of samples: of a file of up to 1 MiB of all of it."""
    size, found = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
    return {"bytes": size, "samples": found.hexdigest()}


def default_folder() -> Path:
    """$AMOEBA_CACHE, else $XDG_CACHE_HOME/amoeba, else ~/.cache/amoeba; OSError for someone without a home."""
    if named := os.environ.get("AMOEBA_CACHE"):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "amoeba"
    try:
        return Path.home() / ".cache" / "amoeba"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder") from error


def finite(value: Any, instead: Callable[[float], Any]) -> Any:
    """The same value with `instead(x)` for every NaN and infinity x in it, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner, instead) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner, instead) for inner in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def shell_command(command: str, *words: object) -> str:
    """command: of aMoEba, with or without the name in front ("amoeba train")."""
    return shell_words("amoeba", command.removeprefix("amoeba "), *words)


def shell_words(*words: object) -> str:
    return shlex.join(map(str, words))
