"""The benchmark written down: one JSON document that says what was run, on what, by which code, with what result.

document = make_document("amoeba bench --shape small", results=reports)
path = result_path(Path("benchmarks/results"))     # raises FileExistsError rather than lose an earlier result
write_document(path, document, first=True)
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from amoeba.bench.ceilings import Ceilings
from amoeba.bench.suite import Report
from amoeba.core.errors import bad_value
from amoeba.system import files
from amoeba.system.machine import commit, machine, machine_kind, versions

# 1: without `rest_ms` (it was 4 on a GPU), `sustained` and `models`. All that it has means the same in 2.
FORMAT = 2
# Of the suites in the repository's benchmarks/.
TABLES = ("models", "streams", "ranks", "products", "roads", "conversions")
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

    results, tables: the reports of the suite that was run, `results` those of layers; one of TABLES.
    finished: False while the run goes on, and for good where it was stopped.
    """
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
        "peer_versions": _peer_versions(),
        "ceilings": None if ceilings is None else asdict(ceilings),
        "results": [_plain(report) for report in results],
        **{table: [asdict(report) for report in tables.get(table, ())] for table in TABLES},
    }


def _peer_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in PEER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
