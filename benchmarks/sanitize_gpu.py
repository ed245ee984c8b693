"""Small layers under NVIDIA's compute-sanitizer: memcheck and racecheck of every kernel of the GPU path.

    PYTHONPATH=src python benchmarks/sanitize_gpu.py     # both tools, all layers; exit status 1 if one finds a fault
    PYTHONPATH=src python benchmarks/sanitize_gpu.py --watch "scheduled backward" fp8        # these alone

Needs a CUDA device, torch, triton and compute-sanitizer. Each layer runs by itself first, so that compilation is not
watched; layers and tools side by side. A control is a few lines of Gluon of which it is known what a tool should say.

Two kinds of reports of racecheck are counted apart and not as faults.

- Dispatch: in kernels with specialised warps, the bytes by which Triton tells a warp what to do. They are written
  before a `barrier.sync 1` of all threads and read after it; racecheck loses that order as soon as a partition has a
  barrier of its own. A control in which partitions share nothing at all shows it: no report without such a barrier, the
  same report with one.
- Handed over: a number that one partition stores, and another loads behind an mbarrier. In PTX that is the store, a
  `bar.sync` of the storing partition, one thread's `mbarrier.arrive`, which releases, the others' `mbarrier.try_wait`,
  which acquires, and the load; that is an order. The control "handed over" does this once and nothing else, and so each
  run finds out whether racecheck follows it: only where it reports the control, such reports in our kernels are counted
  apart. "handed over, not waited for" leaves the wait out, and has to be reported for any of this to mean something.

racecheck watches shared memory alone, and of that what threads do: it does not see the copy engine's writes, so it can
neither miss a wait for them nor prove that none is missing. What it can find in these kernels are tasks, scales and
staged results that warpgroups hand to each other by barriers. It knows nothing of counters in global memory: that gates
and signals are in order, the simulator (`python -m benchmarks tasks`) and tests/tasks show. memcheck sees every access
of threads to memory that was not allocated, in shared and in global memory; not the engine's, which has its own bounds.
Of experts over ranks it watches both processes; what they write to each other's memory it sees as what it is there, a
part of a heap: not which cell.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import amoeba
from amoeba import Activation, ExpertWeights, Routing, experts
from amoeba.kernels.hopper.tma import barrier
from amoeba.parallel import Owners, Ranks, ShardedExperts
from amoeba.parallel import processes as processes_of_ranks
from amoeba.parallel.processes import LocalRanks, first_processes

CLAMPED = Activation("silu", True, 1.702, 7.0, 1.0, True)
SIDE_BY_SIDE = min(12, os.cpu_count() or 1)  # processes: the tools keep a core busy each
TIMEOUT_SECONDS = int(os.environ.get("SANITIZE_SECONDS", "200"))  # of one layer under one tool
HAZARD = re.compile(r"Potential (\w+) hazard detected at __shared__ 0x([0-9a-f]+) .*:\n((?:=========     .*\n)+)")
ACCESS = re.compile(r"(?:Read|Write) Thread .* at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")


def run_layer(
    dtype: torch.dtype, T: int, H: int, I: int, activation: Activation, bias: bool, E: int = 8, backend: str = "triton"
) -> None:
    """Forward and, for more than a few tokens, backward of a layer with K=2 (8 for one token), some slots nobody's."""
    generator = torch.Generator("cuda").manual_seed(0)
    K, train = (8, False) if T == 1 else (2, T > 8)

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, device="cuda", generator=generator) * 0.1
        return drawn.to(dtype).requires_grad_(train)

    expert_TK = torch.rand(T, E, device="cuda", generator=generator).topk(K, 1).indices
    expert_TK[::7, 0] = E
    J = activation.width(I)
    of_up, of_down = (normal(E, J), normal(E, H)) if bias else (None, None)
    weights = ExpertWeights(normal(E, J, H), normal(E, H, I), of_up, of_down, activation)
    routing = Routing(expert_TK, torch.rand(T, K, device="cuda", generator=generator).requires_grad_(train))
    with torch.set_grad_enabled(train):
        y_TH = experts(normal(T, H), routing, weights, backend=backend)
    if train:
        y_TH.backward(torch.randn_like(y_TH))
    torch.cuda.synchronize()


def run_in_fp8(recipe: str, hidden: int, inner: int) -> None:
    """Forward and backward with products in e4m3, as `--precision` trains; one expert has no rows."""
    from amoeba.precision.recipes import with_precision

    normal, routing = _drawn(300)
    weights = with_precision(ExpertWeights(normal(8, 2 * inner, hidden), normal(8, hidden, inner)), recipe)
    experts(normal(300, hidden), routing, weights, backend="triton").sum().backward()
    torch.cuda.synchronize()


def run_in_codes(format: str, many_rows: bool = False) -> None:
    """Frozen experts with LoRA factors: forward and backward of many tokens, and one, five, 64 and 120 tokens decoded,
    with the factors and without. many_rows: experts are dequantised, three of them at a time."""
    from amoeba import LoraFactors
    from amoeba.backends import quantised_rows
    from amoeba.core.weights import LORA_NAMES
    from amoeba.kernels.hopper import weight_only_gemm
    from amoeba.precision.formats import FORMATS
    from amoeba.precision.quantised_experts import quantise_experts

    normal, routing = _drawn(300)
    with torch.no_grad():
        weights = quantise_experts(ExpertWeights(normal(8, 2 * 192, 320), normal(8, 320, 192)), FORMATS[format])
    for each in (weights.gate_up_EJH, weights.down_EHI):
        assert weight_only_gemm.why_not(each.matrix) is None, "or the kernels for Hopper would not be watched"
    if many_rows:
        quantised_rows.MANY_ROWS = quantised_rows.MANY_ROWS_OF_NVFP4 = 0
        quantised_rows.DEQUANTISED_BYTES = 3 * 2 * 192 * 320 * 2
    shapes = [(8, 16, 320), (8, 192, 16)] * 2 + [(8, 16, 192), (8, 320, 16)]
    drawn = (normal(*shape).float().detach().requires_grad_() for shape in shapes)
    lora = LoraFactors(**dict(zip(LORA_NAMES, drawn, strict=True)), scaling=2.0)
    experts(normal(300, 320), routing, weights, lora=lora, backend="triton").sum().backward()
    with torch.no_grad():
        for tokens in (1, 5, 64, 120):
            few = Routing(routing.expert_TK[:tokens], routing.weight_TK[:tokens])
            for factors in (None, lora):
                experts(normal(tokens, 320), few, weights, lora=factors, backend="triton")
    torch.cuda.synchronize()


def _drawn(tokens: int) -> tuple[Callable[..., torch.Tensor], Routing]:
    """Normally distributed numbers in bf16 that want gradients, and two of eight experts for each token."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, device="cuda", generator=generator) * 0.1
        return drawn.bfloat16().requires_grad_()

    expert_TK = torch.rand(tokens, 8, device="cuda", generator=generator).topk(2, 1).indices
    expert_TK[expert_TK == 3] = 8
    weight_TK = torch.rand(tokens, 2, device="cuda", generator=generator).requires_grad_()
    return normal, Routing(expert_TK, weight_TK)


# Of `ShardedExperts`: sums row by row, straight with fixed room, and straight while own rows are computed.
RANK_WAYS: list[dict[str, Any]] = [
    {"straight": False},
    {"straight": True, "most_tokens": 320, "most_rows": 900},
    {"straight": True, "overlap": True},
]


def run_share(rank: int) -> list[bool]:
    """Forward and backward by `peers` in each way; whether it has the bits of the first."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device="cuda", generator=generator) * 0.1).bfloat16().requires_grad_()

    tokens = (300, 171)[rank]
    local = ExpertWeights(normal(3, 256, 192), normal(3, 192, 128))
    layer = ShardedExperts(local, Owners.even(6, 2), Ranks(first_processes(2), 120.0), transport="peers")
    expert_TK = torch.rand(tokens, 6, device="cuda", generator=generator).topk(2, 1).indices
    expert_TK[::7, 0] = 6
    weight_TK = torch.rand(tokens, 2, device="cuda", generator=generator).requires_grad_()
    x_TH, dy_TH, found = normal(tokens, 192), normal(tokens, 192).detach(), list[list[torch.Tensor]]()
    for way in RANK_WAYS:
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), replace(layer, **way))
        wanted = [x_TH, weight_TK, *(tensor for tensor in local.tensors() if tensor is not None)]
        found.append([y_TH.detach(), *torch.autograd.grad(y_TH, wanted, dy_TH)])
        torch.cuda.synchronize()
    return [torch.equal(*pair) for each in found[1:] for pair in zip(each, found[0], strict=True)]


def run_over_ranks() -> None:
    """Two processes on this GPU, which take turns. Started anew and not forked, so that a tool follows them."""
    processes_of_ranks._context = lambda preload: multiprocessing.get_context("spawn")
    with LocalRanks(2) as processes:
        for equal in processes.run(run_share, [(rank,) for rank in range(2)], seconds=TIMEOUT_SECONDS):
            assert all(equal), equal


@gluon.jit
def write(out, PART: gl.constexpr, WARPS: gl.constexpr, CONVERT: gl.constexpr):
    plain: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    other: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    value = gl.arange(0, 1024, plain) * 2
    if CONVERT:
        gl.store(out + PART * 1024 + gl.arange(0, 1024, other), gl.convert_layout(value, other))
    else:
        gl.store(out + PART * 1024 + gl.arange(0, 1024, plain), value)


@gluon.jit
def control_kernel(out, CONVERT: gl.constexpr):
    gl.warp_specialize(
        [
            (write, (out, gl.constexpr(0), gl.constexpr(4), CONVERT)),
            (write, (out, gl.constexpr(1), gl.constexpr(4), CONVERT)),
            (write, (out, gl.constexpr(2), gl.constexpr(1), CONVERT)),
        ],
        [4, 1],
        [120, 24],
    )


def run_control(convert: bool) -> None:
    """Three partitions that write to memory of their own, the last with one warp, as the loading
    one has in our kernels; with `convert` the other two have a barrier among their own warps."""
    out = torch.zeros(3 * 1024, dtype=torch.int32, device="cuda")
    control_kernel[(132,)](out, convert, num_warps=4)
    torch.cuda.synchronize()
    assert out[1025] == 2


@gluon.jit
def give(number, there):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number.store(gl.full([1], 7, gl.int32, one))  # handed over
    barrier()
    mbarrier.arrive(there, count=1)


@gluon.jit
def get(number, there, out, PART: gl.constexpr, WAIT: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if WAIT:
        mbarrier.wait(there, 0)
    found = gl.max(number.load(one), 0)  # handed over
    gl.store(out + gl.program_id(0) * 2 + PART, found)


@gluon.jit
def handing_kernel(out, WAIT: gl.constexpr):
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=1)
    gl.warp_specialize(
        [
            (get, (number, there, out, gl.constexpr(0), WAIT)),
            (get, (number, there, out, gl.constexpr(1), WAIT)),
            (give, (number, there)),
        ],
        [4, 4],
        [64, 64],
    )


def run_handing_over(wait: bool) -> None:
    """Two partitions get a number from a third, as those of the scheduled backward get their tasks."""
    out = torch.zeros(2 * 132, dtype=torch.int32, device="cuda")
    handing_kernel[(132,)](out, wait, num_warps=4)
    torch.cuda.synchronize()
    assert not wait or bool((out == 7).all())


PEERS = "two ranks by peers"  # of which memcheck has to say something alone
LAYERS: dict[str, Callable[[], None]] = {
    "gated with biases": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), True),
    "gated": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), False),
    "scheduled backward": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), False, backend="tasks"),
    "fp8": lambda: run_in_fp8("fp8", 384, 256),
    "fp8 of half blocks": lambda: run_in_fp8("fp8", 320, 192),
    "fp8-saved": lambda: run_in_fp8("fp8-saved", 384, 256),
    "fp8-all": lambda: run_in_fp8("fp8-all", 384, 256),
    "fp8-all of half blocks": lambda: run_in_fp8("fp8-all", 320, 192),
    "experts in fp8": lambda: run_in_codes("fp8-128"),
    "experts in mxfp8": lambda: run_in_codes("mxfp8"),
    "experts in mxfp4": lambda: run_in_codes("mxfp4"),
    "experts in nvfp4": lambda: run_in_codes("nvfp4"),
    "experts in fp8, dequantised": lambda: run_in_codes("fp8-128", many_rows=True),
    "experts in nvfp4, dequantised": lambda: run_in_codes("nvfp4", many_rows=True),
    PEERS: run_over_ranks,
    "plain": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation("relu2", gated=False), False),
    "fp32, odd sizes": lambda: run_layer(torch.float32, 199, 63, 199, CLAMPED, True),
    "one token": lambda: run_layer(torch.bfloat16, 1, 2048, 768, Activation(), False, E=16),
    "eight tokens": lambda: run_layer(torch.bfloat16, 8, 63, 199, Activation(), True),
    "control": lambda: run_control(False),
    "control with barriers": lambda: run_control(True),
    "handed over": lambda: run_handing_over(True),
    "handed over, not waited for": lambda: run_handing_over(False),
}
RIGHT, WRONG = "handed over", "handed over, not waited for"
TOOLS = {PEERS: ("memcheck",)}  # else both
# What of our kernels is handed over so: by file the store and the load, as they are written there.
HANDED_OVER = {
    "queue.py": ("tasks.index(slot).store(", "tasks.index(slot).slice(FIELD, 1).load("),
    Path(__file__).name: ("    number.store(", "= gl.max(number.load("),
}


def source(file: str) -> list[str]:
    """Lines of a file of ours with Gluon in it, by its name; none of others."""
    paths = [Path(__file__), *Path(amoeba.__file__).parent.rglob(file)]
    texts = (path.read_text() for path in paths if path.name == file)
    return next((text.splitlines() for text in texts if "gluon.jit" in text), [])


def dispatch_lines(file: str) -> set[int]:
    """Lines to which the compiler assigns the dispatch of specialised warps: the kernel's own and that of
    `warp_specialize`."""
    lines = source(file)
    kernels = [n for n, line in enumerate(lines, 1) if re.match(r"\s*@gluon\.jit", line) and "_kernel(" in lines[n]]
    specialised = [n for n, line in enumerate(lines, 1) if "warp_specialize(" in line]
    return {*specialised, *kernels, *(n + 1 for n in kernels)}


def handing_lines(file: str) -> set[int]:
    """Lines of a store and a load that an mbarrier is between."""
    marks = HANDED_OVER.get(file, ())
    return {
        n for n, line in enumerate(source(file), 1) if any(mark in line and f'"{mark}' not in line for mark in marks)
    }


class Found(NamedTuple):
    faults: list[str]  # in lines to print
    dispatch: int = 0  # reports
    handed_over: int = 0


def watch(tool: str, layer: str) -> Found:
    options = ["--target-processes", "all"] if layer == PEERS else []
    options += ["--racecheck-report", "all", "--num-cuda-barriers", "64"] if tool == "racecheck" else []
    command = ["compute-sanitizer", "--tool", tool, *options, "--print-limit", "100000", "--show-backtrace", "no"]
    try:
        ran = subprocess.run([*command, sys.executable, __file__, layer], capture_output=True, text=True, check=False,
                             timeout=TIMEOUT_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return Found([f"not through in {TIMEOUT_SECONDS} s"])
    return read_report(tool, ran.stdout + ran.stderr)


def read_report(tool: str, text: str) -> Found:
    if tool == "memcheck" or "hazards displayed (0 errors" in text:
        told = re.findall(r"ERROR SUMMARY: (\d+) error", text) + re.findall(r"\((\d+) errors, \d+ warnings\)", text)
        clean = bool(told) and set(told) == {"0"} and "Traceback" not in text  # every process tells
        return Found([] if clean else text.splitlines()[-12:])
    faults: Counter[str] = Counter()
    dispatch = handed_over = 0
    for kind, _, body in HAZARD.findall(text):
        accesses = [(kernel, file, int(line)) for kernel, file, line in ACCESS.findall(body)]
        if kind == "RAW" and accesses and all(line in dispatch_lines(file) for _, file, line in accesses):
            dispatch += 1
        elif kind == "RAW" and accesses and all(line in handing_lines(file) for _, file, line in accesses):
            handed_over += 1
        else:
            faults[f"{kind}: {'; '.join(f'{kernel} {file} {line}' for kernel, file, line in accesses)}"] += 1
    if not dispatch and not handed_over and not faults:
        return Found(text.splitlines()[-12:])  # it stopped for another reason
    return Found([f"{count} x {fault}" for fault, count in faults.most_common()], dispatch, handed_over)


def is_clean(layer: str, tool: str, found: Found, follows: bool) -> bool:
    """follows: whether racecheck sees the order of what is handed over."""
    if (layer, tool) == (WRONG, "racecheck"):
        return bool(found.handed_over) or any(" x " in fault for fault in found.faults)  # a hazard, of whatever kind
    return not found.faults and not (follows and found.handed_over)


def main() -> None:
    watched = sys.argv[2:] if sys.argv[1:2] == ["--watch"] else list(LAYERS)
    if len(sys.argv) > 1 and sys.argv[1:2] != ["--watch"]:
        LAYERS[sys.argv[1]]()
        return
    watched = list(dict.fromkeys([RIGHT, WRONG, *watched]))
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        alone = [threads.submit(subprocess.run, [sys.executable, __file__, layer]) for layer in watched]
        runs = {layer: done.result().returncode == 0 for layer, done in zip(watched, alone, strict=True)}
        pairs = [(layer, tool) for layer in watched for tool in TOOLS.get(layer, ("racecheck", "memcheck"))]
        watching = {
            (layer, tool): threads.submit(watch, tool, layer)
            if runs[layer]
            else threads.submit(Found, ["it fails by itself"])
            for layer, tool in pairs
        }
        follows = not watching[RIGHT, "racecheck"].result().handed_over
        clean = True
        for (layer, tool), done in watching.items():
            found = done.result()
            good = is_clean(layer, tool, found, follows)
            word = "clean" if good else "FAULTS"
            if (layer, tool) == (WRONG, "racecheck"):
                word = "found, as it has to be" if good else "NOT FOUND"
            clean = clean and good
            told = ", ".join(
                f"{count} reports about {what}"
                for what, count in (("Triton's dispatch", found.dispatch), ("what is handed over", found.handed_over))
                if count
            )
            print(f"{layer:28} {tool:10} {word}{told and f' ({told})'}", flush=True)
            for fault in found.faults:
                print(f"    {fault}", flush=True)
        order = "sees" if follows else "does not see"
        print(f"racecheck {order} the order of a number that an mbarrier hands over: such reports", end=" ")
        print("are faults" if follows else "mean nothing")
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
