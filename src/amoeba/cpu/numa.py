"""NUMA nodes of this machine, or as many virtual ones as are asked for, on which the parts of a partition compute.

    nodes = numa_nodes("auto")                               # the same objects for every layer
    parts = run_on_nodes(nodes, [job_0, job_1])              # each on its own node, at the same time

A node has its cores, its worker pool and, if there are several, a thread that never leaves those cores: what it
allocates and writes first lies in the memory of its node. Jobs of one node run one after another.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import torch

from amoeba.core.errors import bad_value
from amoeba.cpu.pool import WorkerPool, own_cores

Result = TypeVar("Result")

_NODE_FOLDER = Path("/sys/devices/system/node")


class NumaNode:
    """One node: its cores and the threads on them. cores: None for wherever the system puts them."""

    def __init__(self, threads: int | None, cores: Sequence[int] | None) -> None:
        self.cores = cores
        self.pool = WorkerPool(threads, cores)
        self.alone = WorkerPool(1)  # the thread that runs the job, for what is not worth waking another
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, "amoeba-node", initializer=self._stay_here)

    def run(self, job: Callable[[], Result]) -> Result:
        """In the calling thread; a job's dtypes are its own affair, also under autocast."""
        if self._process != os.getpid():  # a forked process has none of the threads, and locks that are never released
            self._begin()
        with self._lock, torch.no_grad():
            if not torch.is_autocast_enabled("cpu"):
                return job()
            with torch.autocast("cpu", enabled=False):
                return job()

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """In the thread of this node."""
        if self._process != os.getpid():
            self._begin()
        return self._executor.submit(self.run, job)

    def _stay_here(self) -> None:
        if self.cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)


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
