"""What the disk and the link to a GPU give at best, found out by a short read and a short copy.

    read_rate(store)            # bytes/s of experts, read as a run reads them; and how many bytes were read
    copy_rate(device)           # bytes/s from pinned memory to the device

Both take less than a second, and a run that is under way should not be disturbed by them: they come at its end.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from amoeba.stream.gpu.device import Device
from amoeba.stream.memory import READS
from amoeba.stream.store.buffers import aligned_buffer
from amoeba.stream.store.store import Store

# Bytes that are read at most, and seconds after which no further expert is.
_MOST_READ, _MOST_SECONDS = 512 * 2**20, 0.5
# A copy of this size takes half a millisecond over the fastest link, so its call does not count. Of so many the best.
_COPY, _COPIES = 32 * 2**20, 4


class Rate(NamedTuple):
    bytes_per_second: float
    bytes: int  # from which it follows


def read_rate(store: Store) -> Rate:
    """StoreError where an expert cannot be read."""
    experts = [(layer, expert) for layer, entry in enumerate(store.layers) for expert in range(entry.experts)]
    random.Random(0).shuffle(experts)  # as a run asks for them: in no order
    largest = max(entry.expert_bytes for entry in store.layers)
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


def copy_rate(device: Device) -> Rate:
    source = device.host_memory(_COPY)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device.device)
    device.wait(device.copies, device.record(device.compute))  # of whom torch may have got this memory
    taken = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        device.copy(device.copies, target, source)
        device.record(device.copies).wait()
        taken.append(time.perf_counter() - began)
    return Rate(_COPY / min(taken), _COPY)
