"""Prints the peak of resident memory over the passes of two layers beside the plan, as JSON; run by test_planner.

python measure_passes.py int8 2 recompute
"""

import ctypes
import gc
import json
import sys

import torch

from amoeba import ExpertWeights
from amoeba.backends import packed as passes
from amoeba.core.problem import Needs, Save
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu.packed_experts import PackedExperts, pack_experts
from amoeba.cpu.planner import LayerSizes, plan

E, H, I, R, TOKENS, K, LAYERS = 16, 768, 448, 8, 1024, 4, 2


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(0.05).bfloat16()


def packed_layer(kind: str, nodes: int, experts: int) -> PackedExperts:
    return pack_experts(ExpertWeights(normal(experts, 2 * I, H), normal(experts, H, I)), kind, nodes)


def factors(experts: int) -> LoraFactors:
    return LoraFactors(
        normal(experts, R, H), normal(experts, I, R), normal(experts, R, H),
        normal(experts, I, R), normal(experts, R, I), normal(experts, H, R),
    )  # fmt: skip


def measure(kind: str, nodes: int, recompute: bool, tokens: int, experts: int) -> dict[str, int]:
    lora = [factors(experts) for _ in range(LAYERS)]
    expert_TK = torch.randint(0, experts, (tokens, K))
    weight_TK = torch.rand(tokens, K)
    # the part of a pass that torch itself would allocate again and again is the same in all of them
    before = settled()
    layers = [packed_layer(kind, nodes, experts) for _ in range(LAYERS)]
    planned = plan(
        LayerSizes(experts, H, I),
        kind=kind, nodes=nodes, ranks=(R, R, R), max_len=tokens, top_k=K, recompute=recompute, layers=LAYERS,
    )  # fmt: skip
    settled()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    save: Save = "inputs" if recompute else "h"
    needs = Needs(True, True, **dict.fromkeys(LORA_NAMES, True))
    for _ in range(2):  # the first backward packs the transposed weights; the second step has them from its beginning
        saved = []
        for layer, mine in zip(layers, lora, strict=True):
            inputs = normal(tokens, H), expert_TK.clone(), weight_TK.clone()
            y_TH, left = passes.forward(layer, mine, *inputs, save)
            y_TH.bfloat16()  # as the backend hands it on
            saved.append(left)
        for layer, mine in zip(reversed(layers), reversed(lora), strict=True):
            passes.backward(layer, mine, saved.pop(), normal(tokens, H), needs).x.bfloat16()
    return {"planned": planned.total, "measured": status("VmHWM") - before}


def settled() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, nodes, recompute = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "recompute"
    measure(kind, nodes, recompute, tokens=64, experts=2)  # libraries are loaded and threads started
    print(json.dumps(measure(kind, nodes, recompute, TOKENS, E)))
