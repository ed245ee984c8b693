"""Commands that write a model's folder in another form.

amoeba pack MODEL                               # its experts as a store from which each can be read by itself
amoeba quantise MODEL --format FORMAT           # with its experts in eight or four bits
amoeba merge MODEL --adapter DIR --out DIR      # the model and its adapter as one
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from amoeba.commands.exits import finish, interrupted, need, usage
from amoeba.commands.generate import parse_dtype
from amoeba.commands.options import DTYPES, Json, TrustRemoteCode, Verbose
from amoeba.commands.output import Output
from amoeba.commands.run_console import duration
from amoeba.commands.start import hide_loading_bars, start
from amoeba.core.errors import bad_value
from amoeba.system.files import model_folder, shell_command, shell_words

if TYPE_CHECKING:
    from amoeba.jobs.convert.quantise import Progress as QuantiseProgress
    from amoeba.stream.store.packing import Progress

_SECONDS_BETWEEN_LINES = 2.0


def pack(
    model: Annotated[str, Argument(help="A Hugging Face model folder or a GGUF file; with --check, also a store.")],
    out: Annotated[str | None, Option(help="Store to write or to resume (default: MODEL.store).")] = None,
    check: Annotated[bool, Option("--check", help="Only read the model's store and verify every checksum.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Pack a model for streaming: one block per expert, with checksums. An interrupted run can be resumed."""
    output = start(verbose)
    document: dict[str, Any] = {"document": "amoeba pack"}
    with usage():
        from amoeba.stream.store.index import is_store

        folder = model_folder(model)
        store = folder if is_store(folder) and check else Path(out or f"{str(folder).rstrip('/')}.store")
        if not check:
            need("transformers")
            document |= _pack(folder, store, trust_remote_code, output)
        elif not is_store(store.expanduser()):
            remedy = "pack the model first: the same command without --check"
            raise bad_value("--check", "a store", f"{str(store)!r}, which is not a store", remedy)
    damaged: list[str] = []
    if check:
        with usage():
            damaged = _check(store, output)
        document |= {"store": str(store), "checked": True, "damaged": damaged}
    finish(output, document, not damaged, json)


def _pack(folder: Path, store: Path, trust_remote_code: bool, output: Output) -> dict[str, Any]:
    from amoeba.integrations.model_folder import is_unfinished_store
    from amoeba.stream.sizes import show_size
    from amoeba.stream.store.index import is_store
    from amoeba.stream.store.packing import pack as pack_folder

    if is_store(folder):
        unfinished = is_unfinished_store(folder)
        got = f"{str(folder)!r}, which is {'an unfinished store' if unfinished else 'a store already'}"
        go_on = f"give the model's folder, and {shell_words('--out', folder)}"
        remedy = go_on if unfinished else "add --check to check it"
        raise bad_value("MODEL", "a folder that save_pretrained wrote", got, remedy)
    lines = _Lines(output)
    try:
        with output.working():
            report = pack_folder(folder, store, trust_remote_code=trust_remote_code, progress=lines.show)
    except KeyboardInterrupt:
        raise interrupted("finished layers are kept; run the same command again to continue") from None
    if report.repaired:
        output.line(f"repaired: {', '.join(report.repaired)}")
    if report.updated:
        output.line(f"updated from the model's folder: {', '.join(report.updated)}")
    if report.resumed_layers:
        output.line(f"{report.resumed_layers} of {report.layers} layers were already packed")
    if report.left_out:
        output.line(f"skipped {len(report.left_out)} tensors that the model does not use ({report.left_out[0]}, ...)")
    sizes = f"{show_size(report.expert_bytes)} of experts in {report.numbers}, {show_size(report.rest_bytes)}"
    output.line(f"packed into {report.store}: {report.experts} experts in {report.layers} layers, {sizes} of the rest")
    return asdict(report)


def _check(store: Path, output: Output) -> list[str]:
    from amoeba.stream.store.packed import PackedStore

    def show(done: int) -> None:
        output.at_times(f"checked {done / 2**30:.1f} GiB", _SECONDS_BETWEEN_LINES)

    with PackedStore(store, check_files=False) as opened, output.working():
        damaged = [said for of_file in opened.damage(show).values() for said in of_file]
    for said in damaged:
        output.line(f"damaged: {said}")
    if not damaged:
        output.line(f"{store}: all checksums match")
    return damaged


class _Lines:
    def __init__(self, output: Output) -> None:
        self._output, self._shown = output, 0.0

    def show(self, now: Progress) -> None:
        if now.seconds - self._shown < _SECONDS_BETWEEN_LINES and now.bytes < now.total:
            return
        self._shown = now.seconds
        rate = now.written / max(now.seconds, 1e-9)
        where = f"layer {now.layer + 1}/{now.layers}" if now.layer < now.layers else "the rest of the model"
        where = "checking what is packed" if now.checks else where
        left = duration((now.total - now.bytes) / max(rate, 1.0))
        sizes = f"{now.bytes / 2**30:.2f} of {now.total / 2**30:.2f} GiB"
        self._output.progress(f"{where}  {sizes}  {rate / 1e9:.2f} GB/s  {left} left")


def quantise(
    model: Annotated[str, Argument(help="A Hugging Face model folder, a store or a GGUF file, quantised or not.")],
    format: Annotated[str, Option(help="Expert format: fp8 (128 x 128 blocks), mxfp8, mxfp4 or nvfp4.")] = "fp8",
    out: Annotated[str | None, Option(help="Folder to write or to resume (default: MODEL-FORMAT).")] = None,
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
        document = {"document": "amoeba quantise"} | _quantise(folder, target, format, trust_remote_code, output)
    finish(output, document, True, json)


def _quantise(folder: Path, out: Path, format: str, trust_remote_code: bool, output: Output) -> dict[str, Any]:
    from amoeba.jobs.convert.quantise import quantise_folder
    from amoeba.stream.sizes import show_size

    def show(now: QuantiseProgress) -> None:
        output.at_times(f"layer {now.layer + 1}/{now.layers}", _SECONDS_BETWEEN_LINES)

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


def merge(
    model: Annotated[str, Argument(help="Base model: a Hugging Face folder, a store, a GGUF file or a hub name.")],
    adapter: Annotated[str | None, Option(help="PEFT adapter: its folder, or a run of amoeba finetune.")] = None,
    out: Annotated[str | None, Option(help="Folder to write. It must not exist yet.")] = None,
    dtype: Annotated[str, Option(help=f"auto (the base model's), {', '.join(DTYPES)}.")] = "auto",
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
    output.line(f"written to {report.model} ({report.format or report.dtype}): {layers} changed")
    if report.quantisation_error is not None:
        error = f"relative error of the experts {report.quantisation_error:.2%}"
        output.line(f"quantised again in {report.format}: {error}")
    output.line(f"try: {shell_command('generate', report.model, '...')}")
    finish(output, {"document": "amoeba merge", **asdict(report)}, True, json)
