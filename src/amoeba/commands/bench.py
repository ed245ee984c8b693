"""`amoeba bench`: runs the benchmark, prints a table per shape and pass, writes the document."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.document import make_document, result_path, write_new
from amoeba.bench.implementations import PEERS
from amoeba.bench.shapes import Shape, default_suite, parse_shape, parse_suite
from amoeba.bench.suite import Measurement, Pass, Report, run_suite
from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output, strict_json
from amoeba.errors import bad_value
from amoeba.machine import load_average, usable_cores

PASSES: dict[str, list[Pass]] = {
    "forward": ["forward"],
    "training": ["training"],
    "both": ["forward", "training"],
}
# A machine this busy (per core) before the first measurement distorts the times.
_BUSY = 0.5


def choose_shapes(shapes: Sequence[str], suite: str | None, device: torch.device) -> list[Shape]:
    if shapes and suite:
        raise bad_value("--suite", "either --shape or --suite", "both", "leave one of them out")
    return [parse_shape(text) for text in shapes] if shapes else parse_suite(suite or default_suite(device))


def choose_passes(name: str) -> list[Pass]:
    if name not in PASSES:
        raise bad_value("--pass", f"one of {', '.join(PASSES)}", repr(name), "training is forward and backward")
    return PASSES[name]


def default_dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.bfloat16 if device.type == "cuda" else torch.float32]


def free_path(directory: Path | None) -> Path | None:
    """Where the document will go; raises before anything is measured if there is an earlier one."""
    return None if directory is None else result_path(directory)


def command_line(
    shapes: Sequence[Shape], device: torch.device, dtypes: Sequence[torch.dtype], passes: str, repeats: int
) -> str:
    """The command that measures the same again, with all defaults written out."""
    words = ["amoeba", "bench", "--device", device.type]
    for shape in shapes:
        words += ["--shape", shape.name]
    for dtype in dtypes:
        words += ["--dtype", dtype_name(dtype)]
    return shlex.join([*words, "--pass", passes, "--repeats", str(repeats)])


def run(
    shapes: Sequence[Shape],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    passes: str,
    repeats: int,
    path: Path | None,
    output: Output,
) -> tuple[dict[str, Any], bool]:
    """Prints the tables; returns the document, and False if an implementation of ours was refused as wrong."""
    load = load_average()
    if load is not None and load > _BUSY * usable_cores():
        output.warning(f"this machine is busy (load {load} on {usable_cores()} cores): the times are not to be trusted")
    # Lines and no spinner: a spinner is a thread that would run while others are timed.
    reports = run_suite(shapes, device, dtypes, choose_passes(passes), repeats, output.progress)
    for report in reports:
        _print(report, output)
    document = strict_json(make_document(reports, command_line(shapes, device, dtypes, passes, repeats), load))
    if path is not None:
        write_new(path, document)
        output.heading(f"written to {path}")
    wrong = [m for report in reports for m in report.measurements if m.ours and m.status == "refused"]
    return document, not wrong


def _print(report: Report, output: Output) -> None:
    shape = report.shape
    sizes = f"T={shape.tokens} H={shape.hidden} I={shape.intermediate} E={shape.experts} K={shape.top_k}"
    title = f"{shape.name} ({sizes}) {report.measured_pass}, {dtype_name(report.dtype)} on {report.device}"
    timed = [measurement for measurement in report.measurements if measurement.status == "timed"]
    peers = [f"transformers {name}" for name in PEERS if any(m.implementation == f"transformers {name}" for m in timed)]
    training = report.measured_pass == "training"
    columns = ["", "ms", "min", *(["forward", "backward"] if training else []), _rate_unit(timed)]
    columns += ["kept MiB"] if training else ["weights GB/s"]
    columns += ["host ms"] if any(m.host_median_ms is not None for m in timed) else []
    columns += ["peak MiB", "error", *(f"vs {peer.removeprefix('transformers ')}" for peer in peers)]
    output.table(title, columns, [_row(m, peers, training, _rate_unit(timed)) for m in timed])
    for note in _notes(report, timed):
        output.line(f"  {note}")
    for measurement in report.measurements:
        if measurement.status != "timed":
            style = "bold red" if measurement.status == "refused" else None
            output.line(f"  {measurement.implementation}: {measurement.status}, {measurement.reason}", style=style)


def _notes(report: Report, timed: Sequence[Measurement]) -> Iterator[str]:
    if timed:
        fewest, most = min(m.rounds for m in timed), max(m.rounds for m in timed)
        rounds = str(most) if fewest == most else f"{fewest} to {most}"
        yield f"medians of {rounds} rounds; vs: so many times faster"
    yield f"error: the worst of output and gradients, against {dtype_name(report.reference)}"
    yield f'backend="auto" takes {report.auto}'
    if report.shape.skew:
        yield f"the busiest expert gets {report.busiest_expert:.1f} times the mean"


def _row(measurement: Measurement, peers: Sequence[str], training: bool, unit: str) -> list[str]:
    assert measurement.median_ms is not None
    assert measurement.min_ms is not None
    assert measurement.flops_per_second is not None
    row = [measurement.implementation, _three(measurement.median_ms), _three(measurement.min_ms)]
    if training:
        row += [_three(measurement.forward_median_ms or 0), _three(measurement.backward_median_ms or 0)]
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    if training:
        row.append(
            f"{(measurement.forward_flops_per_second or 0) / scale:.0f}/"
            f"{(measurement.backward_flops_per_second or 0) / scale:.0f}"
        )
    else:
        row.append(_three(measurement.flops_per_second / scale))
    if training:
        row.append(_mib(measurement.kept_bytes))
    else:
        row.append(_three((measurement.weight_bytes_per_second or 0) / 1e9))
    if measurement.host_median_ms is not None:
        row.append(_three(measurement.host_median_ms))
    row += [_mib(measurement.peak_bytes), f"{measurement.worst_error:.1e}"]
    faster = measurement.times_faster_than
    return row + [f"{faster[peer]:.2f}x" if peer in faster else "-" for peer in peers]


def _rate_unit(timed: Sequence[Measurement]) -> str:
    return "TFLOP/s" if max((m.flops_per_second or 0 for m in timed), default=0) >= 1e12 else "GFLOP/s"


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.2f}" if size < 10 * 2**20 else f"{size / 2**20:.0f}"
