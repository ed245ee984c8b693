"""`peers` where the scheduled backward sends dy itself, and begins before that of other ranks has arrived.

T tokens of this rank · R = W·C rows, C the most tokens that a rank may have · H hidden · W ranks

    dy_RH = start_sending(post, plan, dy_TH, goes_WT, comes_R, keep)      # or None, on all ranks alike

The rows arrive in this rank's heap, in one cell for each rank, and are read there: nothing is copied but own rows. For
that the cells have to hold just C rows of H numbers each: so `most_tokens` has to be given, a multiple of BLOCK, and no
layer of the group may need more. Its sums of dx go straight into the cells of the ranks that the rows came from.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from amoeba.kernels.peer_copies import cells_as_rows
from amoeba.kernels.peer_post import Plan, Post
from amoeba.tasks.triton.arrivals import Arrival, announce

BLOCK, BLOCK_INTERPRETED = 32, 16  # tokens that a task sums up are those of one rank


def start_sending(
    post: Post, plan: Plan, dy_TH: Tensor, goes_WT: Tensor, comes_R: Tensor, keep: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """comes_R, keep: as in `Arrival`."""
    dy_RH = cells_as_rows(post, plan, dy_TH)
    if dy_RH is None or plan.tokens % (BLOCK if dy_TH.is_cuda else BLOCK_INTERPRETED):
        return None
    dy_TH = dy_TH.contiguous()
    first = post.rank * plan.tokens
    dy_RH[first : first + dy_TH.shape[0]].copy_(dy_TH)
    announce(dy_RH, Arrival(post, plan, dy_TH, goes_WT, comes_R, keep))
    return dy_RH
