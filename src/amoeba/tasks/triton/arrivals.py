"""Rows of dy that come from other ranks while the scheduled backward computes, and sums of dx that go back to them.

N = T·K routed rows · E experts · K experts per token · T tokens of this rank · W ranks · R = W·C rows, C of each rank,
the most tokens that one may have · H hidden

    dy_RH = start_sending(...)                    # by the transport, instead of waiting
    arrival = announced(dy_RH)                    # by the backend: taken once
    scheduled_backward(dy_RH, ..., arrival=arrival)
    arrival.close()

dy_RH is this rank's part of the symmetric heap of `amoeba.kernels.peer_rows`: C rows for each rank. Behind its cells
lie flags, one for each block of rows of each source, which hold the exchange that the block last came in; they only
grow. A SEND task puts a block of dy into another rank's heap and raises its flag there; a COMBINE task writes what the
experts here gave to another rank's tokens into that rank's cells for sums, and `close` says that all of it is there.
The graph is `ShareGraph` (tests/support/schedule_cases.py).

Where another rank's memory has no address here (`shmem`), the transport puts blocks of dy and raises their flags ahead
of the kernel, which has no SEND tasks then and waits for the same flags; COMBINE writes to this rank's outbox, and the
transport puts the sums behind the kernel. Everything that is sent still comes before everything that waits.

Row tiles of own tokens before those that wait for rows of other ranks: `Graph._local_first` on the device.

    own = make_local_table(order_N, offs_E, table, row_block, top_k, first_row, end_row)
    item = local_tiles_first(item, places, first_tile, *own, EXPERTS, WAVE)          # in a kernel

Rows of an expert are sorted by the rank that they came from: those of own tokens (first_row to end_row) lie together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.fences import microseconds
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.peer_context import ARRIVED, FLAGS, TAKEN, PeerContext, Plan, counter_of, look, tell, wait_for
from amoeba.kernels.peer_context import ROWS as _ROWS
from amoeba.kernels.peer_context import SUMS as _SUMS
from amoeba.kernels.peer_copies import cells_as_rows
from amoeba.tasks.triton.tickets import Table

_MOST = tl.constexpr(2147483647)


class LocalTable(NamedTuple):
    """Of each expert, the heaviest first: its first tile of own rows alone (where there is none, its end), and how many
    such tiles come before it; of the latter also the end."""

    first_local: Tensor
    local_before: Tensor


def make_local_table(
    order_N: Tensor, offs_E: Tensor, table: Table, row_block: int, top_k: int, first_row: int, end_row: int
) -> LocalTable:
    experts = offs_E.shape[0]
    made = torch.empty(2 * experts + 1, dtype=torch.int32, device=offs_E.device)
    first_local, local_before = made[:experts], made[experts:]
    block = next_power_of_2(experts)
    part = min(block, 32)
    _make_local_table[(block // part,)](
        order_N, offs_E, table.first_tile, table.place_E, first_local, local_before, first_row * top_k, end_row * top_k,
        EXPERTS=experts, BLOCK_E=block, BLOCK_PART=part, BLOCK_M=row_block,
        STEPS=max(order_N.shape[0], 1).bit_length(),
    )  # fmt: skip
    return LocalTable(first_local, local_before)


@triton.jit
def _rows_below(order_N, start_E, end_E, bound, STEPS: tl.constexpr):
    """Of each expert, the first sorted row whose slot is not below the bound."""
    low_E, high_E = start_E, end_E
    for _ in range(STEPS):
        open_E = low_E < high_E
        middle_E = (low_E + high_E) // 2
        below_E = open_E & (tl.load(order_N + middle_E, mask=open_E, other=0) < bound)
        low_E = tl.where(below_E, middle_E + 1, low_E)
        high_E = tl.where(open_E & (below_E == 0), middle_E, high_E)
    return low_E


@triton.jit
def _own_tiles(order_N, offs_E, expert_E, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS: tl.constexpr):
    """Of each expert: the first of its tiles that has own rows alone, counted within the expert, and how many."""
    known = expert_E < EXPERTS
    end_E = tl.load(offs_E + expert_E, mask=known, other=0)
    start_E = tl.load(offs_E + expert_E - 1, mask=known & (expert_E > 0), other=0)
    start_E = tl.where(known, start_E, 0)
    own_E = _rows_below(order_N, start_E, end_E, first_slot, STEPS) - start_E
    own_end_E = _rows_below(order_N, start_E, end_E, end_slot, STEPS) - start_E
    rows_E = end_E - start_E
    first_E = (own_E + BLOCK_M - 1) // BLOCK_M
    last_E = tl.where(own_end_E == rows_E, (rows_E + BLOCK_M - 1) // BLOCK_M, own_end_E // BLOCK_M)
    return first_E, tl.maximum(last_E - first_E, 0), (rows_E + BLOCK_M - 1) // BLOCK_M


@quick
@triton.jit(do_not_specialize=["first_slot", "end_slot"])
def _make_local_table(
    order_N, offs_E, first_tile, place_E, first_local, local_before, first_slot, end_slot,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_PART: tl.constexpr, BLOCK_M: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, BLOCK_E)
    expert_P = tl.program_id(0) * BLOCK_PART + tl.arange(0, BLOCK_PART)
    _, count_E, _ = _own_tiles(order_N, offs_E, expert_E, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS)
    first_P, count_P, tiles_P = _own_tiles(order_N, offs_E, expert_P, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS)
    known_P = expert_P < EXPERTS
    all_places_E = tl.load(place_E + expert_E, mask=expert_E < EXPERTS, other=_MOST)
    place_P = tl.load(place_E + expert_P, mask=known_P, other=0)
    before = (all_places_E[None, :] < place_P[:, None]).to(tl.int32)
    tile_P = tl.load(first_tile + place_P, mask=known_P, other=0)
    tl.store(first_local + place_P, tile_P + tl.where(count_P > 0, first_P, tiles_P), mask=known_P)
    tl.store(local_before + place_P, tl.sum(before * count_E[None, :], 1), mask=known_P)
    if tl.program_id(0) == 0:
        tl.store(local_before + EXPERTS, tl.sum(count_E, 0))


@triton.jit
def local_tiles_first(
    item, places, first_tile, first_local, local_before, EXPERTS: tl.constexpr, WAVE
):  # fmt: skip
    """The row tile in place of this one, which is counted from the beginning of its wave of experts. places: 0 to a
    power of two, at least EXPERTS."""
    known = places < EXPERTS
    first_P = tl.load(first_tile + places, mask=known, other=_MOST)
    before_P = tl.load(local_before + places, mask=known, other=_MOST)
    begin = (tl.sum((first_P <= item).to(tl.int32), 0) - 1) // WAVE * WAVE
    end = tl.minimum(begin + WAVE, EXPERTS)
    before_begin = tl.load(local_before + begin)
    own = tl.load(local_before + end) - before_begin
    index = item - tl.load(first_tile + begin)
    is_own = index < own
    others_P = tl.where(known, first_P - before_P, _MOST)
    wanted_own = before_begin + index
    wanted_other = tl.load(first_tile + begin) - before_begin + index - own
    at_most_P = tl.where(is_own, before_P, others_P)
    place = tl.sum((at_most_P <= tl.where(is_own, wanted_own, wanted_other)).to(tl.int32), 0) - 1
    first, before = tl.load(first_local + place), tl.load(local_before + place)
    other = wanted_other + before
    other = tl.where(other < first, other, other + tl.load(local_before + place + 1) - before)
    return tl.where(is_own, first + wanted_own - before, other)


# Rows of a block that travels, as in `Tiling`. The interpreter's layers are small.
SENT, SENT_INTERPRETED = 128, 16
SENT_AHEAD = 64  # as the flags of `amoeba.tasks.hopper.queue`
_SEND_TILE = 8192  # numbers that a program copies at once
BLOCK, BLOCK_INTERPRETED = 32, 16  # tokens that a task sums up are those of one rank
ROWS, SUMS = tl.constexpr(_ROWS), tl.constexpr(_SUMS)
# The peer context: numbers in memory, of which a kernel needs one address in its registers.
GOES, ADDRESSES, EPOCHS, TROUBLE, RECORD, CELL_AT, CELL_SIZE, FLAGS_AT, FLAGS_SIZE, SENT_TOKENS = map(
    tl.constexpr, range(10)
)
COMES, SUMS_AT, SUMS_SIZE, MOST_TOKENS, RANK, LIMIT, SENDS, FIRST_LOCAL, OWN_DY, OUTBOX = map(
    tl.constexpr, range(10, 20)
)
_FIELDS = 20


class Sender(Protocol):
    """Of a transport that puts rows itself. outbox_at: where cells for others begin in this rank's heap, in bytes."""

    outbox_at: int

    def send(self, dy_TH: Tensor, block: int) -> None:
        """All of it to all other ranks; a flag for each block of rows."""

    def close(self) -> None:
        """The sums in the outbox to their ranks."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """dy_TH: what this rank sends. goes_WT: uint8, which token goes to which rank. comes_R: uint8, which rows come.

    keep: is given dx of own tokens, of this rank's experts alone; what it returns stands for dx of all rows.
    sender: brings rows to ranks whose memory has no address here.
    """

    peers: PeerContext
    plan: Plan
    dy_TH: Tensor
    goes_WT: Tensor
    comes_R: Tensor
    keep: Callable[[Tensor], Tensor]
    sender: Sender | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """Of dy_RH, those of this rank's tokens."""
        return self.peers.rank * self.plan.tokens, (self.peers.rank + 1) * self.plan.tokens

    @property
    def sent(self) -> int:
        if not self.dy_TH.is_cuda:
            return SENT_INTERPRETED
        return SENT if self.sender is None else SENT_AHEAD

    @property
    def sends(self) -> int:
        """Tickets of SEND."""
        return 0 if self.sender is not None else (self.peers.count - 1) * cdiv(self.plan.tokens, self.sent)

    def context(self, local: LocalTable) -> Tensor:
        """What the kernel is told of the other ranks, in the order of the fields below."""
        peers, made = self.peers, torch.empty(_FIELDS, dtype=torch.int64, device=self.dy_TH.device)
        _write_context[(1,)](
            made, self.goes_WT, *peers.waiting, peers.cell_at[_ROWS], peers.cell_size[_ROWS], peers.cell_at[FLAGS],
            peers.cell_size[FLAGS], self.dy_TH.shape[0], self.comes_R, peers.cell_at[_SUMS], peers.cell_size[_SUMS],
            self.plan.tokens, peers.rank, peers.limit, self.sends, local.first_local, self.dy_TH,
            0 if self.sender is None else self.sender.outbox_at, num_warps=1,
        )  # fmt: skip
        return made

    def constants(self) -> dict[str, Any]:
        columns = min(next_power_of_2(self.dy_TH.shape[1]), 2048)
        return {
            "RANKS": self.peers.count,
            "SENT": self.sent,
            "SEND_T": min(max(_SEND_TILE // columns, 1), self.sent),
            "SEND_H": columns,
            "ALIGNED": self.dy_TH.data_ptr() % 16 == 0 and self.dy_TH.stride(0) * self.dy_TH.element_size() % 16 == 0,
            "TAKERS": self.peers.takers,
            "ON_GPU": self.dy_TH.is_cuda,
        }

    def room_for_dx(self) -> Tensor:
        """Of own tokens."""
        return self.dy_TH.new_empty((self.plan.tokens, self.dy_TH.shape[1]))

    def close(self) -> None:
        """Behind the last task: the transport's counters go on as if it had sent and taken dy, and sent the sums."""
        if self.sender is not None:
            return self.sender.close()
        peers = self.peers
        _close[(1,)](
            peers.addresses, peers.epochs, peers.rank, PUSHERS=peers.pushers, TAKERS=peers.takers, RANKS=peers.count,
            num_warps=1,
        )  # fmt: skip


NO_RANKS: dict[str, Any] = {  # in place of `Arrival.constants`
    "RANKS": 1, "SENT": 1, "SEND_T": 1, "SEND_H": 1, "ALIGNED": False, "TAKERS": 1, "ON_GPU": False
}  # fmt: skip
_announced: dict[int, Arrival] = {}


def announce(dy_RH: Tensor, arrival: Arrival) -> None:
    _announced[dy_RH.data_ptr()] = arrival


def start_sending(
    peers: PeerContext,
    plan: Plan,
    dy_TH: Tensor,
    goes_WT: Tensor,
    comes_R: Tensor,
    keep: Callable[[Tensor], Tensor],
    sender: Sender | None = None,
) -> Tensor | None:
    """dy_RH, announced, for a backward that begins before the rows of other ranks have arrived; or None, on all ranks
    alike. comes_R, keep, sender: as in `Arrival`.

    The rows arrive in this rank's heap, in one cell for each rank, and are read there: nothing is copied but own rows.
    For that the cells have to hold just C rows of H numbers each: so `most_tokens` has to be given, a multiple of
    BLOCK, and no layer of the group may need more. Its sums of dx go straight into the cells of the ranks that the rows
    came from.
    """
    dy_RH = cells_as_rows(peers, plan, dy_TH)
    if dy_RH is None or plan.tokens % (BLOCK if dy_TH.is_cuda else BLOCK_INTERPRETED):
        return None
    dy_TH = dy_TH.contiguous()
    first = peers.rank * plan.tokens
    dy_RH[first : first + dy_TH.shape[0]].copy_(dy_TH)
    arrival = Arrival(peers, plan, dy_TH, goes_WT, comes_R, keep, sender)
    if sender is not None:
        sender.send(dy_TH, arrival.sent)
    announce(dy_RH, arrival)
    return dy_RH


def announced(dy_RH: Tensor) -> Arrival | None:
    """To the first caller, which waits for the rows as it comes to them."""
    return _announced.pop(dy_RH.data_ptr(), None) if _announced else None


@quick
@triton.jit(do_not_specialize=["rank"])
def _close(addresses, epochs, rank, PUSHERS: tl.constexpr, TAKERS: tl.constexpr, RANKS: tl.constexpr):
    tl.store(epochs + ROWS, tl.load(epochs + ROWS) + 1)
    for step in range(1, RANKS):
        peer = (rank + step) % RANKS
        tl.atomic_add(counter_of(addresses, peer, rank, ARRIVED, ROWS, RANKS), PUSHERS, sem="release", scope="sys")
        tl.atomic_add(counter_of(addresses, peer, rank, TAKEN, ROWS, RANKS), TAKERS, sem="release", scope="sys")
        tl.atomic_add(counter_of(addresses, peer, rank, ARRIVED, SUMS, RANKS), PUSHERS, sem="release", scope="sys")


@quick
@triton.jit(
    do_not_specialize=[
        "cell_at", "cell_size", "flags_at", "flags_size", "sent_tokens", "sums_at", "sums_size", "most_tokens", "rank",
        "limit", "sends", "outbox",
    ]
)  # fmt: skip
def _write_context(
    peers, goes_WT, addresses, epochs, trouble, record, cell_at, cell_size, flags_at, flags_size, sent_tokens, comes_R,
    sums_at, sums_size, most_tokens, rank, limit, sends, first_local, own_dy, outbox,
):  # fmt: skip
    tl.store(peers + GOES, goes_WT.to(tl.int64))
    tl.store(peers + ADDRESSES, addresses.to(tl.int64))
    tl.store(peers + EPOCHS, epochs.to(tl.int64))
    tl.store(peers + TROUBLE, trouble.to(tl.int64))
    tl.store(peers + RECORD, record.to(tl.int64))
    tl.store(peers + CELL_AT, cell_at)
    tl.store(peers + CELL_SIZE, cell_size)
    tl.store(peers + FLAGS_AT, flags_at)
    tl.store(peers + FLAGS_SIZE, flags_size)
    tl.store(peers + SENT_TOKENS, sent_tokens)
    tl.store(peers + COMES, comes_R.to(tl.int64))
    tl.store(peers + SUMS_AT, sums_at)
    tl.store(peers + SUMS_SIZE, sums_size)
    tl.store(peers + MOST_TOKENS, most_tokens)
    tl.store(peers + RANK, rank)
    tl.store(peers + LIMIT, limit)
    tl.store(peers + SENDS, sends)
    tl.store(peers + FIRST_LOCAL, first_local.to(tl.int64))
    tl.store(peers + OWN_DY, own_dy.to(tl.int64))
    tl.store(peers + OUTBOX, outbox)


@triton.jit
def number(peers, FIELD: tl.constexpr):
    return tl.load(peers + FIELD).to(tl.int32)


@triton.jit
def numbers_at(peers, FIELD: tl.constexpr, dtype: tl.constexpr):
    """An address that the context holds."""
    return tl.load(peers + FIELD).to(tl.pointer_type(dtype))


def address_table(*tensors: Tensor | None) -> Tensor:
    """Their addresses in memory, for `numbers_at`: one argument of a kernel instead of many. 0 for None; at most 7."""
    device = next(tensor.device for tensor in tensors if tensor is not None)
    made = torch.empty(7, dtype=torch.int64, device=device)
    _write_addresses[(1,)](made, *tensors, *[None] * (7 - len(tensors)), num_warps=1)
    return made


@quick
@triton.jit
def _write_addresses(made, first, second, third, fourth, fifth, sixth, seventh):
    _write_address(made, first)
    _write_address(made + 1, second)
    _write_address(made + 2, third)
    _write_address(made + 3, fourth)
    _write_address(made + 4, fifth)
    _write_address(made + 5, sixth)
    _write_address(made + 6, seventh)


@triton.jit
def _write_address(place, tensor):
    if tensor is not None:
        tl.store(place, tensor.to(tl.int64))


@triton.jit
def cell_of(peers, dest, like, ALIGNED: tl.constexpr):
    """Where this rank's rows lie in the heap of `dest`. like: a pointer to such numbers."""
    address = tl.load(numbers_at(peers, ADDRESSES, tl.int64) + dest) + tl.load(peers + CELL_AT)
    address += tl.load(peers + RANK) * tl.load(peers + CELL_SIZE)
    if ALIGNED:
        return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)
    else:
        return address.to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def _flag_of(addresses, at_rank, source, block, flags_at, flags_size):
    """In the heap of `at_rank`, of a block of rows from `source`."""
    flags = tl.load(addresses + at_rank) + flags_at + source.to(tl.int64) * flags_size
    return flags.to(tl.pointer_type(tl.int64)) + block


def raise_flags(peers: PeerContext, dest: int, blocks: int) -> None:
    """Of this rank's first blocks at `dest`, whose heap has an address here."""
    _raise_flags[(1,)](
        peers.addresses, peers.epochs, dest, peers.rank, blocks, peers.cell_at[FLAGS], peers.cell_size[FLAGS]
    )


@quick
@triton.jit(do_not_specialize=["dest", "rank", "blocks", "flags_at", "flags_size"])
def _raise_flags(addresses, epochs, dest, rank, blocks, flags_at, flags_size):
    for block in range(blocks):
        flag = _flag_of(addresses, dest, rank, block, flags_at, flags_size)
        tl.atomic_xchg(flag, tl.load(epochs + ROWS) + 1, sem="release", scope="sys")


@triton.jit
def raise_flag(peers, dest, block):
    """A block of this rank's rows has come to `dest`."""
    flag = _flag_of(
        numbers_at(peers, ADDRESSES, tl.int64), dest, number(peers, RANK), block, tl.load(peers + FLAGS_AT),
        tl.load(peers + FLAGS_SIZE),
    )  # fmt: skip
    epoch = tl.load(numbers_at(peers, EPOCHS, tl.int64) + ROWS)
    tl.debug_barrier()  # what all threads have written comes before
    tl.atomic_xchg(flag, epoch + 1, sem="release", scope="sys")


@triton.jit
def wait_until_taken(
    peers, dest, CHANNEL: tl.constexpr, RANKS: tl.constexpr, TAKERS: tl.constexpr, ON_GPU: tl.constexpr
):
    """What was sent to a rank by this channel before."""
    epoch = tl.load(numbers_at(peers, EPOCHS, tl.int64) + CHANNEL)
    addresses = numbers_at(peers, ADDRESSES, tl.int64)
    taken = counter_of(addresses, number(peers, RANK), dest, TAKEN, CHANNEL, RANKS)
    wait_for(
        taken, epoch * TAKERS, epoch, dest, numbers_at(peers, TROUBLE, tl.int64), numbers_at(peers, RECORD, tl.int64),
        tl.load(peers + LIMIT), TAKEN, CHANNEL, ON_GPU,
    )  # fmt: skip


@triton.jit
def send_block(peers, dest, block, like, PLAN: tl.constexpr):
    """SEND: as soon as what was sent before is taken."""
    wait_until_taken(peers, dest, ROWS, PLAN.RANKS, PLAN.TAKERS, PLAN.ON_GPU)
    dy_TH = tl.load(peers + OWN_DY).to(tl.pointer_type(like.dtype.element_ty))
    if PLAN.ALIGNED:
        dy_TH = tl.multiple_of(dy_TH, 16)
    rows, tokens = cell_of(peers, dest, like, PLAN.ALIGNED), number(peers, SENT_TOKENS)
    goes_T = numbers_at(peers, GOES, tl.uint8) + dest.to(tl.int64) * tokens
    for first in range(block * PLAN.SENT, tl.minimum((block + 1) * PLAN.SENT, tokens), PLAN.SEND_T):
        t = first + tl.arange(0, PLAN.SEND_T)
        goes = tl.load(goes_T + t, mask=t < tokens, other=0) != 0
        for column in range(0, PLAN.H, PLAN.SEND_H):
            c = column + tl.arange(0, PLAN.SEND_H)
            at = t.to(tl.int64)[:, None] * PLAN.H + c[None, :]
            mask = goes[:, None] & (c < PLAN.H)[None, :]
            tl.store(rows + at, tl.load(dy_TH + at, mask=mask), mask=mask)
    raise_flag(peers, dest, block)


@triton.jit
def room_for_sums(peers, block, own, TOKENS: tl.constexpr, H: tl.constexpr):
    """The address for the sums of a block of rows of one rank, as if those of row 0 on lay there: in that rank's heap,
    or in the outbox, where the caller has waited until what was there is read; of own tokens in `own`."""
    source = block * TOKENS // number(peers, MOST_TOKENS)
    rank = tl.load(peers + RANK)
    outbox = tl.load(peers + OUTBOX)
    heap, place = tl.where(outbox > 0, rank, source), tl.where(outbox > 0, source, rank)
    cell = tl.load(numbers_at(peers, ADDRESSES, tl.int64) + heap) + tl.load(peers + SUMS_AT)
    cell += outbox + place * tl.load(peers + SUMS_SIZE)
    address = tl.where(source == rank, own.to(tl.int64), cell)
    size: tl.constexpr = H * (own.dtype.element_ty.primitive_bitwidth // 8)
    address -= source.to(tl.int64) * tl.load(peers + MOST_TOKENS) * size
    return address


@triton.jit
def wait_for_rows(peers, row_M, wanted_M, SENT: tl.constexpr, ON_GPU: tl.constexpr):
    """Until these rows of dy_RH are there, those that are wanted."""
    addresses, epochs = numbers_at(peers, ADDRESSES, tl.int64), numbers_at(peers, EPOCHS, tl.int64)
    trouble, record = numbers_at(peers, TROUBLE, tl.int64), numbers_at(peers, RECORD, tl.int64)
    flags_at, flags_size = tl.load(peers + FLAGS_AT), tl.load(peers + FLAGS_SIZE)
    most_tokens, rank, limit = number(peers, MOST_TOKENS), number(peers, RANK), tl.load(peers + LIMIT)
    epoch = tl.load(epochs + ROWS) + 1
    source_M = row_M // most_tokens
    foreign_M = wanted_M & (source_M != rank)
    flag_M = _flag_of(addresses, rank, source_M, row_M % most_tokens // SENT, flags_at, flags_size)
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
            tell(trouble, record, whom, epoch, oldest, epoch, ARRIVED, ROWS, ON_GPU)
    tl.debug_barrier()


@triton.jit
def wait_for_received(
    peers, block, token_M, tokens, SENT: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, TAKERS: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Until the rows of a block of tokens have come, also those that no expert here reads: their cell is used again.
    And until there is room for their sums."""
    wait_for_rows(peers, token_M, token_M < tokens, SENT, ON_GPU)
    source = block * TOKENS // number(peers, MOST_TOKENS)
    if source != number(peers, RANK):
        wait_until_taken(peers, source, SUMS, RANKS, TAKERS, ON_GPU)


@triton.jit
def _oldest(flag_M, wanted_M, epoch):
    """A number and no tensor from turn to turn: see the kernel."""
    seen_M = tl.atomic_add(flag_M, wanted_M.to(tl.int64) * 0, mask=wanted_M, sem="acquire", scope="sys")
    return tl.min(tl.where(wanted_M, seen_M, epoch), 0)
