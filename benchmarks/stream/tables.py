"""`python -m benchmarks stream`: experts beyond memory: a table of settings, a fine-tuning step, the document."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from benchmarks.stream.decode import BAR_BYTES_PER_SECOND, BAR_TIMES, BAR_US, DecodeMeasurement
from benchmarks.stream.place import Place
from benchmarks.stream.problem import PARTS, StreamProblem, choose_problem
from benchmarks.stream.suite import StreamSuiteReport, run_stream
from benchmarks.stream.turns import TurnsMeasurement

__all__ = ["choose_problem", "run"]

TOKENS_PER_REPEAT = 10


def command_line(problem: StreamProblem, repeats: int) -> str:
    """The command that measures the same again."""
    words = ["python", "-m", "benchmarks", "stream", "--device", problem.device.type, "--shape", problem.size.name]
    words += [] if problem.parts == PARTS else ["--pass", problem.parts[0]]
    return shlex.join([*words, "--repeats", str(repeats)])


def run(
    problem: StreamProblem,
    repeats: int,
    path: Path | None,
    output: Output,
    make_place: Callable[[], Place] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document, and False if a setting did not give the numbers of resident experts."""
    measured, said = BenchRun(command_line(problem, repeats), "streams", path, output), list[str]()

    def keep(report: StreamSuiteReport) -> None:
        """After each setting: what is measured is not lost where the rest is stopped, and can be seen."""
        measured.keep(report)
        of_decodes = [
            line for each in report.decodes for line in (_in_short(each), *_round_lines(each), *_wait_lines(each))
        ]
        lines = *of_decodes, *map(_turns_line, report.turns), *_lora_lines(report)
        for line in lines:
            if line not in said:
                said.append(line)
                output.line(f"  {line}")
                sys.stdout.flush()

    report = run_stream(problem, TOKENS_PER_REPEAT * repeats, None, measured.progress, keep, make_place)
    _print(report, output)
    measured.keep(report)
    return measured.finish(), not report.wrong


def _print(report: StreamSuiteReport, output: Output) -> None:
    size = report.size
    sizes = f"E={size.experts} K={size.top_k} H={size.hidden} I={size.intermediate}"
    timed = [each for each in report.decodes if each.reason is None]
    if timed:
        rows = [_row(each, report) for each in timed]
        if report.resident_us is not None:
            rows.insert(
                0, dict.fromkeys(rows[0], "") | {"": "resident", "us a layer": three_digits(report.resident_us)}
            )
        title = f"{size.name} ({sizes}) one token after another, {report.dtype} on {report.device}"
        output.table(title, list(rows[0]), [list(row.values()) for row in rows])
    for line in _notes(report, timed):
        output.line(f"  {line}")
    for each in report.decodes:
        if each.reason is not None:
            output.line(f"  {each.setting}: refused, {each.reason}", style="bold red")


def _in_short(found: DecodeMeasurement) -> str:
    if found.us is None:
        return f"{found.setting}: refused, {found.reason}"
    said = f"{found.setting}: {three_digits(found.us)} us a layer, {found.hit_rate:.1%} hits"
    if found.simulated_hit_rate is not None:
        said += f" ({found.simulated_hit_rate:.1%} simulated)"
    if found.early_recall is not None:
        said += f", {found.early_per_token:.3g} copies a token began early, {found.early_recall:.0%} of what missed"
    return said


def _round_lines(found: DecodeMeasurement) -> list[str]:
    if not found.rounds:
        return []
    said = ", ".join(
        three_digits(each.us) + ("" if found.over_bar is None else f" (bar {three_digits(each.bar_us)})")
        for each in found.rounds
    )
    rates = [each.link_bytes_per_second for each in found.rounds if each.link_bytes_per_second is not None]
    link = f"; link {', '.join(f'{rate / 1e9:.3g}' for rate in rates)} GB/s" if rates else ""
    return [f"  {found.setting}; rounds: {said}{link}"]


def _wait_lines(found: DecodeMeasurement) -> list[str]:
    """Of each kind of question: mean and 90 % of its phases."""
    return [
        f"  {found.setting}; {each.kind}: {each.questions} questions, {each.missing:.3g} missing"
        + (f", {each.from_disk:.3g} on the disk" if each.from_disk else "")
        + "; us (90 %): "
        + ", ".join(f"{name} {of.mean_us:.0f} ({of.p90_us:.0f})" for name, of in each.phases.items())
        for each in found.waits
    ]


def _row(found: DecodeMeasurement, report: StreamSuiteReport) -> dict[str, str]:
    assert found.us is not None and found.hits_us is not None and found.hit_rate is not None
    has_link = report.link_bytes_per_second is not None
    row = {
        "": found.setting,
        "layers": str(found.layers),
        "us a layer": three_digits(found.us),
        "median": "-" if found.median_us is None else three_digits(found.median_us),
        "all there": three_digits(found.hits_us),
        "hits": f"{found.hit_rate:.1%}",
        "simulated": "-" if found.simulated_hit_rate is None else f"{found.simulated_hit_rate:.1%}",
    }
    if has_link:
        row |= {
            "MB up": _mb(found.bytes_up_per_token),
            "x least": f"{found.over_least:.2f}",
            "x bar": "-" if found.over_bar is None else f"{found.over_bar:.2f}",
            "of link": "-" if found.share_of_link is None else f"{found.share_of_link:.0%}",
            "ids us": "-" if found.export_us is None else three_digits(found.export_us),
            "by CPU": "-" if not found.computed_per_token else three_digits(found.computed_per_token / found.layers),
            "CPU us": "-" if found.computed_us is None else three_digits(found.computed_us),
            "early": "-" if found.early_recall is None else f"{found.early_recall:.0%}",
        }
    if report.disk_bytes_per_second is not None:
        over = "-" if found.over_disk is None else f"{found.over_disk:.2f}"
        row |= {"MB disk": _mb(found.bytes_from_disk_per_token), "x disk": over}
    return row | {"bits": "same" if found.same_bits else f"{found.error:.0e}"}


def _notes(report: StreamSuiteReport, timed: Sequence[DecodeMeasurement]) -> list[str]:
    lines = []
    rates = (
        ("link", report.link_bytes_per_second),
        ("disk", report.disk_bytes_per_second),
        ("disk afterwards", report.disk_bytes_per_second_afterwards),
    )
    known = [f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates if rate is not None]
    if known:
        lines.append(f"measured here: {', '.join(known)}; an expert has {report.expert_bytes / 1e6:.3g} MB")
    if timed:
        rounds = max(len(each.rounds) for each in timed)
        lines.append(
            f"us a layer, x: medians of {rounds} rounds, in turns with resident layers; MB: a token; "
            "all there: a token that asks for the same again"
        )
        if report.link_bytes_per_second is not None:
            lines.append(
                "x least: over resident + bytes at the link's rate; ids us: from the kernel's end to the ids read"
            )
            at = f"{BAR_BYTES_PER_SECOND / 1e9:g} GB/s"
            lines.append(f"x bar: over {BAR_TIMES:.2f} x (resident + bytes at {at}) + {BAR_US:g} us")
        if report.disk_bytes_per_second is not None:
            lines.append("x disk: over the bytes from the disk at its rate")
    if any(each.pause_us for each in timed):
        lines.append("early: of what would have missed, the share whose copy had begun; pauses stand for attention")
    if any(each.computed_us is not None for each in timed):
        lines.append("by CPU: experts of a layer that it computed and that were not moved; CPU us: it took for one")
    return lines + [_turns_line(each) for each in report.turns] + _lora_lines(report)


def _turns_line(found: TurnsMeasurement) -> str:
    about = f"two sequences, {found.layers} layers, {found.slots} slots, pauses of {found.pause_us:g} us"
    if found.turns_us is None or found.turns_hit_rate is None:
        return f"{about}: refused, {found.reason}"
    ways = {
        "one alone": found.alone_us,
        "one after the other": found.one_after_the_other_us,
        "a batch": found.batch_us,
        "in turns": found.turns_us,
    }
    each = ", ".join(f"{name} {three_digits(us)}" for name, us in ways.items() if us is not None)
    of_link = "" if found.turns_share_of_link is None else f", {found.turns_share_of_link:.0%} of the link"
    said = f"{each} us a layer and token; in turns {found.turns_hit_rate:.1%} hits{of_link}"
    return f"{about}: {said}, bits {'same' if found.same_bits else f'{found.error:.0e}'}"


def _lora_lines(report: StreamSuiteReport) -> list[str]:
    lines = list[str]()
    if (lora := report.lora) is not None:
        about = f"LoRA step, {lora.layers} layers, {lora.tokens} tokens, rank {lora.rank}, {lora.slots} slots"
        if lora.reason is not None:
            return [*lines, f"{about}: refused, {lora.reason}"]
        assert lora.ms is not None and lora.resident_ms is not None and lora.share_of_link is not None
        of_what = "link" if report.link_bytes_per_second is not None else "disk"
        rate = report.link_bytes_per_second or report.disk_bytes_per_second or 0
        moved = f"{(lora.bytes_per_step or 0) / 1e9:.3g} GB at {lora.share_of_link:.1%} of the {of_what}"
        moved += f"'s {rate / 1e9:.3g} GB/s"
        lines.append(f"{about}: {three_digits(lora.ms)} ms ({three_digits(lora.resident_ms)} resident), {moved}")
    return lines


def _mb(count: float | None) -> str:
    return "-" if count is None else three_digits(count / 1e6)
