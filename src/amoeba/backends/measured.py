"""Where a backend that nobody takes by default was measured to be faster than the one that is taken.

T tokens · K experts per token · E experts · H hidden · I intermediate

    name = faster_than("triton", request)        # "tasks", or None: `auto` takes it then, see `registry.explain`

Data, by the GPU's name, also of layers where it is no faster: to measure anew is to write other numbers here. What is
not in the table was not measured. Both have the same bits. What is faster needs more memory; where that is more than a
share of the GPU's, the default is kept.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from amoeba.backends.backend import Request
from amoeba.tasks.sizes import Sizes, extra_bytes
from amoeba.weights import AnyExperts, ExpertWeights


class Ratio(NamedTuple):
    """times: as fast as the other, whole backward in bf16, CUDA graphs in turns."""

    backend: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    times: float


# Of the GPU's name and the backend that is left aside then. A layer may have several rows, of even and of skewed
# routing. H200, 2026-11-17, with rests (docs/log.md). Those marked `before` are of an earlier run of that day, when the
# weights' gradients of `triton` did not go on from tile to tile (`onward`). Where both runs have the same order, ratios
# fell by 1.5 to 3.2 % since, so rows above 1 that are older are entered 3.2 % lower than they were measured.
RATIOS: dict[tuple[str, str], tuple[Ratio, ...]] = {
    ("NVIDIA H200", "triton"): (
        Ratio("tasks", 1536, 256, 128, 8, 1024, 1.033),  # 1.067 before
        Ratio("tasks", 1536, 256, 128, 8, 24576, 0.949),
        Ratio("tasks", 2048, 768, 128, 8, 128, 1.006),  # 1.039 before
        Ratio("tasks", 2048, 768, 128, 8, 8192, 0.957),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.986),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.981),  # skewed; before, without a list of tasks
        Ratio("tasks", 2048, 1024, 64, 8, 32768, 0.981),
        Ratio("tasks", 4096, 256, 256, 16, 32768, 0.968),  # before, without a list
        Ratio("tasks", 4096, 14336, 8, 2, 8192, 0.944),
    ),
}
# Taken from here on: no layer at present. Back to back, as in training, ratios were up to 0.038 smaller than in turns
# with rests (0.986 -> 0.948, 0.981 -> 0.947, 0.949 -> 0.937, 0.944 -> 0.951).
AT_LEAST = 1.04
EXTRA_SHARE = 1 / 32  # of the GPU's memory, at most: 4.4 GiB of an H200's, where none of these layers needs 3


def faster_than(name: str, request: Request) -> str | None:
    """Of weights in 16 bits. A traced graph keeps to the default: it is made once for many sizes."""
    weights = request.weights
    if not RATIOS or torch.compiler.is_compiling() or not _is_measured(weights):
        return None
    assert isinstance(weights, ExpertWeights)
    (tokens, hidden), top_k = request.x_TH.shape, request.routing.expert_TK.shape[1]
    layer = hidden, weights.intermediate, weights.num_experts, top_k
    found = [each for each in RATIOS.get((gpu_name(weights.device), name), ()) if each[1:6] == (*layer, tokens)]
    if not found or min(each.times for each in found) < AT_LEAST:
        return None
    extra = extra_bytes(Sizes(*layer), tokens * top_k, weights.dtype.itemsize)
    return found[0].backend if extra <= EXTRA_SHARE * gpu_bytes(weights.device) else None


def _is_measured(weights: AnyExperts) -> bool:
    """Whether the table can say something of such weights."""
    if not isinstance(weights, ExpertWeights) or weights.device.type != "cuda":
        return False
    return weights.dtype in (torch.bfloat16, torch.float16)


@cache
def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


@cache
def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
