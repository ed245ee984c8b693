"""Sends bytes from one rank's heap to another's with NVSHMEM, also to other machines, followed by counters.

    put(heap, source_at, dest_at, nbytes, pe)                   # all of it is on its way when the next kernel begins
    put_blocks(heap, epochs, source_at, dest_at, flags_at, nbytes, block, blocks, pe, channel=1)  # a flag behind each
    count(heap, epochs, pes, counter_at, spare_at, rank, channel=1, ahead=1, parts=16)  # elsewhere, once it is there

A heap is at the same place in every process, so offsets say where. Counters are set, not added to: each has one writer.
These kernels are launched by torch's wrapper, which initialises NVSHMEM in them. Importing this file needs NVSHMEM.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.torch_internals import nvshmem_device_functions
from amoeba.kernels.launch import OPTIONS

nvshmem = nvshmem_device_functions()

PROGRAMS = 16
_WARPS = 16
# The payload of a counter that is sent alone; it is never read.
_LEAST_BYTES = tl.constexpr(16)
# NVSHMEM_SIGNAL_SET. Torch's documentation calls it 0, which adds: the second epoch would find the third already there.
_SET = tl.constexpr(9)


def put(heap: Tensor, source_at: int, dest_at: int, nbytes: int, pe: int) -> None:
    _put[(PROGRAMS,)](heap, source_at, dest_at, nbytes, pe, num_warps=_WARPS, **OPTIONS)


def put_blocks(
    heap: Tensor,
    epochs: Tensor,
    source_at: int,
    dest_at: int,
    flags_at: int,
    nbytes: int,
    block: int,
    blocks: int,
    pe: int,
    *,
    channel: int,
) -> None:
    """block: bytes. flags_at: of int64, which rise to the epoch after the one that the device has counted to."""
    numbers = (source_at, dest_at, flags_at, nbytes, block, blocks, pe)
    _put_blocks[(min(PROGRAMS, blocks),)](heap, epochs, *numbers, CHANNEL=channel, num_warps=_WARPS, **OPTIONS)


def count(
    heap: Tensor,
    epochs: Tensor,
    pes: Tensor,
    counter_at: int,
    spare_at: int,
    rank: int,
    *,
    channel: int,
    ahead: int,
    parts: int,
) -> None:
    """pes: int32 (W,), how NVSHMEM calls each rank. spare_at: bytes that are never read, sent with a counter.
    ahead: of the epoch that the device has counted to."""
    numbers = (counter_at, spare_at, rank, ahead, parts)
    _count[(1,)](heap, epochs, pes, *numbers, CHANNEL=channel, RANKS=pes.shape[0], num_warps=1, **OPTIONS)


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["source_at", "dest_at", "nbytes", "pe"])
def _put(heap, source_at, dest_at, nbytes, pe):
    share = tl.cdiv(tl.cdiv(nbytes, 16), tl.num_programs(0)).to(tl.int64) * 16
    first = tl.program_id(0).to(tl.int64) * share
    size = tl.minimum(nbytes - first, share)
    if size > 0:
        nvshmem.put(heap + dest_at + first, heap + source_at + first, size, pe)
    nvshmem.quiet()


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["source_at", "dest_at", "flags_at", "nbytes", "block", "blocks", "pe"])
def _put_blocks(heap, epochs, source_at, dest_at, flags_at, nbytes, block, blocks, pe, CHANNEL: tl.constexpr):
    value = tl.load(epochs + CHANNEL) + 1
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = index * block.to(tl.int64)
        size = tl.maximum(tl.minimum(nbytes - first, block), _LEAST_BYTES).to(tl.int64)
        nvshmem.putmem_signal_block(
            heap + dest_at + first, heap + source_at + first, size, heap + flags_at + index * 8, value,
            (pe * 0 + _SET).to(tl.int32), pe,
        )  # fmt: skip


@nvshmem.requires_nvshmem
@triton.jit(do_not_specialize=["counter_at", "spare_at", "rank", "ahead", "parts"])
def _count(heap, epochs, pes, counter_at, spare_at, rank, ahead, parts, CHANNEL: tl.constexpr, RANKS: tl.constexpr):
    nvshmem.quiet()
    value = (tl.load(epochs + CHANNEL) + ahead) * parts
    spare = heap + spare_at
    size = (value * 0 + _LEAST_BYTES).to(tl.int64)
    for step in range(1, RANKS):
        pe = tl.load(pes + (rank + step) % RANKS)
        nvshmem.putmem_signal_block(spare, spare, size, heap + counter_at, value, (pe * 0 + _SET).to(tl.int32), pe)
