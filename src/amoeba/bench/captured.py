"""A training step as CUDA graphs, and the host time of its backward: for layers so small that the GPU waits for the
host.

    found, left_out = in_graphs({"triton": run, "tasks": run_too}, workload, repeats=20)
    found["tasks"].backward_median_ms, found["tasks"].backward_times_faster_than["triton"]
    hosts = host_times({"triton": [run, ...]}, apart(workload), repeats=20)     # a run of each layer

Forward and backward are two graphs, replayed one after the other, alternating between implementations as in `timing`:
what is left is the device's own time. A backward may overwrite what forward has kept, so each one has a forward before
it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from amoeba.bench.timing import Step, Timing, time_in_turns
from amoeba.bench.workload import Workload
from amoeba.core import torch_internals
from amoeba.core.weights import LoraFactors

Run = Callable[[], Tensor]
Replay = Callable[[], None]

LAYERS = 4  # whose backward passes follow each other in one call
HOST_ROUNDS, LEAST_HOST_ROUNDS, MOST_HOST_SECONDS = 50, 5, 2.0


@dataclass(frozen=True)
class InGraphs:
    """Device time of forward (what backward needs kept) and backward, each in a CUDA graph."""

    rounds: int
    forward_median_ms: float
    forward_min_ms: float
    backward_median_ms: float
    backward_min_ms: float
    forward_times_faster_than: dict[str, float]  # medians, of all that were captured
    backward_times_faster_than: dict[str, float]


@dataclass(frozen=True)
class BackwardHost:
    """Host time of a backward, from call to return, while the GPU may still be at it. of_several: of each of `layers`
    layers, one behind the other in one call, which wakes autograd's thread once."""

    rounds: int
    median_ms: float
    min_ms: float
    layers: int
    of_several_median_ms: float
    of_several_min_ms: float


def capture(run: Run, workload: Workload) -> tuple[Replay, Replay]:
    """Forward and backward, which have run before. Raises what a step raises that cannot be captured."""
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()  # theirs as long as they live: what they read and write stays where it is
    with torch_internals.capture(forward, pool=pool):
        y_TH = run()
    with torch_internals.capture(backward, pool=pool):
        torch.autograd.grad(y_TH, list(workload.leaves().values()), workload.dy_TH, allow_unused=True)
    return forward.replay, backward.replay


def in_graphs(runs: dict[str, Run], workload: Workload, repeats: int) -> tuple[dict[str, InGraphs], dict[str, str]]:
    """Of each that can be captured, and of the others the reason."""
    steps: dict[str, Step] = {}
    left_out = {}
    for name, run in runs.items():
        workload.clear_gradients()
        try:
            steps[name] = _replayed(*capture(run, workload))
        except Exception as error:  # it waits for the host, or makes something there
            left_out[name] = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
            if workload.device.type == "cuda":
                torch.cuda.synchronize(workload.device)
    timings = time_in_turns(steps, workload.device, repeats)
    return {name: _found(name, timings) for name in timings}, left_out


def _replayed(forward: Replay, backward: Replay) -> Step:
    def step(mark: Callable[[], None]) -> None:
        mark()
        forward()
        mark()
        backward()
        mark()

    step(lambda: None)  # the first replay uploads the graphs
    return step


def _found(name: str, timings: dict[str, Timing]) -> InGraphs:
    parts = timings[name].part_medians_ms
    least = [min(part) for part in zip(*timings[name].parts_ms, strict=True)]
    others = {other: found.part_medians_ms for other, found in timings.items() if other != name}
    return InGraphs(
        timings[name].rounds,
        parts[0],
        least[0],
        parts[1],
        least[1],
        *({other: found[part] / parts[part] for other, found in others.items()} for part in (0, 1)),
    )


def apart(workload: Workload) -> list[Workload]:
    """The same LAYERS times, each with leaves of its own: their gradients are not added up. Weights are not copied."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def factors() -> LoraFactors | None:
        lora = workload.lora
        if lora is None:
            return None
        return LoraFactors(**{name: leaf(each) for name, each in lora.tensors().items()}, scaling=lora.scaling)

    return [
        replace(
            workload,
            lora=factors(),
            x_TH=leaf(workload.x_TH),
            weight_TK=leaf(workload.weight_TK),
            gate_up_EJH=nn.Parameter(workload.gate_up_EJH.detach(), workload.gate_up_EJH.requires_grad),
            down_EHI=nn.Parameter(workload.down_EHI.detach(), workload.down_EHI.requires_grad),
        )
        for _ in range(LAYERS)
    ]


def host_times(
    runs: dict[str, Sequence[Run]],
    workloads: Sequence[Workload],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, BackwardHost]:
    """runs: one per workload for each. Times one alone and all in one call, alternating with the others."""
    alone: dict[str, list[float]] = {name: [] for name in runs}
    together: dict[str, list[float]] = {name: [] for name in runs}
    began = clock()
    for turn in range(max(repeats, HOST_ROUNDS) + 1):
        if turn > LEAST_HOST_ROUNDS and clock() - began > MOST_HOST_SECONDS:  # large layers, whose host is far ahead
            break
        for name in reversed(runs) if turn % 2 else runs:
            for count, found in ((1, alone), (len(workloads), together)):
                ms = _host_ms(runs[name][:count], workloads[:count], clock)
                if turn:  # the first one warms
                    found[name].append(ms / count)
    return {
        name: BackwardHost(
            len(alone[name]),
            statistics.median(alone[name]),
            min(alone[name]),
            len(workloads),
            statistics.median(together[name]),
            min(together[name]),
        )
        for name in runs
    }


def _host_ms(runs: Sequence[Run], workloads: Sequence[Workload], clock: Callable[[], float]) -> float:
    for workload in workloads:
        workload.clear_gradients()
    outputs, gradients = [run() for run in runs], [workload.dy_TH for workload in workloads]
    device = workloads[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    torch.autograd.backward(outputs, gradients)
    ended = clock()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (ended - started) * 1e3
