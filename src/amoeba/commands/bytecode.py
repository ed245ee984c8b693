"""Where Python keeps the bytecode of what a command imports, if it keeps none next to the sources.

    keep_bytecode()             # before the first large import

torch, transformers and torch's compiler are 3,500 files. Python compiles them at every start where it finds no `.pyc`
beside them and may not write one: some installers write none, and images often set PYTHONDONTWRITEBYTECODE. That takes
longer than all else that a start does. Then they are kept in our own cache folder. Python looks at the time and size of
each source, wherever its bytecode lies, so nothing kept is ever out of date.

For commands, whose process is theirs alone. What the user has said with PYTHONPYCACHEPREFIX stays.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_LARGE = ("torch", "transformers")
_VARIABLE = "PYTHONPYCACHEPREFIX"


def keep_bytecode() -> None:
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
    os.environ[_VARIABLE] = str(folder)  # for the processes that torch's compiler starts


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
