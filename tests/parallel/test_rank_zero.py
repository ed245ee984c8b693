"""Ranks that decide, fail and compare together."""

import rank_jobs
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.rank_zero import ALONE


def test_one_decides_all_stop_and_a_difference_is_told_to_all(processes: LocalRanks) -> None:
    found = processes.run(rank_jobs.do_together, [(rank,) for rank in range(3)])
    for rank, (told, nothing, highest, total, parts, stopped, weather, decision) in enumerate(found):
        assert told == {"rank": 0, "text": "ééé"} and nothing is None
        assert highest == 10 and total == 3 * 2**40 + 3  # which fp32 could not hold
        assert parts == [[slice(0, 1), slice(1, 2), slice(2, 4)][rank], [slice(0, 0), slice(0, 1), slice(1, 2)][rank]]
        lost = f"RankLost: rank {rank} stopped at drying, since rank 1 failed: it is wet."
        assert stopped == ("ValueError: it is wet" if rank == 1 else lost)
        assert weather.startswith(
            "BadValue: weather: expected the same on all ranks; got false on ranks 0, 1, true on rank 2."
        )
        assert decision == ("ValueError: no idea" if rank == 0 else decision) and "no idea" in decision


def test_a_process_alone_waits_for_nobody() -> None:
    assert ALONE.here and ALONE.tell(lambda: 3) == 3 and ALONE.highest(2, "") == 2
    assert ALONE.part(5) == slice(0, 5)
    ALONE.check_same({"anything": object()})
