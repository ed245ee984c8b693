"""The threads of one node: torch's, or pinned C++ workers that spin for a moment after their last job and then sleep.

    pool = WorkerPool()                          # torch's threads, as many as torch.get_num_threads() says
    pool = WorkerPool(cores=range(8))            # these cores; the caller's thread is the first and is not pinned

Threads of torch's OpenMP runtime go on spinning for milliseconds after an operator, on the cores that workers of ours
would need: where one node serves the whole machine, we ask that runtime for its threads instead. Several pools may run
at once from different Python threads; calls on one pool run one after another.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from amoeba.core.errors import bad_value
from amoeba.cpu.build import openmp_runtime
from amoeba.cpu.node_library import PHASES, load_node

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"


class WorkerPool:
    """Without arguments: torch's threads where its runtime can be asked for them, else one of our own per core.

    threads: that many of our own; cores: where they run, None for all that this process may use, one thread each of
    those that share a core. With more threads than cores, none is pinned.
    """

    def __init__(self, threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        if threads is not None and threads < 1:
            raise bad_value("threads", "at least 1", threads, "leave it out for one thread per core")
        if cores is not None and not cores:
            raise bad_value("cores", "at least one core", list(cores), "leave it out for all cores")
        chosen = tuple(own_cores() if cores is None else cores)
        self._own_threads = len(chosen) if threads is None else threads
        self.cores = chosen[: self._own_threads] if len(chosen) >= self._own_threads else None
        self._torch_parallel_for = _torch_parallel() if threads is None and cores is None else None
        self._made_in = os.getpid()
        self._process = -1
        self._handle = 0

    @property
    def borrows(self) -> bool:
        """Whether these are torch's threads; a forked child has none of them."""
        return self._torch_parallel_for is not None and self._made_in == os.getpid()

    @property
    def threads(self) -> int:
        return torch.get_num_threads() if self.borrows else self._own_threads

    @property
    def handle(self) -> int:
        """The C++ pool; a forked child, in which the threads are gone, gets its own."""
        library = load_node()
        if self._process != os.getpid():
            if self.borrows:
                self._handle = library.pool_borrow(self._torch_parallel_for, self.threads)
            else:
                array = None if self.cores is None else (ctypes.c_int32 * self.threads)(*self.cores)
                self._handle = library.pool_new(self.threads, array)
            self._process = os.getpid()
            weakref.finalize(self, _delete, library.pool_delete, self._handle, self._process).atexit = False
        elif self.borrows:
            library.pool_borrow_as_many(self._handle, self.threads)
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


@functools.cache
def _torch_parallel() -> int | None:
    """Where GOMP_parallel is in the OpenMP runtime that torch has loaded."""
    runtime = openmp_runtime()
    if runtime is None:
        return None
    return ctypes.cast(ctypes.CDLL(runtime).GOMP_parallel, ctypes.c_void_p).value


def _delete(delete: object, handle: int, process: int) -> None:
    if process == os.getpid():
        delete(handle)  # type: ignore[operator]
