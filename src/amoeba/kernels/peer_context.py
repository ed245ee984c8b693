"""What the kernels of `peers` are told: the heaps of a group, where rows lie in them, and of how many parts a send is.

W ranks

See `amoeba.kernels.peer_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amoeba.kernels.peer_counters import CHANNELS

SLOTS, ROWS, SUMS, GRADIENTS = range(4)
NAMES = ("ids", "rows", "sums", "gradients of weights")
FLAGS = 4  # no channel: where the flags of `amoeba.tasks.triton.arrivals` lie, of each source one for 16 rows at most
# Parts of which what a rank sends is counted, and what it takes: the same on every rank. As many programs do it, unless
# a send is told otherwise. By 16 programs rows left at 347 to 387 GB/s on an H200, by 48 at 498 to 525, their launch by
# the host included (2026-11-16, dev/log). The interpreter runs one after another.
PUSHERS, TAKERS = 48, 64
PUSHERS_INTERPRETED = TAKERS_INTERPRETED = 2
# Without a GPU there is no clock in a kernel, and so many looks take about a second.
LOOKS_PER_SECOND = 10_000


@dataclass(frozen=True, eq=False)
class PeerContext:
    """What the ranks have made once.

    addresses: int64 (W,), of every rank's heap as this process reaches it.
    epochs:    int64 (CHANNELS,), on the device, this rank's own.
    trouble:   int64 (1,), the same: not 0 after a wait in vain.
    record:    int64 (RECORD,), on the host, where the device writes it.
    cell_at:   of each channel, the first byte of its cells in a heap.
    cell_size: of each channel, in bytes.
    tokens:    of one rank at most.
    heaps:     the same heaps, uint8, for copies that no kernel makes.
    reaches:   whether the addresses are all there; else who reads tells nobody, and others' heaps are for `Courier`.
    """

    addresses: Tensor
    epochs: Tensor
    trouble: Tensor
    record: Tensor
    cell_at: tuple[int, ...]
    cell_size: tuple[int, ...]
    tokens: int
    rank: int
    count: int
    seconds: float
    heaps: tuple[Tensor, ...] = ()
    reaches: bool = True

    @property
    def limit(self) -> int:
        return int(self.seconds * (1e6 if self.addresses.is_cuda else LOOKS_PER_SECOND))

    @property
    def pushers(self) -> int:
        return PUSHERS if self.addresses.is_cuda else PUSHERS_INTERPRETED

    @property
    def takers(self) -> int:
        return TAKERS if self.addresses.is_cuda else TAKERS_INTERPRETED

    def constants(self, channel: int) -> dict[str, Any]:
        return {"CHANNEL": channel, "RANKS": self.count, "ON_GPU": self.addresses.is_cuda}

    @property
    def waiting(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.addresses, self.epochs, self.trouble, self.record


@dataclass(frozen=True, eq=False)
class Plan:
    """Where rows are: int64 (3, W), of each rank the first row, the first entry of what says which go, and how many.

    there: of this rank's tokens, in x_TH and goes_WT.
    back:  of each rank's tokens, in x_RH and comes_R.
    places: of each rank's tokens in x_RH, as the host knows them.
    """

    there: Tensor
    back: Tensor
    tokens: int
    rows: int
    places: tuple[slice, ...] = ()


def heap_layout(ranks: int, tokens: int, top_k: int, row_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """cell_at and cell_size of a `PeerContext`, and the bytes of a heap."""
    tokens = tokens_of_cells(tokens)
    slots = tokens * top_k
    sizes = (slots * (4 + 8), tokens * row_bytes, tokens * row_bytes, slots * 8, tokens // 16 * 8)
    at = [_whole(2 * CHANNELS.value * ranks * 8)]
    for size in sizes:
        at.append(_whole(at[-1] + ranks * size))
    return tuple(at[:-1]), sizes, at[-1]


def tokens_of_cells(tokens: int) -> int:
    """So that each cell begins at a multiple of 16 bytes."""
    return -(-max(tokens, 1) // 16) * 16


def _whole(size: int) -> int:
    return -(-size // 256) * 256
