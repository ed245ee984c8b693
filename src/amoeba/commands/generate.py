"""`amoeba generate MODEL PROMPT`: text from a model to stdout while it is generated; what is going on to stderr."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

from amoeba.commands.exits import INTERRUPTED, need, usage
from amoeba.commands.front import typer
from amoeba.commands.options import DTYPES, Json, TrustRemoteCode, Verbose, parse_device, parse_dtypes
from amoeba.commands.start import hide_loading_bars, start
from amoeba.errors import bad_value
from amoeba.loading import loading

if TYPE_CHECKING:
    import torch

    from amoeba.jobs.generate import GenerationReport


def generate(
    model: Annotated[str, typer.Argument(help="A folder that save_pretrained wrote, or a name on the hub.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="A PEFT folder, or a run of amoeba finetune, to put on the model.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens at most.")] = 200,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; left out: as the model's generation_config.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample from the k likeliest; 0: from all.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Sample from the likeliest with this probability together.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1: what was said becomes less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message in the chat template.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help=f"auto (the checkpoint's), {', '.join(DTYPES)}.")] = "auto",
    experts: Annotated[
        str, typer.Option("--experts", help="Where they are kept: resident, cpu-bf16, cpu-int8 or auto.")
    ] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Generate text with a Hugging Face model, its experts computed by aMoEba. Ctrl-C stops it."""
    output = start(verbose)
    with usage():
        need("tokenizers", "safetensors", "transformers")
        with loading():
            from amoeba.jobs.generate import GenerationOptions
            from amoeba.jobs.generate import generate as generate_text

        hide_loading_bars(model, output)
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            chat=chat,
            device=None if device == "auto" else parse_device(device),
            dtype=parse_dtype(dtype),
            experts=experts,
            trust_remote_code=trust_remote_code,
        )

        def say(text: str) -> None:
            output.progress(f"amoeba: {text}")

        if output.on_terminal:
            say(f"loading {model}")
        try:
            report = generate_text(model, read_prompt(prompt), options, _write, adapter, say=say)
        except KeyboardInterrupt:
            typer.echo("amoeba: interrupted before the first token", err=True)
            raise typer.Exit(INTERRUPTED) from None
    if not report.text.endswith("\n"):
        _write("\n")
    output.progress(summary(report))
    if json:
        output.document({"document": "amoeba generate", **dataclasses.asdict(report)})
    if report.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def parse_dtype(name: str) -> torch.dtype | None:
    """None for auto."""
    if name == "auto":
        return None
    try:
        return parse_dtypes([name], [])[0]
    except ValueError:
        raise bad_value(
            "--dtype", f"one of auto, {', '.join(DTYPES)}", repr(name), "leave it out for the checkpoint's own"
        ) from None


def read_prompt(prompt: str) -> str:
    """The line end that a shell puts after the prompt is no part of it."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        got = f"the byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise bad_value("stdin", "text in UTF-8", got, "convert it, for example `iconv -f latin1 -t utf-8`") from error


def summary(report: GenerationReport) -> str:
    parts = [f"{report.prompt_tokens} prompt tokens{_rate(report.prompt_tokens_per_second)}"]
    if report.seconds_to_first_token is not None:
        parts.append(f"first token after {report.seconds_to_first_token:.3f} s")
    parts.append(f"{report.generated_tokens} generated{_rate(report.generation_tokens_per_second)}")
    if report.peak_memory_bytes is not None:
        parts.append(f"peak {report.peak_memory_bytes / 2**20:.0f} MiB")
    return f"amoeba: {', '.join(parts)}; stopped: {report.stopped}"


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" ({tokens_per_second:.1f}/s)"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
