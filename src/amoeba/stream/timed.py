"""What is on a timeline of streamed experts: passes, questions, waits and loads, each with its layer.

    time_calls(memory, Timeline("run.json"))

The engine knows nothing of it and pays nothing for it: this stands around the calls of one memory that wait or load,
from now on. Mostly the host's side is seen: a copy is there as the call that enqueues it, and where a pass ends on the
host, the GPU may still compute it. In captured steps the GPU tells when it asked and when it went on (gpu_spans.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.gpu_spans import GpuSpans
from amoeba.stream.memory import ExpertMemory
from amoeba.stream.timeline import Timeline

DIRECT_ROW = "loads experts without Python"
Described = tuple[str, str, dict[str, Any]] | None  # kind, name and details of a call; None: not worth a mention


def time_calls(memory: ExpertMemory | DeviceMemory, timeline: Timeline) -> None:
    around = _Around(timeline)
    around.call(memory.store, "read", _of_read)
    if isinstance(memory, DeviceMemory):
        _OnGpu(memory, timeline).begin()
        return
    around.call(memory, "_wait_for", lambda _, read: ("wait", "waits for the disk", {}))
    lend = memory.lend

    def timed_lend(layer: int, ids: Any, tokens: int) -> Generator[dict[int, int], None, None]:
        began = timeline.now()
        try:
            yield from lend(layer, ids, tokens)
        finally:
            timeline.add("pass", f"layer {layer}", began, {"layer": layer, "tokens": tokens})

    memory.lend = timed_lend  # type: ignore[method-assign]


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
        self._turn, self._count, self._prefetch = memory.turn, memory.count, memory.prefetch
        self._serve = memory.replays.serving.serve
        self._layers: list[int] = []  # of the replay that is served
        self._first = self._seen = 0  # its first question, and the latest that was seen
        self._channel: Any = None  # that is timed
        self._spans = GpuSpans(timeline)
        self._latest: tuple[int, int, int, int] | None = None  # serial, layer, missing and when it was seen

    def begin(self) -> None:
        memory, replays, around = self._memory, self._memory.replays, _Around(self._timeline)
        around.call(memory, "wait_for_ids", lambda _, layer: ("wait", f"layer {layer} waits for its ids", _of(layer)))
        around.call(memory.loads, "wait_for_reads", self._of_wait)
        around.call(memory.loads, "begin", _of_loads)
        around.call(memory.reads, "read_and_copy", _of_load)
        around.call(replays, "replay", lambda _, passes, *__: ("pass", "a captured step", {"tokens": passes.tokens}))
        around.call(replays, "in_turns", _of_turns)
        around.call(replays.serving, "wait_for", lambda _, *asked: self._of_looking(asked[-1]))
        for owner, name, timed in (
            (memory, "turn", self.turn),
            (memory, "count", self.count),
            (memory, "prefetch", self.prefetch),
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
        if self._channel is None and passes.layers:
            self._channel = self._memory.replays.channel
            self._read, self._channel.read = self._channel.read, self.read
            fast, around = self._memory.replays.serving.fast, _Around(self._timeline)
            assert fast is not None
            around.call(fast, "write_down", _of_fast_path)
            around.call(fast.early, "begin", _of_early)
        self._serve(passes, first)

    def read(self, serial: int) -> Any:
        asked = missing, there = self._read(serial)
        if self._seen < serial < self._first + len(self._layers):  # it may be read twice, and be of steps in turns
            self._seen, layer = serial, self._layers[serial - self._first]
            name = f"layer {layer} asks: {len(missing)} of {len(missing) + len(there)} missing"
            self._timeline.note("question", name, _of(layer) | {"missing": list(missing), "there": list(there)})
            self._add_spans(serial, layer, len(missing))
        return asked

    def _add_spans(self, serial: int, layer: int, missing: int) -> None:
        """Of the question before this one, whose times are whole now."""
        if self._latest is not None:
            before, its_layer, its_missing, seen = self._latest
            asked, went_on = self._channel.times(before)
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


def _of_turns(_: Any, members: Any, steps: int) -> Described:
    return "pass", f"{steps} captured steps of {len(members)} groups in turns", {"steps": steps}


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


def _of_early(_: Any, layer: int, expected: list[int]) -> Described:
    return "load", f"layer {layer} is expected to miss {len(expected)}", _of(layer) | {"expected": expected}
