"""How a command ends: its exit code, its JSON line, and a sentence for what the user can mend.

with usage():
    settings = ...            # a ValueError, a file that cannot be read or written, memory, a package: exit code 2
finish(output, document, ok=True, json=json)
run(app)                      # the whole command line; a bug of ours ends here, with exit code 70

With --json the last line of stdout is a document however the command ends: {"document": "amoeba error", "ok": false,
"exit_code": 2, "error": "...", "remedy": "..."}. AMOEBA_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import errno
import importlib
import json as json_format
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer

from amoeba.commands.options import speaks
from amoeba.commands.output import Output
from amoeba.core.errors import TOLD, RankLost, bad_value, is_out_of_memory, one_line
from amoeba.system.fast_imports import loading

# A reader that went away (`| head -1`) is no failed check, but it is what click and rich exit with too.
# RANK_LOST is what sysexits.h calls a temporary failure: the same command, started again, may succeed.
CHECK_FAILED, READER_GONE, BAD_USAGE, BUG, RANK_LOST, INTERRUPTED = 1, 1, 2, 70, 75, 130
TRACEBACK = "AMOEBA_TRACEBACK"
_START_AGAIN = "Run the same command again; a training run continues with --resume."
_OF_SERVE = ("fastapi", "uvicorn", "prometheus_client")
_OF_EXTRAS = ("transformers", "safetensors", "tokenizers", "huggingface_hub", "accelerate", "yaml", "peft")
TRAINER = ("tokenizers", "safetensors", "transformers", "accelerate", "transformers.trainer")  # for `need`
_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write elsewhere",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
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
        told = _in_our_words(error)
        if told is None:
            raise
        if _ending.interrupted:
            raise KeyboardInterrupt from error
        _note(str(told), getattr(told, "remedy", None))
        if TOLD not in getattr(error, "__notes__", ()):
            _tell(str(told))
        raise typer.Exit(RANK_LOST if isinstance(error, RankLost) else BAD_USAGE) from None


class _Ending:
    """What was told about a command that failed, and whether it got as far as its result and the document of that."""

    error: str | None = None
    remedy: str | None = None
    finished = False
    interrupted = False  # Some packages swallow a KeyboardInterrupt while they are imported, and fail later.


_ending = _Ending()


def run(app: Callable[..., object]) -> None:
    """The command line as a process: no traceback, whatever happens, unless one is asked for."""
    global _ending
    _ending = _Ending()
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _note_interrupt)
    try:
        _run(app)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if code and not _ending.finished:
            if code == INTERRUPTED and _ending.error is None:
                _note("interrupted", _START_AGAIN)
                _tell("interrupted")
            if "--json" in sys.argv[1:] and speaks():
                _document_failure(code, left)
        raise


def _note_interrupt(number: int, frame: Any) -> None:
    _ending.interrupted = True
    raise KeyboardInterrupt


def go_on() -> None:
    """Where a command was interrupted and does not end: what fails from now on is not the interruption's fault."""
    _ending.interrupted = False


def _run(app: Callable[..., object]) -> None:
    try:
        try:
            app(prog_name="amoeba")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _stop_writing()
        sys.exit(READER_GONE)
    except KeyboardInterrupt:  # outside of what typer guards
        sys.exit(INTERRUPTED)
    except Exception as error:
        if _ending.interrupted:
            sys.exit(INTERRUPTED)
        if isinstance(error, OSError):
            _stop_writing()
        if isinstance(error, OSError) or is_out_of_memory(error):
            told = _in_our_words(error)
            assert told is not None
            _note(str(told), getattr(told, "remedy", None))
            _tell(str(told))
            sys.exit(BAD_USAGE)
        remedy = f"Set {TRACEBACK}=1 to see the traceback, and please include it in a bug report."
        said = f"unexpected {type(error).__name__}: {one_line(error)}. This is a bug in amoeba or in a package it uses"
        _note(said, remedy)
        _tell(f"{said}. {remedy}")
        sys.exit(BUG)


def interrupted(what_is_kept: str) -> Exception:
    """To be raised where a KeyboardInterrupt was caught and there is more to say than that."""
    said = f"interrupted: {what_is_kept}"
    _note(said, _START_AGAIN)
    _tell(said)
    return typer.Exit(INTERRUPTED)


def _note(error: str, remedy: str | None) -> None:
    _ending.error, _ending.remedy = " ".join(error.split()), remedy


def _document_failure(code: int, left: SystemExit) -> None:
    error, remedy = _ending.error, _ending.remedy
    if error is None:
        error, remedy = _parse_error(left), "See the command's --help."
    document = {
        "document": "amoeba error",
        "ok": False,
        "exit_code": code,
        "error": error or f"ended with exit code {code}",
        "remedy": remedy or f"See the command's --help, or set {TRACEBACK}=1 to see where the error came from.",
    }
    with suppress(OSError, ValueError):  # stdout may be what failed
        print(json_format.dumps(document), flush=True)


def _parse_error(left: SystemExit) -> str | None:
    """What is wrong with the options: typer prints that, and exits while it handles the error."""
    error = left.__context__
    if error is None:
        return None
    say = getattr(error, "format_message", None)  # click's own errors
    return one_line(error) if say is None else " ".join(say().split())


def need(*packages: str) -> None:
    """Inside `usage`: says which package is missing, before another one trips over it in its own way. Modules that will
    be wanted anyway are imported quickest here."""
    with loading():
        for name in packages:
            importlib.import_module(name)
            if _ending.interrupted:
                raise KeyboardInterrupt


def _in_our_words(error: Exception) -> Exception | None:
    """The error to tell, whose text is a sentence for users. None for what a user cannot have caused."""
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        name = "output" if error.filename is None else str(error.filename)
        got, remedy = error.strerror or one_line(error), _REMEDIES.get(error.errno, "check the path")
        return bad_value(name, "a file or folder that can be read or written", got, remedy)
    if is_out_of_memory(error):
        if isinstance(error, MemoryError) and str(error):
            return error  # foreseen by us, in our words
        remedy = "use a smaller batch, shorter rows or a smaller model, or free some memory"
        return bad_value("memory", "enough for this command", one_line(error), remedy)
    if isinstance(error, ImportError):
        return None if (error.name or "").split(".")[0] == "amoeba" else _missing(error)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of Path.expanduser
        return bad_value("~", "the home folder of a user of this machine", "none", "write the whole path")
    if isinstance(error, EOFError):
        return bad_value("input", "a complete file", one_line(error), "the file ends too early: write or copy it again")
    if isinstance(error, ValueError | OSError | RankLost):
        return error
    if type(error).__module__.split(".")[0].startswith("safetensors"):
        return bad_value("safetensors", "a file that can be read or written", one_line(error), "check the disk")
    return None


def _tell(said: str) -> None:
    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    rank = os.environ.get("RANK", "0")  # of those that a launcher started, the first needs no name
    who = "amoeba" if rank == "0" else f"amoeba, rank {rank}"
    typer.echo(f"{who}: {' '.join(said.split())}", err=True)


def _missing(error: ImportError) -> Exception:
    if not isinstance(error, ModuleNotFoundError):
        return error  # a package's own words, of a version or of an extra of its
    name = (error.name or "package").split(".")[0]
    of_ours = "install what this command needs: pip install 'amoeba-moe[hf,lora]'"
    remedy = of_ours if name in _OF_EXTRAS else f"install it: pip install {name}"
    if name in _OF_SERVE:
        remedy = "install what a server needs: pip install 'amoeba-moe[serve]'"
    return bad_value(name, "an installed package", "none", remedy)


def _open_closed_streams() -> None:
    """`amoeba ... >&-`: nothing is written to a stream that was closed."""
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
    _ending.finished = True
    if not ok:
        raise typer.Exit(CHECK_FAILED)
