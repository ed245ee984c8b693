"""Executes the graph: any number of ranks and workers, random interleavings and arrival delays, every rule checked.

W ranks

    job = [[Script(Computation(graph, layer, tokens_W, epoch)) for graph in graphs] for epoch, ...]    # by pass, rank
    ran = simulate(job, workers=3, pace=Pace(seed=0, slowness=[1.0] * W))
    ran.memory[0][rank][Region(rank, "dx", (0,))], ran.records

A task reads when it starts and writes when it ends. What goes to another rank, and every flag, arrives later, in any
order. A `ScheduleFault` is raised where a task reads what is not written yet or is overwritten too early; where
something is written twice; where a task runs twice or never; where counters do not end at their totals; and where
everybody waits. Ranks go from pass to pass without waiting for each other.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.tasks.graph import FLAGS, Counter, Gate, Graph, Kind, Signal, Task
from amoeba.tasks.timeline import Record
from benchmarks.schedules.computation import Computation, OrderOnly, Region


class ScheduleFault(RuntimeError):
    """rule: which one was broken, in a word or two."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Step(NamedTuple):
    """A ticket as the graph has it."""

    task: Task
    gates: list[Gate]
    signals: list[Signal]
    reads: list[Region]
    writes: list[Region]


class Script:
    """One rank's pass: its steps by ticket, and what they computed. Serves any number of schedules."""

    def __init__(self, regions: Computation | OrderOnly) -> None:
        self.regions, self.graph = regions, regions.graph
        self._found: dict[Task, tuple[list[Tensor], Sequence[Tensor]]] = {}

    @cached_property
    def steps(self) -> list[Step]:
        graph, regions = self.graph, self.regions
        tasks = [graph.decode(ticket) for ticket in range(graph.tickets)]
        expected = set(all_tasks(graph))
        if unknown := [task for task in tasks if task not in expected]:
            raise ScheduleFault("no such task", f"rank {graph.rank} has a ticket for {unknown[0]}")
        epoch = regions.epoch
        return [
            Step(
                task,
                list(graph.gates(task, epoch)),
                list(graph.signals(task, epoch)),
                regions.reads(task),
                regions.writes(task),
            )
            for task in tasks
        ]

    def compute(self, task: Task, values: list[Tensor]) -> Sequence[Tensor]:
        """A result is a function of the values alone: from the same ones it is computed once."""
        found = self._found.get(task)
        if found is not None and len(found[0]) == len(values) and all(map(_same, found[0], values)):
            return found[1]
        results = self.regions.compute(task, values)
        self._found[task] = values, results
        return results


def all_tasks(graph: Graph) -> Iterator[Task]:
    """Everything there is to do, in no order, and counted without tickets."""
    rows, sizes, tiling = graph.rows, graph.sizes, graph.tiling
    for tile in range(len(rows.tiles)):
        yield Task(Kind.ACTIVATE, tile)
        for part, _ in enumerate(range(0, sizes.intermediate, tiling.down_columns)):
            yield Task(Kind.DOWN, tile, part)
        for part, _ in enumerate(range(0, sizes.hidden, tiling.up_columns)):
            yield Task(Kind.UP, tile, part)
    for kind, height, width in (
        (Kind.DOWN_WEIGHTS, sizes.hidden, sizes.intermediate),
        (Kind.UP_WEIGHTS, sizes.width, sizes.hidden),
    ):
        lines, columns = range(0, height, tiling.weight_rows), range(0, width, tiling.weight_columns)
        for expert in range(rows.experts):
            bundles = range(0, len(lines) * len(columns), tiling.bundle)
            yield from (Task(kind, expert, part) for part in range(len(bundles)))
        if graph.biases:
            bias = Kind.DOWN_BIAS if kind == Kind.DOWN_WEIGHTS else Kind.UP_BIAS
            columns = range(0, height, tiling.bias_columns)
            yield from (Task(bias, expert, part) for expert in range(rows.experts) for part in range(len(columns)))
    for peer in graph.peers:
        yield from (Task(Kind.SEND, peer, part) for part in range(len(range(0, len(rows.sent[peer]), tiling.sent))))
        if graph.is_remote(peer):
            came = rows.first_from[peer + 1] - rows.first_from[peer]
            yield from (Task(Kind.RETURN, peer, part) for part in range(len(range(0, came, tiling.sent))))
    for block in range(len(range(0, graph.combined, tiling.tokens))):
        yield Task(Kind.COMBINE, block)
        if graph.router:
            yield Task(Kind.ROUTER, block)
    if graph.router:
        parts = range(len(range(0, sizes.hidden, tiling.router_columns)))
        yield from (Task(Kind.ROUTER_WEIGHTS, 0, part) for part in parts)


class Pace:
    """How long things take, at random. slowness: of each rank, 1 where a task takes a unit of time on average.
    latency: of what travels, on average. work: the time of each task, instead of a random one."""

    def __init__(
        self,
        seed: int,
        slowness: Sequence[float],
        *,
        latency: float = 1.0,
        work: Callable[[Graph, Task], float] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self._slowness, self._latency, self._work = slowness, latency, work

    def task(self, graph: Graph, task: Task) -> float:
        work = self.random.expovariate(1.0) if self._work is None else self._work(graph, task)
        return self._slowness[graph.rank] * work

    def arrival(self) -> float:
        return self._latency * self.random.expovariate(1.0)


class Ran(NamedTuple):
    """memory: what each rank wrote for itself, by pass and rank.
    arrows: (the task that opened a gate last, the task behind that gate)."""

    memory: list[list[dict[Region, Tensor]]]
    records: list[Record]
    arrows: list[tuple[Record, Record]]


def simulate(
    job: Sequence[Sequence[Script]],
    workers: int,
    pace: Pace,
    *,
    ahead: bool = True,
    progress: Callable[[int], None] = lambda started: None,
) -> Ran:
    """job: by pass, by rank. workers: of each rank. ahead: whether a worker draws its next ticket as a task begins.
    progress: called with the number of tasks started so far."""
    if workers < 1:
        raise bad_value("workers", "at least 1 for each rank", workers, "132 is what an H200 has")
    return _Simulation(job, workers, pace, ahead, progress).run()


class _Rank:
    def __init__(self, rank: int, scripts: list[Script], workers: int) -> None:
        self.rank, self.scripts = rank, scripts
        self.workers = [_Worker(self, index) for index in range(workers)]
        self.memory: list[dict[Region, Tensor]] = []
        self.epoch = self.ended = 0

    def enter_pass(self) -> None:
        self.script = self.scripts[self.epoch]
        self.steps = self.script.steps
        self.epoch += 1
        self.memory.append({})
        self.counters: Multiset[Counter] = Multiset()
        self.ran: set[Task] = set()
        self.next_ticket = 0


class _Worker:
    """held: the ticket it is at, or the next one. came: since when it stands before it. launched: it will draw.
    queued: its place among all that ever came to a gate."""

    def __init__(self, rank: _Rank, index: int) -> None:
        self.rank, self.index = rank, index
        self.held: int | None = None
        self.came = 0.0
        self.launched = False
        self.queued = 0


class _Simulation:
    def __init__(
        self,
        job: Sequence[Sequence[Script]],
        workers: int,
        pace: Pace,
        ahead: bool,
        progress: Callable[[int], None],
    ) -> None:
        self.pace, self.ahead, self.progress = pace, ahead, progress
        self.ranks = [_Rank(rank, [scripts[rank] for scripts in job], workers) for rank in range(len(job[0]))]
        self.heap: dict[Region, tuple[int, Tensor]] = {}
        self.flags: Multiset[Counter] = Multiset()
        self.reading: Multiset[Region] = Multiset()
        self.waiting: dict[Counter, list[_Worker]] = {}  # by the counter of the first gate that is closed
        self.arrivals = 0
        self.events: list[tuple[float, float, Callable[[], None]]] = []
        self.now = 0.0
        self.records: list[Record] = []
        self.arrows: list[tuple[Record, Record]] = []
        self.opened: dict[Gate, Record] = {}

    def run(self) -> Ran:
        for rank in self.ranks:
            self.begin_pass(rank)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
        if self.waiting:
            stuck = sorted((worker for each in self.waiting.values() for worker in each), key=lambda each: each.queued)
            raise ScheduleFault("stuck", "; ".join(self.told(worker) for worker in stuck))
        for rank in self.ranks:
            if rank.ended < len(rank.scripts):
                raise ScheduleFault("stuck", f"rank {rank.rank} has no task left and does not end pass {rank.epoch}")
        passes = len(self.ranks[0].scripts)
        return Ran([[rank.memory[each] for rank in self.ranks] for each in range(passes)], self.records, self.arrows)

    def later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, self.pace.random.random(), event))

    def told(self, worker: _Worker) -> str:
        assert worker.held is not None
        step, closed = worker.rank.steps[worker.held], self.closed_gate(worker)
        assert closed is not None
        seen = self.value(worker.rank, closed.counter)
        return f"rank {worker.rank.rank} is at {step.task} and waits for {closed}, sees {seen}"

    def begin_pass(self, rank: _Rank) -> None:
        while rank.epoch < len(rank.scripts):
            rank.enter_pass()
            if rank.steps:
                for worker in rank.workers:
                    if not worker.launched:  # one that slept through the pass before wakes up in this one
                        worker.launched = True
                        self.later(self.pace.arrival(), lambda worker=worker: self.draw(worker))  # type: ignore[misc]
                return
            # no task is there to signal the end of the pass
            self.later(self.pace.arrival(), self.flag(Counter(rank.rank, "finished"), rank.epoch, None, []))
            self.check_end(rank)

    def check_end(self, rank: _Rank) -> None:
        graph = rank.script.graph
        if missing := set(all_tasks(graph)) - rank.ran:
            raise ScheduleFault("never ran", f"{min(missing)} of rank {rank.rank}")
        for counter, total in graph.totals().items():
            if rank.counters[counter] != total:
                raise ScheduleFault("counter", f"{counter} ended at {rank.counters[counter]} instead of {total}")
        rank.ended += 1

    def draw(self, worker: _Worker) -> None:
        """A worker with nothing to do takes the next ticket, unless it holds one."""
        worker.launched = False
        if worker.held is None:
            worker.held = self.ticket(worker.rank)
        if worker.held is not None:
            worker.came = self.now
            self.arrivals += 1
            worker.queued = self.arrivals
            self.start_or_wait(worker)

    def start_or_wait(self, worker: _Worker) -> None:
        closed = self.closed_gate(worker)
        if closed is None:
            self.start(worker)
        else:
            self.waiting.setdefault(closed.counter, []).append(worker)

    def closed_gate(self, worker: _Worker) -> Gate | None:
        rank = worker.rank
        assert worker.held is not None
        gates = rank.steps[worker.held].gates
        return next((gate for gate in gates if self.value(rank, gate.counter) < gate.at_least), None)

    def ticket(self, rank: _Rank) -> int | None:
        if rank.next_ticket == len(rank.steps):
            return None
        rank.next_ticket += 1
        return rank.next_ticket - 1

    def value(self, rank: _Rank, counter: Counter) -> int:
        return self.flags[counter] if counter.name in FLAGS else rank.counters[counter]

    def start(self, worker: _Worker) -> None:
        rank, ticket = worker.rank, worker.held
        assert ticket is not None
        step = rank.steps[ticket]
        if step.task in rank.ran:
            raise ScheduleFault("ran twice", f"{step.task} of rank {rank.rank}")
        rank.ran.add(step.task)
        values = [self.read(rank, region, step.task) for region in step.reads]
        results = rank.script.compute(step.task, values)
        self.reading.update(step.reads)
        duration = self.pace.task(rank.script.graph, step.task)
        record = Record(
            rank.rank, worker.index, rank.epoch, ticket, step.task, worker.came, self.now, self.now + duration
        )
        self.records.append(record)
        openers = [self.opened[gate] for gate in step.gates if gate in self.opened]
        if openers:
            self.arrows.append((max(openers, key=lambda opener: opener.ended), record))
        worker.held = self.ticket(rank) if self.ahead else None
        self.later(duration, lambda: self.end(worker, step, record, results))
        self.progress(len(self.records))

    def read(self, rank: _Rank, region: Region, task: Task) -> Tensor:
        if region.heap:
            written, value = self.heap.get(region, (0, None))
        else:
            written, value = rank.epoch, rank.memory[-1].get(region)
        if value is None or written != rank.epoch:
            rule = "overwritten too early" if written > rank.epoch else "read too early"
            raise ScheduleFault(rule, f"{task} of rank {rank.rank} in pass {rank.epoch} reads {region}")
        return value

    def end(self, worker: _Worker, step: Step, record: Record, results: Sequence[Tensor]) -> None:
        rank = worker.rank
        self.reading.subtract(step.reads)
        written = dict(zip(step.writes, results, strict=True))
        travelling = [(region, value) for region, value in written.items() if region.rank != rank.rank]
        for region, value in written.items():
            if region.rank == rank.rank:
                self.write(rank, region, value)
        changed = []
        for counter, once in step.signals:
            if once is not None and rank.counters[once.counter] != once.at_least:
                continue
            if counter.name in FLAGS:
                rows = travelling if counter.rank != rank.rank else []
                self.later(self.pace.arrival(), self.flag(counter, rank.epoch, record, rows))
            else:
                rank.counters[counter] += 1
                self.opened[Gate(counter, rank.counters[counter])] = record
                changed.append(counter)
        self.wake(changed)
        if rank.counters[Counter(rank.rank, "done")] == len(rank.steps):
            self.opened = {gate: by for gate, by in self.opened.items() if gate.counter.rank != rank.rank}
            self.check_end(rank)
            self.begin_pass(rank)
        else:
            self.draw(worker)

    def write(self, rank: _Rank, region: Region, value: Tensor, epoch: int | None = None) -> None:
        epoch = rank.epoch if epoch is None else epoch
        if self.reading[region] > 0:
            raise ScheduleFault("overwritten too early", f"{region} is read while pass {epoch} writes it")
        if not region.heap:
            if region in rank.memory[-1]:
                raise ScheduleFault("written twice", f"{region} in pass {epoch}")
            rank.memory[-1][region] = value
            return
        if self.heap.get(region, (0, None))[0] >= epoch:
            raise ScheduleFault("written twice", f"{region} in pass {epoch}")
        self.heap[region] = epoch, value

    def flag(
        self, counter: Counter, epoch: int, record: Record | None, travelling: list[tuple[Region, Tensor]]
    ) -> Callable[[], None]:
        """The arrival of a flag, with the rows before it."""

        def arrive() -> None:
            for region, value in travelling:
                self.write(self.ranks[region.rank], region, value, epoch)
            self.flags[counter] = max(self.flags[counter], epoch)
            if record is not None:
                self.opened[Gate(counter, epoch)] = record
            self.wake([counter])

        return arrive

    def wake(self, changed: Sequence[Counter]) -> None:
        """Those that wait for these counters, in the order in which they came."""
        woken = [worker for counter in changed for worker in self.waiting.pop(counter, ())]
        for worker in sorted(woken, key=lambda each: each.queued):
            self.start_or_wait(worker)


def _same(left: Tensor, right: Tensor) -> bool:
    return left is right


class Travelled(NamedTuple):
    """dy between ranks. time: from the first row that left for a rank to the last that came there, on average over
    ranks and passes. hidden: of that time, the share that their readers' workers did not stand waiting for it."""

    time: float
    hidden: float


def travelled(records: Sequence[Record], workers: int) -> Travelled | None:
    """workers: of each rank. None where nothing travelled."""
    sent: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.task.kind == Kind.SEND:
            sent.setdefault((record.epoch, record.task.item), []).append(record)
    windows = {
        place: (min(each.started for each in found), max(each.ended for each in found)) for place, found in sent.items()
    }
    time = sum(end - begin for begin, end in windows.values())
    waited = 0.0
    for record in records:
        if record.task.kind == Kind.DOWN and (record.epoch, record.rank) in windows:  # which waits for nothing else
            begin, end = windows[record.epoch, record.rank]
            waited += max(0.0, min(record.started, end) - max(record.came, begin))
    return Travelled(time / len(windows), 1 - waited / (workers * time)) if time else None
