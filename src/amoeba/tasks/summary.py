"""What a schedule came to: tasks of each kind, their time, how long workers waited at gates, how busy they were.

found = summarise(ran.records, workers=132)
found.busy, found.kinds[Kind.DOWN].tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from amoeba.tasks.graph import Kind
from amoeba.tasks.simulate import Record


class OfKind(NamedTuple):
    """Times are summed over workers."""

    tasks: int
    time: float
    waited: float


class Summary(NamedTuple):
    """span: from the beginning to the last task's end. busy, waited: shares of all workers' time."""

    kinds: dict[Kind, OfKind]
    span: float
    busy: float
    waited: float
    busiest: float
    idlest: float


def summarise(records: Sequence[Record], workers: int) -> Summary:
    """workers: of each rank."""
    kinds = {}
    for kind in Kind:
        mine = [record for record in records if record.task.kind == kind]
        time, waited = sum(each.ended - each.started for each in mine), sum(each.started - each.came for each in mine)
        kinds[kind] = OfKind(len(mine), time, waited)
    span = max((record.ended for record in records), default=0.0)
    time_of: dict[tuple[int, int], float] = {}
    ranks = {record.rank for record in records}
    for record in records:
        place = (record.rank, record.worker)
        time_of[place] = time_of.get(place, 0.0) + record.ended - record.started
    shares = [time_of.get((rank, worker), 0.0) / span for rank in ranks for worker in range(workers)] if span else [0.0]
    all_time = span * workers * len(ranks) or 1.0
    return Summary(
        kinds,
        span,
        sum(each.time for each in kinds.values()) / all_time,
        sum(each.waited for each in kinds.values()) / all_time,
        max(shares),
        min(shares),
    )
