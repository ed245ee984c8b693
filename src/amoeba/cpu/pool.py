"""The threads of one node: pinned C++ workers that spin for a moment after their last job and then sleep.

    pool = WorkerPool()                          # one thread per core that this process may use
    pool = WorkerPool(cores=range(8))            # these cores; the caller's thread is the first and is not pinned

Several pools may run at once from different Python threads; calls on one pool run one after another.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from amoeba.cpu.node_library import PHASES, load_node
from amoeba.errors import bad_value

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"


class WorkerPool:
    """threads: None for one per core; cores: where they run, None for all that this process may use, one thread each
    of those that share a core. With more threads than cores nobody is pinned.
    """

    threads: int

    def __init__(self, threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        if threads is not None and threads < 1:
            raise bad_value("threads", "at least 1", threads, "leave it out for one thread per core")
        if cores is not None and not cores:
            raise bad_value("cores", "at least one core", list(cores), "leave it out for all cores")
        chosen = tuple(own_cores() if cores is None else cores)
        self.threads = len(chosen) if threads is None else threads
        self.cores = chosen[: self.threads] if len(chosen) >= self.threads else None
        self._process = -1
        self._handle = 0

    @property
    def handle(self) -> int:
        """The C++ pool; a forked child, in which the threads are gone, gets its own."""
        if self._process != os.getpid():
            library = load_node()
            array = None if self.cores is None else (ctypes.c_int32 * self.threads)(*self.cores)
            self._handle, self._process = library.pool_new(self.threads, array), os.getpid()
            weakref.finalize(self, _delete, library.pool_delete, self._handle, self._process).atexit = False
        return self._handle

    def phase_seconds(self) -> dict[str, float]:
        """How long each phase of the last call took."""
        seconds = (ctypes.c_double * 16)()
        load_node().pool_phase_seconds(self.handle, seconds)
        return {name: seconds[i] for i, name in enumerate(PHASES) if seconds[i]}


def own_cores() -> list[int]:
    """The cores that this process may use, one of each pair of hyperthreads."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    chosen: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        siblings = Path(_SIBLINGS.format(core=core))
        chosen.setdefault(siblings.read_text() if siblings.exists() else str(core), core)
    return list(chosen.values())


def _delete(delete: object, handle: int, process: int) -> None:
    if process == os.getpid():
        delete(handle)  # type: ignore[operator]
