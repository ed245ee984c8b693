"""A schedule as a trace that Perfetto (ui.perfetto.dev) and Chrome open: a process per rank, a thread per worker.

write_whole(path, trace_text(ran.records, ran.arrows))

Times are microseconds. Arrows go from the task that opened a gate last to the task behind it. What a worker waited
before a task is a slice of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from amoeba.tasks.graph import SEED_KIND
from amoeba.tasks.simulate import Record


def trace_text(records: Iterable[Record], arrows: Iterable[tuple[Record, Record]], worker: str = "worker") -> str:
    """worker: what a worker is called: on a GPU it is a multiprocessor."""
    records = list(records)
    events = [*_names(records, worker), *(event for record in records for event in _slices(record))]
    for number, (before, after) in enumerate(arrows):
        events += _arrow(number, before, after)
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events})


def _names(records: Iterable[Record], called: str) -> Iterator[dict[str, Any]]:
    workers = sorted({(record.rank, record.worker) for record in records})
    for rank in sorted({rank for rank, _ in workers}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for rank, worker in workers:
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": worker, "args": {"name": f"{called} {worker}"}}


def _slices(record: Record) -> Iterator[dict[str, Any]]:
    task = record.task
    place: dict[str, Any] = {"ph": "X", "pid": record.rank, "tid": record.worker}
    if record.started > record.came:
        yield {**place, "name": "waits", "cat": "wait", "ts": record.came, "dur": record.started - record.came}
    yield {
        **place,
        "name": task.kind.name.lower(),
        "cat": SEED_KIND[task.kind],
        "ts": record.started,
        "dur": record.ended - record.started,
        "args": {
            "ticket": record.ticket,
            "pass": record.epoch,
            "item": task.item,
            "part": task.part,
            "seed": SEED_KIND[task.kind],
        },
    }


def _arrow(number: int, before: Record, after: Record) -> list[dict[str, Any]]:
    """An end binds to the slice around it, so the arrow starts within the first task."""
    common = {"cat": "gate", "name": "opens", "id": number}
    middle = (before.started + before.ended) / 2
    return [
        {**common, "ph": "s", "pid": before.rank, "tid": before.worker, "ts": middle},
        {**common, "ph": "f", "bp": "e", "pid": after.rank, "tid": after.worker, "ts": after.started},
    ]
