"""`amoeba report RUN`: a training run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Json, Verbose
from amoeba.commands.output import Output
from amoeba.commands.start import start


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path | None, typer.Option(help="Output file (default: RUN/report.html).")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write an HTML report of a training run: losses, expert heatmap, entropy and co-activation. Works offline."""
    output = start(verbose)
    with usage():
        document = write(run, out, output)
    finish(output, document, True, json)


def write(folder: Path, out: Path | None, output: Output) -> dict[str, Any]:
    """Writes the page and returns where it is. ValueError where the folder is no run."""
    from amoeba.observe.report import write_report

    path = write_report(folder, out).resolve()
    output.line(f"written to {path}")
    output.line(f"open {path.as_uri()} in a browser; it works offline")
    return {
        "document": "amoeba report",
        "run": str(folder.resolve()),
        "report": str(path),
        "bytes": path.stat().st_size,
    }
