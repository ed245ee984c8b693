"""What every benchmark suite shares: how a run begins, how its document is kept up to date, how it ends.

run = BenchRun("amoeba bench --shape small", "results", path, output)
limits = run.measure_ceilings(device, [torch.bfloat16])
run.progress("checking"); run.keep(report)
document = run.finish()
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.suite import Report
from amoeba.bench.timing import Ceilings, measure_ceilings
from amoeba.commands.output import Output, strict_json
from amoeba.commands.start import with_seconds
from amoeba.core.errors import bad_value
from amoeba.system import files
from amoeba.system.machine import commit, load_average, machine, machine_kind, usable_cores, versions

# A machine this busy (per core) before the first measurement distorts the times.
_BUSY = 0.5


class BenchRun:
    """table: of the document, where the reports go. path: of the document, None for none."""

    def __init__(self, command: str, table: str, path: Path | None, output: Output) -> None:
        self.output = output
        self.limits: Ceilings | None = None
        self._command, self._table, self._path = command, table, path
        self._reports: list[Any] = []
        self._load = load = load_average()
        if load is not None and load > _BUSY * usable_cores():
            output.warning(f"this machine is busy (load {load} on {usable_cores()} cores): the times are unreliable")
        self._is_written = False

    def measure_ceilings(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        measure: Callable[[torch.device, Sequence[torch.dtype]], Ceilings] = measure_ceilings,
    ) -> Ceilings:
        self.progress("measuring the ceilings of this device: a dense product and a copy")
        self.limits = measure(device, dtypes)
        self.output.line(self.limits.line())
        return self.limits

    def progress(self, line: str) -> None:
        """A line, and no spinner: a spinner is a thread that would run while others are timed. With -v it has the
        seconds since the command began."""
        self.output.progress(with_seconds(line) if self.output.verbose else line)

    def keep(self, report: Any) -> None:
        """A report, or more of the latest one: what is measured is not lost where the rest is stopped."""
        if not self._reports or self._reports[-1] is not report:
            self._reports.append(report)
        if self._path is not None:
            self._write_down(self._path, finished=False)

    def finish(self) -> dict[str, Any]:
        if self._path is None:
            return self._document(finished=True)
        document = self._write_down(self._path, finished=True)
        self.output.heading(f"written to {self._path}")
        return document

    def _write_down(self, path: Path, finished: bool) -> dict[str, Any]:
        document = self._document(finished)
        write_document(path, document, first=not self._is_written)
        self._is_written = True
        return document

    def _document(self, finished: bool) -> dict[str, Any]:
        tables = {self._table: self._reports}
        return strict_json(make_document(self._command, self._load, self.limits, finished, **tables))


def free_path(directory: Path | None) -> Path | None:
    """Where the document will go; raises before anything is measured if there is an earlier one."""
    return None if directory is None else result_path(directory)


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# 1: without `rest_ms` (it was 4 on a GPU), `sustained` and `models`. All that it has means the same in 2.
FORMAT = 2
# Of the suites in the repository's benchmarks/.
TABLES = ("models", "streams", "ranks", "products", "roads", "conversions", "servers")
# Packages that are compared with ours, or that influence it; transformers and peft are among `versions`.
PEER_PACKAGES = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "kt-kernel")


def make_document(
    command: str,
    load_before: float | None = None,
    ceilings: Ceilings | None = None,
    finished: bool = True,
    results: Sequence[Report] = (),
    **tables: Sequence[Any],
) -> dict[str, Any]:
    """load_before: the machine's load average before the first measurement; others' work distorts the times.

    results, tables: the reports of the suite that was run, `results` those of layers; one of TABLES, or another.
    finished: False while the run goes on, and for good where it was stopped.
    """
    peers = {}
    for name in PEER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # it is not installed
            peers[name] = importlib.metadata.version(name)
    return {
        "document": "amoeba bench",
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command,
        "finished": finished,
        "machine": machine(),
        "load_before": load_before,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),  # passive: torch's threads do not spin while they wait
        "versions": versions(),
        "peer_versions": peers,
        "ceilings": None if ceilings is None else asdict(ceilings),
        "results": [_plain(report) for report in results],
        **{
            name: [asdict(each) for each in reports]
            for name, reports in {**dict.fromkeys(TABLES, ()), **tables}.items()
        },
    }


def _plain(report: Report) -> dict[str, Any]:
    plain = asdict(report)
    for name in ("dtype", "reference"):
        plain[name] = str(plain[name]).removeprefix("torch.")
    plain["pass"] = plain.pop("measured_pass")
    return plain


def result_path(directory: Path) -> Path:
    """The file of a result of today, on this kind of machine, at this commit. Whether it can be written is tried now,
    and not after minutes of measuring."""
    if directory.exists() and not directory.is_dir():
        raise bad_value("--out", "a folder", f"the file {str(directory)!r}", "name the folder for the document")
    name = f"{datetime.now(UTC).date()}_{machine_kind()}_{commit() or 'unknown-commit'}.json"
    path = directory / name
    if path.exists():
        raise FileExistsError(f"{path} holds an earlier result; it is not overwritten. Move it, or give another --out.")
    files.check_can_write(path)
    return path


def write_document(path: Path, document: dict[str, Any], first: bool) -> None:
    """Writes the whole document or nothing. first: not over another one; else over an earlier state of the same run."""
    (files.write_new if first else files.write_whole)(path, json.dumps(document, indent=1) + "\n")
