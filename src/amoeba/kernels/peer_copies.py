"""Whole cells between ranks by the copy engines, which take no multiprocessor from the products that run meanwhile.

T tokens of this rank · R rows here, those of all ranks by (rank, token) · H columns · W ranks

    copy_there(peers, plan, x_TH)                    # all tokens to every rank, whether or not it has their experts
    copy_own(peers, plan, x_TH, x_RH)                # those of own tokens to where all are
    take_copies(peers, plan, x_RH)                   # the rows of the other ranks' tokens
    copy_back(peers, plan, y_RH)

What arrived and what was taken is counted as `amoeba.kernels.peer_rows` counts it: one rank may copy, another push.
The kernels here are one warp each with 32 registers at most, which fits next to a product on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amoeba.kernels.peer_context import ARRIVED, ROWS, SUMS, TAKEN, PeerContext, Plan, add_everywhere, wait_until_taken
from amoeba.kernels.peer_rows import wait_for_all


def copy_there(peers: PeerContext, plan: Plan, rows_TH: Tensor) -> None:
    _copy(peers, ROWS, lambda rank: rows_TH)


def copy_own(peers: PeerContext, plan: Plan, rows_TH: Tensor, out_RH: Tensor) -> None:
    first = plan.places[peers.rank].start
    out_RH[first : first + rows_TH.shape[0]].copy_(rows_TH, non_blocking=True)


def copy_back(peers: PeerContext, plan: Plan, rows_RH: Tensor) -> None:
    _copy(peers, SUMS, lambda rank: rows_RH[plan.places[rank]])


def take_copies(peers: PeerContext, plan: Plan, out_RH: Tensor) -> None:
    wait_for_all(peers, ROWS)
    for source in others(peers):
        into = out_RH[plan.places[source]]
        into.copy_(cell(peers, peers.rank, source, ROWS, into), non_blocking=True)
    if peers.reaches:
        rows_taken(peers)


def rows_taken(peers: PeerContext) -> None:
    """What has come to this rank has been read."""
    count_everywhere(peers, ROWS, TAKEN.value)


def _copy(peers: PeerContext, channel: int, rows_for: Callable[[int], Tensor]) -> None:
    wait_for_room(peers, channel)
    for dest in others(peers):
        rows = rows_for(dest)
        cell(peers, dest, peers.rank, channel, rows).copy_(rows, non_blocking=True)
    count_everywhere(peers, channel, ARRIVED.value)


def wait_for_room(peers: PeerContext, channel: int) -> None:
    wait_until_taken[(1,)](*peers.waiting, peers.rank, peers.limit, TAKERS=peers.takers, **_constants(peers, channel))


def count_everywhere(peers: PeerContext, channel: int, which: int) -> None:
    """In all other heaps, that all of this rank's rows have arrived or that it has taken all of theirs."""
    parts = peers.pushers if which == ARRIVED.value else peers.takers
    add_everywhere[(1,)](peers.addresses, peers.rank, PARTS=parts, WHICH=which, **_constants(peers, channel))


def _constants(peers: PeerContext, channel: int) -> dict[str, Any]:
    return peers.constants(channel) | {"num_warps": 1}


def others(peers: PeerContext) -> list[int]:
    """Each rank begins with another one."""
    return [(peers.rank + step) % peers.count for step in range(1, peers.count)]


def cells_as_rows(peers: PeerContext, plan: Plan, like_TH: Tensor) -> Tensor | None:
    """This rank's cells for rows, as rows of all ranks' tokens; None where cells are larger than what a rank sends."""
    hidden, first = like_TH.shape[1], peers.cell_at[ROWS]
    if plan.tokens != peers.tokens or plan.rows != peers.count * peers.tokens:
        return None
    if peers.cell_size[ROWS] != plan.tokens * hidden * like_TH.element_size():
        return None
    cells = peers.heaps[peers.rank][first : first + peers.count * peers.cell_size[ROWS]]
    return cells.view(like_TH.dtype).view(plan.rows, hidden)


def cell(peers: PeerContext, heap: int, source: int, channel: int, like: Tensor) -> Tensor:
    """Rows in the heap of one rank that come from another."""
    first = peers.cell_at[channel] + source * peers.cell_size[channel]
    size = like.numel() * like.element_size()
    return peers.heaps[heap][first : first + size].view(like.dtype).view_as(like)
