"""How a command ends: its exit code, its JSON line, and a sentence for what the user can mend.

with usage():
    settings = ...            # a ValueError, a file that cannot be read or written, memory, a package: exit code 2
finish(output, document, ok=True, json=json)
run(app)                      # all of the command line; what is nobody's mistake but ours ends here, with exit code 70

AMOEBA_TRACEBACK=1 shows where any of these errors came from.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from amoeba.commands.front import typer
from amoeba.commands.output import Output
from amoeba.errors import TOLD, RankLost, bad_value, is_out_of_memory, one_line
from amoeba.loading import loading

# A reader that went away (`| head -1`) is no failed check, but it is what click and rich exit with too.
# RANK_LOST is what sysexits.h calls a temporary failure: the same command, started again, may succeed.
CHECK_FAILED, READER_GONE, BAD_USAGE, BUG, RANK_LOST, INTERRUPTED = 1, 1, 2, 70, 75, 130
TRACEBACK = "AMOEBA_TRACEBACK"
_OF_EXTRAS = ("transformers", "safetensors", "tokenizers", "huggingface_hub", "accelerate", "yaml", "peft")
_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write elsewhere",
    errno.EACCES: "change its permissions, or choose another",
    errno.EPERM: "change its permissions, or choose another",
    errno.EROFS: "write elsewhere",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
}


@contextmanager
def usage() -> Iterator[None]:
    """What is raised inside is the user's to mend, except for a kind of exception that only a bug raises."""
    try:
        yield
    except Exception as error:
        said = _sentence(error)
        if said is None:
            raise
        if TOLD not in getattr(error, "__notes__", ()):
            _tell(said)
        raise typer.Exit(RANK_LOST if isinstance(error, RankLost) else BAD_USAGE) from None


def run(app: Callable[..., object]) -> None:
    """The command line as a process: no traceback, whatever happens, unless one is asked for."""
    _open_closed_streams()
    try:
        try:
            app(prog_name="amoeba")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _stop_writing()
        sys.exit(READER_GONE)
    except Exception as error:
        if isinstance(error, OSError):
            _stop_writing()
        if isinstance(error, OSError) or is_out_of_memory(error):
            said = _sentence(error)
            assert said is not None
            _tell(said)
            sys.exit(BAD_USAGE)
        _tell(
            f"unexpected {type(error).__name__}: {one_line(error)}. This is a bug, ours or of a package that we use: "
            f"{TRACEBACK}=1 before the command shows where; please report it with that."
        )
        sys.exit(BUG)


def need(*packages: str) -> None:
    """Inside `usage`: says which package is missing, before another one trips over it in its own way. Modules that will
    be wanted anyway are imported quickest here."""
    with loading():
        for name in packages:
            importlib.import_module(name)


def _sentence(error: Exception) -> str | None:
    """None for what a user cannot have caused."""
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        name = "output" if error.filename is None else str(error.filename)
        return str(
            bad_value(
                name,
                "a file or folder that can be read or written",
                error.strerror or one_line(error),
                _REMEDIES.get(error.errno, "check the path"),
            )
        )
    if is_out_of_memory(error):
        if isinstance(error, MemoryError) and str(error):
            return str(error)  # foreseen by us, in our words
        remedy = "take a smaller batch, shorter rows or a smaller model, or free some memory"
        return str(bad_value("memory", "enough for this", one_line(error), remedy))
    if isinstance(error, ImportError):
        return None if (error.name or "").split(".")[0] == "amoeba" else str(_missing(error))
    if isinstance(error, EOFError):
        return str(bad_value("input", "a whole file", one_line(error), "it ends too early: write or copy it again"))
    if isinstance(error, ValueError | OSError | RankLost):
        return str(error)
    if type(error).__module__.split(".")[0].startswith("safetensors"):
        return str(bad_value("safetensors", "a file that can be read or written", one_line(error), "check the disk"))
    return None


def _tell(said: str) -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    rank = os.environ.get("RANK", "0")  # of those that a launcher started, the first needs no name
    who = "amoeba" if rank == "0" else f"amoeba, rank {rank}"
    typer.echo(f"{who}: {' '.join(said.split())}", err=True)


def _missing(error: ImportError) -> object:
    if not isinstance(error, ModuleNotFoundError):
        return error  # a package's own words, of a version or of an extra of its
    name = (error.name or "package").split(".")[0]
    of_ours = "install what this command needs: pip install 'amoeba-moe[hf,lora]'"
    remedy = of_ours if name in _OF_EXTRAS else f"install it: pip install {name}"
    return bad_value(name, "an installed package", "none", remedy)


def _open_closed_streams() -> None:
    """`amoeba ... >&-`: whoever closed a stream wants nothing from it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  as long as the process
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal has no sign for is no reason to stop
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _stop_writing() -> None:
    """What is still in stdout's buffer goes nowhere: flushed at exit, it would fail once more."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finish(output: Output, document: dict[str, Any], ok: bool, json: bool) -> None:
    if json:
        output.document(document)
    if not ok:
        raise typer.Exit(CHECK_FAILED)
