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


class Travelled(NamedTuple):
    """dy between ranks. time: from the first row that left for a rank to the last that came there, on average over
    ranks and passes. hidden: of that time, the share that their readers' workers did not stand waiting for it."""

    time: float
    hidden: float


def travelled(records: Sequence[Record], workers: int) -> Travelled | None:
    """workers: of each rank. None where nothing travelled."""
    sent: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.task.kind == Kind.SEND:
            sent.setdefault((record.epoch, record.task.item), []).append(record)
    windows = {
        place: (min(each.started for each in found), max(each.ended for each in found)) for place, found in sent.items()
    }
    time = sum(end - begin for begin, end in windows.values())
    waited = 0.0
    for record in records:
        if record.task.kind == Kind.DOWN and (record.epoch, record.rank) in windows:  # which waits for nothing else
            begin, end = windows[record.epoch, record.rank]
            waited += max(0.0, min(record.started, end) - max(record.came, begin))
    return Travelled(time / len(windows), 1 - waited / (workers * time)) if time else None


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
