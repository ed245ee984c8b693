"""`amoeba finetune MODEL --data chat.jsonl`: LoRA on a frozen model, and how the run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from amoeba.commands import options
from amoeba.commands.exits import TRAINER, need, usage
from amoeba.commands.output import Output
from amoeba.commands.run_plan import finish_run, with_plan
from amoeba.commands.start import start
from amoeba.jobs.compile_ahead import Work, compiling_ahead
from amoeba.system.fast_imports import loading
from amoeba.system.files import shell_command

if TYPE_CHECKING:
    from amoeba.jobs.finetune.finetune import FinetuneReport
    from amoeba.jobs.settings import FinetuneSettings


@dataclass(frozen=True)
class FinetuneOptions:
    """Fields are named as those of `FinetuneSettings`. None: the default."""

    model: Annotated[str | None, options.ModelArgument] = None
    data: Annotated[
        str | None, Option(help="JSONL with `messages`, `prompt` and `completion`, or `text`; or a folder.")
    ] = None
    out: Annotated[str | None, Option(help="Run folder; the adapter goes to OUT/adapter.")] = None
    r: Annotated[
        int | None, Option("--r", "--lora-rank", help="LoRA rank (default: 16). Use --lora-rank with torchrun.")
    ] = None
    alpha: Annotated[float | None, Option(help="LoRA alpha; the scaling is alpha / r (default: 32).")] = None
    targets: Annotated[
        str | None, Option(help="What to adapt: experts (default), all-linear, or names: experts,q_proj.")
    ] = None
    train_router: Annotated[bool, Option("--train-router", help="Also train the routers in full.")] = False
    experts: Annotated[str | None, options.FrozenExperts] = None
    precision: options.FrozenPrecision = None
    ram: options.Ram = None
    vram: options.Vram = None
    epochs: Annotated[float | None, Option(help="Passes over the data (default: 3).")] = None
    steps: Annotated[int | None, Option(help="Optimizer steps, instead of --epochs.")] = None
    batch_size: Annotated[int | None, Option(help="Rows per batch, in total over all ranks; packed on a GPU.")] = None
    sequence_length: Annotated[int | None, Option(help="Maximum tokens per row (default: 1024).")] = None
    learning_rate: Annotated[float | None, Option(help="Peak learning rate (default: 2e-4).")] = None
    dtype: Annotated[
        str | None,
        Option(help="auto (the checkpoint's, or float32 on a CPU without bf16 instructions), float32 or bfloat16."),
    ] = None
    log_every: Annotated[int | None, Option(help="Steps between log lines (default: 5).")] = None

    def given(self) -> dict[str, Any]:
        """By the names of the settings; ValueError where --precision and --experts do not go together."""
        told = vars(self) | {"experts": options.experts_in(self.precision, self.experts)}
        del told["precision"]
        if self.targets is not None:
            told["targets"] = tuple(self.targets.replace(",", " ").split())
        return told


def finetune(
    own: FinetuneOptions, shared: options.RunOptions, json: options.Json = False, verbose: options.Verbose = False
) -> None:
    """Fine-tune a mixture-of-experts model with LoRA. Trains on the answers only and saves a PEFT adapter."""
    output = start(verbose, over_ranks=True)
    with usage(), compiling_ahead(wanted=options.launched_processes() == 1, heard=output.verbose) as compiler:
        with loading():
            from amoeba.jobs.settings import FinetuneSettings
            from amoeba.jobs.train.resume import settings_of

        settings = settings_of(FinetuneSettings, shared.resume, shared.config, shared.given(own.given()))
        settings, taken = with_plan("finetune", settings, shared, output)
        streamed = settings.ram is not None or settings.vram is not None
        compiler.begin(None if streamed else Work.of_run("finetune", settings))
        need(*TRAINER)
        with loading():
            from amoeba.commands.over_ranks import job_over_ranks
            from amoeba.jobs.finetune.finetune import finetune as finetune_model

        report, first = job_over_ranks(finetune_model, settings, output, **shared.of_the_job())
        if first:
            _show(report, settings, output)
        finish_run(report, taken, output, json)


def _show(report: FinetuneReport, settings: FinetuneSettings, output: Output) -> None:
    output.heading("fine-tuned" if not report.interrupted else "stopped")
    budgets = {"--vram": settings.vram, "--ram": settings.ram}
    more = ["--chat"] if report.chat else []
    more += [word for option, size in budgets.items() if size is not None for word in (option, size)]
    output.facts(
        [
            ("held-out loss", f"{report.losses()}, on the answers"),
            ("steps", f"{report.steps} in {report.seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s at the end"),
            ("trained", f"{report.trainable_parameters / 1e6:.2f}M parameters; the base model is unchanged"),
            ("adapter", report.adapter),
            ("try", shell_command("generate", report.base_model, "...", "--adapter", report.adapter, *more)),
            ("run", f"{report.folder}    report: {shell_command('report', report.folder)}"),
        ]
    )
