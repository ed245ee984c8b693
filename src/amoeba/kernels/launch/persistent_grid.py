"""How many programs a persistent kernel has.

    product[(programs(device),)](...)
    share_the_gpu()                       # from here on, other kernels run concurrently

One for each multiprocessor as long as nothing else runs concurrently: a program fills a multiprocessor's registers, and
has its share of the tiles. Where others hold some multiprocessors for a while (rows that travel, another process), a
program that finds no place begins when they are through, with its whole share left, and all wait for it. Then there are
several for each multiprocessor, with fewer tiles each, and whichever is free takes the next. A tile is computed as
before, so the bits are the same.

Shares may also halve: the first programs have half of the tiles together, the next ones a quarter, and so on, the last
ones as much as those before. Then fewer programs end closer together. Of the products in bf16 and fp16 alone, where a
GPU is shared: the layer of qwen3_30b over two ranks of an H200 takes 1 % less time without an exchange, 2.5 % less with
one that overlaps in fixed room, and as long as before by plain `peers`.
"""

from __future__ import annotations

from functools import cache

import torch

# Programs of a multiprocessor, one after the other, where it is shared. Of 1, 4, 8 and 16: dev/log, 2026-11-16.
TURNS_SHARED = 8
# Of 0 and 5: dev/log, 2026-11-17.
HALVINGS_SHARED = 5
_turns, _halvings = 1, 0


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def sharing() -> tuple[int, int]:
    """What launches of the same kernels differ in."""
    return _turns, _halvings


def halvings() -> int:
    """How often the shares of a product halve; 0: they are all the same."""
    return _halvings


def share_the_gpu(shared: bool = True, halvings: int | None = None) -> None:
    """For this process, from here on: other kernels run concurrently with ours."""
    global _turns, _halvings
    _turns, _halvings = (TURNS_SHARED, HALVINGS_SHARED if halvings is None else halvings) if shared else (1, 0)


def programs(device: torch.device) -> int:
    return multiprocessors(device) * _turns


def programs_in_halves(device: torch.device) -> int:
    """Of a kernel whose shares halve."""
    return multiprocessors(device) * (_halvings + 1)
