"""What streaming did so far, in numbers that follow from the cache's counters and the clock.

With it, what the disk and the link to a GPU give at best, found out by a short read and a short copy:

    read_rate(store)            # bytes/s of experts, read as a run reads them; and how many bytes were read
    copy_rate(device)           # bytes/s from pinned memory to the device

Both take less than a second, and a run that is under way should not be disturbed by them: they come at its end.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from amoeba.core.errors import counted
from amoeba.stream.cpu.memory import READS
from amoeba.stream.gpu.device import Rate, copy_rate
from amoeba.stream.sizes import show_size
from amoeba.stream.store.buffers import aligned_buffer
from amoeba.stream.store.store import Store


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float
    source: Literal["measured now", "measured before", "seen in this run"]


def _show(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


@dataclass(frozen=True)
class PartOfRun:
    """What a part of a run took, and what it could not have taken less than: its bytes by the bandwidths."""

    name: str  # prefill, decode, prompts or training
    tokens: int  # of all passes
    seconds: float
    tokens_per_second: float
    hit_rate: float
    host_hit_rate: float  # of what was not on the GPU
    host_bytes_per_token: float
    read_bytes_per_token: float
    waited_seconds: float
    link_seconds: float  # that the link to the GPU is busy at least; 0 where there is none
    disk_seconds: float
    floor_seconds: float  # the longer of both: they work at the same time

    def __str__(self) -> str:
        bound = "disk" if self.disk_seconds >= self.link_seconds else "link"
        floor = f"floor {_show(self.floor_seconds)} ({bound})" if self.floor_seconds else "no transfers"
        return (
            f"{self.name}: {counted(self.tokens, 'token')} in {_show(self.seconds)} ({self.tokens_per_second:.1f}/s), "
            f"waited {_show(self.waited_seconds)}; {floor}"
        )


@dataclass(frozen=True)
class StreamReport:
    """Of all passes since the experts were attached, the warm-up token's too."""

    store: Literal["packed", "folder"]
    numbers: str  # of the experts: bfloat16, or the format of codes
    ram_bytes: int  # the budget
    rest_bytes: int  # of it, the model without its experts
    slot_bytes: int  # of it, experts in memory
    expert_bytes: int  # of all experts in the store
    slots: list[int]  # of each layer
    experts: list[int]
    tokens: int
    requested: int  # distinct experts of a layer in a pass, over all layers and passes
    hits: int  # of them, were in memory already
    hit_rate: float
    read_bytes: int
    read_bytes_per_token: float
    waited_seconds: float  # for reads, while there was nothing else to compute
    waited_seconds_per_token: float
    trace: str | None  # the file that was recorded
    vram_bytes: int | None  # the budget on a GPU; None: everything is on the CPU
    host_slots: list[int]  # of each layer, in pinned memory below the GPU
    host_hits: int  # of what was asked for: not on the GPU, but there
    host_hit_rate: float  # of what was not on the GPU
    host_bytes_per_token: float  # copied from there to the GPU
    timeline: str | None  # the file that close() writes
    miss: str  # move, cpu or auto: what becomes of experts that a captured step misses
    computed: int  # of what was asked for: missing, computed by the CPU, and not moved
    # of the commands, which know where a part begins
    parts: list[PartOfRun] = field(default_factory=list)
    link: Bandwidth | None = None  # None: nothing came that way
    disk: Bandwidth | None = None

    def __str__(self) -> str:
        slots = sorted(set(self.slots))
        per_layer = str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
        of = max(self.experts)
        where, below = "in memory", ""
        if self.vram_bytes is not None:
            where = "on the GPU"
            by_cpu = (
                f"{100 * self.computed / max(1, self.requested):.1f} % computed by the CPU, " if self.computed else ""
            )
            below = (
                f"{by_cpu}{100 * self.host_hit_rate:.1f} % of the others in host memory, "
                f"{show_size(self.host_bytes_per_token)} copied and "
            )
        return (
            f"experts: {100 * self.hit_rate:.1f} % of {self.requested} {where} ({per_layer} of {of} per layer, "
            f"{show_size(self.slot_bytes)}), {below}{show_size(self.read_bytes_per_token)} read per token, waited "
            f"{1e3 * self.waited_seconds_per_token:.1f} ms per token"
        )

    def lines(self) -> list[str]:
        """For people: all of it, each part of the run, and the bandwidths that their floors follow from."""
        rates = [
            f"{name} {show_size(found.bytes_per_second)}/s ({found.source})"
            for name, found in (("link", self.link), ("disk", self.disk))
            if found is not None
        ]
        return [str(self), *map(str, self.parts), *([", ".join(rates)] if rates else [])]


__all__ = ["Rate", "copy_rate", "read_rate"]

# Bytes that are read at most, and seconds after which no further expert is.
_MOST_READ, _MOST_SECONDS = 512 * 2**20, 0.5


def read_rate(store: Store) -> Rate:
    """StoreError where an expert cannot be read. Opening files, and compiling what reads them where that is still to be
    done, come ahead of the time: a rate of 0.01 GB/s was told by two experts behind a compiler."""
    experts = [(layer, expert) for layer, entry in enumerate(store.layers) for expert in range(entry.experts)]
    random.Random(0).shuffle(experts)  # as a run asks for them: in no order
    largest = max(entry.expert_bytes for entry in store.layers)
    store.read(*experts[0], aligned_buffer(largest)[: store.expert_bytes(experts[0][0])])
    began, left = time.perf_counter(), _MOST_READ

    def read() -> int:
        nonlocal left
        blob, found = aligned_buffer(largest), 0
        while experts and left > 0 and time.perf_counter() - began < _MOST_SECONDS:
            try:
                layer, expert = experts.pop()
            except IndexError:  # the other thread had it
                break
            size = store.expert_bytes(layer)
            store.read(layer, expert, blob[:size])
            found += size
            left -= size
        return found

    with ThreadPoolExecutor(READS, thread_name_prefix="measures the disk") as pool:
        total = sum(each.result() for each in [pool.submit(read) for _ in range(READS)])
    return Rate(total / (time.perf_counter() - began), total)
