"""What every benchmark suite shares: how a run begins, how its document is kept up to date, how it ends.

    run = BenchRun("amoeba bench --shape small", "results", path, output)
    limits = run.measure_ceilings(device, [torch.bfloat16])
    run.progress("checking"); run.keep(report)
    document = run.finish()

The layer suite is `amoeba bench`; those for models, streams, ranks and products are in the repository's benchmarks/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.ceilings import Ceilings, measure_ceilings
from amoeba.bench.document import make_document, result_path, write_document
from amoeba.commands.output import Output, strict_json
from amoeba.commands.start import with_seconds
from amoeba.system.machine import load_average, usable_cores

# A machine this busy (per core) before the first measurement distorts the times.
_BUSY = 0.5


class BenchRun:
    """table: of the document, where the reports go. path: of the document, None for none."""

    def __init__(self, command: str, table: str, path: Path | None, output: Output) -> None:
        self.output = output
        self.limits: Ceilings | None = None
        self._command, self._table, self._path = command, table, path
        self._reports: list[Any] = []
        self._load = warn_if_busy(output)
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


def warn_if_busy(output: Output) -> float | None:
    """The machine's load, which goes into the document."""
    load = load_average()
    if load is not None and load > _BUSY * usable_cores():
        output.warning(f"this machine is busy (load {load} on {usable_cores()} cores): the times are unreliable")
    return load


def free_path(directory: Path | None) -> Path | None:
    """Where the document will go; raises before anything is measured if there is an earlier one."""
    return None if directory is None else result_path(directory)


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
