"""Where a backend that nobody takes by default was measured to be faster than the one that is taken.

T tokens · K experts per token · E experts · H hidden · I intermediate

    name = faster_than("triton", request)        # "tasks", or None: `auto` takes it then, see `registry.explain`

Data, by the GPU's name: what is not here was not measured, or was not faster. Both have the same bits. What is faster
needs more memory; where that is more than a share of the GPU's, the default is kept.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from amoeba.backends.backend import Request
from amoeba.tasks.sizes import Sizes, extra_bytes
from amoeba.weights import AnyExperts, ExpertWeights


class Faster(NamedTuple):
    """times: as fast as the other, whole backward, in a CUDA graph, at both ends of the tokens."""

    backend: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: tuple[int, int]
    times: float


# By the GPU's name and the backend that is left aside. H200, 2026-11-16, bf16, one run in turns: docs/log.md. Left out,
# since slower or no faster: H=1536 I=256 E=128 K=8 at 24576 tokens (0.99) and at 1024 (1.01).
FASTER: dict[tuple[str, str], tuple[Faster, ...]] = {
    ("NVIDIA H200", "triton"): (
        Faster("tasks", 2048, 768, 128, 8, (32768, 32768), 1.026),  # with skewed routing; 1.046 with even
        Faster("tasks", 2048, 768, 128, 8, (8192, 8192), 1.021),
        Faster("tasks", 2048, 768, 128, 8, (128, 128), 1.056),
        Faster("tasks", 2048, 1024, 64, 8, (32768, 32768), 1.055),
        Faster("tasks", 4096, 256, 256, 16, (32768, 32768), 1.053),
        Faster("tasks", 4096, 1024, 128, 8, (32768, 32768), 1.031),
        Faster("tasks", 4096, 14336, 8, 2, (8192, 8192), 1.075),
        Faster("tasks", 7168, 2048, 32, 8, (8192, 8192), 1.028),
    ),
}


EXTRA_SHARE = 1 / 32  # of the GPU's memory, at most: 4.4 GiB of an H200's, where none of these layers needs 3


def faster_than(name: str, request: Request) -> str | None:
    """Of weights in 16 bits. A traced graph keeps to the default: it is made once for many sizes."""
    weights = request.weights
    if not FASTER or torch.compiler.is_compiling() or not _is_measured(weights):
        return None
    assert isinstance(weights, ExpertWeights)
    (tokens, hidden), top_k = request.x_TH.shape, request.routing.expert_TK.shape[1]
    layer = hidden, weights.intermediate, weights.num_experts, top_k
    extra = extra_bytes(Sizes(*layer), tokens * top_k, weights.dtype.itemsize)
    for entry in FASTER.get((gpu_name(weights.device), name), ()):
        least, most = entry.tokens
        if entry[1:5] == layer and least <= tokens <= most:
            return entry.backend if extra <= EXTRA_SHARE * gpu_bytes(weights.device) else None
    return None


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
