"""Imports of large packages in less time, for commands: without garbage collection, and while weights are read.

with loading():
    from transformers import Trainer
with importing(COMPILER):
    model = load_model(name)
"""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

# What `torch.compile` imports when it is first used.
COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo", "torch._dynamo.backends.debugging")


@contextmanager
def loading() -> Iterator[None]:
    """Without garbage collection, which takes a sixth of the time and finds none."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extension modules complain of what is left when they go
            gc.enable()


@contextmanager
def importing(names: Sequence[str]) -> Iterator[None]:
    """In another thread, while this one does something that leaves Python's lock alone, and imports little itself: of
    modules that import each other, Python would let one thread go on with one that is half there."""
    thread = Thread(target=_import, args=(names,), name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import(names: Sequence[str]) -> None:
    for name in names:
        with suppress(Exception):  # who needs it imports it again, and says what is wrong
            importlib.import_module(name)
