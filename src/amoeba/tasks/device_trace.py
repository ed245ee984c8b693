"""The scheduled backward's own timeline: what each multiprocessor did and when, written by the kernel as it ran.

    trace = DeviceTrace(device)
    scheduled_backward(..., trace=trace.room)
    records = trace.records()                                  # as those of a simulation: for `trace_text`, `summarise`
    arrows = trace.gates(records, offs_E.tolist())

Without `trace` the kernel is compiled without any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amoeba.tasks.clock import FIELDS
from amoeba.tasks.graph import Kind, Task
from amoeba.tasks.simulate import Record

_NOBODY = -1  # took this ticket: there are fewer than there is room for


class DeviceTrace:
    """rank: whose. On one GPU the clock is the same for all."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._rank = rank
        self._device, self._buffer = device, torch.empty(0, dtype=torch.int64, device=device)
        self._row_block = 1

    def room(self, tickets: int, row_block: int) -> Tensor:
        self._row_block = row_block
        self._buffer = torch.full((1 + tickets * len(FIELDS),), _NOBODY, dtype=torch.int64, device=self._device)
        self._buffer[0] = 0
        return self._buffer

    def began(self) -> int:
        """When the first task was come to, by the device's clock."""
        lines = self._buffer[1:].view(-1, len(FIELDS))
        return int(lines[lines[:, 0] != _NOBODY][:, 4].min())

    def records(self, since: int | None = None) -> list[Record]:
        """In the order of tickets. Microseconds from the first task on, or from a time that all ranks agree on; in the
        interpreter, looks at the clock."""
        lines = self._buffer[1:].view(-1, len(FIELDS)).cpu()
        lines = lines[lines[:, 0] != _NOBODY]
        if not len(lines):
            return []
        lines[:, 4:] -= lines[:, 4].min() if since is None else since
        unit = 1e3 if self._device.type == "cuda" else 1.0
        return [
            Record(
                self._rank, place, 1, ticket, Task(Kind(kind), item, part), came / unit, started / unit, ended / unit
            )
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
                behind[kind] = [(Kind.UP, item), (Kind.DOWN_WEIGHTS, expert), (Kind.UP_WEIGHTS, expert)]
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
