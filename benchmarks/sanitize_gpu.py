"""Small layers under NVIDIA's compute-sanitizer: memcheck and racecheck of every kernel of the GPU path.

    PYTHONPATH=src python benchmarks/sanitize_gpu.py     # both tools, all layers; exit status 1 if one finds a fault
    PYTHONPATH=src python benchmarks/sanitize_gpu.py --watch "scheduled backward" fp8        # these alone

Needs a CUDA device, torch, triton and compute-sanitizer. Each layer runs by itself first, so that compilation is not
watched. One kind of report of racecheck is counted apart and not as a fault: in Gluon kernels with specialised warps,
the bytes by which Triton tells a warp what to do. They are written before a `barrier.sync 1` of all threads and read
after it; racecheck loses that order as soon as a partition has a barrier of its own. The control, a kernel in which
partitions share nothing at all, shows it: no report without such a barrier, the same report with one.

racecheck watches shared memory alone, and of that what threads do: it does not see the copy engine's writes, so it can
neither miss a wait for them nor prove that none is missing. What it can find in these kernels are tasks, scales and
staged results that warpgroups hand to each other by barriers. It knows nothing of counters in global memory: that gates
and signals are in order, the simulator (`amoeba tasks simulate`) and tests/tasks show. memcheck sees every access of
threads to memory that was not allocated, in shared and in global memory; not the engine's, which has its own bounds.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba import Activation, ExpertWeights, Routing, experts

CLAMPED = Activation("silu", True, 1.702, 7.0, 1.0, True)
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
    biases = (normal(E, J), normal(E, H)) if bias else (None, None)
    weights = ExpertWeights(normal(E, J, H), normal(E, H, I), *biases, activation)
    routing = Routing(expert_TK, torch.rand(T, K, device="cuda", generator=generator).requires_grad_(train))
    with torch.set_grad_enabled(train):
        y_TH = experts(normal(T, H), routing, weights, backend=backend)
    if train:
        y_TH.backward(torch.randn_like(y_TH))
    torch.cuda.synchronize()


def run_in_order(order: str) -> None:
    """The scheduled backward with another order of tickets; few rows of an expert, so that tiles are bundled."""
    os.environ["AMOEBA_TASKS_ORDER"] = order
    run_layer(torch.bfloat16, 300, 320, 192, Activation(), False, backend="tasks")


def run_in_fp8() -> None:
    """Forward and backward with products in e4m3, as `--precision fp8` trains."""
    from amoeba.precision.recipes import with_precision

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, device="cuda", generator=generator) * 0.1
        return drawn.bfloat16().requires_grad_()

    expert_TK = torch.rand(300, 8, device="cuda", generator=generator).topk(2, 1).indices
    weights = with_precision(ExpertWeights(normal(8, 512, 384), normal(8, 384, 256)), "fp8")
    routing = Routing(expert_TK, torch.rand(300, 2, device="cuda", generator=generator).requires_grad_())
    experts(normal(300, 384), routing, weights).sum().backward()
    torch.cuda.synchronize()


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


LAYERS: dict[str, Callable[[], None]] = {
    "gated with biases": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), True),
    "gated": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), False),
    "scheduled backward": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation(), False, backend="tasks"),
    "scheduled, small": lambda: run_in_order("small"),
    "fp8": run_in_fp8,
    "plain": lambda: run_layer(torch.bfloat16, 300, 320, 192, Activation("relu2", gated=False), False),
    "fp32, odd sizes": lambda: run_layer(torch.float32, 199, 63, 199, CLAMPED, True),
    "one token": lambda: run_layer(torch.bfloat16, 1, 2048, 768, Activation(), False, E=16),
    "eight tokens": lambda: run_layer(torch.bfloat16, 8, 63, 199, Activation(), True),
    "control": lambda: run_control(False),
    "control with barriers": lambda: run_control(True),
}


def dispatch_lines(file: str) -> set[int]:
    """Lines of a source file to which the compiler assigns the dispatch of specialised warps: the kernel's own and that
    of `warp_specialize`."""
    known = {Path(path).name: Path(path) for path in (__file__, *_kernel_files())}
    if file not in known:
        return set()
    lines = known[file].read_text().splitlines()
    kernels = [n for n, line in enumerate(lines, 1) if re.match(r"\s*@gluon\.jit", line) and "_kernel(" in lines[n]]
    specialised = [n for n, line in enumerate(lines, 1) if "warp_specialize(" in line]
    return {*specialised, *kernels, *(n + 1 for n in kernels)}


def _kernel_files() -> list[str]:
    from amoeba.kernels.hopper import activation_kernel, product_kernel, scaled_product
    from amoeba.kernels.hopper import gradient as hopper_gradient
    from amoeba.tasks import hopper_kernel

    modules = (hopper_gradient, product_kernel, scaled_product, activation_kernel, hopper_kernel)
    return [inspect.getfile(module) for module in modules]


def watch(tool: str, layer: str) -> tuple[list[str], int]:
    """What the tool found, in lines to print, and how many reports were about Triton's dispatch."""
    options = ["--racecheck-report", "all", "--num-cuda-barriers", "64"] if tool == "racecheck" else []
    command = ["compute-sanitizer", "--tool", tool, *options, "--print-limit", "100000", "--show-backtrace", "no"]
    try:
        ran = subprocess.run([*command, sys.executable, __file__, layer], capture_output=True, text=True, check=False,
                             timeout=TIMEOUT_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"not through in {TIMEOUT_SECONDS} s"], 0
    text = ran.stdout + ran.stderr
    if tool == "memcheck" or "hazards displayed (0 errors" in text:
        clean = "ERROR SUMMARY: 0 errors" in text or "(0 errors, 0 warnings)" in text
        return ([] if clean else text.splitlines()[-12:]), 0
    faults: Counter[str] = Counter()
    of_dispatch = 0
    for kind, _, body in HAZARD.findall(text):
        accesses = ACCESS.findall(body)
        if kind == "RAW" and accesses and all(int(line) in dispatch_lines(file) for _, file, line in accesses):
            of_dispatch += 1
        else:
            faults[f"{kind}: {'; '.join(' '.join(access) for access in accesses)}"] += 1
    if not of_dispatch and not faults:
        return text.splitlines()[-12:], 0  # it stopped for another reason
    return [f"{count} x {fault}" for fault, count in faults.most_common()], of_dispatch


def main() -> None:
    watched = sys.argv[2:] if sys.argv[1:2] == ["--watch"] else list(LAYERS)
    if len(sys.argv) > 1 and not sys.argv[2:]:
        LAYERS[sys.argv[1]]()
        return
    clean = True
    for layer in watched:
        subprocess.run([sys.executable, __file__, layer], check=True)
        for tool in ("memcheck", "racecheck"):
            faults, of_dispatch = watch(tool, layer)
            clean = clean and not faults
            apart = f", {of_dispatch} reports about Triton's dispatch" if of_dispatch else ""
            print(f"{layer:24} {tool:10} {'clean' if not faults else 'FAULTS'}{apart}", flush=True)
            for fault in faults:
                print(f"    {fault}")
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
