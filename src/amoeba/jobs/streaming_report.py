"""What streaming did in each part of a run, compared with the least time that its bytes take.

    parts = StreamParts(streamed)       # None: experts are not streamed, and nothing happens
    parts.begin("prefill"); parts.begin("decode")               # ends the part before
    report = parts.report()

The floor is bytes over bandwidth. How fast link and disk are is measured at the end, and kept for the next run.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from amoeba.jobs.model_cost import keep, kept
from amoeba.stream.attaching import Streamed
from amoeba.stream.cache.expert_cache import Counters
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.report import Bandwidth, PartOfRun, Rate, StreamReport, copy_rate, read_rate
from amoeba.stream.store import StoreError, is_store
from amoeba.system.machine import cpu_model

# A measurement of fewer bytes is made again by the next run: it takes no time, and says little.
WORTH_KEEPING = 16 * 2**20


@dataclass(frozen=True)
class _Part:
    name: str
    counters: Counters
    seconds: float
    waited: float


class StreamParts:
    def __init__(self, streamed: Streamed | None) -> None:
        self._streamed = streamed
        self._under_way: _Part | None = None  # with what had been counted when it began
        self._ended: list[_Part] = []

    def begin(self, name: str) -> None:
        self.end()
        if self._streamed is not None:
            self._under_way = self._now(name)

    def end(self) -> None:
        began, self._under_way = self._under_way, None
        if began is None:
            return
        now = self._now(began.name)
        waited = now.waited - began.waited
        counters = _difference(now.counters, began.counters)
        assert self._streamed is not None
        if (timeline := self._streamed.timeline) is not None:
            timeline.add("run", began.name, int(1e9 * began.seconds), {"tokens": counters.tokens}, row="the run")
        self._ended.append(_Part(began.name, counters, now.seconds - began.seconds, waited))

    def report(self) -> StreamReport | None:
        self.end()
        if self._streamed is None:
            return None
        memory = self._streamed.memory
        link = disk = None
        if any(_copied(part.counters) for part in self._ended) and isinstance(memory, DeviceMemory):
            device = memory.device
            name = torch.cuda.get_device_name(device.device) if device.device.type == "cuda" else "none"
            about = {"gpu": name, "cpu": cpu_model(), "host": socket.gethostname()}
            link = self._bandwidth("link", about, lambda: copy_rate(device), _copied)
        if any(part.counters.disk_bytes for part in self._ended):
            about = _about_disk(memory.store)
            disk = self._bandwidth("disk", about, lambda: read_rate(memory.store), lambda found: found.disk_bytes)
        parts = [_described(part, link, disk) for part in self._ended]
        return replace(self._streamed.report(), parts=parts, link=link, disk=disk)

    def _now(self, name: str) -> _Part:
        assert self._streamed is not None
        memory = self._streamed.memory
        return _Part(name, replace(memory.cache.counters), time.perf_counter(), memory.waited_seconds)

    def _bandwidth(
        self, kind: str, about: dict[str, Any], measure: Callable[[], Rate], moved: Callable[[Counters], int]
    ) -> Bandwidth:
        seen = max(moved(part.counters) / max(part.seconds, 1e-9) for part in self._ended)
        known, source = _kept(kind, about), "measured before"
        if known is None:
            source = "measured now"
            with suppress(StoreError, torch.OutOfMemoryError):  # then what the run saw is all that is known
                known = measure()
                if known.bytes >= WORTH_KEEPING:
                    keep(kind, about, {"bytes_per_second": known.bytes_per_second})
        if known is None or seen > known.bytes_per_second:
            return Bandwidth(seen, "seen in this run")
        return Bandwidth(known.bytes_per_second, source)  # type: ignore[arg-type]


def _difference(now: Counters, before: Counters) -> Counters:
    counts = {name: count for name, count in vars(now).items() if isinstance(count, int)}
    return Counters(**{name: count - getattr(before, name) for name, count in counts.items()})


def _copied(counters: Counters) -> int:
    return max(counters.host_bytes + counters.disk_bytes, counters.written_bytes)


def _described(part: _Part, link: Bandwidth | None, disk: Bandwidth | None) -> PartOfRun:
    counters, tokens = part.counters, max(1, part.counters.tokens)
    of_link = math.inf if link is None else link.bytes_per_second
    of_disk = math.inf if disk is None else disk.bytes_per_second
    link_seconds = tokens * counters.floor_seconds(of_link, math.inf)
    disk_seconds = tokens * counters.floor_seconds(math.inf, of_disk)
    return PartOfRun(
        name=part.name,
        tokens=counters.tokens,
        seconds=part.seconds,
        tokens_per_second=counters.tokens / max(part.seconds, 1e-9),
        hit_rate=counters.top_hit_rate,
        host_hit_rate=counters.host_hit_rate,
        host_bytes_per_token=counters.per_token(counters.host_bytes),
        read_bytes_per_token=counters.per_token(counters.disk_bytes),
        waited_seconds=part.waited,
        link_seconds=link_seconds,
        disk_seconds=disk_seconds,
        floor_seconds=max(link_seconds, disk_seconds),
    )


def _about_disk(store: Any) -> dict[str, Any]:
    folder = store.folder.resolve()
    about = {"store": str(folder), "packed": is_store(folder), "host": socket.gethostname()}
    return about | {"device": folder.stat().st_dev}  # another disk may be mounted there another time


def _kept(kind: str, about: dict[str, Any]) -> Rate | None:
    found = (kept(kind, about) or {}).get("bytes_per_second")
    return Rate(found, WORTH_KEEPING) if isinstance(found, float) and 0 < found < math.inf else None
