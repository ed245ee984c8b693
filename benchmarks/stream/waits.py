"""What the GPU waited for in captured steps, and how long each part of it took: by both clocks, question by question.

    record = WaitRecord(memory, link=54e9)
    run_a_token(); wait_for_the_gpu(); record.collect()         # once a token
    record.close()
    record.kinds()                                              # Waits: mean and 90 % of each phase

As a timeline does (stream/timed.py), this stands around calls of one memory: the engine knows nothing of it, and what
is timed by others is timed without it. The two clocks are never compared, only how long things took.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# of a question: everything in host memory and copied at once; tables first; and some of it on the disk
AT_ONCE, TABLES_FIRST, DISK = "host memory, at once", "host memory, tables first", "disk"


@dataclass(frozen=True)
class Phase:
    mean_us: float
    p90_us: float


@dataclass(frozen=True)
class Waits:
    """Of the questions of one kind. phases, in order:

    waited      from the question to going on, by the GPU's clock
    over_link   of that, what the missing bytes do not take at the link's rate (nothing of the kind for a disk)
    begun       the host saw the question -> the first read was enqueued
    first       -> the first piece was there
    read        -> the last piece was there
    called      -> the word behind all copies was called for; with tables first: since the question was seen
    around      the rest of `waited`: until the question is seen, and from the word's call to its arrival
    """

    kind: str
    questions: int
    missing: float  # experts, mean
    from_disk: float  # of those
    phases: dict[str, Phase] = field(default_factory=dict)


class WaitRecord:
    def __init__(self, memory: Any, link: float | None) -> None:
        self._memory, self._link = memory, link
        self._serving, self._channel = memory.replays.serving, memory.replays.channel
        self._seen: dict[int, dict[str, Any]] = {}  # of each question that missed something
        self._found: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._latest = 0, 0  # serial, and when it was seen
        fast, wait = self._serving.by(self._channel), self._serving.wait_for
        write_down, begin, go_on = fast.write_down, memory.direct.begin, self._channel.go_on

        def waited(layer: int, serial: int, soon: bool = False) -> bool:
            is_served = wait(layer, serial, soon)
            self._latest = serial, time.perf_counter_ns()
            return is_served

        def written_down(layer: int, serial: int, missing: list[int], there: list[int]) -> list[int]:
            self._note(AT_ONCE, layer, len(missing))
            return write_down(layer, serial, missing, there)

        def begun(layer: int, missing: list[int]) -> Any:
            direct = begin(layer, missing)
            on_disk = [each for each in missing if memory.cache.is_on_disk_alone(layer, each)]
            self._note(DISK if on_disk else TABLES_FIRST, layer, len(missing), len(on_disk), direct)
            return direct

        def gone_on(serial: int) -> None:
            go_on(serial)
            if serial in self._seen:
                self._seen[serial]["called"] = time.perf_counter_ns()

        self._calls = [
            (self._serving, "wait_for", waited),
            (fast, "write_down", written_down),
            (memory.direct, "begin", begun),
            (self._channel, "go_on", gone_on),
        ]
        for owner, name, noted in self._calls:
            setattr(owner, name, noted)

    def _note(self, kind: str, layer: int, missing: int, on_disk: int = 0, direct: Any = None) -> None:
        serial, seen = self._latest
        size = self._memory.store.expert_bytes(layer)
        self._seen[serial] = {
            "kind": kind,
            "seen": seen,
            "missing": missing,
            "on_disk": on_disk,
            "direct": direct,
            "bytes": missing * size,
        }

    def collect(self) -> None:
        """Once the GPU is done with all that was asked."""
        for serial, note in self._seen.items():
            asked, went_on = self._channel.times(serial)
            phases: dict[str, float] = {}
            waited = (went_on - asked) % 2**32 if (asked, went_on) != (0, 0) else None
            if waited is not None:
                phases["waited"] = waited
                if note["kind"] != DISK and self._link is not None:
                    phases["over_link"] = waited - note["bytes"] / self._link * 1e6
            called = note.get("called")
            if (direct := note["direct"]) is not None:
                times = direct.times
                steps = {"begun": times.begun, "first": times.first, "read": times.last}
                called = times.called if called is None else called
            else:
                steps = {}
            before = note["seen"]
            if called is not None:
                for name, at in (*steps.items(), ("called", called)):
                    phases[name] = (at - before) / 1e3
                    before = at
                if waited is not None:
                    phases["around"] = waited - (called - note["seen"]) / 1e3
            self._found[note["kind"]].append({"missing": note["missing"], "on_disk": note["on_disk"]} | phases)
        self._seen.clear()

    def close(self) -> None:
        for owner, name, _ in self._calls:
            delattr(owner, name)

    def kinds(self) -> list[Waits]:
        return [_waits(kind, self._found[kind]) for kind in (AT_ONCE, TABLES_FIRST, DISK) if self._found[kind]]


def _waits(kind: str, found: list[dict[str, float]]) -> Waits:
    numbers: dict[str, list[float]] = defaultdict(list)
    for each in found:
        for name, value in each.items():
            numbers[name].append(value)
    missing, on_disk = (statistics.mean(numbers.pop(name)) for name in ("missing", "on_disk"))
    phases = {name: Phase(statistics.mean(each), _p90(each)) for name, each in numbers.items()}
    return Waits(kind, len(found), missing, on_disk, phases)


def _p90(numbers: list[float]) -> float:
    return sorted(numbers)[int(0.9 * (len(numbers) - 1))]
