"""Time, measured alternately: every implementation once per round, so that a slow minute of the machine hits all of
them.

    timings = time_in_turns({"a": step_a, "b": step_b}, torch.device("cpu"), repeats=20)
    timings["a"].median_ms

Steps are expected to have run before, so that nothing is compiled or allocated for the first time.
A step calls `mark()` where its clock starts, between its parts, and where it ends; what it does before the first mark
is not timed. On a GPU marks are events on the stream; before each step the second-level cache is filled with something
else, by reading (dirty lines would have to be written back during the step), and the GPU is kept waiting for a moment,
so that the host is ahead of it as it is in a training loop. The host's time is measured separately.

    ms = graph_ms([first_step, second_step, ...], repeats=20)

is for steps of microseconds on a GPU, of which the events themselves and the way to the first kernel are a good part:
steps that follow each other in one CUDA graph, as tokens do when a model generates.

And bytes: what lives from forward to backward, and the most that a step has allocated at any time.

    with watch_saved() as saved:
        y_TH = run()
    saved.bytes_without(parameters)
    peak = peak_bytes(step, torch.device("cpu"))    # above what was allocated before

What a kernel takes from the system behind torch's allocator is seen by neither.

What the device gives at best, a large dense product and a large copy, is timed in the same way (`measure_ceilings`).
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.core.torch_internals import capture, occupy_gpu
from amoeba.system.cpu_features import compute_dtype
from amoeba.system.machine import available_memory

Step = Callable[[Callable[[], None]], None]

# Rounds go on beyond `repeats` until this much time has passed, for steps of microseconds ...
LEAST_SECONDS = 1.0
MOST_ROUNDS = 1000
# ... and an implementation that has used up its own time sits out the rounds that are left, after this many at least.
MOST_SECONDS_EACH = 5.0
LEAST_ROUNDS = 2

_FLUSHED_CACHES = 4  # times the size of the second-level cache
# For about so long a GPU is kept waiting before each step, longer than the host needs to launch one of ours or of
# transformers' grouped_mm. It cools meanwhile: `sustained` measures without.
REST_MS = 4.0
_CYCLES_PER_MS = 1_750_000


@dataclass
class Timing:
    """Milliseconds between the marks, one tuple per round; on a GPU also the host's milliseconds per round."""

    parts_ms: list[tuple[float, ...]] = field(default_factory=list)
    hosts_ms: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len(self.parts_ms)

    @property
    def totals_ms(self) -> list[float]:
        return [sum(parts) for parts in self.parts_ms]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.totals_ms)

    @property
    def host_median_ms(self) -> float | None:
        return statistics.median(self.hosts_ms) if self.hosts_ms else None

    @property
    def min_ms(self) -> float:
        return min(self.totals_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        if self.rounds < 2:
            return self.min_ms, self.min_ms
        first, _, third = statistics.quantiles(self.totals_ms, n=4, method="inclusive")
        return first, third

    @property
    def part_medians_ms(self) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*self.parts_ms, strict=True))


def step_of(run: Callable[[], object]) -> Step:
    """A step of one part."""

    def step(mark: Callable[[], None]) -> None:
        mark()
        run()
        mark()

    return step


def time_in_turns(steps: dict[str, Step], device: torch.device, repeats: int) -> dict[str, Timing]:
    """Runs all steps in each round, forwards and backwards in turn, `repeats` rounds or more (see above)."""
    measure = _measure_on_gpu(device) if device.type == "cuda" else _measure_on_cpu
    timings = {name: Timing() for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    started = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(max(repeats, MOST_ROUNDS)):
            if turn >= repeats and time.perf_counter() - started >= LEAST_SECONDS:
                break
            for name in reversed(steps) if turn % 2 else steps:
                if timings[name].rounds >= LEAST_ROUNDS and spent[name] > MOST_SECONDS_EACH:
                    continue
                before = time.perf_counter()
                parts, host = measure(steps[name])
                timings[name].parts_ms.append(parts)
                if host is not None:
                    timings[name].hosts_ms.append(host)
                spent[name] += time.perf_counter() - before
    finally:
        if collecting:
            gc.enable()
    return timings


def _measure_on_cpu(step: Step) -> tuple[tuple[float, ...], None]:
    marks: list[int] = []
    step(lambda: marks.append(time.perf_counter_ns()))
    return tuple((end - start) / 1e6 for start, end in itertools.pairwise(marks)), None


def _measure_on_gpu(device: torch.device) -> Callable[[Step], tuple[tuple[float, ...], float]]:
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    others = torch.zeros(_FLUSHED_CACHES * max(cache_bytes, 1 << 24) // 4, dtype=torch.float32, device=device)

    def measure(step: Step) -> tuple[tuple[float, ...], float]:
        marks: list[torch.cuda.Event] = []

        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        occupy_gpu(int(REST_MS * _CYCLES_PER_MS))
        others.sum()
        started = time.perf_counter()
        step(mark)
        host_ms = (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize(device)
        return tuple(start.elapsed_time(end) for start, end in itertools.pairwise(marks)), host_ms

    return measure


def graph_ms(steps: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds per step, one value per replay of a graph of all steps. They are expected to have run before, and to
    read so much that none finds in the cache what another has left. Raises what a step raises that cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), capture(graph):
        for step in steps:
            step()
    found = []
    for turn in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        if turn:  # the first one warms
            found.append(start.elapsed_time(end) / len(steps))
    return found


@dataclass
class SavedTensors:
    """The tensors that autograd has saved; they are held, so that no address is given out twice."""

    tensors: list[Tensor] = field(default_factory=list)

    def bytes_without(self, others: Iterable[Tensor]) -> int:
        """Bytes of the storages, each counted once and as a whole, that do not belong to `others`."""
        excluded = _storages(others)
        return sum(size for address, size in _storages(self.tensors).items() if address not in excluded)


@contextmanager
def watch_saved() -> Iterator[SavedTensors]:
    """Sees what autograd saves for the backward of all that runs inside."""
    saved = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        saved.tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated on the device during step(), above what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_from_events(step)


def _peak_from_events(step: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes a line to stderr at start and stop
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        live += change
        peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class Size:
    """matmul: side of the square matrices; copy_bytes: of the source; rounds: at least."""

    matmul: int
    copy_bytes: int
    rounds: int


SIZES = {"cuda": Size(8192, 4 << 30, rounds=10), "cpu": Size(2048, 512 << 20, rounds=3)}
# Share of the free memory that the source of the copy may take; the destination takes as much again.
_SHARE_OF_MEMORY = 0.25
# A dtype in which one product would take longer, as one that is emulated, is measured on smaller matrices.
_MOST_SECONDS = 0.5
_SMALLEST = 256


@dataclass(frozen=True)
class Product:
    """A dense product of two square matrices with this side."""

    size: int
    flops_per_second: float


@dataclass(frozen=True)
class Ceilings:
    device: str
    matmul: dict[str, Product]  # by dtype
    copied_bytes: int
    copy_bytes_per_second: float

    def matmul_flops_per_second(self, dtype: torch.dtype) -> float:
        """Of a problem stored in dtype: a CPU computes some dtypes in fp32 (see cpu_features)."""
        return self.matmul[dtype_name(compute_dtype(dtype, torch.device(self.device)))].flops_per_second

    def line(self) -> str:
        products = (
            f"matmul {_rate(product.flops_per_second)} in {name} ({product.size}³)"
            for name, product in self.matmul.items()
        )
        copied = f"copy {self.copy_bytes_per_second / 1e9:.0f} GB/s read and written"
        return f"ceilings of this {self.device}: {', '.join(products)}, {copied}"


def measure_ceilings(device: torch.device, dtypes: Sequence[torch.dtype]) -> Ceilings:
    """Products in the dtypes that these are computed in (on a CPU in fp32, too) and a copy, timed alternately."""
    at_most = SIZES[device.type]
    always = [torch.float32] if device.type == "cpu" else []
    computed = dict.fromkeys([*always, *(compute_dtype(dtype, device) for dtype in dtypes)])
    sizes = {dtype_name(dtype): _affordable(at_most.matmul, device, dtype) for dtype in computed}
    steps = {dtype_name(dtype): step_of(_product(sizes[dtype_name(dtype)], device, dtype)) for dtype in computed}
    copied_bytes = _copied_bytes(at_most.copy_bytes, device)
    steps["copy"] = step_of(_copy(copied_bytes, device))
    for step in steps.values():
        step(lambda: None)  # warm
    timings = time_in_turns(steps, device, at_most.rounds)
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes that no shape could use in one piece
    seconds = {name: timing.median_ms / 1e3 for name, timing in timings.items()}
    products = {name: Product(size, 2 * size**3 / seconds[name]) for name, size in sizes.items()}
    return Ceilings(device.type, products, copied_bytes, 2 * copied_bytes / seconds["copy"])


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    # random: products of zeros take less power and are faster than any real ones
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size // 4, device=device, dtype=torch.float32)
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)


def _affordable(size: int, device: torch.device, dtype: torch.dtype) -> int:
    """The largest of size, size / 2, ... whose product will not take too long, judged by that of half its side. From
    the smallest up: small ones may be far slower than their operations tell, and say little about much larger ones."""
    smaller = [size >> halvings for halvings in range(1, 32) if size >> halvings >= _SMALLEST]
    for side in reversed(smaller):
        if 2**3 * _seconds(_product(side, device, dtype), device) > _MOST_SECONDS:
            return side
    return size


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the second run: the first one may load libraries."""
    for _ in range(2):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _copied_bytes(size: int, device: torch.device) -> int:
    free = available_memory(device)
    affordable = size if free is None else min(size, int(_SHARE_OF_MEMORY * free))
    return affordable // 4 * 4


def _rate(flops_per_second: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops_per_second >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_second / scale:.0f} {unit}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
