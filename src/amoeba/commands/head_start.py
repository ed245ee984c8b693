"""The imports of a command that trains, and beside them what else it will wait for.

    load_trainer(without=NOT_FOR_TEXT)          # inside `usage`: a package may be missing

Python imports one module after the other, for seconds. The driver opens the GPU, cuBLAS is loaded and Triton hashes its
library without Python's lock, so they need no time of their own. Whoever needs one of them next finds it done, or does
it as if nothing had been begun. The process does not end before they do, half a second at most.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from amoeba.commands.exits import need
from amoeba.commands.quick_transformers import quick_transformers

logger = logging.getLogger("amoeba")


def load_trainer(without: tuple[str, ...]) -> None:
    """without: packages that transformers shall not look for, see `quick_transformers`."""
    _begin(_open_gpu)
    with quick_transformers(without):
        need("tokenizers", "safetensors", "transformers", "accelerate", "transformers.trainer")
    if "triton" in sys.modules:
        _begin(_hash_triton)  # not before: it imports a few modules itself
    kept = f", bytecode in {sys.pycache_prefix}" if sys.pycache_prefix else ""
    logger.info("torch and transformers are loaded%s", kept)


def _begin(work: Callable[[], None]) -> None:
    def run() -> None:
        with suppress(Exception):  # it is told where the GPU or the compiler is used
            work()

    Thread(target=run, name=work.__name__).start()


def _open_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        some = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        some.mm(some)  # the first product loads cuBLAS


def _hash_triton() -> None:
    """All of its compiler, 400 MB, before it looks for a kernel in its cache; it remembers the result."""
    import torch
    from triton.runtime.cache import triton_key

    if torch.cuda.is_available():
        triton_key()
