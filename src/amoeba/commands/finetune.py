"""`amoeba finetune MODEL --data chat.jsonl`: LoRA on a frozen model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amoeba.commands.exits import TRAINER, finish, need, usage
from amoeba.commands.options import (
    Accumulation,
    Compile,
    ConfigFile,
    DenseParameters,
    EvalEvery,
    ExpertRanks,
    FrozenPrecision,
    GradientCheckpointing,
    HeldOut,
    Json,
    Minutes,
    OptimizerStates,
    Resume,
    SaveEvery,
    Seed,
    StartFrom,
    TrustRemoteCode,
    Verbose,
    experts_in,
    share_or_file,
    speaks,
)
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.system.loading import loading
from amoeba.system.shell import shell_command

if TYPE_CHECKING:
    from amoeba.jobs.settings import FinetuneSettings


def finetune(
    model: Annotated[
        str | None, typer.Argument(help="A folder that save_pretrained wrote, a store, or a hub name.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="JSONL with messages, prompt and completion, or text; or a folder.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="Run folder; the adapter is in OUT/adapter.")] = None,
    config: ConfigFile = None,
    resume: Resume = None,
    start_from: StartFrom = None,
    r: Annotated[
        int | None,
        typer.Option("--r", "--lora-rank", help="Rank of the factors; default 16. torchrun wants the longer name."),
    ] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Scaling is alpha / r; default 32.")] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", help="experts (default), all-linear, or names: experts,q_proj,v_proj.")
    ] = None,
    train_router: Annotated[bool, typer.Option("--train-router", help="Train the routers too, whole.")] = False,
    experts: Annotated[
        str | None,
        typer.Option(
            "--experts", help="Where: resident, cpu-bf16, cpu-int8, ranks, auto; or in codes: mxfp4-weights ..."
        ),
    ] = None,
    precision: FrozenPrecision = None,
    expert_ranks: ExpertRanks = None,
    dense: DenseParameters = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", help="Stream the experts through a budget of memory for the model: 8GiB, or auto."),
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="The same on a GPU; --ram is then for experts below it.")
    ] = None,
    held_out: HeldOut = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the data; default 3.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps in place of epochs.")] = None,
    minutes: Minutes = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Rows per pass, of all ranks together; packed on a GPU.")
    ] = None,
    accumulation: Accumulation = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Tokens of a row at most; default 1024.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Default 2e-4.")] = None,
    gradient_checkpointing: GradientCheckpointing = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="auto (the checkpoint's, or float32 on a CPU without bf16 instructions), float32 or bfloat16.",
        ),
    ] = None,
    compile_layers: Compile = None,
    optimizer_states: OptimizerStates = None,
    log_every: Annotated[int | None, typer.Option("--log-every", help="Steps between lines; default 5.")] = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    seed: Seed = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Fine-tune a mixture-of-experts model with LoRA; the loss is on the answers, the result a PEFT adapter."""
    flags: dict[str, Any] = {
        "model": model, "data": data, "out": out, "r": r, "alpha": alpha, "train_router": train_router or None,
        "expert_ranks": expert_ranks, "dense": dense,
        "ram": ram, "vram": vram, "epochs": epochs, "steps": steps, "minutes": minutes,
        "batch_size": batch_size, "accumulation": accumulation,
        "sequence_length": sequence_length, "learning_rate": learning_rate,
        "gradient_checkpointing": gradient_checkpointing or None, "dtype": dtype, "compile": compile_layers,
        "optimizer_states": optimizer_states, "log_every": log_every,
        "eval_every": eval_every, "save_every": save_every, "seed": seed,
        "targets": None if targets is None else tuple(targets.replace(",", " ").split()),
        "held_out": share_or_file(held_out),
    }  # fmt: skip
    output = start(verbose, over_ranks=True)
    with loading():
        from amoeba.jobs.settings import FinetuneSettings
        from amoeba.jobs.train.resume import settings_of

    with usage():
        flags["experts"] = experts_in(precision, experts)
        given = {name: value for name, value in flags.items() if value is not None}
        settings = settings_of(FinetuneSettings, resume, config, given)
        document = run(settings, resume is not None, start_from, output, trust_remote_code)
    finish(output, document, True, json and speaks())
    if document["exit_code"]:
        raise typer.Exit(document["exit_code"])


def run(
    settings: FinetuneSettings, resume: bool, start_from: str | None, output: Output, trust_remote_code: bool = False
) -> dict[str, Any]:
    need(*TRAINER)
    with loading():
        from amoeba.commands.over_ranks import job_over_ranks
        from amoeba.jobs.finetune.finetune import finetune as finetune_model

    report, first = job_over_ranks(
        finetune_model, settings, output, resume=resume, start_from=start_from, trust_remote_code=trust_remote_code
    )
    if not first:
        return asdict(report)
    output.heading("fine-tuned" if not report.interrupted else "stopped")
    budgets = {"--vram": settings.vram, "--ram": settings.ram}
    more = [*(["--chat"] if report.chat else [])]
    more += [word for option, size in budgets.items() if size is not None for word in (option, size)]
    output.facts(
        [
            ("held-out loss", f"{report.losses()}, of the answers"),
            ("steps", f"{report.steps} in {report.seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s at the end"),
            ("trained", f"{report.trainable_parameters / 1e6:.2f}M numbers; the base model is as it was"),
            ("adapter", report.adapter),
            ("try", shell_command("generate", report.base_model, "...", "--adapter", report.adapter, *more)),
            ("run", f"{report.folder}    look: {shell_command('report', report.folder)}"),
        ]
    )
    return asdict(report)
