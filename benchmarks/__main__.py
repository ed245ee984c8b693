"""The command line of the benchmarks: `python -m benchmarks --help`, from the root of the repository."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from amoeba.commands import exits
from amoeba.commands.exits import finish, need, usage
from amoeba.commands.options import Json, Verbose, parse_device, parse_dtypes
from amoeba.commands.start import start
from amoeba.commands.typer_app import Typer
from amoeba.core.errors import bad_value

app = Typer(
    name="benchmarks",
    help="Benchmarks of whole models, streamed experts, experts over ranks, conversions and single kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Shapes = Annotated[list[str] | None, typer.Option("--shape", help="A name, or T,H,I,E,K where a layer is measured.")]
Passes = Annotated[str | None, typer.Option("--pass", help="Only this part; default: all.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Measure at least this many rounds.")]
Ours = Annotated[list[str] | None, typer.Option("--ours", help="Of ours only these, by a part of the name.")]
Peers = Annotated[list[str] | None, typer.Option("--peer", help="Of the peers only these, by a part of the name.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the JSON document.")]


def suite(needs: str | None = None, passive_waiting: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """A command that writes a document. The function looks at what the user gave, and returns what measures: it is
    called with the document's path and the output, and gives the document and whether all is well.

    needs: a package."""

    def add(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def command(out: Path | None, json: bool, verbose: bool, **given: Any) -> None:
            output = start(verbose, passive_waiting=passive_waiting)
            with usage():
                if needs is not None:
                    need(needs)
                from amoeba.commands.bench_run import free_path

                measure = function(**given)
                path = free_path(out)
            document, ok = measure(path=path, output=output)
            finish(output, document, ok, json)

        added = (("out", Out, None), ("json", Json, False), ("verbose", Verbose, False))
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(name, kind, default=default, annotation=hint) for name, hint, default in added]
        signature = inspect.signature(function, eval_str=True)
        parameters = [*(each.replace(kind=kind) for each in signature.parameters.values()), *more]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return app.command()(command)

    return add


@suite("transformers")
def models(
    shape: Shapes = None,
    passes: Passes = None,
    device: Device = "auto",
    repeats: Repeats = 20,
    ours: Ours = None,
    peer: Peers = None,
) -> Any:
    """Training steps, LoRA steps and decodes of whole models, compared with transformers and PEFT."""
    from benchmarks.models.problem import choose_problems
    from benchmarks.models.run import choose_candidates, run

    problems = choose_problems(shape or [], passes, parse_device(device))
    chosen = choose_candidates(problems, ours or [], peer or [])
    return functools.partial(run, problems, repeats, chosen)


@suite()
def stream(shape: Shapes = None, passes: Passes = None, device: Device = "auto", repeats: Repeats = 20) -> Any:
    """Streamed experts compared with resident ones: decode, disk and lora."""
    from benchmarks.stream.problem import choose_problem
    from benchmarks.stream.run import run

    problem = choose_problem(shape or [], passes, parse_device(device))
    return functools.partial(run, problem, repeats)


@suite()
def ranks(
    shape: Shapes = None,
    ranks: Annotated[int, typer.Option("--ranks", help="Processes of this machine.")] = 2,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Default: bfloat16 on a GPU, float32 else.")
    ] = None,
    device: Device = "auto",
    repeats: Repeats = 20,
    ours: Annotated[list[str] | None, typer.Option("--ours", help="A recipe by which the experts train: fp8.")] = None,
) -> Any:
    """Experts over processes of this machine: what each exchange costs, and how much of it is hidden."""
    from amoeba.commands.bench_layers import default_dtypes
    from benchmarks.ranks.run import choose_job, run

    place = parse_device(device)
    dtypes = parse_dtypes(dtype or [], default_dtypes(place))
    job = choose_job(shape or [], ranks, place, dtypes, ours or [])
    return functools.partial(run, job, repeats)


@suite()
def products(shape: Shapes = None, device: Device = "auto", repeats: Repeats = 20, ours: Ours = None) -> Any:
    """Each kernel of a training step by itself on a GPU, compared with torch's grouped products."""
    from benchmarks.products import choose_shapes, run

    place = parse_device(device)
    shapes = choose_shapes(shape or [], place)
    return functools.partial(run, shapes, place, repeats, ours=ours or [])


@app.command()
def cache(
    trace: Annotated[
        Path | None, typer.Argument(help="Routing trace from `amoeba generate --record`. Or use --synthetic.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            help="Generate a trace: qwen3-30b, or changes to it, such as layers=4,tokens=500,next=0.45,within=0.8,"
            "skew=0.5,drift=0,seed=0,experts=128,top_k=8.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="Shares of the experts on the GPU, the rest in host memory (default: 10%,25%,50%)."
        ),
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Bytes of experts kept on the GPU, such as 8GiB, instead of --budget.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", help="Bytes of experts kept in memory; the rest is on disk (default: all in memory)."),
    ] = None,
    expert_size: Annotated[
        str | None, typer.Option("--expert-size", help="Bytes per expert, such as 9MiB (default: from the trace).")
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, help="Initial tokens that fill the cache and are not counted.")
    ] = 0,
    link: Annotated[float, typer.Option("--link", help="GB/s from memory to the GPU, for the time floor.")] = 55.0,
    disk: Annotated[float, typer.Option("--disk", help="GB/s from disk, for the time floor.")] = 5.0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Replay a routing trace with several memory budgets: hit rates, bytes per token, time floor."""
    output = start(verbose)
    with usage():
        from benchmarks.stream.cache import check_warm_up, choose_budgets, load_trace, run

        if not (link > 0 and disk > 0):
            raise bad_value(
                "--link and --disk", "more than 0 GB/s", f"{link:g} and {disk:g}", "use measured values if you can"
            )
        replayed, name = load_trace(trace, synthetic, expert_size)
        check_warm_up(replayed, warm_up)
        settings = choose_budgets(replayed, budget, vram, ram)
        document = run(replayed, name, settings, warm_up, link * 1e9, disk * 1e9, output)
    finish(output, document, True, json)


@suite("transformers")
def roads(
    shape: Annotated[
        str | None, typer.Option("--shape", help="tiny, or qwen3_30b (default on a GPU): its sizes, three layers.")
    ] = None,
    road: Annotated[list[str] | None, typer.Option("--road", help="Only this one, such as generate.")] = None,
    place: Annotated[
        list[str] | None, typer.Option("--place", help="Only experts resident, streamed, cpu or ranks.")
    ] = None,
    format: Annotated[list[str] | None, typer.Option("--format", help="Only bf16, fp8, mxfp8, mxfp4 or nvfp4.")] = None,
) -> Any:
    """Every command with every place and format of the experts: its speed and path, or why it is refused."""
    import torch

    from benchmarks.roads import SIZES, choose_cells, run

    size = shape or ("qwen3_30b" if torch.cuda.is_available() else "tiny")
    if size not in SIZES:
        raise bad_value("--shape", f"one of {', '.join(SIZES)}", repr(size), "leave it out")
    cells = choose_cells(road or [], place or [], format or [])
    return functools.partial(run, cells, SIZES[size])


@suite("transformers")
def plan(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="tiny, middle, 1b or qwen3_30b (four layers).")
    ] = None,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="generate, finetune or train.")] = None,
    place: Annotated[list[str] | None, typer.Option("--place", help="Only experts resident, streamed, ...")] = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", help="Train with experts over this many processes.")
    ] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="On a CPU: CPU time of one thread, for a machine with other work.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Begin no cell after this many.")] = 1e9,
    after: Annotated[
        Path | None, typer.Option("--after", help="Only cells that this document did not measure.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep the models here (default: nowhere).")] = None,
) -> Any:
    """What `amoeba plan` predicts, next to the memory and speed of the commands."""
    import torch

    from benchmarks.plan import choose_cells, not_in, run

    cells = choose_cells(shape or [], passes or [], place or [], torch.cuda.is_available(), ranks or [])
    cells = cells if after is None else not_in(after, cells)
    return functools.partial(run, cells, folder, seconds, cpu_time=cpu_time)


@app.command()
def tasks(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Layer shape T,H,I,E,K, with T tokens per rank (default: 40,32,24,6,2). With --timing also a name "
            "such as qwen3_30b (default: qwen3_small).",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Expert-parallel ranks.")] = 2,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Workers per rank (default: 4; with --timing 132, as on an H200)."),
    ] = None,
    passes: Annotated[int, typer.Option("--passes", min=1, help="Consecutive backward passes.")] = 2,
    schedules: Annotated[int, typer.Option("--schedules", min=1, help="Number of random schedules.")] = 20,
    remote: Annotated[
        str | None, typer.Option("--remote", help="Ranks reached by put and signal instead of loads, such as 1,3.")
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing",
            help="Estimate the time on an H200 instead: one schedule without tensors, for layers of real size.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for tokens, routing and schedules.")] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Save the first schedule as JSON for ui.perfetto.dev.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Save the first schedule as an SVG picture.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Simulate the scheduled backward in random orders: no early read, no deadlock, every gradient correct."""
    output = start(verbose)
    with usage():
        from benchmarks.tasks import choose_job, run

        job = choose_job(shape, ranks, workers, passes, remote, seed, timing, schedules, trace, picture)
    finish(output, *run(job, trace, picture, output), json)


@suite("transformers")
def convert(
    size: Annotated[
        str | None, typer.Option("--size", help="Bytes of the model (default: 8GB with a GPU, else 1.5GB).")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", help="On the disk to measure; needs room for three such models.")
    ] = Path(),
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds after the first.")] = 3,
) -> Any:
    """quantise, pack and save, compared with what the disk copies."""
    import torch

    from amoeba.stream.sizes import parse_size
    from benchmarks.convert import ConvertSize, run

    wanted = parse_size("--size", size or ("8GB" if torch.cuda.is_available() else "1.5GB"))
    return functools.partial(run, ConvertSize(wanted), folder, repeats)


@suite("transformers")
def quality(
    model: Annotated[Path, typer.Argument(help="A folder that amoeba train wrote.")],
    data: Annotated[str | None, typer.Option("--data", help="What it was trained on.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="A run of amoeba finetune on it.")] = None,
    answers: Annotated[str | None, typer.Option("--answers", help="What that was trained on.")] = None,
) -> Any:
    """Loss and greedy tokens of a model with its experts in each format."""
    from benchmarks.quality import run

    return functools.partial(run, model, data, adapter, answers)


@suite("transformers")
def exactness(
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Generated after each prompt.")] = 8,
    repeats: Annotated[int, typer.Option("--repeats", min=0, help="Rounds of the cost; 0 for none.")] = 5,
    seconds: Annotated[float, typer.Option("--seconds", help="Begin no model after this many.")] = 1e9,
    device: Device = "auto",
) -> Any:
    """How far generation and training are apart, with and without exact mode, and what it costs."""
    from benchmarks.exactness import run

    place = parse_device(device)
    return functools.partial(run, new_tokens, repeats, device=place, seconds=seconds)


@suite("transformers")
def decode(
    shape: Annotated[
        str | None, typer.Option("--shape", help="qwen3_30b (default on a GPU), qwen3_next, tiny or tiny_next.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="How many (default: 6, of tiny ones 4).")] = None,
    format: Annotated[
        list[str] | None,
        typer.Option("--format", help="Of the experts: bf16, fp8, mxfp8, mxfp4, nvfp4, or a GGUF type such as q4_k."),
    ] = None,
    rows: Annotated[list[int] | None, typer.Option("--rows", help="Rows at once (default: 1, 8, 64).")] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of each row's prompt.")] = 128,
    plain: Annotated[bool, typer.Option("--plain", help="Measure transformers' own loop as well.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Begin no cell after this many.")] = 1e9,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds after the first.")] = 3,
    device: Device = "auto",
) -> Any:
    """Steps of generate with experts in each format, next to the time in which their bytes can be read."""
    from benchmarks.decode import ROWS, choose_cells, run

    place = parse_device(device)
    size = shape or ("qwen3_30b" if place.type == "cuda" else "tiny")
    cells = choose_cells(
        size, layers or (4 if size.startswith("tiny") else 6), format or [], rows or ROWS, prompt, plain
    )
    return functools.partial(run, cells, place, repeats, seconds)


@suite("transformers")
def serve(
    shape: Annotated[
        str | None, typer.Option("--shape", help="tiny, or qwen3_30b (default on a GPU): its sizes, six layers.")
    ] = None,
    clients: Annotated[list[int] | None, typer.Option("--clients", help="Clients at once (default: 1, 8, 32).")] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without HTTP: the engines alone, in this process.")
    ] = False,
    device: Device = "auto",
) -> Any:
    """Concurrent clients of amoeba serve, compared with transformers serve: tokens/s and first tokens."""
    from benchmarks.serve import SIZES, run

    place = parse_device(device)
    size = shape or ("qwen3_30b" if place.type == "cuda" else "tiny")
    if size not in SIZES:
        raise bad_value("--shape", f"one of {', '.join(SIZES)}", repr(size), "leave it out")
    return functools.partial(run, SIZES[size], clients or [1, 8, 32], place, not in_process)


@suite("transformers", passive_waiting=True)
def soak(
    minutes: Annotated[float, typer.Option("--minutes", help="How long.")] = 10.0,
    clients: Annotated[int, typer.Option("--clients", help="Clients at once.")] = 16,
) -> Any:
    """amoeba serve under clients that leave, send nonsense or are slow: statuses, texts, memory, SIGTERM."""
    from benchmarks.soak import run

    return functools.partial(run, minutes, clients)


if __name__ == "__main__":
    exits.run(lambda **_: app(prog_name="python -m benchmarks"))
