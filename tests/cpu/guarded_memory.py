"""Tensors between the red zones of AddressSanitizer, for the length of a call of compiled code.

torch has an allocator of its own on some machines, whose blocks the sanitizer does not know. So each tensor whose
address is taken is copied into memory of malloc's, and back when the call has returned. What compiled code keeps an
address of must stay: nothing is freed.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from amoeba.cpu import build, core, node_library, pointers
from amoeba.cpu import weights as packed

# Not optimised, which takes the compiler a third of the time; without the checks of every pointer that AddressSanitizer
# makes anyway, which take it minutes.
SANITIZED_FLAGS = (
    *build._FLAGS,
    "-O0",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,pointer-overflow,object-size,vptr",
    "-fno-sanitize-recover=undefined",
)
_CACHE_LINE = 64
_WITHOUT_TENSORS = ("amoeba_pool_", "amoeba_packed_bytes")
_lent = threading.local()
_checked_start = pointers._start


def guard_all_calls() -> None:
    """To be called before a library is loaded."""
    pointers._start = _start
    for module in (core, packed, node_library):
        module.load = _load


def _start(name: str, tensor: Tensor) -> int:
    place = _checked_start(name, tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = span * tensor.itemsize if tensor.numel() else 0
    memory = ctypes.c_void_p()
    if ctypes.CDLL(None).posix_memalign(ctypes.byref(memory), ctypes.c_size_t(_CACHE_LINE), ctypes.c_size_t(length)):
        raise MemoryError(f"{name}: {length} bytes")
    ctypes.memmove(memory, place, length)
    if not hasattr(_lent, "pieces"):
        _lent.pieces = []
    _lent.pieces.append((memory, place, length, tensor))
    return memory.value or 0


def _load(file: Path, signatures: Any) -> _Library:
    return _Library(build.load(file, signatures))


class _Library:
    """Its functions, each of which gives back what it was lent."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name.startswith(_WITHOUT_TENSORS):  # called while the arguments of another are made ready
            return function

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            for memory, place, length, _kept_alive in getattr(_lent, "pieces", []):
                ctypes.memmove(place, memory, length)
            _lent.pieces = []
            return result

        return call
