"""NUMA nodes of this machine, or as many virtual ones as are asked for, on which the parts of a partition compute.

    nodes = numa_nodes("auto")                               # the same objects for every layer
    parts = run_on_nodes(nodes, [job_0, job_1])              # each on its own node, at the same time

A node has its cores, its worker pool and, if there are several, a thread that never leaves those cores. What these
threads touch first is in the memory of their NUMA node, also where the process was started with another policy
(`numactl --interleave`), and `keep` moves there what is not. Jobs of one node run one after another.

The threads of a node are torch's, or pinned C++ workers that spin for a moment after their last job and then sleep:

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
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.build import CoreUnavailable, openmp_runtime
from amoeba.cpu.node_library import load_node
from amoeba.cpu.pointers import place_of

Result = TypeVar("Result")

_NODE_FOLDER = Path("/sys/devices/system/node")


class HostThread:
    """Runs jobs one after another in a thread of its own; a forked process, which has no such thread, gets another."""

    def __init__(self, name: str, first: Callable[[], None] = lambda: None) -> None:
        """first: runs in the thread before any job."""
        self._name, self._first = name, first
        self._process = -1

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        if self._process != os.getpid():
            self._executor = ThreadPoolExecutor(1, self._name, initializer=self._first)
            self._process = os.getpid()
        return self._executor.submit(job)


class NumaNode:
    """One node: its cores and the threads on them. cores: None for wherever the system puts them."""

    def __init__(self, threads: int | None, cores: Sequence[int] | None) -> None:
        self.cores = cores
        self.memory_node = None if cores is None else _memory_node(cores)
        self.pool = WorkerPool(threads, cores, self.memory_node)
        self.alone = WorkerPool(1)  # the thread that runs the job, for what is not worth waking another
        self._thread = HostThread("amoeba-node", self._stay_here)
        self._process, self._lock = os.getpid(), threading.Lock()

    def run(self, job: Callable[[], Result]) -> Result:
        """In the calling thread; a job's dtypes are its own affair, also under autocast."""
        if self._process != os.getpid():  # the lock may be one that is never released
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock, torch.no_grad():
            if not torch.is_autocast_enabled("cpu"):
                return job()
            with torch.autocast("cpu", enabled=False):
                return job()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """In the thread of this node."""
        return self._thread.start(functools.partial(self.run, job))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """In the memory of this node, from now on: pages of theirs that are elsewhere are moved."""
        if self.memory_node is not None:
            for tensor in tensors:
                load_node().amoeba_move_memory_to(self.memory_node, place_of(tensor), tensor.nbytes)

    def _stay_here(self) -> None:
        if self.cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        if self.memory_node is not None:
            with suppress(CoreUnavailable):  # where it is, or is refused, the node that touches memory first has it
                load_node().amoeba_prefer_memory_of(self.memory_node)


def run_on_nodes(nodes: Sequence[NumaNode], jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of job n on node n; an error is raised when all have come to their end."""
    if len(nodes) == 1:
        return [nodes[0].run(jobs[0])]
    started = [node.start(job) for node, job in zip(nodes, jobs, strict=True)]
    wait(started)
    return [future.result() for future in started]


def run_one_by_one(nodes: Sequence[NumaNode], jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """As `run_on_nodes`, but one after another, for jobs that each need much memory for a moment."""
    if len(nodes) == 1:
        return [nodes[0].run(jobs[0])]
    return [node.start(job).result() for node, job in zip(nodes, jobs, strict=True)]


def numa_nodes(nodes: int | Literal["auto"] = 1, threads: int | None = None) -> tuple[NumaNode, ...]:
    """nodes: "auto" for the NUMA nodes of this machine. threads: of all of them together; None for one per core."""
    numa = numa_cores()
    if nodes == "auto":
        nodes = len(numa)
    if not isinstance(nodes, int) or nodes < 1:
        raise bad_value("nodes", 'a number of at least 1, or "auto"', repr(nodes), "use 1 on a machine with one socket")
    if threads is not None and threads < nodes:
        raise bad_value("threads", f"at least one for each of the {nodes} nodes", threads, "use more threads")
    if nodes == 1:
        return (_node_of(threads, None),)
    groups = numa if nodes == len(numa) else _divide([core for cores in numa for core in cores], nodes)
    counts: list[int | None] = [None] * nodes
    if threads is not None:
        counts = [threads // nodes + (node < threads % nodes) for node in range(nodes)]
    return tuple(
        _node_of(count, tuple(group), node) for node, (count, group) in enumerate(zip(counts, groups, strict=True))
    )


@functools.cache
def _node_of(threads: int | None, cores: tuple[int, ...] | None, node: int = 0) -> NumaNode:
    """One for all layers: threads of layers that wait for each other would only be in each other's way."""
    return NumaNode(threads, cores)


def numa_cores() -> list[list[int]]:
    """The cores that this process may use, by NUMA node; one list where the system does not tell."""
    usable, found = own_cores(), []
    for folder in sorted(_NODE_FOLDER.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        cores = _core_list((folder / "cpulist").read_text())
        if mine := [core for core in usable if core in cores]:
            found.append(mine)
    return found or [usable]


def _memory_node(cores: Sequence[int]) -> int | None:
    """The number of the NUMA node that has all of these cores; None where none has, or the system does not tell."""
    for folder in _NODE_FOLDER.glob("node[0-9]*"):
        if _core_list((folder / "cpulist").read_text()).issuperset(cores):
            return int(folder.name[4:])
    return None


def _core_list(text: str) -> set[int]:
    """From the kernel's notation: 0-3,8,10-11."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {core for first, last in spans for core in range(int(first), int(last or first) + 1)}


def _divide(cores: list[int], parts: int) -> list[list[int]]:
    """In contiguous groups; where there are fewer cores than parts, some share one."""
    if len(cores) < parts:
        return [[cores[part % len(cores)]] for part in range(parts)]
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]


_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"


class WorkerPool:
    """Without arguments: torch's threads where its runtime can be asked for them, else one of our own per core.

    threads: that many of our own; cores: where they run, None for all that this process may use, one thread each of
    those that share a core. With more threads than cores, none is pinned. memory_node: the NUMA node of their memory.
    """

    def __init__(
        self, threads: int | None = None, cores: Sequence[int] | None = None, memory_node: int | None = None
    ) -> None:
        if threads is not None and threads < 1:
            raise bad_value("threads", "at least 1", threads, "leave it out for one thread per core")
        if cores is not None and not cores:
            raise bad_value("cores", "at least one core", list(cores), "leave it out for all cores")
        chosen = tuple(own_cores() if cores is None else cores)
        self._own_threads = len(chosen) if threads is None else threads
        self.cores = chosen[: self._own_threads] if len(chosen) >= self._own_threads else None
        self._torch_parallel_for = _torch_parallel() if threads is None and cores is None else None
        self._memory_node = -1 if memory_node is None else memory_node
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
                self._handle = library.amoeba_pool_borrow(self._torch_parallel_for, self.threads)
            else:
                array = None if self.cores is None else (ctypes.c_int32 * self.threads)(*self.cores)
                self._handle = library.amoeba_pool_new(self.threads, array, self._memory_node)
            self._process = os.getpid()
            weakref.finalize(self, _delete, library.amoeba_pool_delete, self._handle, self._process).atexit = False
        elif self.borrows:
            library.amoeba_pool_borrow_as_many(self._handle, self.threads)
        return self._handle


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
