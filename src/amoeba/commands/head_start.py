"""What a run on a GPU waits for without Python's lock, begun beside the imports, which need nothing else.

    open_gpu()              # as soon as torch is there
    ...                     # seconds of imports
    hash_triton()           # as soon as they are done

Whoever needs it next finds it done, or does it as if nothing had been begun. Both end with the process, which waits
for them: half a second at most.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch


def open_gpu() -> None:
    """Makes the driver's context. An error of the GPU's is told where the GPU is used."""
    _begin(_make_context)


def hash_triton() -> None:
    """Triton hashes its library, 400 MB, before it looks for a kernel in its cache, and remembers the result."""
    if "triton" in sys.modules and torch.cuda.is_available():
        _begin(_compute_key)


def _make_context() -> None:
    if torch.cuda.is_available():
        torch.empty(1, device=torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))


def _compute_key() -> None:
    from triton.runtime.cache import triton_key

    triton_key()


def _begin(work: Callable[[], None]) -> None:
    def quietly() -> None:
        with suppress(Exception):
            work()

    Thread(target=quietly, name=work.__name__).start()
