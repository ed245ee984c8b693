"""Training steps of one layer with few tokens: the backward as one scheduled kernel, against separate kernels.

T tokens · K experts per token · E experts · H hidden · I intermediate

    PYTHONPATH=src python benchmarks/small_backward.py                                # all layers, 32 to 1024 tokens
    PYTHONPATH=src python benchmarks/small_backward.py --layer 2048,768,128,8 --tokens 64 128 --mode graph

A step is a forward and a backward, in a CUDA graph ("graph") or launched one by one ("eager"); "frozen" experts need no
gradients of weights. The two backends alternate. A ratio is triton's median time over tasks', of the backward alone:
the forward has the same kernels and is timed apart. It is the lowest of three blocks, so that chance wins nothing. The
last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from amoeba import ExpertWeights, Routing, experts
from amoeba.core.torch_internals import capture

LAYERS = ("2048,768,128,8", "2880,2880,32,4", "1024,512,64,8", "7168,2048,64,8")
TOKENS = (32, 64, 128, 256, 512, 1024)
RIVALS = ("triton", "tasks")
BLOCKS, ROUNDS, REPEATS = 3, 4, 5


class Layer:
    def __init__(self, hidden: int, intermediate: int, count: int, top_k: int) -> None:
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.count, self.top_k, self.hidden = count, top_k, hidden
        self.weights = self.normal(count, 2 * intermediate, hidden), self.normal(count, hidden, intermediate)

    def normal(self, *shape: int) -> Tensor:
        made = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return made.normal_(0, shape[-1] ** -0.5, generator=self.generator)

    def problem(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = torch.rand(tokens, self.count, generator=self.generator, device="cuda").topk(self.top_k).indices
        weight = torch.rand(tokens, self.top_k, generator=self.generator, device="cuda")
        return (
            self.normal(tokens, self.hidden).requires_grad_(),
            chosen,
            weight.requires_grad_(),
            self.normal(tokens, self.hidden),
        )

    def steps(self, tokens: int, frozen: bool) -> dict[str, Callable[[], object]]:
        """Of each backend a step, and the forward alone."""
        x_TH, expert_TK, weight_TK, dy_TH = self.problem(tokens)
        gate_up, down = (weight.detach().requires_grad_(not frozen) for weight in self.weights)
        weights = ExpertWeights(gate_up, down)
        wanted = [x_TH, weight_TK, *(() if frozen else (gate_up, down))]
        routing = Routing(expert_TK, weight_TK, trusted=True)

        def forward(backend: str) -> Tensor:
            return experts(x_TH, routing, weights, backend=backend)

        def step(backend: str) -> object:
            return torch.autograd.grad(forward(backend), wanted, dy_TH)

        made: dict[str, Callable[[], object]] = {name: functools.partial(step, name) for name in RIVALS}
        return made | {"forward": functools.partial(forward, RIVALS[0])}


def captured(function: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph, stream=stream):
        function()
    return graph.replay


def milliseconds(function: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def block(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            taken = milliseconds(step)
            found[name] += [taken] if number else []
    return {name: statistics.median(times) for name, times in found.items()}


def ratio(times: dict[str, float]) -> float:
    return (times["triton"] - times["forward"]) / (times["tasks"] - times["forward"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", nargs="*", default=LAYERS, help="H,I,E,K")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--mode", nargs="*", default=("graph", "eager"))
    parser.add_argument("--frozen", action="store_true", help="only frozen experts; default: only those that train")
    parser.add_argument("--compile", action="store_true", help="run each step once, to compile its kernels")
    given, document = parser.parse_args(), []
    for name in given.layer:
        layer = Layer(*map(int, name.split(",")))
        for tokens in given.tokens:
            steps = layer.steps(tokens, given.frozen)
            for step in steps.values():
                step()
            torch.cuda.synchronize()
            for mode in () if given.compile else given.mode:
                timed = {each: captured(step) for each, step in steps.items()} if mode == "graph" else steps
                blocks = [block(timed) for _ in range(BLOCKS)]
                worst = min(blocks, key=ratio)
                print(
                    f"{name} T={tokens} {'frozen' if given.frozen else 'trains'} {mode}: backward "
                    f"{worst['triton'] - worst['forward']:.3f} / {worst['tasks'] - worst['forward']:.3f} ms, "
                    f"ratios {' '.join(f'{ratio(each):.3f}' for each in blocks)}; forward {worst['forward']:.3f} ms",
                    flush=True,
                )
                document.append({"layer": name, "tokens": tokens, "mode": mode, "blocks": blocks})
                del timed
    print(json.dumps({"document": "benchmarks small_backward", "frozen": given.frozen, "results": document}))


if __name__ == "__main__":
    main()
