"""`python -m benchmarks models`: whole models, a table per model and kind of work, and the document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amoeba.bench.ceilings import Ceilings, measure_ceilings
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value, counted
from benchmarks.models.candidates import candidates_for
from benchmarks.models.measure import DecodeTime, ModelMeasurement
from benchmarks.models.problem import Problem, choose_problems
from benchmarks.models.suite import ModelReport, run_models

__all__ = ["choose_candidates", "choose_problems", "run"]


NOBODY = "none"  # as --ours or --peer


class Chosen(NamedTuple):
    """Names of the candidates that are wanted, or parts of them; None: all."""

    ours: tuple[str, ...] | None
    peers: tuple[str, ...] | None


def choose_candidates(problems: Sequence[Problem], ours: Sequence[str], peers: Sequence[str]) -> Chosen:
    for option, parts, is_ours in (("--ours", ours, True), ("--peer", peers, False)):
        names = {each.name: None for problem in problems for each in candidates_for(problem) if each.ours == is_ours}
        for part in parts:
            if part != NOBODY and not any(part in name for name in names):
                remedy = f"leave it out for all, or {NOBODY} for none of them"
                raise bad_value(option, f"one of these, or a part of it: {'; '.join(names)}", repr(part), remedy)
    chosen = (tuple(part for part in parts if part != NOBODY) if parts else None for parts in (ours, peers))
    return Chosen(*chosen)


def command_line(problems: Sequence[Problem], repeats: int, chosen: Chosen) -> str:
    """The command that measures the same again."""
    words = ["python", "-m", "benchmarks", "models", "--device", problems[0].device.type]
    for name in dict.fromkeys(problem.size.name for problem in problems):
        words += ["--shape", name]
    kinds = {problem.kind for problem in problems}
    words += ["--pass", kinds.pop()] if len(kinds) == 1 else []
    words += ["--repeats", str(repeats)]
    for option, names in (("--ours", chosen.ours), ("--peer", chosen.peers)):
        words += [word for name in (names or [NOBODY] if names is not None else []) for word in (option, name)]
    return shlex.join(words)


def run(
    problems: Sequence[Problem],
    repeats: int,
    chosen: Chosen,
    path: Path | None,
    output: Output,
    ceilings: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] = measure_ceilings,
) -> tuple[dict[str, Any], bool]:
    """Prints the tables; returns the document, and False if a candidate of ours failed."""
    measured = BenchRun(command_line(problems, repeats, chosen), "models", path, output)
    peak = measured.measure_ceilings(problems[0].device, [problems[0].dtype], ceilings)
    rate = peak.matmul_flops_per_second(problems[0].dtype)
    reports = run_models(
        problems,
        repeats,
        measured.progress,
        lambda report: _print(report, rate, output),
        chosen.ours,
        chosen.peers,
        measured.keep,
    )
    failed = [each for report in reports for each in report.measurements if each.ours and each.status == "failed"]
    return measured.finish(), not failed


def _print(report: ModelReport, peak: float, output: Output) -> None:
    decode = report.kind == "decode"
    sizes = (
        f"prompts of {report.length} tokens, {report.new_tokens} new" if decode else f"{report.rows} x {report.length}"
    )
    title = f"{report.model} ({report.parameters / 1e9:.2f}B parameters) {report.kind}, {sizes}, on {report.device}"
    measured: dict[str | None, ModelMeasurement] = {
        each.candidate: each for each in report.measurements if each.status == "measured"
    }
    rows = [(_decode_row(each, measured) if decode else _step_row(each, measured, peak)) for each in measured.values()]
    output.table(title, list(rows[0]) if rows else [""], [list(row.values()) for row in rows])
    output.line("  one after another, each with a model of its own, its steps back to back without rests")
    if decode:
        output.line("  ms a step; first: until the first token; start: the model made, and the first decode of one row")
        output.line("  greedy: the tokens of the plain loop, or at how many logits it parted from them (median margin)")
    else:
        output.line(
            "  start: the model made, and the first step with what it compiles; of matmul: of the dense product of "
            f"{peak / 1e12:.3g} TFLOP/s, {report.flops_per_token / 1e9:.3g} GFLOP a token"
        )
    if any(each.against in measured for each in measured.values()):
        output.line("  x: the time over that of the same without factors")
    if (line := _beside_peers(list(measured.values()), report.kind == "lora")) is not None:
        output.line(f"  {line}")
    for each in report.measurements:
        if each.status != "measured":
            style = "bold red" if each.ours and each.status == "failed" else None
            output.line(f"  {each.candidate}: {each.status}, {each.reason}", style=style)
        for sentence in each.said:
            output.line(f"  {each.candidate}: {sentence}")


def _beside_peers(measured: Sequence[ModelMeasurement], with_factors: bool) -> str | None:
    """The fastest of ours over the fastest of the peers: in LoRA steps those with factors, else those without."""
    same = [each for each in measured if (each.against is not None) == with_factors]
    ours, peers = ([each for each in same if each.ours == is_ours] for is_ours in (True, False))
    if not ours or not peers:
        return None
    if measured[0].decodes:
        texts = []
        for number, decode in enumerate(measured[0].decodes):
            best, other = (min(some, key=lambda each: each.decodes[number].ms) for some in (ours, peers))
            ratio = other.decodes[number].ms / best.decodes[number].ms
            texts.append(f"{decode.rows} rows: {best.candidate} {ratio:.2f} times as fast as {other.candidate}")
        return "; ".join(texts)
    best, other = (min(some, key=lambda each: each.ms or 0.0) for some in (ours, peers))
    return f"{best.candidate}: {(other.ms or 0.0) / (best.ms or 1.0):.2f} times as fast as {other.candidate}"


def _step_row(found: ModelMeasurement, measured: Mapping[str | None, ModelMeasurement], peak: float) -> dict[str, str]:
    assert found.ms is not None and found.tokens_per_second is not None and found.flops_per_second is not None
    assert found.first_step_seconds is not None
    other = measured.get(found.against)
    row = {
        "": found.candidate,
        "ms": three_digits(found.ms),
        "tokens/s": f"{found.tokens_per_second:,.0f}",
        "of matmul": f"{found.flops_per_second / peak:.1%}",
    }
    if any(each.against in measured for each in measured.values()):
        row["x"] = "-" if other is None or other.ms is None else f"{found.ms / other.ms:.3f}"
    return row | {
        "peak GiB": _gib(found.peak_bytes),
        "start s": _start(found, found.first_step_seconds),
        "loss": f"{found.first_loss:.3f}",
    }


def _decode_row(found: ModelMeasurement, measured: Mapping[str | None, ModelMeasurement]) -> dict[str, str]:
    row, other = {"": found.candidate}, measured.get(found.against)
    compared = any(each.against in measured for each in measured.values())
    for number, each in enumerate(found.decodes):
        row[f"ms, {counted(each.rows, 'row')}"] = three_digits(each.ms)
        row[f"first ms, {each.rows}"] = three_digits(each.first_token_ms)
        if compared:
            row[f"x, {each.rows}"] = "-" if other is None else f"{each.ms / other.decodes[number].ms:.2f}"
    row["greedy"] = "; ".join(_agreement(each) for each in found.decodes) if found.decodes[0].greedy else "-"
    return row | {"peak GiB": _gib(found.peak_bytes), "start s": _start(found, found.decodes[0].first_call_seconds)}


def _agreement(decode: DecodeTime) -> str:
    greedy = decode.greedy
    if greedy is None or greedy.same:
        return "same"
    widest = max(each.margin for each in greedy.first_differences)
    count = len(greedy.first_differences)
    return f"{count} of {decode.rows} rows part, at {widest:.2g} ({greedy.median_margin:.2g})"


def _start(found: ModelMeasurement, first: float) -> str:
    return f"{found.prepare_seconds or 0:.1f} + {first:.1f}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"
