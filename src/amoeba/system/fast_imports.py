"""Imports of large packages without garbage collection, which takes a sixth of their time and finds none.

    with loading():
        from transformers import Trainer

For commands, whose process is theirs alone: what is there at the end is never looked at again.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extension modules complain of what is left when they go
            gc.enable()
