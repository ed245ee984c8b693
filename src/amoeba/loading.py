"""Imports of large packages, in which nobody looks for garbage: it takes a sixth of their time, and there is none.

with loading():
    from transformers import Trainer
"""

from __future__ import annotations

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
            gc.enable()
