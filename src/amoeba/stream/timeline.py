"""A timeline of what the host does while experts are streamed, for ui.perfetto.dev (or chrome://tracing).

    timeline = Timeline("run.json")
    began = timeline.now()
    ...
    timeline.add("wait", "layer 3 waits for the disk", began, {"experts": [5, 9]})
    timeline.note("request", "layer 3 asks", {"missing": [5, 9]})
    timeline.at_close.append(add_what_is_known_then)
    timeline.close()                                    # writes the file

Every thread has a row of its own, in which what was called inside a call is drawn below it; `row` names another.

    time_calls(memory, Timeline("run.json"))

draws passes, requests, waits and loads of a memory, each with its layer. The engine knows nothing of it and pays
nothing for it: this stands around the calls of one memory that wait or load, from now on. Mostly the host's side is
seen: a copy is there as the call that enqueues it, and where a pass ends on the host, the GPU may still compute it. In
captured steps the GPU tells when it asked and when it went on (`GpuSpans`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from amoeba.core.errors import bad_value
from amoeba.stream.cpu.memory import ExpertMemory
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.system.files import write_whole

logger = logging.getLogger("amoeba")

# Some 2,000 tokens of 48 layers; a browser shows no more than that with pleasure.
MOST_EVENTS = 500_000
GPU_ROW = "the GPU, captured steps"
DIRECT_ROW = "loads experts without Python"
Described = tuple[str, str, dict[str, Any]] | None  # kind, name and details of a call; None: not worth a mention
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
            logger.warning("%s: only the first %d events are kept", self.path, MOST_EVENTS)

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


class _Request(NamedTuple):
    layer: int
    missing: int
    asked: int  # microseconds of the GPU's clock
    went_on: int
    is_first: bool  # of a step


class GpuSpans:
    """What the GPU did in captured steps, by its own clock: where it waited for experts, and what it computed between.

    The two clocks differ by an unknown amount, and a request is seen some microseconds after it was asked, so the
    least difference of all is taken for theirs. That is known at the end: then the row is added.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._requests = timeline, list[_Request]()
        self._behind: int | None = None  # nanoseconds from the GPU's clock to ours, and the way of a request
        self._latest = 0  # of the GPU's clock, as many bits as it takes
        self._is_first = True
        timeline.at_close.append(self._write)

    def begin_step(self) -> None:
        self._is_first = True

    def add(self, layer: int, missing: int, asked: int, went_on: int, seen: int) -> None:
        """asked, went_on: 32 bits of microseconds. seen: by our clock, in nanoseconds."""
        if (asked, went_on) == (0, 0) or 2 * len(self._requests) >= MOST_EVENTS:
            return
        self._latest += (asked - self._latest + 2**31) % 2**32 - 2**31
        lasted = (went_on - asked) % 2**32 if missing else 0
        behind = seen - 1000 * self._latest
        self._behind = behind if self._behind is None else min(self._behind, behind)
        self._requests.append(_Request(layer, missing, self._latest, self._latest + lasted, self._is_first))
        self._is_first = False

    def _write(self) -> None:
        before: _Request | None = None
        for here in self._requests:
            if before is not None and not here.is_first:
                name = f"experts of layer {before.layer}, then up to layer {here.layer}'s router"
                self._span("pass", name, before.went_on, here.asked, before.layer)
            if here.missing:
                self._span("wait", f"layer {here.layer} waits for {here.missing}", here.asked, here.went_on, here.layer)
            before = here

    def _span(self, kind: str, name: str, began: int, ended: int, layer: int) -> None:
        assert self._behind is not None
        first, last = (1000 * each + self._behind for each in (began, ended))
        self._timeline.add(kind, name, first, {"layer": layer}, row=GPU_ROW, ended=last)


def time_calls(memory: ExpertMemory | DeviceMemory, timeline: Timeline) -> None:
    around = _Around(timeline)
    around.call(memory.store, "read", _of_read)
    if isinstance(memory, DeviceMemory):
        _OnGpu(memory, timeline).begin()
        return
    around.call(memory, "_wait_for", lambda _, read: ("wait", "waits for the disk", {}))
    acquire = memory.acquire

    def timed_acquire(layer: int, ids: Any, tokens: int) -> Generator[dict[int, int], None, None]:
        began = timeline.now()
        try:
            yield from acquire(layer, ids, tokens)
        finally:
            timeline.add(*_pass(layer, tokens, began))

    memory.acquire = timed_acquire  # type: ignore[method-assign]
    note_use = memory.note_use

    def timed_use(layer: int, ids: Any, tokens: int) -> None:
        note_use(layer, ids, tokens)
        timeline.add(*_pass(layer, tokens, timeline.now()))

    memory.note_use = timed_use  # type: ignore[method-assign]


def _pass(layer: int, tokens: int, began: int) -> tuple[str, str, int, dict[str, int]]:
    return "pass", f"layer {layer}", began, {"layer": layer, "tokens": tokens}


class _Around:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def call(self, owner: Any, name: str, describe: Callable[..., Described]) -> None:
        """describe(result, *arguments); the result is None where the call failed."""
        timeline, inner = self._timeline, getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began, result = timeline.now(), None
            try:
                result = inner(*arguments, **options)
                return result
            finally:
                found = describe(result, *arguments)
                if found is not None:
                    kind, what, details = found
                    timeline.add(kind, what, began, details)

        setattr(owner, name, timed)


class _OnGpu:
    def __init__(self, memory: DeviceMemory, timeline: Timeline) -> None:
        self._memory, self._timeline = memory, timeline
        self._thread = threading.local()  # whether it only expects, and the tokens of its pass
        self._turn, self._count, self._prefetch = memory.pool.turn, memory.pool.count, memory.loads.prefetch
        self._serve = memory.replays.serving.serve
        self._layers: list[int] = []  # of the replay that is served
        self._first = self._seen = 0  # its first request, and the latest that was seen
        self._mailbox: Any = None  # that is timed
        self._spans = GpuSpans(timeline)
        self._latest: tuple[int, int, int, int] | None = None  # serial, layer, missing and when it was seen

    def begin(self) -> None:
        memory, replays, around = self._memory, self._memory.replays, _Around(self._timeline)
        around.call(
            memory.pool, "wait_for_ids", lambda _, layer: ("wait", f"layer {layer} waits for its ids", _of(layer))
        )
        around.call(memory.loads, "wait_for_reads", self._of_wait)
        around.call(memory.loads, "begin", _of_loads)
        around.call(memory.reads, "read_and_copy", _of_load)
        around.call(replays, "replay", lambda _, passes, *__: ("pass", "a captured step", {"tokens": passes.tokens}))
        around.call(replays.serving, "wait_for", lambda _, *asked: self._of_looking(asked[-1]))
        for owner, name, timed in (
            (memory.pool, "turn", self.turn),
            (memory.pool, "count", self.count),
            (memory.loads, "prefetch", self.prefetch),
            (replays.serving, "serve", self.serve),
        ):
            setattr(owner, name, timed)

    @contextmanager
    def turn(self, layer: int) -> Iterator[None]:
        began = self._timeline.now()
        try:
            with self._turn(layer):
                yield
        finally:
            if not getattr(self._thread, "expects", False):
                details = _of(layer) | {"tokens": getattr(self._thread, "tokens", 0)}
                self._timeline.add("pass", f"layer {layer}", began, details)

    def count(self, layer: int, tokens: int) -> None:
        self._thread.tokens = tokens
        self._count(layer, tokens)

    def prefetch(self, layer: int, ids: Any) -> None:
        began, self._thread.expects = self._timeline.now(), True
        try:
            self._prefetch(layer, ids)
        finally:
            self._thread.expects = False
            self._timeline.add("load", f"layer {layer} is expected next", began, _of(layer))

    def serve(self, passes: Any, first: int) -> None:
        self._layers, self._first = passes.layers, first
        if self._mailbox is None and passes.layers:
            self._mailbox = self._memory.replays.mailbox
            self._read, self._mailbox.read = self._mailbox.read, self.read
            fast, around = self._memory.replays.serving.fast, _Around(self._timeline)
            assert fast is not None
            around.call(fast, "write_down", _of_fast_path)
        self._serve(passes, first)

    def read(self, serial: int) -> Any:
        asked = missing, there = self._read(serial)
        if self._seen < serial < self._first + len(self._layers):  # it may be read twice
            self._seen, layer = serial, self._layers[serial - self._first]
            name = f"layer {layer} asks: {len(missing)} of {len(missing) + len(there)} missing"
            self._timeline.note("request", name, _of(layer) | {"missing": list(missing), "there": list(there)})
            self._add_spans(serial, layer, len(missing))
        return asked

    def _add_spans(self, serial: int, layer: int, missing: int) -> None:
        """Of the request before this one, whose times are whole now."""
        if self._latest is not None:
            before, its_layer, its_missing, seen = self._latest
            asked, went_on = self._mailbox.times(before)
            self._spans.add(its_layer, its_missing, asked, went_on, seen)
        if serial == self._first:
            self._spans.begin_step()
        self._latest = serial, layer, missing, self._timeline.now()

    def _of_wait(self, _: Any, layer: int, group: Any) -> Described:
        if (direct := group.direct) is not None and direct.is_there:
            about = _of(layer) | {"experts": list(direct), "slots": list(direct.slot_of.values())}
            began, ended = direct.times.begun, direct.times.called
            name = f"layer {layer}: {len(direct)} from disk to the GPU"
            self._timeline.add("load", name, began, about, row=DIRECT_ROW, ended=ended)
        if not (read := _read(group)):
            return None
        return "wait", f"layer {layer} waits for the disk", _of(layer) | {"experts": read}

    def _of_looking(self, serial: int) -> Described:
        layer = self._layers[serial - self._first]
        return "wait", f"until layer {layer} asks", _of(layer)


def _of(layer: int) -> dict[str, Any]:
    return {"layer": layer}


def _of_read(_: Any, layer: int, expert: int, *__: Any) -> Described:
    return "load", f"layer {layer}, expert {expert} from disk", _of(layer) | {"expert": expert}


def _of_load(_: Any, layer: int, expert: int, host_slot: int | None, slot: int, is_there: bool, *__: Any) -> Described:
    where = "from host memory" if is_there else "from disk to the GPU"
    return "load", f"layer {layer}, expert {expert} {where}", _of(layer) | {"expert": expert, "slot": slot}


def _of_loads(group: Any, layer: int, part: list[int], *_: Any) -> Described:
    """What is copied from host memory has been called now; what is on the disk is for those who load."""
    read = [] if group is None else _read(group)
    if group is None or not (group.copied or read):
        return None
    name = f"layer {layer} has {len(group.copied)} copied from host memory, {len(read)} read"
    return "load", name, _of(layer) | {"from_host": list(group.copied), "from_disk": read}


def _read(group: Any) -> list[int]:
    return [*group.jobs, *(group.direct or ())]


def _of_fast_path(computed: Any, layer: int, serial: int, missing: list[int], there: list[int]) -> Described:
    """The copies were called ahead of this, when it asked."""
    copied = [expert for expert in missing if expert not in (computed or ())]
    by_cpu = f", {len(computed)} computed by the CPU" if computed else ""
    name = f"layer {layer} has {len(copied)} copied from host memory{by_cpu}, tables follow"
    return "load", name, _of(layer) | {"from_host": copied, "from_disk": [], "computed": list(computed or ())}
