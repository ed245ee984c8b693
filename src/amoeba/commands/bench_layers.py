"""`amoeba bench`: runs the benchmark, prints a table per shape and pass, writes the document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.implementations import PEERS, names_of_ours
from amoeba.bench.suite import Measurement, Pass, Plan, Report, run_suite
from amoeba.bench.sustained import TURNS, MeterError, Sustained, open_meter
from amoeba.bench.timing import Ceilings, measure_ceilings
from amoeba.bench.workload import Shape, check_memory, default_suite, parse_shape, parse_suite
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value

PASSES: dict[str, list[Pass]] = {"forward": ["forward"], "training": ["training"], "both": ["forward", "training"]}
_MOST_SUSTAINED_SECONDS = 600.0


def check_plan(plan: Plan) -> None:
    check_memory(plan.problems(), plan.device, "training" in plan.passes)
    check_sustained(plan.sustained, plan.device)
    if plan.graphs and "training" not in plan.passes:
        raise bad_value("--graphs", "--pass training or both", "--pass forward", "leave one of them out")
    if plan.graphs and plan.device.type != "cuda":
        raise bad_value("--graphs", "a GPU: CUDA graphs are replayed there", plan.device.type, "leave it out")


def choose_shapes(shapes: Sequence[str], suite: str | None, device: torch.device) -> list[Shape]:
    of_suite = parse_suite(suite or default_suite(device))
    if shapes and suite:
        raise bad_value("--suite", "either --shape or --suite", "both", "leave one of them out")
    return [parse_shape(text) for text in shapes] or of_suite


def choose_peers(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in PEERS:
            remedy = "see docs/reference/bench.md for what they are"
            raise bad_value("--peer", f"one of {', '.join(PEERS)}", repr(name), remedy)
    return tuple(names) or PEERS


def choose_ours(names: Sequence[str]) -> Sequence[str] | None:
    for name in names:
        if name not in names_of_ours():
            wanted = "; ".join(names_of_ours())  # some have a comma in them
            raise bad_value("--ours", f"one of: {wanted}", repr(name), "leave it out for all of them")
    return tuple(names) or None


def choose_passes(name: str) -> list[Pass]:
    if name not in PASSES:
        raise bad_value("--pass", f"one of {', '.join(PASSES)}", repr(name), "training is forward and backward")
    return PASSES[name]


def check_sustained(seconds: float | None, device: torch.device) -> None:
    if seconds is None:
        return
    if not 0 < seconds <= _MOST_SUSTAINED_SECONDS:
        remedy = "4 seconds are enough for a step of 20 ms"
        raise bad_value("--sustained", f"seconds, at most {_MOST_SUSTAINED_SECONDS:g}", seconds, remedy)
    try:
        open_meter(device)
    except MeterError as error:
        remedy = "leave it out"
        raise bad_value("--sustained", "a GPU whose clocks and watts can be read", f"none: {error}", remedy) from error


def default_dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.bfloat16 if device.type == "cuda" else torch.float32]


def command_line(plan: Plan) -> str:
    """The command that measures the same again, with all defaults written out."""
    words = ["amoeba", "bench", "--device", plan.device.type]
    words += [word for shape in plan.shapes for word in ("--shape", shape.name)]
    words += [word for dtype in plan.dtypes for word in ("--dtype", dtype_name(dtype))]
    passes = next(name for name, passes in PASSES.items() if passes == plan.passes)
    words += ["--pass", passes, "--repeats", str(plan.repeats)]
    if tuple(plan.peers) != PEERS:
        words += [word for peer in plan.peers for word in ("--peer", peer)]
    words += [word for name in plan.ours or () for word in ("--ours", name)]
    words += [] if plan.sustained is None else ["--sustained", f"{plan.sustained:g}"]
    words += ["--graphs"] if plan.graphs else []
    return shlex.join(words)


def run(
    plan: Plan,
    path: Path | None,
    output: Output,
    ceilings: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] | None = measure_ceilings,
) -> tuple[dict[str, Any], bool]:
    """Prints the tables; returns the document, and False if an implementation of ours was refused as wrong.

    With ceilings=None they are not measured, and the tables have no shares of them.
    """
    measured = BenchRun(command_line(plan), "results", path, output)
    if ceilings is not None:
        computed = dict.fromkeys(dtype for dtype, _ in plan.problems())
        measured.measure_ceilings(plan.device, list(computed), ceilings)

    def keep(report: Report) -> None:
        _print(report, measured.limits, output)
        measured.keep(report)

    detail = measured.progress if output.verbose else _untold
    reports = run_suite(plan, measured.progress, keep, detail)
    wrong = [m for report in reports for m in report.measurements if m.ours and m.status == "refused"]
    return measured.finish(), not wrong


def _untold(line: str) -> None:
    """For what is told with -v only."""


def _print(report: Report, limits: Ceilings | None, output: Output) -> None:
    shape = report.shape
    sizes = f"T={shape.tokens} H={shape.hidden} I={shape.intermediate} E={shape.experts} K={shape.top_k}"
    sizes += f" R={shape.rank}" if shape.rank else ""
    title = f"{shape.name} ({sizes}) {report.measured_pass}, {dtype_name(report.dtype)} on {report.device}"
    timed = [measurement for measurement in report.measurements if measurement.status == "timed"]
    peers = [measurement.implementation for measurement in timed if not measurement.ours]
    unit = "TFLOP/s" if max((m.flops_per_second or 0 for m in timed), default=0) >= 1e12 else "GFLOP/s"
    rows = [_row(measurement, report, peers, unit, limits) for measurement in timed]
    output.table(title, list(rows[0]) if rows else [""], [list(row.values()) for row in rows])
    for note in _notes(report, timed):
        output.line(f"  {note}")
    if any(measurement.sustained for measurement in timed):
        _print_sustained(title, report, timed, limits, output)
    _print_captured(title, timed, output)
    for (status, reason), names in _untimed(report.measurements).items():
        style = "bold red" if status == "refused" else None
        output.line(f"  {'; '.join(names)}: {status}, {reason}", style=style)


def _untimed(measurements: Sequence[Measurement]) -> dict[tuple[str, str | None], list[str]]:
    found: dict[tuple[str, str | None], list[str]] = {}
    for each in measurements:
        if each.status != "timed":
            found.setdefault((each.status, each.reason), []).append(each.implementation)
    return found


def _notes(report: Report, timed: Sequence[Measurement]) -> Iterator[str]:
    if timed:
        fewest, most = min(m.rounds for m in timed), max(m.rounds for m in timed)
        rounds = str(most) if fewest == most else f"{fewest} to {most}"
        yield f"medians of {rounds} rounds; vs: speed-up over that implementation"
        if report.rest_ms:
            yield f"rests of {report.rest_ms:g} ms before each pass, and caches flushed"
    yield f"error: the worst of output and gradients, against {dtype_name(report.reference)}"
    yield f'backend="auto" takes {report.auto}'
    if report.shape.skew:
        yield f"the busiest expert gets {report.busiest_expert:.1f} times the mean"


def _print_sustained(
    title: str, report: Report, timed: Sequence[Measurement], limits: Ceilings | None, output: Output
) -> None:
    by_name = {each.implementation: each.sustained for each in timed if each.sustained is not None}
    peers = [each.implementation for each in timed if each.implementation in by_name and not each.ours]
    rows = [_sustained_row(name, by_name, peers, report, limits) for name in by_name]
    output.table(f"{title}, back to back", list(rows[0]), [list(row.values()) for row in rows])
    found = next(iter(by_name.values()))
    output.line(
        f"  no pauses, about {found.seconds:.1f} s each in {TURNS} alternating rounds after warm-up; "
        f"W and MHz are means, power limit {found.power_limit_watts:.0f} W"
    )


def _sustained_row(
    name: str, by_name: dict[str, Sustained], peers: Sequence[str], report: Report, limits: Ceilings | None
) -> dict[str, str]:
    found = by_name[name]
    rate = report.flops / found.ms * 1e3
    row = {"": name, "ms": three_digits(found.ms)}
    if found.backward_ms is not None:
        row |= {"forward": three_digits(found.forward_ms), "backward": three_digits(found.backward_ms)}
    row["TFLOP/s"] = three_digits(rate / 1e12)
    if limits is not None:
        row["of matmul"] = f"{rate / limits.matmul_flops_per_second(report.dtype):.0%}"
    row |= {"SM MHz": f"{found.sm_mhz:.0f}", "W": f"{found.watts:.0f}", "J/step": three_digits(found.joules_per_step)}
    versus = {f"vs {peer.removeprefix('transformers ')}": f"{by_name[peer].ms / found.ms:.2f}x" for peer in peers}
    return row | versus


def _print_captured(title: str, timed: Sequence[Measurement], output: Output) -> None:
    found = [each for each in timed if each.backward_host is not None]
    if not found:
        return
    names = [each.implementation for each in found if each.in_graphs is not None]
    rows = [_captured_row(each, names) for each in found]
    output.table(f"{title}, in CUDA graphs", list(rows[0]), [list(row.values()) for row in rows])
    layers = next(each.backward_host.layers for each in found if each.backward_host is not None)
    output.line(
        "  forward, backward: device ms, eager and as graphs, replayed alternately; vs: speed-up of the backward; "
        f"host: ms until a backward returns, median (minimum), alone and per layer of {layers}"
    )
    for each in found:
        if each.not_in_graphs is not None:
            output.line(f"  {each.implementation}: not captured, {each.not_in_graphs}")


def _captured_row(measurement: Measurement, names: Sequence[str]) -> dict[str, str]:
    graphs, host = measurement.in_graphs, measurement.backward_host
    assert host is not None
    forward, backward = (
        ("-", "-") if graphs is None else (_ms(graphs.forward_median_ms), _ms(graphs.backward_median_ms))
    )
    row = {"": measurement.implementation, "forward": _ms(measurement.forward_median_ms), "in graph": forward}
    row |= {"backward": _ms(measurement.backward_median_ms), "in graph ": backward}
    row["host"] = f"{_ms(host.median_ms)} ({_ms(host.min_ms)})"
    row[f"of {host.layers}"] = f"{_ms(host.of_several_median_ms)} ({_ms(host.of_several_min_ms)})"
    faster = {} if graphs is None else graphs.backward_times_faster_than
    versus = {name: f"{faster[name]:.3f}x" if name in faster else "-" for name in names}
    return row | {f"vs {name.removeprefix('amoeba ')}": cell for name, cell in versus.items()}


def _row(
    measurement: Measurement, report: Report, peers: Sequence[str], unit: str, limits: Ceilings | None
) -> dict[str, str]:
    assert measurement.median_ms is not None
    assert measurement.min_ms is not None
    assert measurement.flops_per_second is not None
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    row = {"": measurement.implementation, "ms": three_digits(measurement.median_ms)}
    row["min"] = three_digits(measurement.min_ms)
    if report.measured_pass == "training":
        row["forward"] = three_digits(measurement.forward_median_ms or 0)
        row["backward"] = three_digits(measurement.backward_median_ms or 0)
        forward, backward = measurement.forward_flops_per_second or 0, measurement.backward_flops_per_second or 0
        row[unit] = f"{forward / scale:.0f}/{backward / scale:.0f}"
    else:
        row[unit] = three_digits(measurement.flops_per_second / scale)
    if limits is not None and not report.shape.forward_only:
        row["of matmul"] = f"{measurement.flops_per_second / limits.matmul_flops_per_second(report.dtype):.0%}"
    if report.measured_pass == "training":
        row["kept MiB"] = _mib(measurement.kept_bytes)
    else:
        row["weights GB/s"] = three_digits((measurement.weight_bytes_per_second or 0) / 1e9)
    if limits is not None and report.shape.forward_only:
        row["of copy"] = f"{(measurement.weight_bytes_per_second or 0) / limits.copy_bytes_per_second:.0%}"
    if report.device == "cuda" and report.shape.forward_only:
        graph_ms, rate = measurement.graph_median_ms, measurement.graph_weight_bytes_per_second or 0
        row["in graph"] = "-" if graph_ms is None else three_digits(graph_ms)
        if limits is not None:
            row["of copy there"] = "-" if graph_ms is None else f"{rate / limits.copy_bytes_per_second:.0%}"
    if measurement.host_median_ms is not None:
        row["host ms"] = three_digits(measurement.host_median_ms)
    row |= {"peak MiB": _mib(measurement.peak_bytes), "error": f"{measurement.worst_error:.1e}"}
    faster = measurement.times_faster_than
    versus = {peer: f"{faster[peer]:.2f}x" if peer in faster else "-" for peer in peers}
    return row | {f"vs {peer.removeprefix('transformers ')}": cell for peer, cell in versus.items()}


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.2f}" if size < 10 * 2**20 else f"{size / 2**20:.0f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
