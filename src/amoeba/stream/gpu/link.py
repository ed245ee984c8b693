"""What the link to a GPU gives at best: bytes/s from pinned memory to the device, found out by a short copy."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from amoeba.stream.gpu.device import Device

# A copy of this size takes half a millisecond over the fastest link, so its call does not count. Of so many the best.
_COPY, _COPIES = 32 * 2**20, 4


class Rate(NamedTuple):
    bytes_per_second: float
    bytes: int  # from which it follows


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
