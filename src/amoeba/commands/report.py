"""`amoeba report RUN`: a training run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Json, Verbose
from amoeba.commands.start import start


def report(
    run: Annotated[Path, Argument(help="Folder of a training run.")],
    out: Annotated[Path | None, Option(help="Output file (default: RUN/report.html).")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write an HTML report of a training run: losses, expert heatmap, entropy and co-activation. Works offline."""
    output = start(verbose)
    with usage():
        from amoeba.observe.report import write_report

        path = write_report(run, out).resolve()
        output.line(f"written to {path}")
        output.line(f"open {path.as_uri()} in a browser; it works offline")
        document: dict[str, Any] = {"document": "amoeba report", "run": str(run.resolve()), "report": str(path)}
        document |= {"bytes": path.stat().st_size}
    finish(output, document, True, json)
