"""`amoeba tune`: searches the best configurations of the kernels on this GPU, and keeps each as it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from amoeba.commands.exits import INTERRUPTED, finish, need, usage
from amoeba.commands.options import Json, Verbose, dtype_name, parse_dtypes
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.core.errors import bad_value

if TYPE_CHECKING:
    import torch

    from amoeba.bench.workload import Shape
    from amoeba.tuning.search import Found, Measure, Search

SERVED = ("bfloat16", "float16", "float32")
MOST_MINUTES = 24 * 60.0


def tune(
    shape: Annotated[
        list[str] | None, Option(help="Shape: a name (qwen3_30b, ...) or T,H,I,E,K. Can be repeated.")
    ] = None,
    model: Annotated[str | None, Option(help="Tune for a preset (120m, ...) or a folder with config.json.")] = None,
    tokens: Annotated[int, Option(min=1, help="With --model: tokens per pass.")] = 8192,
    dtype: Annotated[
        list[str] | None, Option(help=f"{', '.join(SERVED)} (default: bfloat16). Can be repeated.")
    ] = None,
    minutes: Annotated[float, Option(help="Total time budget for all kernels.")] = 5.0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find the fastest tile sizes for each kernel on this GPU and save them for later runs."""
    output = start(verbose)
    with usage():
        import torch

        if model is not None:
            need("transformers")
        device = check_device()
        dtypes = parse_dtypes(dtype or [], [torch.bfloat16])
        for wanted in map(dtype_name, dtypes):
            if wanted not in SERVED:
                remedy = "the kernels support no other dtype"
                raise bad_value("--dtype", f"one of {', '.join(SERVED)}", wanted, remedy)
        if not 0 < minutes <= MOST_MINUTES:
            remedy = "5 minutes are enough for one layer"
            raise bad_value("--minutes", f"more than 0, at most {MOST_MINUTES:g}", minutes, remedy)
        shapes, head_sizes = choose_shapes(shape or [], model, tokens, device, dtypes)
        from amoeba.tuning.searches import searches

        found = [each for kind in dtypes for one in shapes for each in searches(one, kind, device, head_sizes)]
    document = run(found, minutes, torch.device(device), output)
    finish(output, document, True, json)
    if not document["finished"]:
        raise typer.Exit(INTERRUPTED)


def check_device() -> torch.device:
    import torch

    remedy = "run it on the machine that has the GPU: what is found holds for that GPU alone"
    if not torch.cuda.is_available():
        raise bad_value("GPU", "a CUDA device", f"none that torch {torch.__version__} finds", remedy)
    if torch.cuda.get_device_capability() < (8, 0):
        found = "{}.{}".format(*torch.cuda.get_device_capability())
        raise bad_value("GPU", "compute capability 8.0 or newer, which the kernels need", found, remedy)
    need("triton")
    return torch.device("cuda", torch.cuda.current_device())


def choose_shapes(
    names: Sequence[str], model: str | None, tokens: int, device: torch.device, dtypes: Sequence[torch.dtype]
) -> tuple[list[Shape], tuple[int, ...]]:
    from amoeba.bench.workload import check_memory, parse_shape
    from amoeba.kernels.attention.tile import HEAD_SIZES

    if bool(names) == (model is not None):
        remedy = "write for example --shape qwen3_30b, --shape 8192,2048,768,128,8 or --model 120m"
        raise bad_value("--shape", "either --shape or --model", "both" if names else "neither", remedy)
    shapes: list[Shape] = [parse_shape(name) for name in names]
    head_sizes: tuple[int, ...] = HEAD_SIZES
    if model is not None:
        from amoeba.tuning.model_shapes import shapes_of

        shapes, head_sizes = shapes_of(model, tokens)
    check_memory([(dtype, shape) for dtype in dtypes for shape in shapes], device, training=True)
    return shapes, head_sizes


def run(
    searches: list[Search],
    minutes: float,
    device: torch.device,
    output: Output,
    measure: Measure | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Keeps what each search finds before the next begins; Ctrl-C ends it with what was found until then. Searches that
    found something in an earlier call come last, so that one that ran out of time is gone on with."""
    from amoeba.system import tuned
    from amoeba.tuning.search import find_best, median_ms

    measure = measure or median_ms
    gpu, began, total = tuned.gpu_of(device), clock(), len(searches)
    results: dict[str, Found] = {}
    path, finished = tuned.path_of(gpu), False
    known = tuned.read(path, gpu)
    searches.sort(key=lambda search: search.key in known)
    output.progress(f"{total} kernels on {gpu.name} in at most {minutes:g} minutes; Ctrl-C keeps what has been found")
    try:
        while searches:
            left = began + 60 * minutes - clock()
            if left <= 0 and results:
                break
            search = searches.pop(0)  # so that its tensors go with it
            deadline = clock() + left / (len(searches) + 1)
            found = find_best(search, measure=measure, clock=clock, deadline=deadline)
            tuned.keep(gpu, search.key, found.entry())
            results[search.key] = found
            output.progress(f"{len(results)}/{total} {search.key}: {_said(found, len(search.candidates))}")
        finished = True
    except KeyboardInterrupt:
        output.warning(f"interrupted: {len(results)} of {total} kernels are tuned and saved")
    _print(results, output)
    left_over = [search.key for search in searches] if finished else []
    if left_over:
        output.warning(
            f"time is up ({minutes:g} minutes): {len(left_over)} of {total} kernels were not tuned and run as before;"
            " run the same command again to continue with them"
        )
    if results:
        output.line(f"saved to {path}; the next run uses it ({tuned.VARIABLE}=off ignores it)")
    kernels = [{"key": key, **found.entry(), "left_out": found.left_out} for key, found in results.items()]
    document: dict[str, Any] = {
        "document": "amoeba tune",
        "gpu": gpu._asdict(),
        "path": str(path),
        "finished": finished,
    }
    return document | {"not_searched": left_over, "seconds": round(clock() - began, 3), "kernels": kernels}


def _said(found: Found, candidates: int) -> str:
    what = f"{found.gain:.2f}x ours" if found.gain > 1 else "ours is the best"
    return f"{found.best_ms:.3g} ms, {what} ({found.tried} of {candidates} candidates timed)"


def _print(results: dict[str, Found], output: Output) -> None:
    columns, rows = ["kernel", "ours ms", "best ms", "gain", "error", "configuration"], []
    for key, found in results.items():
        numbers = [f"{found.default_ms:.4g}", f"{found.best_ms:.4g}", f"{found.gain:.2f}x", f"{found.error:.1e}"]
        rows.append([key, *numbers, str(found.best) if found.gain > 1 else "ours"])
    if rows:
        output.table("found (error: against ours, on the same inputs)", columns, rows, text=("kernel", "configuration"))
