"""Products with packed frozen weights on this CPU against torch's bf16 matmul, in turns within one run.

    python benchmarks/cpu_packed.py [--experts 16] [--tokens 512 2048 --threads 1 2 --seconds 1.0]

The gate-up projection of Qwen3-30B-A3B (H=2048, J=1536, 8 experts per token); fewer experts than its 128, for memory.
Every contender is checked against torch before it is timed. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from amoeba.cpu.packed import PackedWeights, current_path, multiply_rows, multiply_rows_transposed

Clock = Callable[[], float]
HIDDEN, WIDTH, TOP_K = 2048, 1536, 8
DENSE = 2048


class Case:
    """One number of tokens: rows of every expert together, tokens gathered by an index."""

    def __init__(self, tokens: int, experts: int, weight_EJH: Tensor) -> None:
        expert_N = torch.rand(tokens, experts).argsort(1)[:, : min(TOP_K, experts)].reshape(-1)
        order_N = expert_N.argsort(stable=True)
        self.rows = expert_N.numel()
        self.token_N = order_N // min(TOP_K, experts)
        self.offs_E = torch.bincount(expert_N, minlength=experts).cumsum(0).to(torch.int32)
        self.x_TH = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
        self.dh_NJ = torch.randn(self.rows, WIDTH).to(torch.bfloat16)
        self.h_NJ = torch.empty(self.rows, WIDTH, dtype=torch.bfloat16)
        self.dx_NH = torch.empty(self.rows, HIDDEN, dtype=torch.bfloat16)
        self.weights = weight_EJH.unbind(0)

    def forward(self, packed: PackedWeights) -> Tensor:
        multiply_rows(packed, self.x_TH, self.offs_E, self.h_NJ, index_N=self.token_N)
        return self.h_NJ

    def backward(self, packed: PackedWeights) -> Tensor:
        multiply_rows_transposed(packed, self.dh_NJ, self.offs_E, self.dx_NH)
        return self.dx_NH

    def torch_forward(self) -> Tensor:
        start, rows_NH = 0, self.x_TH.index_select(0, self.token_N)
        for weight, end in zip(self.weights, self.offs_E.tolist(), strict=True):
            torch.mm(rows_NH[start:end], weight.t(), out=self.h_NJ[start:end])
            start = end
        return self.h_NJ

    def torch_backward(self) -> Tensor:
        start = 0
        for weight, end in zip(self.weights, self.offs_E.tolist(), strict=True):
            torch.mm(self.dh_NJ[start:end], weight, out=self.dx_NH[start:end])
            start = end
        return self.dx_NH


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def in_turns(contenders: dict[str, Callable[[], Tensor]], seconds: float, clock: Clock) -> dict[str, float]:
    """Best seconds of each; others may share the machine, so the contenders take turns and the best counts."""
    best = dict.fromkeys(contenders, float("inf"))
    deadline = time.monotonic() + seconds * len(contenders)
    rounds = 0
    while rounds < 3 or time.monotonic() < deadline:
        for name, contender in contenders.items():
            began = clock()
            contender()
            best[name] = min(best[name], clock() - began)
        rounds += 1
    return best


def check(case: Case, bf16: PackedWeights, int8: PackedWeights) -> None:
    for ours, theirs in ((case.forward, case.torch_forward), (case.backward, case.torch_backward)):
        expected = theirs().clone()
        for packed, limit in ((bf16, 5e-3), (int8, 3e-2)):
            error = relative_error(ours(packed), expected)
            assert error < limit, f"{packed.kind}: relative error {error:.1e}, at most {limit} is right"


def measure(
    tokens: int, threads: int, seconds: float, weight_EJH: Tensor, bf16: PackedWeights, int8: PackedWeights
) -> dict:
    case = Case(tokens, weight_EJH.shape[0], weight_EJH)
    check(case, bf16, int8)
    torch.set_num_threads(threads)
    dense = torch.randn(DENSE, DENSE).to(torch.bfloat16)
    flops = 2 * case.rows * HIDDEN * WIDTH
    best = in_turns(
        {
            "bf16": lambda: case.forward(bf16),
            "int8": lambda: case.forward(int8),
            "torch per expert": case.torch_forward,
            "bf16 backward": lambda: case.backward(bf16),
            "int8 backward": lambda: case.backward(int8),
            "torch backward": case.torch_backward,
            "torch dense": lambda: dense @ dense,
        },
        seconds,
        # one thread: time on the CPU, without the turns of others; more: the clock on the wall, waiting for each other
        time.thread_time if threads == 1 else time.perf_counter,
    )
    rates = {name: (2 * DENSE**3 if name == "torch dense" else flops) / took / 1e12 for name, took in best.items()}
    line = " · ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
    print(f"q={tokens} threads={threads} rows/expert={case.rows // weight_EJH.shape[0]}: TFLOP/s {line}", flush=True)
    return {"tokens": tokens, "threads": threads, **{name: round(rate, 4) for name, rate in rates.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and case")
    options = parser.parse_args()
    torch.manual_seed(0)
    weight_EJH = (torch.randn(options.experts, WIDTH, HIDDEN) / HIDDEN**0.5).to(torch.bfloat16)
    bf16, int8 = PackedWeights.pack(weight_EJH, "bf16"), PackedWeights.pack(weight_EJH, "int8")
    path = current_path().name.lower()
    print(f"path {path}, E={options.experts}, H={HIDDEN}, J={WIDTH}, K={TOP_K}, torch {torch.__version__}")
    results = [
        measure(tokens, threads, options.seconds, weight_EJH, bf16, int8)
        for tokens in options.tokens
        for threads in options.threads
    ]
    print(json.dumps({"path": path, "experts": options.experts, "tflops": results}))


if __name__ == "__main__":
    main()
