"""Over ranks, the scheduled backward's tiles start when their rows are there: interpreted, over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch

import rank_jobs
from amoeba.parallel.processes import LocalRanks
from selection import quick

pytest.importorskip("triton")
from amoeba.parallel.transports.peers import PeerExchange
from amoeba.tasks.arrivals import Arrival, announce, announced

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")


def test_rows_that_the_backward_did_not_take_end_with_an_error_and_not_with_what_was_in_their_memory() -> None:
    exchange = object.__new__(PeerExchange)
    exchange._started_RH = torch.zeros(2, 3)
    announce(exchange._started_RH, cast(Arrival, "under way"))
    with pytest.raises(RuntimeError, match="got another tensor in its place"):
        exchange.give_back(torch.zeros(2, 3), "gradients of tokens")
    assert announced(torch.zeros(0)) is None and exchange._started_RH is None


@pytest.fixture(scope="module")
def fresh() -> Iterator[LocalRanks]:
    """Where no larger layer has made cells larger."""
    with LocalRanks(3, preload=rank_jobs.PRELOAD) as found:
        yield found


@quick(lambda ranks, slow: (ranks, slow) == (2, 1))
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 1)])
def test_gradients_have_the_bits_of_collective_while_rows_come_late(fresh: LocalRanks, ranks: int, slow: int) -> None:
    """Numbers of tokens change, cells are used again, and a rank may come without any."""
    steps = [(20, 5, 9)[:ranks], (0, 3, 32)[:ranks]]
    jobs = [(rank, ranks, steps, 32, slow) for rank in range(ranks)]
    for equal, early in fresh.run(rank_jobs.started_early, jobs):
        assert len(equal) == 5 * len(steps) and all(equal)
        assert early == len(steps)


@quick(lambda last: last)
@pytest.mark.parametrize("last", [True, False])
def test_gradients_are_those_without_checkpointing(fresh: LocalRanks, last: bool) -> None:
    """Forward, and with it an exchange by the same cells, is run again within a backward that has begun. last: behind
    the experts nothing is saved, so that this is after dy is announced."""
    for equal, early in fresh.run(rank_jobs.checkpointed_early, [(rank, last) for rank in range(2)]):
        assert len(equal) == 4 and all(equal)
        assert early == 2


@pytest.mark.thorough
def test_where_cells_have_other_sizes_all_is_waited_for_as_before(processes: LocalRanks) -> None:
    """most_tokens is no multiple of 16."""
    jobs = [(rank, 2, [(9, 5), (0, 9)], 9, 0) for rank in range(2)]
    for equal, early in processes.run(rank_jobs.started_early, jobs):
        assert all(equal) and early == 0
