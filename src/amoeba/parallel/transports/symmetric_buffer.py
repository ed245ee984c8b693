"""Symmetric memory of a group of ranks, for `peers` and `shmem`: how it grows, and what kernels need to know about it.

W ranks

    buffer = symmetric_buffer_of(ranks, device)
    tokens = buffer.prepare(ranks, facts, x_TH, routing, most_tokens=None)      # on all ranks at once
    plan = plan_of(tuple(tokens), routing.num_tokens, buffer)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.parallel.agreement import agree
from amoeba.parallel.heap import SPARE, Heap, open_heap
from amoeba.parallel.ranks import Ranks, watch
from amoeba.parallel.transports.capacity import CapacityEstimate
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
        self.capacity = CapacityEstimate()
        self.holds = False  # rows that have come are read where they lie, and have not all been read
        self._heap: Heap | None = None
        self._peers: PeerContext | None = None
        self._told: Tensor | None = None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        watch(self.check)

    def prepare(
        self, ranks: Ranks, facts: dict[str, int], x_TH: Tensor, routing: Routing, most_tokens: int | None
    ) -> Sequence[int]:
        """The numbers of tokens of all ranks, or the maximum; and a heap that holds that many."""
        self.ranks, tokens = ranks, routing.num_tokens
        if self._peers is not None and self._peers.seconds != ranks.deadline:
            self._peers = replace(self._peers, seconds=ranks.deadline)
        if most_tokens is not None and tokens > most_tokens:
            raise bad_value("x_TH", f"at most most_tokens={most_tokens} tokens", tokens, "raise most_tokens")
        same = (most_tokens, *facts.values())
        if most_tokens is not None and same == self.agreed:
            return [most_tokens] * ranks.count
        facts = facts | {"most_tokens": -1 if most_tokens is None else most_tokens}
        told = [count for (count,) in agree(ranks, facts, [tokens], _HOST, "the numbers of tokens to come")]
        counts = told if most_tokens is None else [most_tokens] * ranks.count
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
