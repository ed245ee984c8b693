"""Symmetric memory of a group of ranks, for `peers` and `shmem`: how it grows, and what kernels need to know about it.

W ranks

    buffer = symmetric_buffer_of(ranks, device)
    tokens = buffer.prepare(ranks, facts, x_TH, routing, most_tokens=None)      # on all ranks at once
    plan = plan_of(tuple(tokens), routing.num_tokens, buffer)

Below it is the symmetric heap, memory of one rank that all ranks of its group reach:

    heap = open_heap(ranks, device, nbytes)     # on all ranks at once
    heap.addresses                              # of each rank's, as this process reaches it

On GPUs it is torch's symmetric memory. Without one it is a file that the processes map, so that the same kernels run
there in Triton's interpreter, over real processes. A group has one heap per device, which is never given back while it
serves: making it takes seconds on a GPU, and must not happen while kernels wait.

Capacity estimates say how many rows to allocate for a pass, before or after its rows are counted:

    room = rounded_up(owned, slots)                 # `owned` of `slots` slots have an expert here
    guess = estimate.guess(layer, slots)            # None: of this layer nothing is known yet
    estimate.remember(layer, room, slots, guess)

A guess is the room of the layer's last pass, in proportion to the slots, and one size more. After a pass that needed
more than those behind it, it comes down by one size at a time. What becomes of a pass that has more rows than were
guessed is said where guesses are made, in `PeerExchange.room`.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.core.torch_internals import symmetric_memory
from amoeba.core.weights import AnyExperts
from amoeba.parallel.agreement import agree, agreed_format
from amoeba.parallel.ranks import Ranks, watch
from amoeba.precision.formats import Format
from amoeba.routing.router import Routing

if TYPE_CHECKING:
    from amoeba.kernels.peer_context import PeerContext, Plan

_HOST = torch.device("cpu")
# of the channels of `peer_rows`, for who waits in vain
_NAMES = (
    "ids and routing weights",
    "tokens or gradients of sums",
    "sums of the experts or gradients of tokens",
    "gradients of routing weights",
)


@dataclass(frozen=True)
class Size:
    """Of a heap: the most tokens of a rank, experts per token, and bytes of a row."""

    tokens: int
    top_k: int
    row_bytes: int

    def holds(self, other: Size) -> bool:
        return self.tokens >= other.tokens and self.top_k >= other.top_k and self.row_bytes >= other.row_bytes

    def joined(self, other: Size) -> Size:
        return Size(*(max(one, two) for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


class SymmetricBuffer:
    """The heap of a group on one device, and what its kernels are told. All layers of a model share it."""

    def __init__(self, ranks: Ranks, device: torch.device, *, remote: bool = False) -> None:
        """remote: of ranks that do not reach each other's memory; half of a heap is an outbox then."""
        self.ranks, self.device, self.remote = ranks, device, remote
        self.size = Size(0, 0, 0)
        self.agreed: tuple[Any, ...] | None = None
        self.row_format: Format | None = None  # of the last pass
        self.capacity = CapacityEstimate()
        self.holds = False  # rows that have come are read where they lie, and have not all been read
        self._heap: Heap | None = None
        self._peers: PeerContext | None = None
        self._told: Tensor | None = None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        watch(self.check)

    def prepare(
        self,
        ranks: Ranks,
        facts: dict[str, int],
        x_TH: Tensor,
        routing: Routing,
        most_tokens: int | None,
        row_format: int = 0,
    ) -> Sequence[int]:
        """The numbers of tokens of all ranks, or the maximum; and a heap that holds that many. Writes `row_format`."""
        self.ranks, tokens = ranks, routing.num_tokens
        if self._peers is not None and self._peers.seconds != ranks.deadline:
            self._peers = replace(self._peers, seconds=ranks.deadline)
        if most_tokens is not None and tokens > most_tokens:
            raise bad_value("x_TH", f"at most most_tokens={most_tokens} tokens", tokens, "raise most_tokens")
        same = (most_tokens, row_format, *facts.values())
        if most_tokens is not None and same == self.agreed:
            return [most_tokens] * ranks.count
        facts = facts | {"most_tokens": -1 if most_tokens is None else most_tokens}
        told, formats = zip(
            *agree(ranks, facts, [tokens, row_format], _HOST, "the numbers of tokens to come"), strict=True
        )
        self.row_format = agreed_format(formats)
        counts = list(told) if most_tokens is None else [most_tokens] * ranks.count
        self.agreed = same
        needed = Size(max(*counts, 1), routing.top_k, x_TH.shape[1] * x_TH.element_size())
        if not self.size.holds(needed):
            self._grow(ranks, self.size.joined(needed))
        return counts

    def _grow(self, ranks: Ranks, size: Size) -> None:
        from amoeba.kernels.peer_context import CHANNELS, RECORD, PeerContext, heap_layout, tokens_of_cells

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ranks.gather([size.tokens], _HOST, "the others to be done with the heap")
        self._heap = self._peers = None
        cell_at, cell_size, nbytes = heap_layout(ranks.count, *vars(size).values())
        nbytes = 2 * nbytes + SPARE if self.remote else nbytes
        self._heap = open_heap(ranks, self.device, nbytes, remote=self.remote)
        self._peers = PeerContext(
            self._heap.addresses,
            epochs=torch.zeros(CHANNELS.value, dtype=torch.int64, device=self.device),
            trouble=torch.zeros(1, dtype=torch.int64, device=self.device),
            record=torch.zeros(RECORD, dtype=torch.int64, device=_HOST, pin_memory=self.device.type == "cuda"),
            cell_at=cell_at,
            cell_size=cell_size,
            tokens=tokens_of_cells(size.tokens),
            rank=ranks.rank,
            count=ranks.count,
            seconds=ranks.deadline,
            heaps=self._heap.bytes_of,
            reaches=not self.remote,
        )
        self.size = size

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """What is launched inside need not be done before what follows, until `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def ask(self, numbers: Tensor) -> Callable[[], list[int]]:
        """int32, on the device: what is called next waits for them, and for nothing that is launched in between."""
        if self._stream is None:
            return numbers.tolist
        if self._told is None or self._told.shape != numbers.shape:
            self._told = torch.empty_like(numbers, device=_HOST, pin_memory=True)
        told, known = self._told.copy_(numbers, non_blocking=True), torch.cuda.Event()
        known.record(torch.cuda.current_stream(self.device))

        def wait() -> list[int]:
            known.synchronize()
            return told.tolist()

        return wait

    def checked(self) -> PeerContext:
        self.check()
        assert self._peers is not None
        return self._peers

    def check(self) -> None:
        """RankLost if a kernel gave up waiting, ValueError if more rows came than fit. The host looks at its own
        memory, and waits for nothing."""
        from amoeba.kernels.peer_context import CROWDED, TAKEN

        peers = self._peers
        if peers is None or not peers.record[0]:
            return
        _, channel, whom, epoch, seen, expected, which = peers.record.tolist()
        if which == CROWDED.value:
            needed = f"room for all slots with an expert of rank {self.ranks.rank}, {seen} in exchange {epoch}"
            raise bad_value("most_rows", needed, expected, "raise it, or leave it out to allocate memory for all rows")
        of_taken = which == TAKEN.value
        what = f"{_NAMES[channel]}, exchange {epoch}"
        parts = peers.takers if of_taken else peers.pushers
        found = f"{max(seen - expected + parts, 0)} of {parts} parts {'were taken' if of_taken else 'had come'}"
        raise self.ranks.lost(f"{what} to be taken" if of_taken else what, whom, found)


_buffers: dict[tuple[Any, torch.device, bool], SymmetricBuffer] = {}  # one per group, device and way, made once


def symmetric_buffer_of(ranks: Ranks, device: torch.device, *, remote: bool = False) -> SymmetricBuffer:
    key = ranks.group, device, remote
    if key not in _buffers:
        _buffers[key] = SymmetricBuffer(ranks, device, remote=remote)
    return _buffers[key]


@functools.lru_cache(maxsize=256)
def plan_of(counts: tuple[int, ...], tokens: int, buffer: SymmetricBuffer) -> Plan:
    """counts: rows of each rank's tokens here; tokens: of this rank."""
    from amoeba.kernels.peer_context import Plan

    ranks = range(len(counts))
    first = [sum(counts[:rank]) for rank in ranks]
    there = [[0 for _ in ranks], [rank * tokens for rank in ranks], [tokens for _ in ranks]]
    tables = [torch.tensor(table, dtype=torch.int64, device=_HOST) for table in (there, [first, first, list(counts)])]
    if buffer.device.type == "cuda":  # only from pinned memory is a copy sure not to wait for the device
        tables = [table.pin_memory().to(buffer.device, non_blocking=True) for table in tables]
    places = tuple(slice(begin, begin + count) for begin, count in zip(first, counts, strict=True))
    return Plan(tables[0], tables[1], counts[buffer.ranks.rank], sum(counts), places)


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


_SIZES = 64  # few, so that memory of the pass before serves again
_TILE = 128  # rows
_MOST_LAYERS = 4096


def rounded_up(owned: int, slots: int) -> int:
    """To one of the sizes."""
    size = _size(slots)
    return min(-(-max(owned, 1) // size) * size, slots)


def _size(slots: int) -> int:
    return max(-(-slots // (_SIZES * _TILE)), 1) * _TILE


class CapacityEstimate:
    """What layers needed. A layer is known by the place of its weights: should another one lie there some day, its
    first guess is no good, and no harm is done."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[int, int]] = {}  # of a layer: rows, and of how many slots

    def guess(self, layer: int, slots: int) -> int | None:
        rows, before = self._next.get(layer, (0, 0))
        if rows == 0 or slots == 0:
            return None
        return rounded_up(-(-rows * slots // before), slots)

    def remember(self, layer: int, room: int, slots: int, guess: int | None) -> None:
        if slots == 0:
            return
        if len(self._next) >= _MOST_LAYERS:
            self._next.clear()
        size = _size(slots)
        self._next[layer] = min(max(room + size, (guess or 0) - size), slots), slots


def layer_of(local: AnyExperts) -> int:
    return next((tensor.data_ptr() for tensor in local.tensors() if tensor is not None), 0)
