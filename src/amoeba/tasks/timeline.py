"""The timeline of a schedule, simulated or run: records of its tasks, their summary, and a trace for Perfetto.

    trace = DeviceTrace(device)
    scheduled_backward(..., trace=trace.room)
    records = trace.records()                                  # as those of a simulation
    found = summarise(records, workers=132)
    write_whole(path, trace_text(records, trace.gates(records, offs_E.tolist())))

The kernel itself writes down what each multiprocessor did and when. Without `trace` it is compiled without any of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.tasks.graph import OF_EXPERT, Kind, Task

_UNUSED = -1  # a ticket that no task took: there is room for more tickets than tasks


class Record(NamedTuple):
    """One task as it ran. came: when its worker stood before it with nothing else to do."""

    rank: int
    worker: int
    epoch: int
    ticket: int
    task: Task
    came: float
    started: float
    ended: float


class DeviceTrace:
    """Of one rank, by the clock of its GPU."""

    def __init__(self, device: torch.device) -> None:
        from amoeba.tasks.triton.tickets import FIELDS  # needs Triton

        self._fields = len(FIELDS)
        self._device, self._buffer = device, torch.empty(0, dtype=torch.int64, device=device)
        self._row_block = 1

    def room(self, tickets: int, row_block: int) -> Tensor:
        self._row_block = row_block
        self._buffer = torch.full((1 + tickets * self._fields,), _UNUSED, dtype=torch.int64, device=self._device)
        self._buffer[0] = 0
        return self._buffer

    def records(self) -> list[Record]:
        """In the order of tickets. Microseconds from the first task on; in the interpreter, looks at the clock."""
        lines = self._buffer[1:].view(-1, self._fields).cpu()
        lines = lines[lines[:, 0] != _UNUSED]
        if not len(lines):
            return []
        lines[:, 4:] -= lines[:, 4].min()
        unit = 1e3 if self._device.type == "cuda" else 1.0
        return [
            Record(0, place, 1, ticket, Task(Kind(kind), item, part), came / unit, started / unit, ended / unit)
            for ticket, (kind, item, part, place, came, started, ended) in enumerate(lines.tolist())
        ]

    def gates(self, records: Sequence[Record], offs_E: Sequence[int]) -> list[tuple[Record, Record]]:
        """(the task that opened it last, the task behind it), for those that waited for rows of a tile or of an expert.

        A block of tokens waits for tiles of many experts: it has no arrow.
        """
        expert_of = _experts_of_tiles(offs_E, self._row_block)
        opened: dict[tuple[Kind, int], Record] = {}  # by the kind of task behind it, and its item
        for record in records:
            kind, item = record.task.kind, record.task.item
            behind = {Kind.DOWN: [(Kind.ACTIVATE, item)]}
            if kind == Kind.ACTIVATE:
                expert = expert_of[item]
                behind[kind] = [(Kind.UP, item), *((each, expert) for each in OF_EXPERT)]
            for gate in behind.get(kind, ()):
                if gate not in opened or opened[gate].ended < record.ended:
                    opened[gate] = record
        waited = ((opened.get((record.task.kind, record.task.item)), record) for record in records)
        return [(before, after) for before, after in waited if before is not None and after.started > after.came]


def _experts_of_tiles(offs_E: Sequence[int], row_block: int) -> list[int]:
    """Row tiles are numbered from the heaviest expert on, as in `make_table`."""
    rows = [end - begin for begin, end in zip((0, *offs_E[:-1]), offs_E, strict=True)]
    heaviest = sorted(range(len(rows)), key=lambda expert: -rows[expert])
    return [expert for expert in heaviest for _ in range(-(-rows[expert] // row_block))]


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


def trace_text(records: Iterable[Record], arrows: Iterable[tuple[Record, Record]], worker: str = "worker") -> str:
    """JSON that Perfetto (ui.perfetto.dev) and Chrome open: a process per rank, a thread per worker, in microseconds.
    Arrows go from the task that opened a gate last to the task behind it. What a worker waited before a task is a slice
    of its own. worker: what a worker is called, on a GPU a multiprocessor."""
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
        "cat": "task",
        "ts": record.started,
        "dur": record.ended - record.started,
        "args": {
            "ticket": record.ticket,
            "pass": record.epoch,
            "item": task.item,
            "part": task.part,
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
