"""What the disk and the link to a GPU give at best, found out by a short read and a short copy.

    read_rate(store)            # bytes/s of experts, read as a run reads them; and how many bytes were read
    copy_rate(device)           # bytes/s from pinned memory to the device

Both take less than a second, and a run that is under way should not be disturbed by them: they come at its end.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

from amoeba.stream.cpu.memory import READS
from amoeba.stream.gpu.device import Rate, copy_rate
from amoeba.stream.store.buffers import aligned_buffer
from amoeba.stream.store.store import Store

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
