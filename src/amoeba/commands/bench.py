"""`amoeba bench`: its options. `bench_layers.py` measures and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Device, Dtypes, Json, Verbose, parse_device, parse_dtypes
from amoeba.commands.start import start


def bench(
    shape: Annotated[
        list[str] | None, Option(help="Layer shape: a name (small, qwen3_30b, ...) or T,H,I,E,K. Can be repeated.")
    ] = None,
    suite: Annotated[str | None, Option(help="A set of shapes: small, cpu or gpu.")] = None,
    dtype: Dtypes = None,
    device: Device = "auto",
    passes: Annotated[str, Option("--pass", help="forward, training (forward and backward) or both.")] = "both",
    repeats: Annotated[int, Option(min=1, help="Minimum number of timed rounds.")] = 20,
    peer: Annotated[
        list[str] | None,
        Option(
            help="Compare with eager, batched_mm, grouped_mm, sonicmoe, liger, loop or kt_kernel (default: all). "
            "Can be repeated."
        ),
    ] = None,
    ours: Annotated[
        list[str] | None,
        Option(help='Measure only this amoeba backend, by its name in the table ("cpu-bf16"). Can be repeated.'),
    ] = None,
    sustained: Annotated[
        float | None, Option(help="On a GPU, also run back to back for this many seconds; shows clocks and joules.")
    ] = None,
    graphs: Annotated[
        bool, Option("--graphs", help="On a GPU, also measure our backends in CUDA graphs, with host time.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder for the JSON document.")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Benchmark one layer: check each implementation on the given shape, then time the correct ones side by side."""
    output = start(verbose, passive_waiting=False)  # measured as the environment is, which the document holds
    from amoeba.bench.suite import Plan
    from amoeba.commands import bench_layers
    from amoeba.commands.bench_run import free_path

    with usage():
        place = parse_device(device)
        shapes = bench_layers.choose_shapes(shape or [], suite, place)
        dtypes, kinds = (
            parse_dtypes(dtype or [], bench_layers.default_dtypes(place)),
            bench_layers.choose_passes(passes),
        )
        peers, own = bench_layers.choose_peers(peer or []), bench_layers.choose_ours(ours or [])
        plan = Plan(shapes, place, dtypes, kinds, repeats, peers, own, sustained, graphs)
        bench_layers.check_plan(plan)
        path = free_path(out)
    document, ok = bench_layers.run(plan, path, output)
    finish(output, document, ok, json)
