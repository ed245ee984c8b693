"""`amoeba generate MODEL PROMPT`: text from a model to stdout while it is generated; what is going on to stderr.

With `--prompts FILE` one JSON object per prompt, to stdout or to `--out`.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from amoeba.commands.exits import INTERRUPTED, finish, interrupted, need, usage
from amoeba.commands.options import (
    DTYPES,
    Device,
    FrozenExperts,
    FrozenPrecision,
    Json,
    ModelArgument,
    PlanFile,
    Ram,
    TrustRemoteCode,
    Verbose,
    Vram,
    experts_in,
    launched_processes,
    parse_device,
    parse_dtypes,
    speaks,
)
from amoeba.commands.start import hide_loading_bars, start
from amoeba.core.errors import bad_value, counted
from amoeba.jobs.compile_ahead import Work, compiling_ahead
from amoeba.system.fast_imports import loading

if TYPE_CHECKING:
    import torch

    from amoeba.commands.output import Output
    from amoeba.jobs.generate.generate import GenerationReport
    from amoeba.jobs.generate.generate_prompts import PromptsReport
    from amoeba.jobs.generate.options import GenerationOptions
    from amoeba.parallel.rank_zero import RankZero
    from amoeba.plan.memory import Purpose
    from amoeba.plan.taking import Taken

# Characters of a prompt for a token of it, at least, and tokens of a prompt in a file: they are read later.
_CHARACTERS, _FILE_PROMPT = 3, 512
_SECONDS_BETWEEN_LINES = 5.0  # of progress, where it is not shown in place


@dataclass(frozen=True)
class ManyPrompts:
    prompts: Annotated[
        Path | None, Option(help="Prompts file: one per line, or JSONL with `prompt` (`messages` with --chat).")
    ] = None
    out: Annotated[Path | None, Option(help="Results file for --prompts. Prompts already in it are skipped.")] = None
    batch_size: Annotated[int | None, Option(help="Prompts answered at once (default: 32 on a GPU, 8 on a CPU).")] = (
        None
    )

    def check(self, prompt: str | None, has_images: bool) -> None:
        if (prompt is None) == (self.prompts is None):
            got = "neither" if prompt is None else "both"
            raise bad_value("generate", "a prompt, or --prompts FILE", got, "give one of them")
        if self.prompts is not None and has_images:
            raise bad_value("--image", "a single prompt", "--prompts", "call generate for each prompt with images")
        given = {"--out": self.out is not None, "--batch-size": self.batch_size is not None}
        if self.prompts is None and (without := [name for name, is_given in given.items() if is_given]):
            raise bad_value(" and ".join(without), "to be used with --prompts FILE", "a single prompt", "leave it out")


@dataclass(frozen=True)
class Sampling:
    """Fields are named as those of `GenerationOptions`."""

    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0 is greedy (default: the model's generation_config).")
    ] = None
    top_k: Annotated[int | None, Option(help="Sample from the k most likely tokens; 0 keeps all of them.")] = None
    top_p: Annotated[float | None, Option(help="Sample from the most likely tokens with this total probability.")] = (
        None
    )
    repetition_penalty: Annotated[float | None, Option(help="Values above 1 discourage repetition.")] = None
    seed: Annotated[int | None, Option(help="Random seed. The same seed gives the same text.")] = None


@dataclass(frozen=True)
class Computing:
    """Fields are named as those of `GenerationOptions`, with the words of the command line."""

    device: Device = "auto"
    dtype: Annotated[
        str,
        Option(help=f"auto (the checkpoint's, or float32 on a CPU without bf16 instructions), {', '.join(DTYPES)}."),
    ] = "auto"
    experts: Annotated[str, FrozenExperts] = "auto"
    precision: FrozenPrecision = None
    ram: Ram = None
    vram: Vram = None
    plan: PlanFile = None
    miss: Annotated[
        str,
        Option(help="With --vram, on a cache miss: move (copy it to the GPU), cpu (compute it on the CPU) or auto."),
    ] = "move"
    record: Annotated[
        Path | None, Option(help="With --ram or --vram: save the routing, for `python -m benchmarks cache`.")
    ] = None
    trace: Annotated[
        Path | None, Option(help="With --ram or --vram: save a timeline of loads and waits for ui.perfetto.dev.")
    ] = None
    dense: Annotated[
        str,
        Option(help="On a CPU: format of the other weights while decoding: auto (as loaded) or int8 (half the size)."),
    ] = "auto"
    exact: Annotated[
        bool, Option("--exact", help="Compute bitwise the same numbers as a training pass, for any batch. Slower.")
    ] = False
    compile: Annotated[
        bool | None, Option("--compile/--no-compile", help="Compile the layers on a GPU (default: where it is faster).")
    ] = None
    trust_remote_code: TrustRemoteCode = False

    def told(self) -> dict[str, Any]:
        given = vars(self) | {
            "experts": experts_in(self.precision, self.experts) or self.experts,
            "products": "bf16" if self.precision == "bf16" else "auto",
            "device": None if self.device == "auto" else parse_device(self.device),
            "dtype": parse_dtype(self.dtype),
            "record": None if self.record is None else str(self.record),
            "trace": None if self.trace is None else str(self.trace),
        }
        del given["precision"], given["plan"]
        return given

    def at_once(self) -> int:
        import torch

        from amoeba.jobs.generate.generate_prompts import CPU_BATCH, GPU_BATCH

        return GPU_BATCH if self.device != "cpu" and torch.cuda.is_available() else CPU_BATCH

    def take_plan(
        self, model: str, context: int, batch: int, prompt: int | None = None, purpose: Purpose = "generate"
    ) -> Taken:
        """Where the experts go: as a file says, or the best way that fits, unless the options say where."""
        from amoeba.plan.memory import Work
        from amoeba.plan.taking import Taken, take_plan

        defaults = {"experts": "auto", "precision": None, "ram": None, "vram": None}
        given = {name: value for name, value in vars(self).items() if defaults.get(name, value) != value}
        if self.exact and self.plan is not None:
            remedy = "leave it out: exact mode keeps experts resident"
            raise bad_value("--plan", "a command without --exact", "both", remedy)
        if launched_processes() > 1 or self.exact:  # exact mode takes no placement that a plan would choose
            return Taken()
        told: dict[str, Any] = {"file": self.plan, "given": given, "trust_remote_code": self.trust_remote_code}
        work, dtype = Work(purpose, context, batch, prompt=prompt), parse_dtype(self.dtype)
        return take_plan(model, work, gpu=self.device != "cpu", dtype=dtype, **told)


def generate(
    model: Annotated[str, ModelArgument],
    prompt: Annotated[
        str | None, Argument(help="Text to continue; - reads it from stdin. For several prompts, use --prompts FILE.")
    ] = None,
    *,
    many: ManyPrompts,
    adapter: Annotated[
        str | None, Option(help="PEFT adapter to load: its folder, or a run of amoeba finetune.")
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Maximum number of new tokens.")] = 200,
    sampling: Sampling,
    chat: Annotated[bool, Option("--chat", help="Apply the chat template: the prompt is a user message.")] = False,
    image: Annotated[
        list[Path] | None, Option(help="Image that the prompt is about (repeatable); applies the chat template.")
    ] = None,
    computing: Computing,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Generate text with a Hugging Face model, with experts run by aMoEba. Ctrl-C stops it."""
    output = start(verbose, over_ranks=True)
    resident = computing.device != "cpu" and computing.ram is None and computing.vram is None
    ahead = prompt is not None and adapter is None and not image and resident and launched_processes() == 1
    with usage(), compiling_ahead(wanted=ahead, heard=output.verbose) as compiler:
        experts = experts_in(computing.precision, computing.experts) or computing.experts
        compiler.begin(Work.of_prompt(model, prompt or "", computing.dtype, experts))
        need("tokenizers", "safetensors", "transformers", "transformers.models.auto.modeling_auto")
        with loading():
            from amoeba.jobs.generate.options import GenerationOptions

        many.check(prompt, bool(image))
        hide_loading_bars(model, output)
        images = tuple(map(str, image or ()))
        options = GenerationOptions(max_new_tokens, **vars(sampling), chat=chat, images=images, **computing.told())
        taken = _taken(model, prompt, many, max_new_tokens, computing)
        options = replace(options, **taken.options)
        if taken.words is not None:
            output.say(taken.words)
        if output.on_terminal and speaks():
            output.say(f"loading {model}")
        with loading():
            from amoeba.commands.over_ranks import over_ranks
            from amoeba.jobs.same_on_ranks import check_same_job

        try:
            report: GenerationReport | PromptsReport
            with over_ranks(options.experts, output) as rank_zero:
                told = {"--prompts": many.prompts is not None, "--batch-size": many.batch_size}
                check_same_job(rank_zero, "amoeba generate", options, told, model=model, adapter=adapter)
                if rank_zero.count > 1 and options.experts != "ranks":
                    remedy = "start it without torchrun, or add --experts ranks"
                    got = f"{rank_zero.count} processes"
                    raise bad_value("generate", "one process, or --experts ranks", got, remedy)
                if many.prompts is None:
                    assert prompt is not None
                    report = _one(model, prompt, options, adapter, output, rank_zero, taken)
                else:
                    report = _many(model, many, options, adapter, output, rank_zero)
        except KeyboardInterrupt:
            raise interrupted("before the first token") from None
    document = {"document": "amoeba generate", **asdict(report), "plan": _compared(taken, report)}
    finish(output, document, True, json and speaks())
    if report.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _taken(model: str, prompt: str | None, many: ManyPrompts, max_new_tokens: int, computing: Computing) -> Taken:
    tokens, batch = _FILE_PROMPT, 1
    if prompt is not None:
        tokens = _FILE_PROMPT if prompt == "-" else len(prompt) // _CHARACTERS + 1
    else:
        batch = many.batch_size or computing.at_once()
    return computing.take_plan(model, tokens + max_new_tokens, batch, tokens)


def _compared(taken: Taken, report: Any) -> dict[str, Any] | None:
    from amoeba.jobs.generate.generate import GenerationReport

    if not isinstance(report, GenerationReport) or report.generated_tokens < 1:
        return None
    tokens = report.prompt_tokens + report.generated_tokens
    return taken.compared(asdict(report), prompt=report.prompt_tokens, context=tokens)


def _one(
    model: str,
    prompt: str,
    options: GenerationOptions,
    adapter: str | None,
    output: Output,
    rank_zero: RankZero,
    taken: Taken,
) -> GenerationReport:
    with loading():
        from amoeba.jobs.generate.generate import generate as generate_text

    text = rank_zero.tell(lambda: read_prompt(prompt), "the prompt")
    if not rank_zero.here:
        return generate_text(model, text, options, _nowhere, adapter, rank_zero=rank_zero)
    report = generate_text(model, text, options, write, adapter, say=output.say, rank_zero=rank_zero)
    if not report.text.endswith("\n"):
        write("\n")
    output.say(summary(report) + planned_words(_compared(taken, report)))
    _say_streaming(report, output)
    return report


def _many(
    model: str, many: ManyPrompts, options: GenerationOptions, adapter: str | None, output: Output, rank_zero: RankZero
) -> PromptsReport:
    with loading():
        from amoeba.data.sources import read_prompts
        from amoeba.jobs.generate.generate_prompts import Results, generate_prompts

    assert many.prompts is not None
    of = model if adapter is None else f"{model} with {adapter}"
    asked = read_prompts(many.prompts, options.chat)
    content = repr([(each.line, each.content) for each in asked]).encode()
    rank_zero.check_same({"--prompts": hashlib.blake2b(content, digest_size=6).hexdigest()}, "give every rank one file")
    results = Results(None, asked, of, _nowhere)
    with rank_zero.all_or_none("the prompts that are left"):
        if rank_zero.here:
            results = Results(many.out, asked, of, lambda line: write(line + "\n"), options.settings)
    left = rank_zero.tell(lambda: [each.line for each in results.left])
    results.left = [each for each in asked if each.line in left]
    if not rank_zero.here:
        return generate_prompts(model, results, options, many.batch_size, adapter, rank_zero=rank_zero)

    def progress(text: str) -> None:
        output.at_times(f"amoeba: {text}", _SECONDS_BETWEEN_LINES)

    with output.working():
        report = generate_prompts(model, results, options, many.batch_size, adapter, output.say, progress, rank_zero)
    output.say(summary_of_prompts(report))
    _say_streaming(report, output)
    return report


def parse_dtype(name: str) -> torch.dtype | None:
    """None for auto."""
    if name == "auto":
        return None
    try:
        return parse_dtypes([name], [])[0]
    except ValueError:
        remedy = "leave it out for the checkpoint's own"
        raise bad_value("--dtype", f"one of auto, {', '.join(DTYPES)}", repr(name), remedy) from None


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
    parts = [f"{counted(report.prompt_tokens, 'prompt token')}{_rate(report.prompt_tokens_per_second)}"]
    if report.steps != "plain":
        parts.append(f"steps {report.steps} in {report.prepare_seconds:.1f} s")
    if report.seconds_to_first_token is not None:
        parts.append(f"first token after {report.seconds_to_first_token:.3f} s")
    parts.append(f"{report.generated_tokens} generated{_rate(report.generation_tokens_per_second)}")
    if report.peak_memory_bytes is not None:
        parts.append(f"peak {report.peak_memory_bytes / 2**20:.0f} MiB")
    return f"{', '.join(parts)}; stopped: {report.stopped}"


def planned_words(compared: dict[str, Any] | None) -> str:
    """The end of a summary: nothing where speeds were not known beforehand."""
    speed = None if compared is None else compared["predicted"].get("generation_tokens_per_second")
    if compared is None or speed is None:
        return ""
    return f"; planned {speed:.1f}/s, {compared['predicted']['peak_memory_bytes'] / 2**20:.0f} MiB"


def summary_of_prompts(report: PromptsReport) -> str:
    parts = [f"{counted(report.prompts, 'prompt')} answered"]
    if report.skipped:
        parts.append(f"{report.skipped} already done")
    parts.append(f"{report.generated_tokens} generated{_rate(report.generated_tokens_per_second)}")
    if report.batching is not None:
        parts.append(f"batching {report.batching}")
    if report.peak_memory_bytes is not None:
        parts.append(f"peak {report.peak_memory_bytes / 2**20:.0f} MiB")
    return f"{', '.join(parts)}; {report.stopped}"


def _say_streaming(report: GenerationReport | PromptsReport, output: Output) -> None:
    if report.streaming is not None:
        for line in report.streaming.lines():
            output.say(line)


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" ({tokens_per_second:.1f}/s)"


def _nowhere(text: str) -> None:
    """Where a rank other than the first writes."""


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
