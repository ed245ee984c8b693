"""Memory to read into. O_DIRECT wants it to begin at a page, which torch's own allocations do not."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.pointers import address

_HUGE = 2 * 2**20
_NUMBERS = 16  # bytes; a blob is seen as numbers of any dtype


def aligned_buffer(size: int) -> Tensor:
    """uint8 zeros on the CPU that begin at a page; not pinned. Private: where huge pages are given on advice, shared
    memory gets none."""
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    pages = mmap.mmap(-1, size, **({"flags": flags} if flags else {}))
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages


class Memory:
    """The bytes of a tensor, or of anything with a writable buffer, where they are.

    on_part: called where a read of them has ended, with its begin and its bytes, by the thread that read.
    """

    def __init__(self, into: Any, size: int, on_part: Callable[[int, int], None] | None = None) -> None:
        self.on_part = on_part
        if not isinstance(into, Tensor):
            view = memoryview(into)
            if view.readonly:
                raise bad_value(
                    "into", "memory that can be written", "read-only memory", "pass a bytearray or a tensor"
                )
            into = torch.frombuffer(view, dtype=torch.uint8)
        self.tensor = into
        self.address = address("into", into, torch.uint8, (size,))
        if self.address % _NUMBERS:
            got = f"memory that begins at {self.address:#x}"
            raise bad_value("into", f"memory that begins at a multiple of {_NUMBERS} bytes", got, "use aligned_buffer")
        self.bytes = memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")
