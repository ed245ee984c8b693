"""`amoeba bench --suite model`: whole models, a table per model and kind of work, and the document."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amoeba.bench.ceilings import Ceilings, measure_ceilings
from amoeba.bench.document import make_document, write_again, write_new
from amoeba.bench.models.candidates import candidates_for
from amoeba.bench.models.measure import ModelMeasurement
from amoeba.bench.models.problem import Problem, choose_problems
from amoeba.bench.models.suite import ModelReport, run_models
from amoeba.commands.bench import three_digits, warn_if_busy
from amoeba.commands.exits import need
from amoeba.commands.output import Output, strict_json
from amoeba.errors import bad_value

__all__ = ["check_options", "choose_candidates", "choose_problems", "run"]


class Chosen(NamedTuple):
    """Parts of the names of the candidates that are wanted; None: all."""

    ours: tuple[str, ...] | None
    peers: tuple[str, ...] | None


def check_options(dtypes: Sequence[str], sustained: float | None) -> None:
    need("transformers")
    if dtypes:
        raise bad_value(
            "--dtype", "none with --suite model", ", ".join(dtypes), "each candidate has its own: --ours bf16"
        )
    if sustained is not None:
        raise bad_value(
            "--sustained", "none with --suite model", sustained, "whole models are always measured back to back"
        )


def choose_candidates(problems: Sequence[Problem], ours: Sequence[str], peers: Sequence[str]) -> Chosen:
    for option, parts, is_ours in (("--ours", ours, True), ("--peer", peers, False)):
        names = {each.name: None for problem in problems for each in candidates_for(problem) if each.ours == is_ours}
        for part in parts:
            if not any(part in name for name in names):
                raise bad_value(option, f"a part of one of: {'; '.join(names)}", repr(part), "leave it out for all")
    return Chosen(tuple(ours) or None, tuple(peers) or None)


def command_line(problems: Sequence[Problem], repeats: int, chosen: Chosen) -> str:
    """The command that measures the same again."""
    words = ["amoeba", "bench", "--suite", "model", "--device", problems[0].device.type]
    for name in dict.fromkeys(problem.size.name for problem in problems):
        words += ["--shape", name]
    kinds = {problem.kind for problem in problems}
    words += ["--pass", kinds.pop()] if len(kinds) == 1 else []
    words += ["--repeats", str(repeats)]
    words += [word for name in chosen.ours or () for word in ("--ours", name)]
    words += [word for name in chosen.peers or () for word in ("--peer", name)]
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
    load = warn_if_busy(output)
    output.progress("measuring the ceilings of this device: a dense product and a copy")
    limits = ceilings(problems[0].device, [problems[0].dtype])
    output.line(limits.line())
    command, reports = command_line(problems, repeats, chosen), list[ModelReport]()

    def document_of(finished: bool) -> dict[str, Any]:
        return strict_json(make_document([], command, load, limits, finished, reports))

    def keep(report: ModelReport) -> None:
        reports.append(report)
        _print(report, limits.matmul_flops_per_second(problems[0].dtype), output)
        if path is not None:
            (write_new if len(reports) == 1 else write_again)(path, document_of(finished=False))

    run_models(problems, repeats, output.progress, keep, chosen.ours, chosen.peers)
    document = document_of(finished=True)
    if path is not None:
        write_again(path, document)
        output.heading(f"written to {path}")
    failed = [each for report in reports for each in report.measurements if each.ours and each.status == "failed"]
    return document, not failed


def _print(report: ModelReport, peak: float, output: Output) -> None:
    decode = report.kind == "decode"
    sizes = (
        f"prompts of {report.length} tokens, {report.new_tokens} new" if decode else f"{report.rows} x {report.length}"
    )
    title = f"{report.model} ({report.parameters / 1e9:.2f}B parameters) {report.kind}, {sizes}, on {report.device}"
    measured = [each for each in report.measurements if each.status == "measured"]
    rows = [_decode_row(each) if decode else _step_row(each, peak) for each in measured]
    output.table(title, list(rows[0]) if rows else [""], [list(row.values()) for row in rows])
    output.line("  each in a process of its own, one after another, its steps back to back without rests")
    if decode:
        output.line("  ms a step; first: until the first token; start: the model made, and the first decode of one row")
    else:
        output.line(
            "  start: the model made, and the first step with what it compiles; of matmul: of the dense product"
        )
    for each in report.measurements:
        if each.status != "measured":
            style = "bold red" if each.ours and each.status == "failed" else None
            output.line(f"  {each.candidate}: {each.status}, {each.reason}", style=style)


def _step_row(found: ModelMeasurement, peak: float) -> dict[str, str]:
    assert found.ms is not None and found.tokens_per_second is not None and found.flops_per_second is not None
    assert found.first_step_seconds is not None
    return {
        "": found.candidate,
        "ms": three_digits(found.ms),
        "tokens/s": f"{found.tokens_per_second:,.0f}",
        "of matmul": f"{found.flops_per_second / peak:.1%}",
        "peak GiB": _gib(found.peak_bytes),
        "start s": _start(found, found.first_step_seconds),
        "loss": f"{found.first_loss:.3f}",
    }


def _decode_row(found: ModelMeasurement) -> dict[str, str]:
    row = {"": found.candidate}
    for each in found.decodes:
        row[f"ms, {each.rows} row{'s' if each.rows > 1 else ''}"] = three_digits(each.ms)
        row[f"first ms, {each.rows}"] = three_digits(each.first_token_ms)
    return row | {"peak GiB": _gib(found.peak_bytes), "start s": _start(found, found.decodes[0].first_call_seconds)}


def _start(found: ModelMeasurement, first: float) -> str:
    return f"{found.prepare_seconds or 0:.1f} + {first:.1f}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"
