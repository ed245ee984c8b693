"""Layers for which a backend that is not the default was measured to be faster than the default one.

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
from amoeba.core.weights import AnyExperts, ExpertWeights
from amoeba.tasks.sizes import Sizes, extra_bytes


class Ratio(NamedTuple):
    """times: speed-up over the other: whole backward in bf16, CUDA graphs, replayed alternately."""

    backend: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    times: float


# By the GPU's name and the backend that is replaced. A layer may have several rows, of even and of skewed
# routing. H200, 2026-11-17, with rests: document `tasks-graphs` of 1a0ceba.
RATIOS: dict[tuple[str, str], tuple[Ratio, ...]] = {
    ("NVIDIA H200", "triton"): (
        Ratio("tasks", 1536, 256, 128, 8, 1024, 0.980),
        Ratio("tasks", 1536, 256, 128, 8, 24576, 0.946),
        Ratio("tasks", 2048, 768, 128, 8, 128, 1.040),
        Ratio("tasks", 2048, 768, 128, 8, 8192, 0.947),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.979),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.951),  # skewed
        Ratio("tasks", 2048, 1024, 64, 8, 32768, 0.979),
        Ratio("tasks", 4096, 256, 256, 16, 32768, 0.959),
        Ratio("tasks", 4096, 1024, 128, 8, 32768, 0.965),
        Ratio("tasks", 4096, 14336, 8, 2, 8192, 0.968),
        Ratio("tasks", 7168, 2048, 32, 8, 8192, 0.944),
    ),
}
# Taken from here on. Back to back, as in training, ratios of large layers are up to 0.038 smaller than alternating with
# rests; that of 128 tokens is the same there (1.039, dev/log).
AT_LEAST = 1.03
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
