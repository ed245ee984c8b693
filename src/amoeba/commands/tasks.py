"""`amoeba tasks simulate`: the scheduled backward executed on paper, and what came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Json, Verbose, check_file_to_write, check_seed
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.commands.typer_app import Typer
from amoeba.core.errors import bad_value, counted
from amoeba.system.fast_imports import loading

if TYPE_CHECKING:
    from amoeba.bench.workload import Shape
    from amoeba.tasks.simulator import Ran
    from amoeba.tasks.timeline import Summary

tasks = Typer(name="tasks", help="Tools for the scheduled backward.", no_args_is_help=True)

# Multiplications in fp64, some seconds' worth.
MOST_WORK = 2e9
MOST_RANKS, MOST_WORKERS, MOST_TASKS = 64, 4096, 400_000
OF_SCHEDULE = "tasks of the first schedule, all ranks and passes"
SHAPE, TIMING_SHAPE = "40,32,24,6,2", "qwen3_small"
UNIT, TIMING_UNIT = "steps", "us"  # a task of a random schedule takes one step on average
_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_UPDATES, _BAR = 5.0, 0.2, 24


@tasks.command()
def simulate(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help=f"Layer shape T,H,I,E,K, with T tokens per rank (default: {SHAPE}). With --timing also a name such as "
            f"qwen3_30b (default: {TIMING_SHAPE}).",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Expert-parallel ranks.")] = 2,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Workers per rank (default: 4; with --timing 132, as on an H200)."),
    ] = None,
    passes: Annotated[int, typer.Option("--passes", min=1, help="Consecutive backward passes.")] = 2,
    schedules: Annotated[int, typer.Option("--schedules", min=1, help="Number of random schedules.")] = 20,
    remote: Annotated[
        str | None, typer.Option("--remote", help="Ranks reached by put and signal instead of loads, such as 1,3.")
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing",
            help="Estimate the time on an H200 instead: one schedule without tensors, for layers of real size.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for tokens, routing and schedules.")] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Save the first schedule as JSON for ui.perfetto.dev.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Save the first schedule as an SVG picture.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Simulate the scheduled backward in random orders: no early read, no deadlock, every gradient correct."""
    output = start(verbose)
    with usage():
        from amoeba.bench.workload import parse_shape

        found = parse_shape(shape or (TIMING_SHAPE if timing else SHAPE))
        workers = workers or (132 if timing else 4)
        _check_size(found, ranks, workers, passes, timing)
        far = _ranks_named(remote, ranks)
        for option, file, name in (("--trace", trace, "tasks.json"), ("--picture", picture, "tasks.svg")):
            if file is not None:
                check_file_to_write(option, file, name)
        check_seed(seed)
    if timing:
        document, ok, ran = _estimate(found, ranks, workers, passes, far, seed, output)
    else:
        document, ok, ran = _prove(found, ranks, workers, passes, schedules, far, seed, output)
    if ran is not None:
        document |= _written(ran, workers, found, TIMING_UNIT if timing else UNIT, trace, picture, output)
    finish(output, document, ok, json)


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


def _prove(
    shape: Shape,
    ranks: int,
    workers: int,
    passes: int,
    schedules: int,
    remote: frozenset[int],
    seed: int,
    output: Output,
) -> tuple[dict[str, Any], bool, Ran | None]:
    from amoeba.proof.schedules import TOLERANCE, make_case
    from amoeba.tasks.simulator import Pace, ScheduleFault, simulate
    from amoeba.tasks.sizes import Sizes, Tiling
    from amoeba.tasks.timeline import summarise

    sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k)
    draw = random.Random(seed)
    tiling = Tiling(
        rows=8,
        down_columns=16,
        up_columns=16,
        weight_rows=32,
        weight_columns=32,
        router_columns=16,
        tokens=8,
        sent=8,
        wave=2,
        group=4,
    )
    owner = tuple(expert * ranks // shape.experts for expert in range(shape.experts))
    counts = [[draw.choice((0, shape.tokens, shape.tokens)) for _ in range(ranks)] for _ in range(passes)]
    counts[0] = [shape.tokens] * ranks
    case = make_case(sizes, tiling, counts, owner, remote, seed=seed, skew=0.3)
    job = case.job()
    _say(shape, ranks, workers, passes, f"{schedules} random schedules, in fp64", output)
    errors: dict[str, float] = {}
    fault, ran = None, None
    with output.working():
        for number in range(schedules):
            if output.on_terminal:
                output.progress(f"schedule {number + 1} of {schedules}")
            slowness = [draw.choice((1.0, 1.0, 5.0)) if number else 1.0 for _ in range(ranks)]
            pace = Pace(seed + number, slowness, latency=draw.choice((0.1, 1.0)))
            try:
                found = simulate(job, workers, pace)
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


def _estimate(
    shape: Shape, ranks: int, workers: int, passes: int, remote: frozenset[int], seed: int, output: Output
) -> tuple[dict[str, Any], bool, Ran | None]:
    from amoeba.tasks.estimate import microseconds, scripts_without_tensors
    from amoeba.tasks.simulator import Pace, simulate
    from amoeba.tasks.sizes import Sizes
    from amoeba.tasks.timeline import summarise

    _say(shape, ranks, workers, passes, "one schedule with estimated times of an H200, without tensors", output)
    # nothing here is garbage before the end, and looking for it takes most of the time
    with output.working(), loading():
        output.progress("making the tasks")
        sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k)
        job = [
            scripts_without_tensors(
                sizes, shape.tokens, ranks, skew=shape.skew, remote=remote, seed=seed + number, epoch=number + 1
            )
            for number in range(passes)
        ]
        total = sum(script.graph.tickets for scripts in job for script in scripts)
        pace = Pace(seed, [1.0] * ranks, latency=2.0, work=microseconds)
        ran = simulate(job, workers, pace, progress=_progress(total, output))
    summary = summarise(ran.records, workers)
    print_summary(summary, output, OF_SCHEDULE, TIMING_UNIT)
    travel = _say_travelled(ran, workers, output, TIMING_UNIT)
    output.line(f"{summary.span / 1e3 / passes:.2f} ms a pass: an estimate of the order, not a measurement")
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
        f"{shape.intermediate}; {shape.tokens} tokens a rank, {shape.top_k} experts per token"
    )
    output.line(f"{workers} workers a rank, {passes} pass{'es' if passes > 1 else ''}; {how}")


def print_summary(summary: Summary, output: Output, title: str, unit: str = UNIT) -> None:
    from amoeba.tasks.graph import SEED_KIND

    all_time = sum(each.time for each in summary.kinds.values()) or 1.0
    rows = [
        [
            kind.name.lower(),
            SEED_KIND[kind],
            str(each.tasks),
            f"{100 * each.time / all_time:.1f}",
            f"{each.waited / each.tasks:.2f}",
        ]
        for kind, each in summary.kinds.items()
        if each.tasks
    ]
    columns = ["kind", "in FlashMoE", "tasks", "time %", f"waited {unit} each"]
    output.table(title, columns, rows, text=("kind", "in FlashMoE"))
    output.line(
        f"workers were busy {100 * summary.busy:.0f} % of {summary.span:.1f} {unit} "
        f"({100 * summary.idlest:.0f} to {100 * summary.busiest:.0f}), and waited {100 * summary.waited:.0f} % at gates"
    )


def _say_travelled(ran: Ran, workers: int, output: Output, unit: str = UNIT) -> dict[str, Any]:
    from amoeba.tasks.timeline import travelled

    found = travelled(ran.records, workers)
    if found is None:
        return {}
    output.line(f"dy from other ranks was in transit for {found.time:.1f} {unit}, {found.hidden:.0%} of it hidden")
    return {"travelled": found._asdict()}


def _document(shape: Shape, ranks: int, workers: int, passes: int, summary: Summary | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "document": "amoeba tasks simulate",
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
    from amoeba.system.files import write_whole
    from amoeba.tasks.picture import draw
    from amoeba.tasks.timeline import trace_text

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
