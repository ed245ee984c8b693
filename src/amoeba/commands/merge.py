"""`amoeba merge MODEL --adapter DIR --out DIR`: a model and its adapter as one folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from amoeba.commands.exits import finish, interrupted, need, usage
from amoeba.commands.generate import parse_dtype
from amoeba.commands.options import DTYPES, Json, TrustRemoteCode, Verbose
from amoeba.commands.start import hide_loading_bars, start
from amoeba.core.errors import bad_value
from amoeba.system.shell import shell_command


def merge(
    model: Annotated[str, typer.Argument(help="Base model: a Hugging Face folder or a hub name.")],
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="PEFT adapter: its folder, or a run of amoeba finetune.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder to write. It must not exist yet.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=f"auto (the base model's), {', '.join(DTYPES)}.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Merge an adapter into its base model and save a folder that plain transformers can load."""
    output = start(verbose)
    with usage():
        need("tokenizers", "safetensors", "transformers")
        from amoeba.jobs.convert.merge import merge as merge_folders

        hide_loading_bars(model, output)
        if adapter is None or out is None:
            missing = "--adapter" if adapter is None else "--out"
            raise bad_value(missing, "a folder", "none", "write it as amoeba merge MODEL --adapter FOLDER --out FOLDER")
        try:
            report = merge_folders(model, adapter, out, parse_dtype(dtype), trust_remote_code=trust_remote_code)
        except KeyboardInterrupt:
            raise interrupted("nothing was written") from None
    layers = f"{report.experts_layers} layers of experts and {report.linear_layers} linear layers"
    output.line(f"written to {report.model} ({report.dtype}): {layers} changed")
    output.line(f"try: {shell_command('generate', report.model, '...')}")
    finish(output, {"document": "amoeba merge", **asdict(report)}, True, json)
