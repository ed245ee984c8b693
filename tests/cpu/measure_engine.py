"""Prints the peak of resident memory over an engine's passes beside the plan, as JSON; run by test_planner.

python measure_engine.py int8 2 recompute
"""

import ctypes
import gc
import json
import sys

import torch

from amoeba import ExpertWeights
from amoeba.cpu.engine import Engine
from amoeba.cpu.packed_experts import pack_experts
from amoeba.weights import LoraFactors

E, H, I, R, TOKENS, K, DEPTH = 16, 768, 448, 8, 1024, 4, 2


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def passes(kind: str, nodes: int, recompute: bool, tokens: int, experts: int) -> dict[str, int]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul_(0.05).bfloat16()

    lora = LoraFactors(
        normal(experts, R, H), normal(experts, I, R), normal(experts, R, H),
        normal(experts, I, R), normal(experts, R, I), normal(experts, H, R),
    )  # fmt: skip
    expert_TK = torch.randint(0, experts, (tokens, K))
    weight_TK = torch.rand(tokens, K)
    # the part of a pass that torch itself would allocate again and again is the same in all of them
    before = settled()
    packed = pack_experts(ExpertWeights(normal(experts, 2 * I, H), normal(experts, H, I)), kind, nodes)
    engine = Engine(packed, lora, max_len=tokens, top_k=K, max_cache_depth=DEPTH, recompute=recompute)
    settled()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    for _ in range(DEPTH):
        engine.forward(normal(tokens, H), expert_TK.clone(), weight_TK.clone())
    for _ in range(DEPTH):
        engine.backward(normal(tokens, H))
    return {"planned": engine.plan.total, "measured": status("VmHWM") - before}


def settled() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, nodes, recompute = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "recompute"
    passes(kind, nodes, recompute, tokens=64, experts=2)  # libraries are loaded and threads started
    print(json.dumps(passes(kind, nodes, recompute, TOKENS, E)))
