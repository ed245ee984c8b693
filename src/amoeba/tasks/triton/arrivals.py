"""Rows of dy that come from other ranks while the scheduled backward computes, and sums of dx that go back to them.

T tokens of this rank · W ranks · R = W·C rows, C of each rank, the most tokens that one may have · H hidden

    announce(dy_RH, Arrival(...))                 # by the transport, in place of waiting
    arrival = announced(dy_RH)                    # by the backend: taken once
    scheduled_backward(dy_RH, ..., arrival=arrival)
    arrival.close()

dy_RH is this rank's part of the symmetric heap of `amoeba.kernels.peer_rows`: C rows for each rank. Behind its cells
lie flags, one for each block of rows of each source, which hold the exchange that the block last came in; they only
grow. A SEND task puts a block of dy into another rank's heap and raises its flag there; a COMBINE task writes what the
experts here gave to another rank's tokens into that rank's cells for sums, and `close` says that all of it is there.
The graph is `ShareGraph`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.fences import microseconds
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.peer_counters import ARRIVED, TAKEN, counter_of, look, tell, wait_for
from amoeba.kernels.peer_post import FLAGS, ROWS, SUMS, Plan, Post

# Rows of a block that travels, as in `Tiling`. The interpreter's layers are small.
SENT, SENT_INTERPRETED = 128, 16
_SEND_TILE = 8192  # numbers that a program copies at once
_CHANNEL, _SUMS = tl.constexpr(ROWS), tl.constexpr(SUMS)


@dataclass(frozen=True, eq=False)
class Arrival:
    """dy_TH: what this rank sends. goes_WT: uint8, which token goes to which rank. comes_R: uint8, which rows come.

    keep: is given dx of own tokens, of this rank's experts alone; what it returns stands for dx of all rows.
    """

    post: Post
    plan: Plan
    dy_TH: Tensor
    goes_WT: Tensor
    comes_R: Tensor
    keep: Callable[[Tensor], Tensor]

    @property
    def rows(self) -> tuple[int, int]:
        """Of dy_RH, those of this rank's tokens."""
        return self.post.rank * self.plan.tokens, (self.post.rank + 1) * self.plan.tokens

    @property
    def sent(self) -> int:
        return SENT if self.dy_TH.is_cuda else SENT_INTERPRETED

    @property
    def sends(self) -> int:
        """Tickets of SEND."""
        return (self.post.count - 1) * cdiv(self.plan.tokens, self.sent)

    def arguments(self) -> tuple[Any, ...]:
        post = self.post
        return (
            self.dy_TH, self.goes_WT, *post.waiting, post.cell_at[ROWS], post.cell_size[ROWS], post.cell_at[FLAGS],
            post.cell_size[FLAGS], self.comes_R, post.cell_at[SUMS], post.cell_size[SUMS], self.dy_TH.shape[0],
            self.plan.tokens, post.rank, post.limit,
        )  # fmt: skip

    def constants(self) -> dict[str, Any]:
        columns = min(next_power_of_2(self.dy_TH.shape[1]), 2048)
        return {
            "RANKS": self.post.count,
            "SENT": self.sent,
            "SEND_T": min(max(_SEND_TILE // columns, 1), self.sent),
            "SEND_H": columns,
            "ALIGNED": self.dy_TH.data_ptr() % 16 == 0 and self.dy_TH.stride(0) * self.dy_TH.element_size() % 16 == 0,
            "TAKERS": self.post.takers,
            "ON_GPU": self.dy_TH.is_cuda,
        }

    def room_for_dx(self) -> Tensor:
        """Of own tokens."""
        return self.dy_TH.new_empty((self.plan.tokens, self.dy_TH.shape[1]))

    def close(self) -> None:
        """Behind the last task: the transport's counters go on as if it had sent and taken dy, and sent the sums."""
        post = self.post
        _close[(1,)](
            post.addresses, post.epochs, post.rank, PUSHERS=post.pushers, TAKERS=post.takers, RANKS=post.count,
            num_warps=1,
        )  # fmt: skip


NOTHING = (None,) * 17  # in place of `Arrival.arguments`
NO_RANKS: dict[str, Any] = {
    "RANKS": 1, "SENT": 1, "SEND_T": 1, "SEND_H": 1, "ALIGNED": False, "TAKERS": 1, "ON_GPU": False
}  # fmt: skip
_announced: dict[int, Arrival] = {}


def announce(dy_RH: Tensor, arrival: Arrival) -> None:
    _announced[dy_RH.data_ptr()] = arrival


def announced(dy_RH: Tensor) -> Arrival | None:
    """To whoever asks first: he waits for the rows as he comes to them."""
    return _announced.pop(dy_RH.data_ptr(), None) if _announced else None


@quick
@triton.jit(do_not_specialize=["rank"])
def _close(addresses, epochs, rank, PUSHERS: tl.constexpr, TAKERS: tl.constexpr, RANKS: tl.constexpr):
    tl.store(epochs + _CHANNEL, tl.load(epochs + _CHANNEL) + 1)
    for step in range(1, RANKS):
        peer = (rank + step) % RANKS
        tl.atomic_add(counter_of(addresses, peer, rank, ARRIVED, _CHANNEL, RANKS), PUSHERS, sem="release", scope="sys")
        tl.atomic_add(counter_of(addresses, peer, rank, TAKEN, _CHANNEL, RANKS), TAKERS, sem="release", scope="sys")
        tl.atomic_add(counter_of(addresses, peer, rank, ARRIVED, _SUMS, RANKS), PUSHERS, sem="release", scope="sys")


@triton.jit
def flag_of(addresses, at_rank, source, block, flags_at, flags_size):
    """In the heap of `at_rank`, of a block of rows from `source`."""
    flags = tl.load(addresses + at_rank) + flags_at + source.to(tl.int64) * flags_size
    return flags.to(tl.pointer_type(tl.int64)) + block


@triton.jit
def send_block(
    dest, block, dy_TH, goes_WT, addresses, epochs, trouble, record, cell_at, cell_size, flags_at, flags_size, tokens,
    rank, limit,
    H: tl.constexpr, RANKS: tl.constexpr, SENT: tl.constexpr, SEND_T: tl.constexpr, SEND_H: tl.constexpr,
    ALIGNED: tl.constexpr, TAKERS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """SEND: as soon as what was sent before is taken."""
    epoch = tl.load(epochs + _CHANNEL)
    taken = counter_of(addresses, rank, dest, TAKEN, _CHANNEL, RANKS)
    wait_for(taken, epoch * TAKERS, epoch, dest, trouble, record, limit, TAKEN, _CHANNEL, ON_GPU)
    cell = tl.load(addresses + dest) + cell_at + rank.to(tl.int64) * cell_size
    rows = cell.to(tl.pointer_type(dy_TH.dtype.element_ty))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    for first in range(block * SENT, tl.minimum((block + 1) * SENT, tokens), SEND_T):
        t = first + tl.arange(0, SEND_T)
        goes = tl.load(goes_WT + dest.to(tl.int64) * tokens + t, mask=t < tokens, other=0) != 0
        for column in range(0, H, SEND_H):
            c = column + tl.arange(0, SEND_H)
            at = t.to(tl.int64)[:, None] * H + c[None, :]
            mask = goes[:, None] & (c < H)[None, :]
            tl.store(rows + at, tl.load(dy_TH + at, mask=mask), mask=mask)
    tl.debug_barrier()  # what all threads of the program have written comes before
    tl.atomic_xchg(flag_of(addresses, dest, rank, block, flags_at, flags_size), epoch + 1, sem="release", scope="sys")


@triton.jit
def room_for_sums(
    row, own, addresses, epochs, trouble, record, sums_at, sums_size, most_tokens, rank, limit,
    H: tl.constexpr, RANKS: tl.constexpr, TAKERS: tl.constexpr, ALIGNED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Where the sums of a block of rows of one rank go, as if those of row 0 on lay there: into that rank's heap, as
    soon as what was there is read; of own tokens into `own`."""
    source = row // most_tokens
    address = own.to(tl.int64)
    if source != rank:
        epoch = tl.load(epochs + _SUMS)
        taken = counter_of(addresses, rank, source, TAKEN, _SUMS, RANKS)
        wait_for(taken, epoch * TAKERS, epoch, source, trouble, record, limit, TAKEN, _SUMS, ON_GPU)
        address = tl.load(addresses + source) + sums_at + rank.to(tl.int64) * sums_size
    before = source.to(tl.int64) * most_tokens * (H * (own.dtype.element_ty.primitive_bitwidth // 8))
    sums = (address - before).to(tl.pointer_type(own.dtype.element_ty))
    if ALIGNED:
        sums = tl.multiple_of(sums, 16)
    return sums


@triton.jit
def wait_for_rows(
    row_M, wanted_M, addresses, epochs, trouble, record, flags_at, flags_size, most_tokens, rank, limit,
    SENT: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Until these rows of dy_RH are there, those that are wanted."""
    epoch = tl.load(epochs + _CHANNEL) + 1
    source_M = row_M // most_tokens
    foreign_M = wanted_M & (source_M != rank)
    flag_M = flag_of(addresses, rank, source_M, row_M % most_tokens // SENT, flags_at, flags_size)
    oldest = _oldest(flag_M, foreign_M, epoch)
    if oldest < epoch:
        began = microseconds(epoch * 0, ON_GPU)
        now = began
        stop = look(trouble)
        while (oldest < epoch) & (stop == 0) & (now - began < limit):
            oldest = _oldest(flag_M, foreign_M, epoch)
            now = microseconds(now, ON_GPU)
        if (oldest < epoch) & (stop == 0):
            whom = tl.max(tl.where(foreign_M, source_M, 0), 0)
            tell(trouble, record, whom, epoch, oldest, epoch, ARRIVED, _CHANNEL, ON_GPU)
    tl.debug_barrier()


@triton.jit
def _oldest(flag_M, wanted_M, epoch):
    """A number and no tensor from turn to turn: see the kernel."""
    seen_M = tl.atomic_add(flag_M, wanted_M.to(tl.int64) * 0, mask=wanted_M, sem="acquire", scope="sys")
    return tl.min(tl.where(wanted_M, seen_M, epoch), 0)
