"""Many tensors in one launch: a table of their addresses on the device, cut into chunks of equal size.

    table = TensorTable()                                  # kept by the caller from step to step
    rows, chunks = table.place([[address, count], ...], counts, device)
    _kernel[(len(chunks),)](rows, chunks, ...)             # a program: the tensor chunks[i, 0], its chunk chunks[i, 1]

rows: int64, as given; chunks: int32. Nothing is sent to the device while nothing changes, and nobody waits for what is.
The rows go stale with the tensors: `place` is called anew before each launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv

CHUNK = 16384  # elements; a power of two


class TensorTable:
    def __init__(self) -> None:
        self._rows: list[list[int]] | None = None
        self._counts: list[int] | None = None

    def place(self, rows: list[list[int]], counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """counts: elements of each tensor."""
        if rows != self._rows:
            self._placed_rows = _place(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            self._rows = rows
        if counts != self._counts:
            self._placed_chunks = _place(_chunks_of(counts), device)
            self._counts = counts
        return self._placed_rows, self._placed_chunks


def _chunks_of(counts: list[int]) -> Tensor:
    each = torch.tensor([cdiv(count, CHUNK) for count in counts], dtype=torch.int64, device="cpu")
    tensor = torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(each)
    part = torch.arange(len(tensor), dtype=torch.int64, device="cpu") - (each.cumsum(0) - each)[tensor]
    return torch.stack((tensor, part), 1).to(torch.int32)


def _place(tensor: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory is a copy sure not to wait for the device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def pointers_to(address, tile, FULL: tl.constexpr, BF16: tl.constexpr):
    """Of elements of a tensor, or of their bits where it is bf16.

    FULL: the address is a multiple of 16, which the compiler is told here: it then reads and writes 16 bytes at a time.
    """
    start = address.to(tl.pointer_type(tl.int16 if BF16 else tl.float32))
    if FULL:
        start = tl.multiple_of(start, 16)
    return start + tile


@triton.jit
def load_as_fp32(pointers, inside):
    """Undefined outside."""
    if pointers.dtype.element_ty == tl.int16:
        bits = tl.load(pointers, mask=inside).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=inside)
