"""Runs the benchmark: check, then time, one shape after another.

    plan = Plan([SHAPES["small"]], torch.device("cpu"), [torch.float32], ["training"], repeats=20)
    reports = run_suite(plan)
    reports[0].measurements[0].median_ms

An implementation whose output or one of whose gradients is out of tolerance on the problem that is to be timed, or that
raises, is refused: it gets no time at all.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from amoeba.bench.captured import BackwardHost, InGraphs, apart, host_times, in_graphs
from amoeba.bench.implementations import PEERS, chosen_by_auto, implementations
from amoeba.bench.sustained import Sustained, open_meter, sustain_in_turns
from amoeba.bench.timing import REST_MS, Step, Timing, dtype_name, graph_ms, peak_bytes, time_in_turns, watch_saved
from amoeba.bench.workload import Implementation, Shape, Workload, make_workload
from amoeba.core import cost
from amoeba.proof.conformance import TOLERANCE

Pass = Literal["forward", "training"]
Status = Literal["timed", "refused", "left out"]
Progress = Callable[[str], None]

GRAPH_STEPS = 16  # decoding steps in a graph: 16 tokens of 8 out of 128 experts meet each expert once
GRAPH_REPEATS = 20


@dataclass(frozen=True)
class Measurement:
    """One implementation on one problem. Without a time, `reason` says why."""

    implementation: str
    ours: bool
    status: Status
    reason: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    median_ms: float | None = None
    min_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    forward_median_ms: float | None = None
    backward_median_ms: float | None = None
    forward_flops_per_second: float | None = None
    backward_flops_per_second: float | None = None
    host_median_ms: float | None = None
    flops_per_second: float | None = None
    weight_bytes_per_second: float | None = None
    graph_median_ms: float | None = None  # of one of many decoding steps in a CUDA graph
    graph_weight_bytes_per_second: float | None = None
    kept_bytes: int | None = None
    kept_bytes_without_inputs: int | None = None
    peak_bytes: int | None = None
    times_faster_than: dict[str, float] = field(default_factory=dict)
    sustained: Sustained | None = None  # the same step back to back; all other times are those with rests
    in_graphs: InGraphs | None = None  # of ours, in training
    not_in_graphs: str | None = None  # why it could not be captured
    backward_host: BackwardHost | None = None

    @property
    def worst_error(self) -> float:
        return max(self.errors.values(), default=math.inf)


@dataclass(frozen=True)
class Report:
    """All implementations on one shape, in one dtype and one pass."""

    shape: Shape
    device: str
    dtype: torch.dtype
    measured_pass: Pass
    reference: torch.dtype
    tolerance: float
    flops: int
    weight_bytes: int
    busiest_expert: float
    auto: str | None
    measurements: list[Measurement]
    rest_ms: float  # before each step that was timed, except for those in `sustained` and in graphs


@dataclass(frozen=True)
class Plan:
    """What is measured: each shape in each dtype and pass, decoding shapes in the forward pass only.

    peers: names of theirs. ours: names of ours without "amoeba"; None: all.
    sustained: seconds for which each step also runs back to back, watched by the meter of the GPU; not decoding steps,
    which wait for memory or for the host.
    graphs: of ours also forward and backward in CUDA graphs, and the host's time for a backward; in training.
    """

    shapes: Sequence[Shape]
    device: torch.device
    dtypes: Sequence[torch.dtype]
    passes: Sequence[Pass]
    repeats: int
    peers: Sequence[str] = PEERS
    ours: Sequence[str] | None = None
    sustained: float | None = None
    graphs: bool = False

    def problems(self) -> list[tuple[torch.dtype, Shape]]:
        """Each shape in each dtype; those with LoRA factors once, in bf16."""
        pairs = ((torch.bfloat16 if shape.rank else dtype, shape) for dtype in self.dtypes for shape in self.shapes)
        return list(dict.fromkeys(pairs))

    def implementations(self, workload: Workload, training: bool) -> tuple[list[Implementation], dict[str, str]]:
        return implementations(workload, training=training, peers=self.peers, ours=self.ours)


def run_suite(
    plan: Plan,
    progress: Progress = lambda line: None,
    done: Callable[[Report], None] = lambda report: None,
    detail: Progress = lambda line: None,
) -> list[Report]:
    """done: called with each report as soon as there is one, so that a run that is stopped loses only what it was at.
    detail: like `progress`, called when a part of a check begins: the first use of a library may take minutes.
    """
    reports = []
    for dtype, shape in plan.problems():
        wanted: Sequence[Pass] = ["forward"] if shape.forward_only else plan.passes
        progress(f"{shape.name} {dtype_name(dtype)}: computing the reference")
        workload = make_workload(shape, plan.device, dtype, training="training" in wanted)
        for measured in wanted:
            reports.append(_report(plan, workload, measured, progress, detail))
            done(reports[-1])
        del workload  # before the next one is made: large ones do not fit twice
    return reports


def _report(plan: Plan, workload: Workload, measured: Pass, progress: Progress, detail: Progress) -> Report:
    shape, tolerance, training = workload.shape, TOLERANCE[workload.dtype], measured == "training"
    about = f"{shape.name} {measured} {dtype_name(workload.dtype)}"
    candidates, left_out = plan.implementations(workload, training)
    rows, hidden, inner = shape.rows, shape.hidden, shape.intermediate
    flops = [cost.forward_flops(rows=rows, hidden=hidden, intermediate=inner)]
    if training:
        frozen = workload.lora is not None
        flops.append(cost.backward_flops(rows=rows, hidden=hidden, intermediate=inner, frozen=frozen))
    itemsize = workload.dtype.itemsize
    weight_bytes = cost.weight_bytes(
        experts=workload.experts_touched(), hidden=hidden, intermediate=inner, itemsize=itemsize
    )
    read_bytes = {each.name: weight_bytes * (each.itemsize or itemsize) / itemsize for each in candidates}

    measurements: dict[str, Measurement] = {}
    steps: dict[str, Step] = {}
    for at, candidate in enumerate(candidates, 1):  # at first use kernels are compiled, some libraries tune theirs
        progress(f"{about}: checking {candidate.name} ({at} of {len(candidates)})")
        checked = _check(candidate, workload, training, tolerance, detail)
        if checked.status == "timed":
            detail(f"{candidate.name}: its peak memory")
            steps[candidate.name] = step = _step(candidate, workload, training)
            checked = replace(checked, peak_bytes=peak_bytes(functools.partial(step, _no_mark), workload.device))
        measurements[candidate.name] = checked
    progress(f"{about}: timing {len(steps)} implementations, alternating")
    timings = time_in_turns(steps, workload.device, plan.repeats)
    for name in timings:
        read = None if training else round(read_bytes[name])
        measurements[name] = _timed(measurements[name], timings, flops, read)
    if shape.forward_only and workload.device.type == "cuda":
        progress(f"{about}: timing {len(steps)} in CUDA graphs")
        for name, median_ms in _in_graphs(plan, workload, list(timings)).items():
            rate = read_bytes[name] / median_ms * 1e3
            measurements[name] = replace(
                measurements[name], graph_median_ms=median_ms, graph_weight_bytes_per_second=rate
            )
    if plan.sustained is not None and not shape.forward_only:
        progress(f"{about}: running {len(steps)} back to back, {plan.sustained:g} s each")
        meter = open_meter(workload.device)
        for name, found in sustain_in_turns(steps, workload.device, plan.sustained, meter).items():
            measurements[name] = replace(measurements[name], sustained=found)
    if plan.graphs and training:
        progress(f"{about}: timing ours in CUDA graphs, and the host time of a backward")
        _measure_captured(workload, measurements, list(timings), plan.repeats)
    workload.clear_gradients()
    for name, reason in left_out.items():
        measurements[name] = Measurement(name, name.startswith("amoeba"), "left out", reason)
    return Report(
        shape,
        workload.device.type,
        workload.dtype,
        measured,
        workload.truth_dtype,
        tolerance,
        sum(flops),
        weight_bytes,
        workload.busiest(),
        chosen_by_auto(workload),
        list(measurements.values()),
        REST_MS if workload.device.type == "cuda" else 0.0,
    )


def _check(
    candidate: Implementation, workload: Workload, training: bool, tolerance: float, detail: Progress
) -> Measurement:
    """One step, compared with the truth by name; its status says whether it may be timed."""
    refused = Measurement(candidate.name, candidate.ours, "refused")
    workload.clear_gradients()
    try:
        detail(f"{candidate.name}: its first forward")
        with torch.set_grad_enabled(training), watch_saved() as kept:
            y_TH = candidate.run()
        found: dict[str, Tensor] = {"output": y_TH}
        if training:
            detail(f"{candidate.name}: its first backward")
            y_TH.backward(workload.dy_TH)
            given = {name: leaf.grad for name, leaf in workload.leaves().items() if leaf.grad is not None}
            given |= candidate.gradients() if candidate.gradients is not None else {}
            missing = [name for name in workload.leaves() if name not in given]
            if missing:
                return replace(refused, reason=f"gave no gradient to {', '.join(missing)}")
            found |= given
    except Exception as error:  # whatever a peer raises is its answer to this problem
        first_line = (str(error) or "no message").splitlines()[0]
        return replace(refused, reason=f"{type(error).__name__}: {first_line}")
    detail(f"{candidate.name}: comparing")
    errors = workload.errors(found)
    workload.clear_gradients()
    allowed = candidate.tolerance or {"output": tolerance, "gradient": tolerance}
    limits = {name: allowed["output" if name == "output" else "gradient"] for name in errors}
    wrong = [f"{name} {error:.1e} > {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]]
    if wrong:
        return replace(refused, reason=f"out of tolerance: {', '.join(wrong)}", errors=errors)
    checked = Measurement(candidate.name, candidate.ours, "timed", errors=errors)
    if not training:
        return checked
    parameters = [workload.gate_up_EJH, workload.down_EHI, *candidate.parameters]
    inputs = [workload.x_TH, workload.expert_TK, workload.weight_TK]
    return replace(
        checked,
        kept_bytes=kept.bytes_without(parameters),
        kept_bytes_without_inputs=kept.bytes_without([*parameters, *inputs]),
    )


def _in_graphs(plan: Plan, workload: Workload, names: Sequence[str]) -> dict[str, float]:
    """Milliseconds of a decoding step among others on other experts; who cannot be captured is left out.

    Each step meets as many experts as the workload and begins with the one after the last of the step before, so that
    weights come from memory and not from a cache.
    """
    touched, place_TK = workload.expert_TK.unique(return_inverse=True)
    runs: dict[str, list[Callable[[], Tensor]]] = {name: [] for name in names}
    for i in range(GRAPH_STEPS):
        shifted = replace(workload, expert_TK=(place_TK + i * touched.numel()) % workload.shape.experts)
        for candidate in plan.implementations(shifted, training=False)[0]:
            if candidate.name in runs:
                runs[candidate.name].append(candidate.run)
    found = {}
    for name, steps in runs.items():
        with torch.no_grad():
            for step in steps:
                step()
        try:
            found[name] = statistics.median(graph_ms(steps, workload.device, max(plan.repeats, GRAPH_REPEATS)))
        except RuntimeError:  # it waits for the host
            torch.cuda.synchronize(workload.device)
    return found


def _measure_captured(
    workload: Workload, measurements: dict[str, Measurement], timed: Sequence[str], repeats: int
) -> None:
    ours = [name for name in timed if measurements[name].ours]
    wanted = [name.removeprefix("amoeba ") for name in ours]

    def runs(workload: Workload) -> dict[str, Callable[[], Tensor]]:
        found = implementations(workload, training=True, peers=(), ours=wanted)[0]
        return {candidate.name: candidate.run for candidate in found if candidate.name in ours}

    found, left_out = in_graphs(runs(workload), workload, repeats)
    for name in ours:
        measurements[name] = replace(measurements[name], in_graphs=found.get(name), not_in_graphs=left_out.get(name))
    workload.clear_gradients()
    layers = apart(workload)
    of_layers = [runs(layer) for layer in layers]
    hosts = host_times({name: [each[name] for each in of_layers] for name in ours}, layers, repeats)
    for name, host in hosts.items():
        measurements[name] = replace(measurements[name], backward_host=host)


def _step(candidate: Implementation, workload: Workload, training: bool) -> Step:
    def train(mark: Callable[[], None]) -> None:
        workload.clear_gradients()
        mark()
        y_TH = candidate.run()
        mark()
        y_TH.backward(workload.dy_TH)
        mark()

    def infer(mark: Callable[[], None]) -> None:
        with torch.no_grad():
            mark()
            candidate.run()
            mark()

    return train if training else infer


def _no_mark() -> None:
    """For a step that is run and not timed."""


def _timed(
    checked: Measurement, timings: dict[str, Timing], flops: Sequence[int], weight_bytes: int | None
) -> Measurement:
    """flops: of forward and, where that was timed, backward."""
    timing = timings[checked.implementation]
    parts = timing.part_medians_ms
    return replace(
        checked,
        rounds=timing.rounds,
        median_ms=timing.median_ms,
        min_ms=timing.min_ms,
        quartiles_ms=timing.quartiles_ms,
        forward_median_ms=parts[0],
        backward_median_ms=parts[1] if len(parts) > 1 else None,
        forward_flops_per_second=flops[0] / parts[0] * 1e3,
        backward_flops_per_second=flops[1] / parts[1] * 1e3 if len(parts) > 1 else None,
        host_median_ms=timing.host_median_ms,
        flops_per_second=sum(flops) / timing.median_ms * 1e3,
        weight_bytes_per_second=None if weight_bytes is None else weight_bytes / timing.median_ms * 1e3,
        times_faster_than={
            other: found.median_ms / timing.median_ms for other, found in timings.items() if found is not timing
        },
    )
