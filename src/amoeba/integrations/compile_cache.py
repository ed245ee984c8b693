"""Where what torch.compile makes is kept, so that the next run only has to load it.

keep_compiled_code()        # before the first thing is compiled
folder()                    # $TORCHINDUCTOR_CACHE_DIR, else a part of our cache
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path

from amoeba.core.torch_internals import hash_compiler_beside
from amoeba.system.files import default_folder

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def folder() -> Path:
    """The user's choice, else a part of our cache. OSError for someone without a home."""
    return Path(os.environ.get(_VARIABLE) or default_folder() / "compiled")


def keep_compiled_code() -> None:
    """Unless the user has said where."""
    if importlib.util.find_spec("triton") is not None:
        # Inductor moves Triton's cache into its own folder when it first makes a kernel, and not at all where it finds
        # its kernels there: then ours, compiled after that moment in one run, would be compiled again in the next.
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    with suppress(OSError):  # nowhere to keep it
        os.environ[_VARIABLE] = str(folder())
    hash_compiler_beside()
