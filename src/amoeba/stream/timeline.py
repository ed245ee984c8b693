"""A timeline of what the host does while experts are streamed, for ui.perfetto.dev (or chrome://tracing).

    timeline = Timeline("run.json")
    began = timeline.now()
    ...
    timeline.add("wait", "layer 3 waits for the disk", began, {"experts": [5, 9]})
    timeline.note("question", "layer 3 asks", {"missing": [5, 9]})
    timeline.at_close.append(add_what_is_known_then)
    timeline.close()                                    # writes the file

Every thread has a row of its own, in which what was called inside a call is drawn below it; `row` names another.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from amoeba.core.errors import bad_value
from amoeba.system.files import write_whole

logger = logging.getLogger("amoeba")

# Some 2,000 tokens of 48 layers; a browser shows no more than that with pleasure.
MOST_EVENTS = 500_000
_THREADS = {"MainThread": "the model", "amoeba-load-": "loads experts ", "amoeba-expert_": "loads experts "}


class _Event(NamedTuple):
    row: str
    kind: str
    name: str
    began: int  # nanoseconds
    lasted: int | None  # None: a moment
    details: dict[str, Any]


class Timeline:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            got = "a folder" if self.path.is_dir() else "a name in a folder that is not there"
            raise bad_value("--trace", "the name of a file to write", f"{path}, {got}", "name a file")
        self._events: list[_Event] = []
        self.at_close: list[Callable[[], None]] = []
        self._began = time.perf_counter_ns()
        self._is_full = False

    @staticmethod
    def now() -> int:
        return time.perf_counter_ns()

    def add(
        self,
        kind: str,
        name: str,
        began: int,
        details: dict[str, Any],
        row: str | None = None,
        ended: int | None = None,
    ) -> None:
        """What ends now, or ended then. Any thread may call it."""
        lasted = (time.perf_counter_ns() if ended is None else ended) - began
        self._append(_Event(row or _row(), kind, name, began, lasted, details))

    def note(self, kind: str, name: str, details: dict[str, Any]) -> None:
        """What happens now."""
        self._append(_Event(_row(), kind, name, time.perf_counter_ns(), None, details))

    def _append(self, event: _Event) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        elif not self._is_full:
            self._is_full = True
            logger.warning("%s: what comes after the first %d events is left out", self.path, MOST_EVENTS)

    def close(self) -> None:
        for add in self.at_close:
            add()
        write_whole(self.path, json.dumps({"traceEvents": self._written(), "displayTimeUnit": "ms"}) + "\n")

    def _written(self) -> list[dict[str, Any]]:
        """As https://ui.perfetto.dev reads them: times in microseconds, what encloses ahead of what is enclosed."""
        process, found = os.getpid(), list(self._events)
        rows = {row: number for number, row in enumerate(sorted({event.row for event in found}, key=_order), 1)}
        written = [_named("process_name", process, 0, name="aMoEba: what the host sees")]
        for row, number in rows.items():
            written += [
                _named("thread_name", process, number, name=row),
                _named("thread_sort_index", process, number, sort_index=number),
            ]
        for event in sorted(found, key=lambda event: (event.began, -(event.lasted or 0))):
            of_kind = {"ph": "i", "s": "t"} if event.lasted is None else {"ph": "X", "dur": event.lasted / 1e3}
            written.append(
                {"name": event.name, "cat": event.kind, "pid": process, "tid": rows[event.row]}
                | {"ts": (event.began - self._began) / 1e3, "args": event.details}
                | of_kind
            )
        return written


def _named(what: str, process: int, row: int, **content: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": content}


def _row() -> str:
    name = threading.current_thread().name
    for start, words in _THREADS.items():
        if name.startswith(start):
            return words + name[len(start) :]
    return name


def _order(row: str) -> tuple[bool, bool, str]:
    """Parts of the run first, then the model, then those who load."""
    return row.startswith("loads"), row == "the model", row
