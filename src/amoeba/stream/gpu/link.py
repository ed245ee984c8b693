"""What the link to a GPU gives at best: bytes/s from pinned memory to the device, found out by a short copy."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from amoeba.stream.gpu.device import Device

# So many copies of this size in a row, so that neither their calls nor the wait behind them count; the best of so many
# rows, since a link may wake up in the first, and none is begun after so many seconds. Single copies, each waited for,
# told 37.6 GB/s where a run then moved 42.9 (H200, 2026-11-16).
_COPY, _IN_A_ROW = 32 * 2**20, 8
_ROWS, _MOST_SECONDS = 5, 0.1


class Rate(NamedTuple):
    bytes_per_second: float
    bytes: int  # from which it follows


def copy_rate(device: Device) -> Rate:
    source = device.host_memory(_COPY)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device.device)
    device.wait(device.copies, device.record(device.compute))  # of whom torch may have got this memory
    taken: list[float] = []
    while len(taken) < _ROWS and sum(taken) < _MOST_SECONDS:
        began = time.perf_counter()
        for _ in range(_IN_A_ROW):
            device.copy(device.copies, target, source)
        device.record(device.copies).wait()
        taken.append(time.perf_counter() - began)
    moved = _IN_A_ROW * _COPY
    return Rate(moved / min(taken), moved)
