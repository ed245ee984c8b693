"""`amoeba report`: a training run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amoeba.commands.output import Output
from amoeba.observe.report import write_report


def run(folder: Path, out: Path | None, output: Output) -> dict[str, Any]:
    """Writes the page and returns where it is. ValueError where the folder is no run."""
    path = write_report(folder, out).resolve()
    output.line(f"written to {path}")
    output.line(f"open {path.as_uri()} in a browser; it needs no network")
    return {
        "document": "amoeba report",
        "run": str(folder.resolve()),
        "report": str(path),
        "bytes": path.stat().st_size,
    }
