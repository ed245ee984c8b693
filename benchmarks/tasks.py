"""`python -m benchmarks tasks`: the scheduled backward executed on paper, and what came of it.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I

How long it would take on H200s is estimated from the times of tasks that were measured there:

    job = [scripts_without_tensors(sizes, tokens=8192, ranks=1)]      # a layer of real size, its order alone
    ran = simulate(job, WORKERS, Pace(0, [1.0], work=microseconds))

A worker finds its next task and waits at its gates while the four stages in flight are computed. So the time a ticket
takes is hidden behind the last four stages of the task before it; behind a short task not all of it fits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amoeba.bench.workload import Shape, parse_shape
from amoeba.commands.options import check_file_to_write, check_seed
from amoeba.commands.output import Output
from amoeba.commands.trace import print_summary
from amoeba.core.errors import bad_value, counted
from amoeba.system.fast_imports import loading
from amoeba.system.files import write_whole
from amoeba.tasks.graph import Graph, Kind, Task
from amoeba.tasks.picture import draw
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling, is_small, tiling_of
from amoeba.tasks.timeline import Summary, summarise, trace_text
from benchmarks.schedules.cases import TOLERANCE, make_case
from benchmarks.schedules.computation import OrderOnly
from benchmarks.schedules.simulator import Pace, Ran, ScheduleFault, Script, simulate, travelled

WORKERS = 132
# In bf16, from a trace of sonic_a (H200, 2026-11-16), for all workers together. The router's kinds were not timed.
FLOP_PER_MICROSECOND = {
    Kind.DOWN: 644e6 / WORKERS,
    Kind.UP: 700e6 / WORKERS,
    Kind.DOWN_WEIGHTS: 606e6 / WORKERS,
    Kind.UP_WEIGHTS: 634e6 / WORKERS,
    Kind.ROUTER: 600e6 / WORKERS,
    Kind.ROUTER_WEIGHTS: 600e6 / WORKERS,
}
# A row pass, if all workers run one at once. Sums over tokens are assumed to be as fast, and so are weights and their
# gradients where an expert has so few rows that memory is the limit.
BYTES_PER_MICROSECOND = 4.5e6 / WORKERS
LINK_BYTES_PER_MICROSECOND = 450e3 / 24  # one worker's share of NVLink, with 24 of them at 450 GB/s
BYTES = 2  # of a number in bf16
# To draw a ticket, where no list of tasks was made in advance; and to decode the task, check an open gate and load the
# first rows. With their sum, qwen3's layer at 128 tokens, nearly all of whose tasks are shorter, takes about as long
# as measured (0.82 ms without a list).
TICKET_MICROSECONDS, GATE_MICROSECONDS = 0.7, 2.8
RING = 4  # stages
_STAGE_FLOP = 2.0 * 128 * 256 * 64
# Multiplications in fp64, some seconds' worth.
MOST_WORK = 2e9
MOST_RANKS, MOST_WORKERS, MOST_TASKS = 64, 4096, 400_000
OF_SCHEDULE = "tasks of the first schedule, all ranks and passes"
SHAPE, TIMING_SHAPE = "40,32,24,6,2", "qwen3_small"
UNIT, TIMING_UNIT = "steps", "us"  # a task of a random schedule takes one step on average
_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_UPDATES, _BAR = 5.0, 0.2, 24


class Job(NamedTuple):
    """remote: ranks reached by put and signal. timing: estimated times without tensors, instead of `schedules` random
    schedules with them."""

    shape: Shape
    ranks: int
    workers: int
    passes: int
    remote: frozenset[int]
    seed: int
    timing: bool
    schedules: int


def choose_job(
    shape: str | None, ranks: int, workers: int | None, passes: int, remote: str | None, seed: int, timing: bool,
    schedules: int, trace: Path | None, picture: Path | None,
) -> Job:  # fmt: skip
    """As it is written on the command line. ValueError for what cannot be simulated, or not be written."""
    found = parse_shape(shape or (TIMING_SHAPE if timing else SHAPE))
    workers = workers or (WORKERS if timing else 4)
    _check_size(found, ranks, workers, passes, timing)
    far = _ranks_named(remote, ranks)
    for option, file, name in (("--trace", trace, "tasks.json"), ("--picture", picture, "tasks.svg")):
        if file is not None:
            check_file_to_write(option, file, name)
    check_seed(seed)
    return Job(found, ranks, workers, passes, far, seed, timing, schedules)


def run(job: Job, trace: Path | None, picture: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    """A document, and whether all is well. trace, picture: files to write."""
    document, ok, ran = (_estimate if job.timing else _prove)(job, output)
    if ran is not None:
        unit = TIMING_UNIT if job.timing else UNIT
        document |= _written(ran, job.workers, job.shape, unit, trace, picture, output)
    return document, ok


def _check_size(shape: Shape, ranks: int, workers: int, passes: int, timing: bool) -> None:
    for name, value, most in (("--ranks", ranks, MOST_RANKS), ("--workers", workers, MOST_WORKERS)):
        if value > most:
            raise bad_value(name, f"at most {most}", value, "a smaller number shows the same")
    work = 18.0 * ranks * passes * shape.rows * shape.hidden * shape.intermediate
    if not timing and work > MOST_WORK:
        remedy = "lower T, H, I or --passes, or add --timing, which needs no tensors"
        raise bad_value("--shape", f"at most {MOST_WORK:.0e} multiplications in all", f"{work:.0e}", remedy)
    # row tiles and tiles of weights, of the size that they have on a GPU
    tiles = (shape.rows * ranks / 128 + shape.experts) * (shape.hidden + shape.intermediate) / 256
    tiles += shape.experts * 3 * shape.hidden * shape.intermediate / (128 * 256)
    if timing and passes * tiles > MOST_TASKS:
        remedy = "lower T, or --passes 1"
        raise bad_value("--shape", f"at most {MOST_TASKS} tasks", f"about {passes * tiles:.0f}", remedy)


def _ranks_named(text: str | None, ranks: int) -> frozenset[int]:
    try:
        found = frozenset(int(word) for word in text.split(",")) if text else frozenset()
    except ValueError:
        raise bad_value("--remote", "ranks such as 1,3", repr(text), "count them from 0") from None
    if outside := [rank for rank in found if not 0 <= rank < ranks]:
        raise bad_value("--remote", f"ranks from 0 to {ranks - 1}", outside[0], "raise --ranks, or leave it out")
    return found


def _prove(job: Job, output: Output) -> tuple[dict[str, Any], bool, Ran | None]:
    shape, ranks, workers, passes, remote, seed, _, schedules = job
    sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k)
    dice = random.Random(seed)
    tiling = Tiling(
        rows=8,
        down_columns=16,
        up_columns=16,
        weight_rows=32,
        weight_columns=32,
        router_columns=16,
        bias_columns=16,
        tokens=8,
        sent=8,
        wave=2,
        group=4,
    )
    owner = tuple(expert * ranks // shape.experts for expert in range(shape.experts))
    counts = [[dice.choice((0, shape.tokens, shape.tokens)) for _ in range(ranks)] for _ in range(passes)]
    counts[0] = [shape.tokens] * ranks
    case = make_case(sizes, tiling, counts, owner, remote, seed=seed, skew=0.3, biases=True)
    tasks = case.job()
    _say(shape, ranks, workers, passes, f"{schedules} random schedules, in fp64", output)
    errors: dict[str, float] = {}
    fault, ran = None, None
    with output.working():
        for number in range(schedules):
            if output.on_terminal:
                output.progress(f"schedule {number + 1} of {schedules}")
            slowness = [dice.choice((1.0, 1.0, 5.0)) if number else 1.0 for _ in range(ranks)]
            pace = Pace(seed + number, slowness, latency=dice.choice((0.1, 1.0)))
            try:
                found = simulate(tasks, workers, pace)
            except ScheduleFault as error:
                fault = f"schedule {number}: {error}"
                break
            ran = ran or found
            errors = {name: max(error, errors.get(name, 0.0)) for name, error in case.check(found).items()}
    ok = fault is None and max(errors.values()) <= TOLERANCE
    travel: dict[str, Any] = {}
    summary = None if ran is None else summarise(ran.records, workers)
    if summary is not None and ran is not None:
        print_summary(summary, output, OF_SCHEDULE)
        travel = _say_travelled(ran, workers, output)
    if fault is not None:
        output.line(f"FAILED, {fault}", style="red")
    else:
        worst = max(errors, key=lambda name: errors[name])
        output.line(
            "each task ran once, each read came after its writes, counters ended at their totals, no worker got stuck"
        )
        output.line(f"{'ok' if ok else 'FAILED'}: gradients within {errors[worst]:.1e} of the reference ({worst})")
    document = _document(shape, ranks, workers, passes, summary)
    document |= travel | {"schedules": schedules, "remote": sorted(remote), "errors": errors, "fault": fault, "ok": ok}
    return document, ok, ran


def _estimate(job: Job, output: Output) -> tuple[dict[str, Any], bool, Ran | None]:
    shape, ranks, workers, passes, remote, seed, *_ = job
    _say(shape, ranks, workers, passes, "one schedule with estimated times of an H200, without tensors", output)
    # nothing here is garbage before the end, and looking for it takes most of the time
    with output.working(), loading():
        output.progress("making the tasks")
        sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k)
        tasks = [
            scripts_without_tensors(
                sizes, shape.tokens, ranks, skew=shape.skew, remote=remote, seed=seed + number, epoch=number + 1
            )
            for number in range(passes)
        ]
        total = sum(script.graph.tickets for scripts in tasks for script in scripts)
        pace = Pace(seed, [1.0] * ranks, latency=2.0, work=microseconds)
        ran = simulate(tasks, workers, pace, progress=_progress(total, output))
    summary = summarise(ran.records, workers)
    print_summary(summary, output, OF_SCHEDULE, TIMING_UNIT)
    travel = _say_travelled(ran, workers, output, TIMING_UNIT)
    output.line(f"{summary.span / 1e3 / passes:.2f} ms per pass: an estimate for this order of tasks")
    document = _document(shape, ranks, workers, passes, summary)
    return document | travel | {"remote": sorted(remote), "ok": True}, True, ran


def _progress(total: int, output: Output) -> Callable[[int], None]:
    """A bar on a terminal; in a pipe a line every few seconds."""
    last = 0.0

    def show(started: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= (_SECONDS_BETWEEN_UPDATES if output.on_terminal else _SECONDS_BETWEEN_LINES):
            last = now
            done = _BAR * started // total
            bar = f"[{'#' * done}{'.' * (_BAR - done)}] " if output.on_terminal else ""
            output.progress(f"{bar}{started:,} of {total:,} tasks")

    return show


def _say(shape: Shape, ranks: int, workers: int, passes: int, how: str, output: Output) -> None:
    output.line(
        f"{shape.experts} experts over {counted(ranks, 'rank')}, hidden {shape.hidden}, intermediate "
        f"{shape.intermediate}; {shape.tokens} tokens per rank, {shape.top_k} experts per token"
    )
    output.line(f"{workers} workers per rank, {passes} pass{'es' if passes > 1 else ''}; {how}")


def _say_travelled(ran: Ran, workers: int, output: Output, unit: str = UNIT) -> dict[str, Any]:
    found = travelled(ran.records, workers)
    if found is None:
        return {}
    output.line(f"dy from other ranks was in transit for {found.time:.1f} {unit}, {found.hidden:.0%} of it hidden")
    return {"travelled": found._asdict()}


def _document(shape: Shape, ranks: int, workers: int, passes: int, summary: Summary | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "document": "benchmarks tasks",
        "shape": [shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k],
        "ranks": ranks,
        "workers": workers,
        "passes": passes,
    }
    if summary is not None:
        document["kinds"] = {kind.name.lower(): each._asdict() for kind, each in summary.kinds.items()}
        document |= {name: getattr(summary, name) for name in ("span", "busy", "waited", "busiest", "idlest")}
    return document


def _written(
    ran: Ran, workers: int, shape: Shape, unit: str, trace: Path | None, picture: Path | None, output: Output
) -> dict[str, str]:
    written = {}
    if trace is not None:
        write_whole(trace, trace_text(ran.records, ran.arrows))
        output.line(f"{trace}: open it at ui.perfetto.dev")
        written["trace"] = str(trace)
    if picture is not None:
        sizes = f"T={shape.tokens} H={shape.hidden} I={shape.intermediate} E={shape.experts} K={shape.top_k}"
        write_whole(picture, draw(ran.records, workers, f"{sizes}, simulated", unit))
        output.line(f"{picture}: a picture of it")
        written["picture"] = str(picture)
    return written


def microseconds(graph: Graph, task: Task) -> float:
    flop = _flop(graph, task)
    half = task.kind in (Kind.DOWN, Kind.UP) and _small(graph) and _rows(graph, task) <= graph.tiling.rows // 2
    sent = graph.tiling.sent * graph.sizes.hidden * BYTES if task.kind in (Kind.SEND, Kind.RETURN) else 0
    work = max(
        flop * (0.5 if half else 1.0) / FLOP_PER_MICROSECOND.get(task.kind, 1.0),
        _bytes(graph, task) / BYTES_PER_MICROSECOND,
        sent / LINK_BYTES_PER_MICROSECOND,
    )
    ticket = GATE_MICROSECONDS + (TICKET_MICROSECONDS if graph.ranks > 1 else 0.0)  # over ranks there is no list
    return work + max(0.0, ticket - work * min(1.0, RING * _STAGE_FLOP / max(flop, _STAGE_FLOP)))


def _small(graph: Graph) -> bool:
    hidden, intermediate, _, top_k = graph.sizes
    return is_small(graph.rows.tokens * top_k, hidden, intermediate, over_ranks=graph.ranks > 1)


def _rows(graph: Graph, task: Task) -> int:
    _, first, end = graph.rows.tiles[task.item]
    return end - first


def _product(graph: Graph, kind: Kind) -> int:
    """Numbers of the weights that a tile of DOWN or UP reads."""
    if kind == Kind.DOWN:
        return graph.sizes.hidden * graph.tiling.down_columns
    return graph.sizes.width * graph.tiling.up_columns


def _flop(graph: Graph, task: Task) -> float:
    kind, sizes, tiling, rows = task.kind, graph.sizes, graph.tiling, graph.rows
    if kind in (Kind.DOWN, Kind.UP):  # whole tiles, also where few rows are left
        return 2.0 * tiling.rows * _product(graph, kind)
    if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        count = sum(tile.end - tile.first for tile in rows.tiles[slice(*graph.tile_range(task.item))])
        return 2.0 * count * tiling.weight_rows * tiling.weight_columns * len(graph.bundled(task))
    if kind == Kind.ROUTER:
        return 2.0 * len(graph.tokens_of(task.item)) * sizes.experts * sizes.hidden
    return 2.0 * rows.tokens * sizes.experts * tiling.router_columns if kind == Kind.ROUTER_WEIGHTS else 0.0


def _bytes(graph: Graph, task: Task) -> int:
    kind, sizes, tiling = task.kind, graph.sizes, graph.tiling
    if kind == Kind.ACTIVATE:  # dA' and h in, s·a and dh out
        return _rows(graph, task) * 6 * sizes.intermediate * BYTES
    if kind in (Kind.DOWN, Kind.UP) and len(graph.rows.tiles) <= graph.rows.experts:  # each reads its weights
        return _product(graph, kind) * BYTES
    if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
        return len(graph.bundled(task)) * tiling.weight_rows * tiling.weight_columns * BYTES
    if kind == Kind.COMBINE:
        return len(graph.tokens_of(task.item)) * (sizes.top_k + 1) * sizes.hidden * BYTES
    return 0


def scripts_without_tensors(
    sizes: Sizes,
    tokens: int,
    ranks: int,
    *,
    skew: float = 0.0,
    remote: frozenset[int] = frozenset(),
    seed: int = 0,
    epoch: int = 1,
) -> list[Script]:
    """One pass of each rank with random routing, in the order that Hopper's kernel uses for a layer of this size.
    skew: exponent of a Zipf law for the experts' popularity."""
    own, rows = sizes._replace(experts=max(1, sizes.experts // ranks)), tokens * sizes.top_k
    small = is_small(rows, sizes.hidden, sizes.intermediate, over_ranks=ranks > 1)
    tiling = tiling_of(own, rows, WORKERS, small)
    generator = torch.Generator().manual_seed(seed)
    popular_E = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu") ** -skew
    popular_E = popular_E[torch.randperm(sizes.experts, generator=generator, dtype=torch.int64, device="cpu")]
    chosen = torch.multinomial(popular_E.expand(ranks * tokens, -1), sizes.top_k, generator=generator)
    owner = tuple(expert * ranks // sizes.experts for expert in range(sizes.experts))
    divided = divide_rows(chosen.view(ranks, tokens, sizes.top_k).tolist(), owner, ranks, tiling.rows)
    graphs = (Graph(rank, divided, sizes, tiling, remote=remote, router=ranks > 1) for rank in range(ranks))
    return [Script(OrderOnly(graph, epoch)) for graph in graphs]
