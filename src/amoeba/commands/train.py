"""`amoeba train`: a language model from scratch or from a checkpoint, and how the run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from amoeba.commands.exits import TRAINER, need, usage
from amoeba.commands.options import Json, RunOptions, Verbose, launched_processes
from amoeba.commands.output import Output
from amoeba.commands.run_plan import finish_run, with_plan
from amoeba.commands.start import start
from amoeba.jobs.compile_ahead import Work, compiling_ahead
from amoeba.system.fast_imports import loading
from amoeba.system.files import shell_command

if TYPE_CHECKING:
    from amoeba.jobs.train.train import TrainReport


@dataclass(frozen=True)
class TrainOptions:
    """Fields are named as those of `TrainSettings`. None: the default."""

    model: Annotated[str | None, Option(help="A preset (demo, 120m, mixtral, ...) or a folder with config.json.")] = (
        None
    )
    data: Annotated[
        str | None, Option(help="Training text: a file, folder or dataset name (default: the Python manual).")
    ] = None
    out: Annotated[str | None, Option(help="Run folder (default: runs/MODEL).")] = None
    steps: Annotated[int | None, Option(help="Optimizer steps (default: 400, or the preset's).")] = None
    batch_size: Annotated[int | None, Option(help="Rows per batch, in total over all ranks.")] = None
    sequence_length: Annotated[int | None, Option(help="Tokens per row (default: 256, or the preset's).")] = None
    learning_rate: Annotated[
        float | None, Option(help="Peak learning rate after warm-up (default: 2e-3, or the preset's).")
    ] = None
    vocab_size: Annotated[int | None, Option(help="Vocabulary size of the tokenizer trained on the data.")] = None
    balance: Annotated[str | None, Option(help="Load balancing: aux, bias or none.")] = None
    experts: Annotated[str | None, Option(help="Expert placement: resident, or ranks (with torchrun).")] = None
    dtype: Annotated[str | None, Option(help="auto (whichever is faster), float32 or bfloat16.")] = None
    precision: Annotated[
        str | None,
        Option(
            help="Recipe for the experts' matrix products: bf16 (same as --dtype), fp8, fp8-ste, fp8-saved, fp8-all, "
            "mxfp8, nvfp4 or auto."
        ),
    ] = None
    log_every: Annotated[int | None, Option(help="Steps between log lines (default: 10).")] = None


def train(own: TrainOptions, shared: RunOptions, json: Json = False, verbose: Verbose = False) -> None:
    """Train a mixture-of-experts language model and save it as a Hugging Face folder."""
    output = start(verbose, over_ranks=True)
    with usage(), compiling_ahead(wanted=launched_processes() == 1, heard=output.verbose) as compiler:
        with loading():
            from amoeba.jobs.settings import TrainSettings
            from amoeba.jobs.train.resume import settings_of

        settings = settings_of(TrainSettings, shared.resume, shared.config, shared.given(vars(own)))
        # before the plan, which takes imports of many seconds and hardly ever changes a kernel
        compiler.begin(None if settings.experts == "ranks" else Work.of_run("train", settings))
        settings, taken = with_plan("train", settings, shared, output)
        need(*TRAINER)
        with loading():
            from amoeba.commands.over_ranks import job_over_ranks
            from amoeba.jobs.train.train import train as train_model

        report, first = job_over_ranks(train_model, settings, output, **shared.of_the_job())
        if first:
            _show(report, output)
        finish_run(report, taken, output, json)


def _show(report: TrainReport, output: Output) -> None:
    output.heading("trained" if not report.interrupted else "stopped")
    output.facts(
        [
            ("held-out loss", f"{report.losses()} (perplexity {report.perplexity:.1f})"),
            ("steps", f"{report.steps} in {report.seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s at the end"),
            ("dead experts", f"{report.dead_experts} at the end"),
            ("model", f"{report.model}    try: {shell_command('generate', report.model, 'The')}"),
            ("run", f"{report.folder}    report: {shell_command('report', report.folder)}"),
        ]
    )
