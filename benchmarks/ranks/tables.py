"""`python -m benchmarks ranks`: experts over processes of this machine, with and without an exchange, the document."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.shapes import parse_shape
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.precision.recipes import OF_ALL_TOKENS, SUMMARIES, UNCHANGED
from benchmarks.ranks.suite import Phase, RankMeasurement, RanksReport, run_ranks
from benchmarks.ranks.worker import RankJob

# Of each rank, with the shape that has none of its own to say: two ranks with half of qwen3_30b's tokens each.
_DEFAULT = {"cuda": "16384,2048,768,128,8", "cpu": "256,512,256,32,4"}
_MOST_RANKS = 16


def choose_job(
    shapes: Sequence[str],
    ranks: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    ours: Sequence[str] = (),
) -> RankJob:
    """ours: a recipe by which the experts train."""
    recipes = [name for name in SUMMARIES if name != OF_ALL_TOKENS]
    if ours and (len(ours) > 1 or ours[0] not in recipes):
        expected = f"one of {', '.join(recipes)}"
        raise bad_value("--ours", expected, ", ".join(ours), "leave it out for the dtype of the weights")
    if not 1 <= ranks <= _MOST_RANKS:
        raise bad_value("--ranks", f"1 to {_MOST_RANKS}", ranks, "each is a process of this machine")
    if len(shapes) > 1 or len(dtypes) > 1:
        raise bad_value("--shape", "one shape and one dtype", "several", "run it once for each")
    shape = parse_shape(shapes[0] if shapes else _DEFAULT[device.type])
    if shape.experts < ranks * shape.top_k:
        expected = f"K experts for each of {ranks} ranks at least"
        raise bad_value("--shape", expected, f"E={shape.experts} K={shape.top_k}", "raise E, or lower K or --ranks")
    if shape.rank or shape.forward_only:
        raise bad_value("--shape", "a layer that is trained", shape.name, "give T,H,I,E,K")
    sizes = shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k
    return RankJob(ranks, *sizes, device.type, dtypes[0], *ours)


def command_line(job: RankJob, repeats: int) -> str:
    """The command that measures the same again."""
    shape = ",".join(map(str, job[1:6]))
    words = ["python", "-m", "benchmarks", "ranks", "--ranks", str(job.ranks), "--device", job.device]
    words += ["--shape", shape, "--dtype", dtype_name(job.dtype), "--repeats", str(repeats)]
    return shlex.join([*words, *(() if job.precision == UNCHANGED else ("--ours", job.precision))])


def run(job: RankJob, repeats: int, path: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document, and False if an exchange failed or gave other numbers."""
    measured = BenchRun(command_line(job, repeats), "ranks", path, output)
    report = run_ranks(job, repeats, measured.progress, measured.keep)
    _print(report, output)
    measured.keep(report)
    return measured.finish(), not report.wrong


def _print(report: RanksReport, output: Output) -> None:
    sizes = f"T={report.tokens} a rank, H={report.hidden} I={report.intermediate} E={report.experts} K={report.top_k}"
    dtype = report.dtype if report.precision == UNCHANGED else f"{report.precision} beside {report.dtype}"
    title = f"{report.ranks} ranks, {sizes}, {dtype} on {report.device}"
    rows = [_row(each, report) for each in report.measurements if each.ms is not None]
    if rows:
        output.table(title, list(rows[0]), [list(row.values()) for row in rows])
    output.line("  ms: forward and backward, the slowest rank; x and memory: over the first line")
    if report.ranks > 1:
        output.line(
            "  exchange ms: the same rows there and back, nothing computed; hidden: the share of it that the step"
        )
        output.line("  is not longer than with the received rows alone")
    for each in report.measurements:
        if len(each.phases) > 2:
            output.line(f"  {each.setting}, ms of each rank: {'; '.join(_phase(phase) for phase in each.phases)}")
    if report.push_bytes_per_second:
        rates = ", ".join(f"by {name} {rate / 1e9:.0f} GB/s" for name, rate in report.push_bytes_per_second.items())
        output.line(f"  rows leave a rank {rates}")
    about = [f"{name} {value}" for name, value in report.about_device.items()]
    about += [] if report.mps_percentage is None else [f"MPS, {report.mps_percentage} % each"]
    about += [f"heap {report.heap_bytes / 2**20:.0f} MiB a rank, not in the peaks"] if report.heap_bytes else []
    if about:
        output.line(f"  {', '.join(about)}")
    for each in report.measurements:
        if each.reason is not None:
            style = "bold red" if each.setting in report.wrong else None
            output.line(f"  {each.setting}: {each.reason}", style=style)


def _phase(phase: Phase) -> str:
    return f"{phase.name} {' '.join(f'{ms:.2f}' for ms in phase.ranks_ms)}"


def _row(found: RankMeasurement, report: RanksReport) -> dict[str, str]:
    assert found.ms is not None
    exchange = report.exchange_ms.get(found.setting)
    return {
        "": found.setting,
        "ms": three_digits(found.ms),
        "x": "-" if found.over_alone is None else f"{found.over_alone:.3f}",
        "peak MiB": "-" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:.0f}",
        "memory": "-" if found.memory_over_alone is None else f"{found.memory_over_alone:.2f}",
        "exchange ms": "-" if exchange is None else three_digits(exchange),
        "hidden": "-" if found.hidden is None else f"{found.hidden:.0%}",
    }
