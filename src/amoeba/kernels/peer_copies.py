"""Whole cells between ranks by the copy engines, which take no multiprocessor from the products that run meanwhile.

T tokens of this rank · R rows here, those of all ranks by (rank, token) · H columns · W ranks

    copy_there(post, plan, x_TH)                    # all tokens to every rank, whether or not it has their experts
    copy_own(post, plan, x_TH, x_RH)                # those of own tokens to where all are
    take_copies(post, plan, x_RH)                   # the rows of the other ranks' tokens
    copy_back(post, plan, y_RH)

What arrived and what was taken is counted as `amoeba.kernels.peer_rows` counts it: one rank may copy, another push.
The kernels here are one warp each with 32 registers at most, which finds room beside a product on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amoeba.kernels.peer_counters import ARRIVED, TAKEN, add_everywhere, wait_until_taken
from amoeba.kernels.peer_post import ROWS, SUMS, Plan, Post
from amoeba.kernels.peer_rows import wait_for_all


def copy_there(post: Post, plan: Plan, rows_TH: Tensor) -> None:
    _copy(post, ROWS, lambda rank: rows_TH)


def copy_own(post: Post, plan: Plan, rows_TH: Tensor, out_RH: Tensor) -> None:
    first = plan.places[post.rank].start
    out_RH[first : first + rows_TH.shape[0]].copy_(rows_TH, non_blocking=True)


def copy_back(post: Post, plan: Plan, rows_RH: Tensor) -> None:
    _copy(post, SUMS, lambda rank: rows_RH[plan.places[rank]])


def take_copies(post: Post, plan: Plan, out_RH: Tensor) -> None:
    wait_for_all(post, ROWS)
    for source in others(post):
        into = out_RH[plan.places[source]]
        into.copy_(cell(post, post.rank, source, ROWS, into), non_blocking=True)
    if post.reaches:
        rows_taken(post)


def rows_taken(post: Post) -> None:
    """What has come to this rank has been read."""
    count_everywhere(post, ROWS, TAKEN.value)


def _copy(post: Post, channel: int, rows_for: Callable[[int], Tensor]) -> None:
    wait_for_room(post, channel)
    for dest in others(post):
        rows = rows_for(dest)
        cell(post, dest, post.rank, channel, rows).copy_(rows, non_blocking=True)
    count_everywhere(post, channel, ARRIVED.value)


def wait_for_room(post: Post, channel: int) -> None:
    wait_until_taken[(1,)](*post.waiting, post.rank, post.limit, TAKERS=post.takers, **_constants(post, channel))


def count_everywhere(post: Post, channel: int, which: int) -> None:
    """In all other heaps, that all of this rank's rows have arrived or that it has taken all of theirs."""
    parts = post.pushers if which == ARRIVED.value else post.takers
    add_everywhere[(1,)](post.addresses, post.rank, PARTS=parts, WHICH=which, **_constants(post, channel))


def _constants(post: Post, channel: int) -> dict[str, Any]:
    return post.constants(channel) | {"num_warps": 1}


def others(post: Post) -> list[int]:
    """Each rank begins with another one."""
    return [(post.rank + step) % post.count for step in range(1, post.count)]


def cells_as_rows(post: Post, plan: Plan, like_TH: Tensor) -> Tensor | None:
    """This rank's cells for rows, as rows of all ranks' tokens; None where cells are larger than what a rank sends."""
    hidden, first = like_TH.shape[1], post.cell_at[ROWS]
    if not post.reaches or plan.tokens != post.tokens or plan.rows != post.count * post.tokens:
        return None
    if post.cell_size[ROWS] != plan.tokens * hidden * like_TH.element_size():
        return None
    cells = post.heaps[post.rank][first : first + post.count * post.cell_size[ROWS]]
    return cells.view(like_TH.dtype).view(plan.rows, hidden)


def cell(post: Post, heap: int, source: int, channel: int, like: Tensor) -> Tensor:
    """Rows in the heap of one rank that come from another."""
    first = post.cell_at[channel] + source * post.cell_size[channel]
    size = like.numel() * like.element_size()
    return post.heaps[heap][first : first + size].view(like.dtype).view_as(like)
