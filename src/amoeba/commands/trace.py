"""`amoeba trace`: the scheduled backward's own timeline, as the device ran it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from amoeba.commands import options
from amoeba.commands.exits import finish, need, usage
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.core.errors import bad_value

if TYPE_CHECKING:
    import torch

    from amoeba.bench.workload import Shape
    from amoeba.core.problem import Problem
    from amoeba.tasks.timeline import Record, Summary

GPU_SHAPE, INTERPRETED_SHAPE = "1024,1536,256,128,8", "40,16,24,3,2"


def trace(
    out: Annotated[Path, Option(help="Trace file, for ui.perfetto.dev.")] = Path("amoeba-trace.json"),
    picture: Annotated[Path | None, Option(help="SVG picture to write (default: next to --out).")] = None,
    shape: Annotated[
        str | None,
        Option(help=f"A name (sonic_a, ...) or T,H,I,E,K (default: {GPU_SHAPE}; {INTERPRETED_SHAPE} without a GPU)."),
    ] = None,
    dtype: Annotated[str | None, Option(help="bfloat16 (default), float16, float32.")] = None,
    device: Annotated[str, Option(help="auto, cpu (TRITON_INTERPRET=1) or cuda.")] = "auto",
    seed: Annotated[int, Option(help="Random seed for weights, tokens and routing.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Run the scheduled backward once and save a timeline of every multiprocessor, for ui.perfetto.dev."""
    output = start(verbose)
    with usage():
        need("torch", "triton")
        import torch

        from amoeba.bench.workload import check_memory, parse_shape

        place = options.parse_device(device)
        default = INTERPRETED_SHAPE if place.type == "cpu" else GPU_SHAPE
        found = parse_shape(shape or default)
        (kind,) = options.parse_dtypes(
            [dtype] if dtype else [], [torch.float32 if place.type == "cpu" else torch.bfloat16]
        )
        drawn = picture or out.with_suffix(".svg")
        options.check_seed(seed)
        for option, file, name in (("--out", out, "trace.json"), ("--picture", drawn, "trace.svg")):
            options.check_file_to_write(option, file, name)
        if drawn == out:
            remedy = "leave it out to write it next to the JSON file"
            raise bad_value("--picture", "a file other than --out", drawn, remedy)
        check_memory([(kind, found)], place, training=True)
        problem, dy_TH = _problem(found, place, kind, seed)
        _check(problem)
    finish(output, run(found, problem, dy_TH, out, drawn, output), True, json)


def run(
    shape: Shape, problem: Problem, dy_TH: torch.Tensor, out: Path, picture: Path, output: Output
) -> dict[str, Any]:
    from amoeba.core.cost import backward_flops
    from amoeba.system.files import write_whole
    from amoeba.tasks.picture import draw
    from amoeba.tasks.timeline import summarise, trace_text
    from amoeba.tasks.triton.backward import programs

    device, dtype = problem.x_TH.device, options.dtype_name(problem.x_TH.dtype)
    output.line(
        f"one backward of {shape.tokens} tokens, {shape.top_k} of {shape.experts} experts each, hidden {shape.hidden}, "
        f"intermediate {shape.intermediate}, {dtype}, on {device.type}"
    )
    with output.working():
        ceiling = _ceiling(device, problem.x_TH.dtype)
        records, arrows, rows = _trace(problem, dy_TH)
    workers = max(programs(device), 1 + max(record.worker for record in records))
    summary = summarise(records, workers)
    unit = "us" if device.type == "cuda" else "ticks"  # the interpreter's clock goes on by one at each look
    print_summary(summary, output, "tasks as they ran", unit)
    idle = max(0.0, 1 - summary.busy - summary.waited)
    noun = "worker" if workers == 1 else "workers"
    output.line(f"{workers} {noun}: {summary.busy:.0%} busy, {summary.waited:.0%} waiting at gates, {idle:.0%} idle")
    tensor_cores = None
    if ceiling is not None:
        _, hidden, intermediate = problem.weights.down_EHI.shape
        sizes_of = {"hidden": hidden, "intermediate": intermediate, "gated": problem.weights.activation.gated}
        reached = backward_flops(rows=rows, **sizes_of) / (summary.span * 1e-6)
        tensor_cores = {"flops_per_second": reached, "ceiling": ceiling, "share": reached / ceiling}
        output.line(
            f"tensor cores: {reached / ceiling:.0%} busy, {reached / 1e12:.0f} TFLOP/s over the whole backward "
            f"of {ceiling / 1e12:.0f} that a dense product reaches here (arithmetic of the {rows} rows alone)"
        )
    write_whole(out, trace_text(records, arrows, "SM" if device.type == "cuda" else "program"))
    sizes = "T={} H={} I={} E={} K={}".format(*_numbers(shape))
    write_whole(picture, draw(records, workers, f"{sizes}, {dtype}, {_named(device)}", unit))
    output.line(f"{out}: open it at ui.perfetto.dev; {picture}: a picture of it")
    kinds = {kind.name.lower(): each._asdict() for kind, each in summary.kinds.items() if each.tasks}
    document: dict[str, Any] = {"document": "amoeba trace", "shape": _numbers(shape), "dtype": dtype}
    document |= {"device": device.type}
    document |= {"unit": unit, "workers": workers, "tasks": len(records), "kinds": kinds, "span": summary.span}
    document |= {"busy": summary.busy, "waited": summary.waited, "idle": idle, "tensor_cores": tensor_cores}
    return document | {"trace": str(out), "picture": str(picture)}


def _numbers(shape: Shape) -> list[int]:
    return [shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k]


def _named(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "in Triton's interpreter"


def _ceiling(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a large dense product reaches on this GPU; the interpreter's clock says nothing about rates."""
    if device.type != "cuda":
        return None
    from amoeba.bench.timing import measure_ceilings

    return measure_ceilings(device, [dtype]).matmul_flops_per_second(dtype)


def _problem(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Problem, torch.Tensor]:
    import torch

    from amoeba.bench.workload import draw_routing
    from amoeba.core.problem import Problem
    from amoeba.core.weights import ExpertWeights

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).div_(size[-1] ** 0.5)

    weights = ExpertWeights(
        normal(shape.experts, 2 * shape.intermediate, shape.hidden),
        normal(shape.experts, shape.hidden, shape.intermediate),
    )
    expert_TK, weight_TK = draw_routing(shape, generator)
    x_TH, dy_TH = normal(shape.tokens, shape.hidden), normal(shape.tokens, shape.hidden)
    return Problem(x_TH, expert_TK, weight_TK.to(dtype), weights), dy_TH


def _check(problem: Problem) -> None:
    from amoeba.backends.triton import why_not_on

    reason = why_not_on(problem.weights.device, problem.weights.dtype)
    if reason is not None:
        expected, got = "a device that the kernels support", f"{problem.weights.device.type}: `triton` {reason}"
        raise bad_value("--device", expected, got, "run it on a GPU, or with TRITON_INTERPRET=1 and --dtype float32")


def _trace(problem: Problem, dy_TH: torch.Tensor) -> tuple[list[Record], list[tuple[Record, Record]], int]:
    """Of the second pass: the first one compiles. And how many rows it had."""
    from amoeba.backends.tasks import kernel_for
    from amoeba.backends.triton import BACKEND
    from amoeba.core.problem import Saved
    from amoeba.tasks.timeline import DeviceTrace

    _, saved = BACKEND.forward(problem, "h")
    assert isinstance(saved, Saved)
    weights, trace = problem.weights, DeviceTrace(problem.x_TH.device)
    for _ in range(2):
        rows = dy_TH, problem.x_TH, saved.h_NJ, problem.expert_TK, problem.weight_TK
        experts = weights.gate_up_EJH, weights.down_EHI, weights.activation
        kernel_for(problem)(*rows, *experts, saved.maps, trace=trace.room)
    records, ends = trace.records(), saved.offs_E.tolist()
    return records, trace.gates(records, ends), ends[-1]


def print_summary(summary: Summary, output: Output, title: str, unit: str = "steps") -> None:
    all_time = sum(each.time for each in summary.kinds.values()) or 1.0
    rows = []
    for kind, each in ((kind, each) for kind, each in summary.kinds.items() if each.tasks):
        numbers = [str(each.tasks), f"{100 * each.time / all_time:.1f}", f"{each.waited / each.tasks:.2f}"]
        rows.append([kind.name.lower(), *numbers])
    columns = ["kind", "tasks", "time %", f"waited {unit} each"]
    output.table(title, columns, rows, text=("kind",))
    output.line(
        f"workers were busy {100 * summary.busy:.0f} % of {summary.span:.1f} {unit} "
        f"({100 * summary.idlest:.0f} to {100 * summary.busiest:.0f}), and waited {100 * summary.waited:.0f} % at gates"
    )
