"""How many programs a kernel has that goes through its tiles in turns.

    product[(programs(device),)](...)
    share_the_gpu()                       # from here on, other kernels run beside ours

One for each multiprocessor as long as nothing else runs beside: a program fills a multiprocessor's registers, and has
its share of the tiles. Where others hold some multiprocessors for a while (rows that travel, another process), a
program that finds no place begins when they are through, with its whole share left, and all wait for it. Then there are
several for each multiprocessor, with fewer tiles each, and whichever is free takes the next. A tile is computed as
before, so the bits are the same.
"""

from __future__ import annotations

from functools import cache

import torch

# Programs of a multiprocessor, one after the other, where it is shared. Of 1, 4, 8 and 16: docs/log.md, 2026-11-16.
TURNS_SHARED = 8
_turns = 1


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def turns() -> int:
    return _turns


def share_the_gpu(shared: bool = True) -> None:
    """Of this process, from here on: other kernels run beside ours."""
    global _turns
    _turns = TURNS_SHARED if shared else 1


def programs(device: torch.device) -> int:
    return multiprocessors(device) * _turns
