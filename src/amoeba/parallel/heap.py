"""Memory of one rank that all ranks of its group reach: the symmetric heap of the transport `peers`.

W ranks

    heap = open_heap(ranks, device, nbytes)     # on all ranks at once
    heap.addresses                              # of each rank's, as this process reaches it

On GPUs it is torch's symmetric memory. Without one it is a file that the processes map, so that the same kernels run
there in Triton's interpreter, over real processes. A group has one heap per device, which is never given back while it
serves: making it takes seconds on a GPU, and must not happen while kernels wait.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.torch_internals import symmetric_memory
from amoeba.parallel.ranks import Ranks

SPARE = 256  # bytes at the end of a remote heap that are never read, see `amoeba.kernels.shmem_put`
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, eq=False)
class Heap:
    addresses: Tensor  # int64 (W,), on the device
    nbytes: int
    bytes_of: tuple[Tensor, ...]  # the heap of each rank, uint8
    kept: Any  # what the mappings need to last as long as this


def open_heap(ranks: Ranks, device: torch.device, nbytes: int, *, remote: bool = False) -> Heap:
    """Of zeros, before any rank goes on. remote: for NVSHMEM; of the others there are neither addresses nor bytes."""
    make = (_by_nvshmem if remote else _on_gpus) if device.type == "cuda" else _in_files
    heaps, places, kept = make(ranks, device, nbytes)
    heaps[ranks.rank].zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ranks.gather([nbytes], torch.device("cpu"), "the others' heaps")
    return Heap(torch.tensor(places, dtype=torch.int64, device=device), nbytes, tuple(heaps), kept)


def _on_gpus(ranks: Ranks, device: torch.device, nbytes: int) -> tuple[list[Tensor], list[int], Any]:
    own, handle = symmetric_memory(nbytes, device, ranks.group)
    heaps = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(ranks.count)]
    return heaps, list(handle.buffer_ptrs), (own, handle)


def _by_nvshmem(ranks: Ranks, device: torch.device, nbytes: int) -> tuple[list[Tensor], list[int], Any]:
    own, handle = symmetric_memory(nbytes, device, ranks.group, nvshmem=True)
    heaps = [own if rank == ranks.rank else own[:0] for rank in range(ranks.count)]
    return heaps, [own.data_ptr() if rank == ranks.rank else 0 for rank in range(ranks.count)], (own, handle)


def _in_files(ranks: Ranks, device: torch.device, nbytes: int) -> tuple[list[Tensor], list[int], Any]:
    file, name = tempfile.mkstemp(prefix="amoeba-heap-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
    try:
        os.ftruncate(file, nbytes)
        names = ranks.gather_texts(name, "the others' heaps")
        maps = [torch.from_file(each, shared=True, size=nbytes, dtype=torch.uint8) for each in names]
        ranks.gather([nbytes], device, "the others' heaps")
    finally:
        os.close(file)
        os.unlink(name)
    return maps, [each.data_ptr() for each in maps], None
