"""The threads of one node."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


class WorkerPool:
    """threads: None for as many as torch uses; cores: where they may run."""

    def __init__(self, threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        self.threads = threads or (len(cores) if cores else torch.get_num_threads())
        self.cores = None if cores is None else tuple(cores)


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))
