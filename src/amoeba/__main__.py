"""The command `amoeba`, which is `python -m amoeba`. Ctrl-C ends it without a traceback, also while it still imports
and while Python shuts down."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

_LARGE = ("torch", "transformers")
_BYTECODE = "PYTHONPYCACHEPREFIX"
_INTERRUPTED = {
    "document": "amoeba error",
    "ok": False,
    "exit_code": 130,
    "error": "interrupted",
    "remedy": "Run the same command again.",
}


def _say_interrupted() -> None:
    if "--json" in sys.argv[1:] and os.environ.get("RANK", "0") == "0":
        print(json.dumps(_INTERRUPTED), flush=True)


def _leave_at_once(*_: object) -> None:
    """While packages are imported: some of them swallow every exception there, KeyboardInterrupt included."""
    _say_interrupted()
    os._exit(130)


def main() -> None:
    before = signal.signal(signal.SIGINT, _leave_at_once)
    try:
        keep_bytecode()
        from amoeba.cli import main as run

        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:  # outside of what `commands.exits` guards
        _say_interrupted()
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all that counts is written


def keep_bytecode() -> None:
    """torch, transformers and torch's compiler are 3,500 files. Python compiles them at every start if it finds no
    `.pyc` next to them and may not write one: some installers write none, and images often set PYTHONDONTWRITEBYTECODE.
    That takes longer than the rest of a start, so they are kept in our own cache folder. Python compares them with the
    time and size of each source, so none is ever out of date. PYTHONPYCACHEPREFIX wins."""
    if sys.pycache_prefix is not None or not any(map(_is_compiled_each_time, _LARGE)):
        return
    from amoeba.cpu.library_cache import prepared
    from amoeba.system.files import default_folder

    try:
        folder = prepared(prepared(default_folder()) / "bytecode")
    except OSError:  # nowhere to keep it, or where others could write
        return
    if not os.access(folder, os.W_OK):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ[_BYTECODE] = str(folder)  # for the processes that torch's compiler starts


def _is_compiled_each_time(package: str) -> bool:
    if package in sys.modules:
        return False
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    if found is None or found.origin is None or found.cached is None or Path(found.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(found.origin).parent, os.W_OK)


if __name__ == "__main__":
    main()
