"""Over ranks, the scheduled backward's tiles start when their rows are there: interpreted, over real processes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import rank_jobs
from amoeba.parallel.processes import LocalRanks
from selection import quick

pytest.importorskip("triton")
from amoeba.parallel.transports.peers import PeerExchange
from amoeba.tasks.triton.arrivals import Arrival, announce, announced

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")


def test_rows_that_the_backward_did_not_take_end_with_an_error() -> None:
    exchange = object.__new__(PeerExchange)
    exchange._started_RH = torch.zeros(2, 3)
    announce(exchange._started_RH, cast(Arrival, "under way"))
    with pytest.raises(RuntimeError, match="got a different tensor"):
        exchange.give_back(torch.zeros(2, 3), "gradients of tokens")
    assert announced(torch.zeros(0)) is None and exchange._started_RH is None


@pytest.fixture(scope="module")
def fresh() -> Iterator[LocalRanks]:
    """Where no larger layer has made cells larger."""
    with rank_jobs.started(3) as found:
        yield found


@quick(lambda ranks, slow, biases: (ranks, slow) == (2, 1) and biases)
@pytest.mark.parametrize(
    ("ranks", "slow", "biases"), [(2, 0, False), (2, 1, False), (3, 1, False), (2, 1, True), (3, 0, True)]
)
def test_gradients_have_the_bits_of_collective_while_rows_come_late(fresh, ranks, slow, biases):
    """Numbers of tokens change, cells are used again, and a rank may come without any."""
    steps = [(20, 5, 9)[:ranks], (0, 3, 32)[:ranks]]
    jobs = [(rank, ranks, steps, 32, slow, biases) for rank in range(ranks)]
    for equal, early in fresh.run(rank_jobs.started_early, jobs):
        assert len(equal) == (7 if biases else 5) * len(steps) and all(equal)
        assert early == len(steps)


@quick(lambda ranks, slow: (ranks, slow) == (2, 1))
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 1)])
def test_ranks_that_cannot_reach_each_others_memory_start_early_too(fresh: LocalRanks, ranks: int, slow: int) -> None:
    """The transport puts blocks of dy ahead of the kernel, and its sums behind it. Cells are used again."""
    steps = [(20, 5, 9)[:ranks], (0, 32, 3)[:ranks]]
    jobs = [(rank, ranks, steps, 32, slow, True, "shmem") for rank in range(ranks)]
    for equal, early in fresh.run(rank_jobs.started_early, jobs):
        assert len(equal) == 7 * len(steps) and all(equal)
        assert early == len(steps)


@quick(lambda last: last)
@pytest.mark.parametrize("last", [True, False])
def test_gradients_are_those_without_checkpointing(fresh: LocalRanks, last: bool) -> None:
    """Forward, and with it an exchange by the same cells, is run again within a backward that has begun. last: behind
    the experts nothing is saved, so that this is after dy is announced."""
    for equal, early in fresh.run(rank_jobs.checkpointed_early, [(rank, last) for rank in range(2)]):
        assert len(equal) == 4 and all(equal)
        assert early == 2


@quick(lambda way: way == "as they come")
@pytest.mark.parametrize("way", ["as they come", "overlapped", "checkpointed", "checkpointed, nothing behind"])
def test_rows_of_gradients_are_read_where_they_come_to_and_no_bit_changes(fresh: LocalRanks, way: str) -> None:
    """Also where forward is run again within backward: its own rows come to the same cells."""
    for equal, in_place, left in fresh.run(read_in_place, [(rank, way) for rank in range(2)]):
        assert all(equal) and in_place == (1 if way == "as they come" else 2) and not left


def read_in_place(rank: int, way: str) -> tuple[list[bool], int, bool]:
    """Also how often they were read there, and whether others still wait for that."""
    from amoeba.parallel.transports import peers
    from amoeba.parallel.transports import symmetric_buffer as buffer

    options = {"most_tokens": 32, "straight": True, "overlap": way == "overlapped"}
    with pytest.MonkeyPatch.context() as patch:
        in_place, found = peers.PeerExchange._in_place, []
        patch.setattr(peers.PeerExchange, "_in_place", lambda *given: found.append(in_place(*given)) or found[-1])
        if "checkpointed" in way:
            last = "nothing" in way
            given = {"transport": "peers", "local_backend": "triton", **options}
            equal = rank_jobs.with_and_without_checkpointing(rank, 2, last, **given)
        else:
            steps = [(20, 5), (0, 32)][: 1 + options["overlap"]]
            equal, _ = rank_jobs.peers_as_collective(rank, 2, steps, "triton", **options)
    left = any(each.holds for each in buffer._buffers.values())
    return equal, sum(rows_RH is not None for rows_RH in found), left


def test_an_exchange_within_a_backward_that_reads_in_place_is_an_error() -> None:
    exchange = object.__new__(PeerExchange)
    exchange.buffer = cast(Any, SimpleNamespace(holds=True, checked=lambda: None))
    with pytest.raises(RuntimeError, match="Set straight=False"):
        exchange._set_off(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.thorough
def test_where_cells_have_other_sizes_all_is_waited_for_as_before(processes: LocalRanks) -> None:
    """most_tokens is no multiple of 16."""
    jobs = [(rank, 2, [(9, 5), (0, 9)], 9, 0) for rank in range(2)]
    for equal, early in processes.run(rank_jobs.started_early, jobs):
        assert all(equal) and early == 0
