"""`amoeba quantise MODEL --format FORMAT`: a model's folder with its experts in eight or four bits."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amoeba.commands.exits import finish, interrupted, need, usage
from amoeba.commands.options import Json, TrustRemoteCode, Verbose
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.system.files import model_folder

if TYPE_CHECKING:
    from amoeba.jobs.convert.quantise import Progress

_SECONDS_BETWEEN_LINES = 2.0


def quantise(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder.")],
    format: Annotated[
        str, typer.Option("--format", help="Expert format: fp8 (128 x 128 blocks), mxfp8, mxfp4 or nvfp4.")
    ] = "fp8",
    out: Annotated[
        str | None, typer.Option("--out", help="Folder to write or to resume (default: MODEL-FORMAT).")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Save a copy of a model with quantised experts. generate and finetune load it directly."""
    output = start(verbose)
    with usage():
        folder = model_folder(model)
        need("transformers")
        target = Path(out or f"{str(folder).rstrip('/')}-{format}")
        document = {"document": "amoeba quantise"} | _run(folder, target, format, trust_remote_code, output)
    finish(output, document, True, json)


def _run(folder: Path, out: Path, format: str, trust_remote_code: bool, output: Output) -> dict[str, Any]:
    from amoeba.jobs.convert.quantise import quantise_folder
    from amoeba.stream.sizes import show_size

    shown = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            output.progress(f"layer {now.layer + 1}/{now.layers}")

    try:
        with output.working():
            report = quantise_folder(folder, out, format, trust_remote_code=trust_remote_code, progress=show)
    except KeyboardInterrupt:
        raise interrupted("finished layers are kept; run the same command again to continue") from None
    if report.resumed_layers:
        output.line(f"{report.resumed_layers} of {report.layers} layers were already written")
    size = f"{show_size(report.expert_bytes)}, {report.bytes_per_parameter:.3f} bytes per weight"
    output.line(f"written to {report.out}: {report.experts} experts in {report.layers} layers in {format}, {size}")
    if not report.read_by_transformers:
        output.line("plain transformers cannot load this format; amoeba can")
    return asdict(report)
