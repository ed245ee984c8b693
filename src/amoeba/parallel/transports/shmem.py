"""`shmem`: sends rows with NVSHMEM, between GPUs that cannot access each other's memory: of several machines.

T tokens · K experts per token · R rows of all ranks · H hidden · W ranks

The heap of `peers`, with an outbox behind it: what goes to a rank is laid there, put into its cell, and counted. Whole
cells travel: all tokens of a rank go to every other. Who reads, and who waits, is the same as in `peers`.

Without a GPU, in Triton's interpreter, processes that map each other's files stand in for NVSHMEM, so that all but its
own two kernels (`amoeba.kernels.shmem_put`) is proven.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.core.torch_internals import why_not_nvshmem
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.transports.peers import REMOTE, PeerExchange, is_forced_remote, places, planned, why_not_kernels
from amoeba.parallel.transports.symmetric_buffer import SPARE, SymmetricBuffer, symmetric_buffer_of
from amoeba.parallel.transports.transport import Exchange, Transport
from amoeba.routing.router import Routing

if TYPE_CHECKING:
    from amoeba.kernels.peer_context import PeerContext, Plan


class Shmem(Transport):
    name, summary = "shmem", "NVSHMEM, also between machines"

    def why_not_by_itself(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"is for GPUs; x is on {device.type}"
        if is_forced_remote():
            return None
        return f"has not been tested between machines: select it by name, or with {REMOTE}=1"

    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        reason = why_not_kernels(ranks, device)
        if reason is not None or ranks.count == 1 or device.type != "cuda":
            return reason
        reason = why_not_nvshmem()
        if reason is not None:
            return f"needs NVSHMEM: {reason}"
        return why_not_on_shared_gpus(places(ranks, device), ranks.post("MPS", _share_of_gpu()))

    def plan(
        self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool, row_format: int = 0
    ) -> Exchange:
        buffer = symmetric_buffer_of(sharded.ranks, x_TH.device, remote=True)
        return planned(ShmemExchange, buffer, sharded, x_TH, routing, gradients, row_format)


_PIPES, _PERCENTAGE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def _share_of_gpu() -> str:
    """Of this process by CUDA MPS, in percent; empty where MPS does not run or gives it no share."""
    runs = Path(os.environ.get(_PIPES, "/tmp/nvidia-mps"), "control").exists()
    return os.environ.get(_PERCENTAGE, "") if runs else ""


def why_not_on_shared_gpus(place_of: Sequence[str], share_of: Sequence[str]) -> str | None:
    """NVSHMEM ends a process (exit code 255) whose GPU other ranks use as well, if they may use more than all of it."""
    for place, ranks in Counter(place_of).items():
        shares = [share for other, share in zip(place_of, share_of, strict=True) if other == place]
        if ranks > 1 and not (all(shares) and sum(map(float, shares)) <= 100):
            return (
                f"needs a GPU for each rank, or CUDA MPS with {_PERCENTAGE} of at most {100 // ranks} for each of the "
                f"{ranks} ranks that share one; got {', '.join(share or 'none' for share in shares)}"
            )
    return None


class Courier(ABC):
    """Brings cells, blocks of rows and counters to ranks whose memory has no address here."""

    @abstractmethod
    def put(self, peers: PeerContext, channel: int, dest: int, nbytes: int) -> None:
        """Out of the outbox into this rank's cell at the other."""

    @abstractmethod
    def put_blocks(self, peers: PeerContext, dest: int, nbytes: int, block: int, blocks: int) -> None:
        """Rows, a block of bytes after the other, each with its flag of `amoeba.tasks.triton.arrivals` behind it; also
        for blocks behind the last byte."""

    @abstractmethod
    def count(self, peers: PeerContext, channel: int, which: int) -> None:
        """At all others, behind all that was put: that this rank's rows of the epoch have come, or were taken."""


class Files(Courier):
    """Without GPUs."""

    def put(self, peers: PeerContext, channel: int, dest: int, nbytes: int) -> None:
        at = _cell_at(peers, channel, peers.rank)
        peers.heaps[dest][at : at + nbytes] = outbox(peers, channel, dest)[:nbytes]

    def put_blocks(self, peers: PeerContext, dest: int, nbytes: int, block: int, blocks: int) -> None:
        from amoeba.kernels.peer_context import ROWS
        from amoeba.tasks.triton.arrivals import raise_flags

        self.put(peers, ROWS, dest, nbytes)
        raise_flags(peers, dest, blocks)

    def count(self, peers: PeerContext, channel: int, which: int) -> None:
        from amoeba.kernels.peer_copies import count_everywhere

        count_everywhere(peers, channel, which)


class Nvshmem(Courier):
    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._names = ranks.global_ranks
        self._pes = torch.tensor(self._names, dtype=torch.int32, device=device)

    def put(self, peers: PeerContext, channel: int, dest: int, nbytes: int) -> None:
        from amoeba.kernels import shmem_put

        source = _outbox_at(peers) + _cell_at(peers, channel, dest)
        shmem_put.put(peers.heaps[peers.rank], source, _cell_at(peers, channel, peers.rank), nbytes, self._names[dest])

    def put_blocks(self, peers: PeerContext, dest: int, nbytes: int, block: int, blocks: int) -> None:
        from amoeba.kernels import shmem_put
        from amoeba.kernels.peer_context import FLAGS, ROWS

        source = _outbox_at(peers) + _cell_at(peers, ROWS, dest)
        places = source, _cell_at(peers, ROWS, peers.rank), _cell_at(peers, FLAGS, peers.rank)
        shmem_put.put_blocks(
            peers.heaps[peers.rank], peers.epochs, *places, nbytes, block, blocks, self._names[dest], channel=ROWS
        )

    def count(self, peers: PeerContext, channel: int, which: int) -> None:
        from amoeba.kernels import shmem_put
        from amoeba.kernels.peer_context import ARRIVED, CHANNELS

        arrived = which == ARRIVED.value
        counter = ((which * CHANNELS.value + channel) * peers.count + peers.rank) * 8
        own = peers.heaps[peers.rank]
        shmem_put.count(
            own, peers.epochs, self._pes, counter, own.shape[0] - SPARE, peers.rank, channel=channel,
            ahead=int(arrived), parts=peers.pushers if arrived else peers.takers,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _courier(buffer: SymmetricBuffer) -> Courier:
    return Nvshmem(buffer.ranks, buffer.device) if buffer.device.type == "cuda" else Files()


def _outbox_at(peers: PeerContext) -> int:
    return (peers.heaps[peers.rank].shape[0] - SPARE) // 2


def _cell_at(peers: PeerContext, channel: int, rank: int) -> int:
    return peers.cell_at[channel] + rank * peers.cell_size[channel]


def outbox(peers: PeerContext, channel: int, dest: int) -> Tensor:
    """Bytes in which a cell for that rank is laid."""
    at = _outbox_at(peers) + _cell_at(peers, channel, dest)
    return peers.heaps[peers.rank][at : at + peers.cell_size[channel]]


class ShmemExchange(PeerExchange):
    def _send_slots(self, weight_TK: Tensor) -> None:
        from amoeba.kernels.peer_context import SLOTS

        peers = self.buffer.checked()
        self._ship(SLOTS, lambda dest, cell: self._lay_slots(peers, weight_TK, dest, cell))
        at = _cell_at(peers, SLOTS, peers.rank)
        own = peers.heaps[peers.rank][at : at + peers.cell_size[SLOTS]]
        self._lay_slots(peers, weight_TK, peers.rank, own)

    def _lay_slots(self, peers: PeerContext, weight_TK: Tensor, dest: int, cell: Tensor) -> int:
        """Weights, then ids, as `peer_rows` lays them; the bytes that it took."""
        tokens, top_k = weight_TK.shape
        rank_TK, local_TK = self.owners.find(self.expert_TK)
        expert_TK = torch.where(rank_TK == dest, local_TK, -1).to(torch.int32)
        torch.any(expert_TK >= 0, 1, out=self.goes_WT[dest].view(torch.bool))
        first = peers.tokens * top_k * 8
        size = self.plan.tokens * top_k * 4  # of ids that are expected: behind the tokens there is no expert
        ids = cell[first : first + size].view(torch.int32).view(-1, top_k)
        ids[:tokens] = expert_TK
        ids[tokens:] = -1
        _lay(weight_TK, cell)
        return first + size

    def _take_slots(self, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from amoeba.kernels.peer_context import SLOTS

        found = super()._take_slots(weight_TK)
        self._taken(SLOTS)
        return found

    def _set_off(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        from amoeba.kernels.peer_context import ROWS

        self._ship(ROWS, lambda dest, cell: _lay(rows_TH, cell))

    def _arrive(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        from amoeba.kernels.peer_context import ROWS
        from amoeba.kernels.peer_copies import take_copies
        from amoeba.kernels.peer_rows import own_rows

        peers = self.buffer.checked()
        own_rows(peers, self.plan, rows_TH, out_RH, self.comes_R)
        take_copies(peers, self.plan, out_RH)
        self._taken(ROWS)

    def _sender(self) -> EarlyRows:
        return EarlyRows(self.buffer.checked(), self.plan, _courier(self.buffer))

    def _add_to(self, own_TH: Tensor) -> Tensor:
        from amoeba.kernels.peer_context import SUMS

        found = super()._add_to(own_TH)
        self._taken(SUMS)
        return found

    def _send_back(self, channel: int, rows_RH: Tensor) -> None:
        self._ship(channel, lambda dest, cell: _lay(rows_RH[self.plan.places[dest]], cell))

    def _add_up(self, channel: int, rows_RH: Tensor) -> Tensor:
        found = super()._add_up(channel, rows_RH)
        self._taken(channel)
        return found

    def _ship(self, channel: int, lay: Callable[[int, Tensor], int]) -> None:
        """lay: what goes to a rank into its cell of the outbox; the bytes that it took."""
        from amoeba.kernels.peer_context import ARRIVED
        from amoeba.kernels.peer_copies import others, wait_for_room

        peers, courier = self.buffer.checked(), _courier(self.buffer)
        wait_for_room(peers, channel)
        for dest in others(peers):
            nbytes = lay(dest, outbox(peers, channel, dest))
            if nbytes:
                courier.put(peers, channel, dest, nbytes)
        courier.count(peers, channel, ARRIVED.value)

    def _taken(self, channel: int) -> None:
        from amoeba.kernels.peer_context import TAKEN

        _courier(self.buffer).count(self.buffer.checked(), channel, TAKEN.value)


class EarlyRows:
    """dy of a scheduled backward, which begins before that of other ranks has come, and its sums of dx: the sender of
    `amoeba.tasks.triton.arrivals`."""

    def __init__(self, peers: PeerContext, plan: Plan, courier: Courier) -> None:
        self._peers, self._plan, self._courier, self.outbox_at = peers, plan, courier, _outbox_at(peers)
        self._row_bytes = 0

    def send(self, dy_TH: Tensor, block: int) -> None:
        from amoeba.kernels.peer_context import ROWS
        from amoeba.kernels.peer_copies import others, wait_for_room

        self._row_bytes = dy_TH.shape[1] * dy_TH.element_size()
        blocks = -(-self._plan.tokens // block)
        wait_for_room(self._peers, ROWS)
        for dest in others(self._peers):
            nbytes = _lay(dy_TH, outbox(self._peers, ROWS, dest))
            self._courier.put_blocks(self._peers, dest, nbytes, block * self._row_bytes, blocks)

    def close(self) -> None:
        from amoeba.kernels.peer_context import ARRIVED, ROWS, SUMS, TAKEN
        from amoeba.kernels.peer_copies import others

        peers, courier = self._peers, self._courier
        courier.count(peers, ROWS, ARRIVED.value)
        peers.epochs[ROWS].add_(1)
        courier.count(peers, ROWS, TAKEN.value)
        for dest in others(peers):
            courier.put(peers, SUMS, dest, self._plan.tokens * self._row_bytes)
        courier.count(peers, SUMS, ARRIVED.value)


def _lay(rows: Tensor, cell: Tensor) -> int:
    nbytes = rows.numel() * rows.element_size()
    cell[:nbytes].view(rows.dtype).view_as(rows).copy_(rows)
    return nbytes


TRANSPORT = Shmem()
