"""One node's packed experts on this CPU: forward and backward of LoRA fine-tuning, and decoding, with times by phase.

    PYTHONPATH=src python benchmarks/cpu_layer.py                               # all shapes, both kinds, all cores
    PYTHONPATH=src python benchmarks/cpu_layer.py --shape qwen3_30b --tokens 512 --kind int8 --threads 8 --phases
    PYTHONPATH=src python benchmarks/cpu_layer.py --quick                       # small experts, seconds, for a look

Routing is uniform at random. TFLOP/s count 6·T·K·H·I each way, GB/s the packed weights of the experts that were hit
(forward: as packed; backward: the transposed packing). Times are medians; `pack` is the packing of the LoRA factors,
which every optimizer step asks for again. Experts are one random block repeated at different scales, so that setting
up takes seconds. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.problem import Needs
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu import weights as packed
from amoeba.cpu.node_passes import NodeExperts, NodeFactors, backward, forward
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import PackedKind, PackedWeights


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    rank: int
    tokens: tuple[int, ...]


SHAPES = {
    "qwen3_30b": Shape(128, 2048, 768, 8, 8, (1, 16, 512, 2048)),
    "dsv2lite": Shape(64, 2048, 1408, 6, 8, (512, 2048)),
    "dsv3": Shape(64, 7168, 2048, 8, 16, (512,)),
}
DECODE = 32  # up to so many tokens only forward is timed, with nothing kept


def experts_like_one(kind: PackedKind, experts: int, out_features: int, in_features: int) -> PackedWeights:
    """Expert e is a random block times a scale of its own."""
    one = PackedWeights.pack(torch.randn(1, out_features, in_features) / in_features**0.5, kind)
    scale_E = torch.linspace(0.5, 1.5, experts)

    def repeated(packing: packed._Packing) -> packed._Packing:
        data = packed._empty_packing(kind, experts, packing.columns, packing.depth)
        for e, scale in enumerate(scale_E.tolist()):
            torch.mul(packing.data[0], 1 if kind == "int8" else scale, out=data[e])
        scales = [
            None if t is None else t * scale_E[:, None] for t in (packing.column_scale_EC, packing.depth_scale_ED)
        ]
        sums = None if packing.sum_EC is None else packing.sum_EC.expand(experts, -1).contiguous()
        return replace(packing, data=data, sum_EC=sums, column_scale_EC=scales[0], depth_scale_ED=scales[1])

    weights = PackedWeights(kind, experts, out_features, in_features, repeated(one.forward))
    weights.__dict__["transposed"] = repeated(one.transposed)
    return weights


def random_lora(shape: Shape) -> LoraFactors:
    def factor(*sizes: int) -> Tensor:
        return torch.randn(shape.experts, *sizes) / sizes[-1] ** 0.5

    rank, hidden, intermediate = shape.rank, shape.hidden, shape.intermediate
    return LoraFactors(
        *(factor(rank, hidden), factor(intermediate, rank)) * 2,
        *(factor(rank, intermediate), factor(hidden, rank)),
        scaling=2.0,
    )


def median_seconds(call: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None) -> float:
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        after()
    return statistics.median(times)


class Phases:
    """Median milliseconds of each phase of a pool's calls."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.seen: dict[str, list[float]] = {}

    def look(self) -> None:
        for name, seconds in self.pool.phase_seconds().items():
            self.seen.setdefault(name, []).append(1e3 * seconds)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(times), 3) for name, times in self.seen.items()}


def measure(
    shape: Shape, tokens: int, node: NodeExperts, lora: LoraFactors, pool: WorkerPool, seconds: float
) -> dict[str, object]:
    x_TH, dy_TH = (torch.randn(tokens, shape.hidden).to(torch.bfloat16) for _ in range(2))
    expert_TK = torch.rand(tokens, shape.experts).argsort(1)[:, : shape.top_k].contiguous()
    weight_TK = torch.rand(tokens, shape.top_k)
    decode = tokens <= DECODE
    save = "nothing" if decode else "h"
    factors = NodeFactors.pack(node, lora, pool)
    phases = Phases(pool)

    def go() -> object:
        return forward(node, factors, x_TH, expert_TK, weight_TK, pool, save=save)  # type: ignore[arg-type]

    for _ in range(3):
        go()
    took = median_seconds(go, seconds, phases.look)
    flops = 6 * tokens * shape.top_k * shape.hidden * shape.intermediate
    per_expert = sum(w.forward.data.nbytes for w in (node.gate_up, node.down)) / shape.experts
    hit = per_expert * expert_TK.unique().numel()
    found: dict[str, object] = {
        "forward_ms": round(1e3 * took, 3),
        "forward_tflops": round(flops / took / 1e12, 2),
        "forward_gbs": round(hit / took / 1e9, 1),
    }
    if not decode:
        _, cache = forward(node, factors, x_TH, expert_TK, weight_TK, pool, save="h")
        assert cache is not None
        needs = Needs(True, True, **dict.fromkeys(LORA_NAMES, True))

        def back() -> object:
            return backward(node, factors, cache, dy_TH, pool, needs)

        for _ in range(3):
            back()
        took_back = median_seconds(back, seconds, phases.look)
        found |= {
            "backward_ms": round(1e3 * took_back, 3),
            "backward_tflops": round(flops / took_back / 1e12, 2),
            "backward_gbs": round(hit / took_back / 1e9, 1),
            "tokens_per_s": round(tokens / (took + took_back)),
            "pack_ms": round(1e3 * median_seconds(lambda: NodeFactors.pack(node, lora, pool), seconds / 4), 3),
        }
    return found | {"phases_ms": phases.medians()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", help="instead of those of the shape")
    parser.add_argument("--kind", nargs="+", default=["bf16", "int8"], choices=["bf16", "int8"])
    parser.add_argument("--threads", type=int, nargs="+", help="default: one per core")
    parser.add_argument("--cores", type=int, nargs="+", help="which cores; default: all, one thread each")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has, for less memory")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--phases", action="store_true", help="print the median time of every phase")
    parser.add_argument("--quick", action="store_true", help="an eighth of the experts and a fifth of the seconds")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"path {packed.current_path().name.lower()}, torch {torch.__version__}")
    results = []
    for name in options.shape:
        shape = SHAPES[name]
        if options.experts or options.quick:
            shape = replace(shape, experts=max(shape.top_k, options.experts or shape.experts // 8))
        seconds = options.seconds / 5 if options.quick else options.seconds
        for kind in options.kind:
            width = 2 * shape.intermediate
            node = NodeExperts(
                experts_like_one(kind, shape.experts, width, shape.hidden),
                experts_like_one(kind, shape.experts, shape.hidden, shape.intermediate),
                None, None, Activation(),
            )  # fmt: skip
            lora = random_lora(shape)
            for threads in options.threads or [None]:
                pool = WorkerPool(threads, options.cores)
                for tokens in options.tokens or shape.tokens:
                    found = measure(shape, tokens, node, lora, pool, seconds)
                    phases = found.pop("phases_ms")
                    line = "  ".join(f"{key} {value}" for key, value in found.items())
                    print(f"{name} {kind} E={shape.experts} q={tokens} threads={pool.threads}: {line}", flush=True)
                    if options.phases:
                        print("    ms: " + " · ".join(f"{key} {value}" for key, value in phases.items()), flush=True)  # type: ignore[attr-defined]
                    case = {"shape": name, "kind": kind, "tokens": tokens, "threads": pool.threads}
                    results.append(case | found | {"phases_ms": phases})
            del node
    print(json.dumps({"path": packed.current_path().name.lower(), "results": results}))


if __name__ == "__main__":
    main()
