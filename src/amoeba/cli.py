"""The command line: parses, calls a command, prints. `amoeba --help` lists what there is.

Exit codes: 0 all is well, 1 a check failed or the reader of stdout went away, 2 the command was used wrongly,
70 a bug, 75 another rank was lost (start it again), 130 interrupted, 143 stopped by SIGTERM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from amoeba._version import __version__
from amoeba.commands import exits
from amoeba.commands.checked_commands import Typer
from amoeba.commands.exits import finish, usage
from amoeba.commands.finetune import finetune
from amoeba.commands.generate import generate
from amoeba.commands.merge import merge
from amoeba.commands.options import (
    DTYPES,
    Accumulation,
    Compile,
    ConfigFile,
    DenseParameters,
    EvalEvery,
    ExpertRanks,
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
    all_dtypes,
    parse_device,
    parse_dtypes,
    share_or_file,
    speaks,
)
from amoeba.commands.pack import pack
from amoeba.commands.quantise import quantise
from amoeba.commands.start import speak_up, start
from amoeba.commands.stream import stream
from amoeba.commands.tasks import tasks
from amoeba.commands.trace import trace
from amoeba.commands.tune import tune
from amoeba.system.loading import loading

app = Typer(
    name="amoeba",
    help="Mixture of experts for PyTorch: train, fine-tune, generate, prove, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; may be repeated.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"amoeba {__version__}")
        raise typer.Exit()


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    say_more: Verbose = False,
) -> None:
    speak_up(say_more)


@app.command()
def verify(
    device: Device = "auto",
    dtype: Dtypes = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", help="Check this one only; may be repeated.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Every case there is, without a time limit.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, help="Experts over so many processes instead, started here, on the CPU."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Prove every backend of this machine within a minute: output and each gradient against the fp64 reference."""
    output = start(verbose)
    from amoeba.commands import verify as verify_command

    with usage():
        dtypes = parse_dtypes(dtype or [], all_dtypes())
        if ranks is not None:
            verify_command.check_ranks(ranks, device, backend or [], thorough)
    if ranks is not None:
        finish(output, *verify_command.run_over_ranks(ranks, dtypes, output), json)
        return
    with usage():
        place = parse_device(device)
        backends = verify_command.check_backends(backend or [], place)
    document, ok = verify_command.run(place, dtypes, backends, thorough, output)
    finish(output, document, ok, json)


@app.command()
def doctor(json: Json = False, verbose: Verbose = False) -> None:
    """Show the machine, the versions, and which backend runs on what (and why not)."""
    output = start(verbose, passive_waiting=False)  # it tells what the environment is
    with usage():
        from amoeba.commands import doctor as doctor_command

        document = doctor_command.run(output)
    finish(output, document, True, json)


@app.command()
def bench(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="A name (small, qwen3_30b, ...) or T,H,I,E,K; may be repeated.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="Several shapes: small, cpu or gpu."),
    ] = None,
    dtype: Dtypes = None,
    device: Device = "auto",
    passes: Annotated[
        str,
        typer.Option("--pass", help="forward, training (forward and backward) or both."),
    ] = "both",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="At least so many rounds.")] = 20,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="eager, batched_mm, grouped_mm, sonicmoe, liger, loop or kt_kernel; default: all. May be repeated.",
        ),
    ] = None,
    ours: Annotated[
        list[str] | None,
        typer.Option("--ours", help='Of ours this one, as the table calls it ("cpu-bf16"). May be repeated.'),
    ] = None,
    sustained: Annotated[
        float | None,
        typer.Option("--sustained", help="On a GPU, also back to back for so many seconds, with clocks and joules."),
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option("--graphs", help="On a GPU, ours also in CUDA graphs, and what a backward takes of the host."),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the JSON document.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check each implementation on the problem itself, then time those that are right, in turns."""
    output = start(verbose, passive_waiting=False)  # measured as the environment is, which the document holds
    from amoeba.commands import bench as bench_command
    from amoeba.commands.bench_run import free_path

    with usage():
        place = parse_device(device)
        plan = bench_command.choose_plan(
            shape or [], suite, dtype or [], place, passes, repeats, peer or [], ours or [], sustained, graphs
        )
        path = free_path(out)
    document, ok = bench_command.run(plan, path, output)
    finish(output, document, ok, json)


@app.command()
def train(
    model: Annotated[
        str | None, typer.Option("--model", help="A preset (demo, 120m, mixtral, ...) or a folder with a config.json.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="File, folder or dataset; default: Python's manual.")
    ] = None,
    held_out: HeldOut = None,
    config: ConfigFile = None,
    out: Annotated[str | None, typer.Option("--out", help="Run folder; default runs/MODEL.")] = None,
    resume: Resume = None,
    start_from: StartFrom = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps; default 400, or the preset's.")] = None,
    minutes: Minutes = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Rows per pass; under torchrun of all ranks together.")
    ] = None,
    accumulation: Accumulation = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Tokens of a row; default 256, or the preset's.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", help="Its peak, after the warm-up; default 2e-3, or the preset's."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", help="Of a tokenizer trained on the data.")] = None,
    balance: Annotated[str | None, typer.Option("--balance", help="aux, bias or none.")] = None,
    experts: Annotated[
        str | None,
        typer.Option("--experts", help="Where they are: resident, or over the ranks that torchrun started: ranks."),
    ] = None,
    expert_ranks: ExpertRanks = None,
    dense: DenseParameters = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto (the faster), float32 or bfloat16.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Of the experts' products: bf16 (as --dtype says), fp8, fp8-ste, fp8-saved, fp8-all or auto.",
        ),
    ] = None,
    compile_layers: Compile = None,
    optimizer_states: OptimizerStates = None,
    log_every: Annotated[int | None, typer.Option("--log-every", help="Steps between lines; default 10.")] = None,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    seed: Seed = None,
    gradient_checkpointing: GradientCheckpointing = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train a mixture-of-experts language model, watch its experts, keep it as a Hugging Face folder."""
    flags = {
        "model": model, "data": data, "held_out": share_or_file(held_out), "out": out, "steps": steps,
        "minutes": minutes, "batch_size": batch_size,
        "accumulation": accumulation, "sequence_length": sequence_length, "learning_rate": learning_rate,
        "vocab_size": vocab_size, "balance": balance, "experts": experts, "expert_ranks": expert_ranks,
        "dense": dense, "dtype": dtype, "precision": precision,
        "compile": compile_layers,
        "optimizer_states": optimizer_states, "log_every": log_every,
        "eval_every": eval_every, "save_every": save_every, "seed": seed,
        "gradient_checkpointing": gradient_checkpointing or None,
    }  # fmt: skip
    output = start(verbose, over_ranks=True)
    with loading():
        from amoeba.commands import train as train_command
        from amoeba.jobs.settings import TrainSettings
        from amoeba.jobs.train.resume import settings_of

    with usage():
        given = {name: value for name, value in flags.items() if value is not None}
        settings = settings_of(TrainSettings, resume, config, given)
        document = train_command.run(settings, resume is not None, start_from, output, trust_remote_code)
    finish(output, document, True, json and speaks())
    if document["exit_code"]:
        raise typer.Exit(document["exit_code"])


app.command()(tune)
app.command()(finetune)
app.command()(generate)
app.command()(merge)
app.command()(pack)
app.command()(quantise)
app.command()(trace)
app.add_typer(stream)
app.add_typer(tasks)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where to write the page; default RUN/report.html.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a training run as one HTML page: losses, expert heatmap, entropy, co-activation; no network needed."""
    output = start(verbose)
    from amoeba.commands import report as report_command

    with usage():
        document = report_command.run(run, out, output)
    finish(output, document, True, json)


def main() -> None:
    exits.run(app)
