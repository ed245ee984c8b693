"""Experts streamed to a GPU as a placement: made out of resident ones, through a store in memory, to be proven.

A user streams from a folder or a packed store (`amoeba.stream.attach`), where no expert is ever resident. Importing
this module registers the placement and its backend.
"""

from __future__ import annotations

import torch

from amoeba.backends.triton import DECODE_TOKENS
from amoeba.core.placement import Placement, Tolerance
from amoeba.core.weights import ExpertWeights
from amoeba.placements import register_placement
from amoeba.stream.gpu.backend import GpuStreamedBackend
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.experts import GpuStreamedExperts
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MemoryStore

# Tokens that decode, times as many experts as a token may have; beyond that all of a layer are streamed.
MOST_IDS = DECODE_TOKENS * 32


def stream_to_gpu(weights: ExpertWeights, slots: int | None = None) -> GpuStreamedExperts:
    """slots: None for half of the experts; as many more in pinned memory, the rest in the store."""
    half = max(1, weights.num_experts // 2) if slots is None else slots
    device = CudaDevice(weights.device)
    return DeviceMemory(MemoryStore(weights), device, [half], [weights.num_experts // 2], MOST_IDS).layers[0]


def _why_not() -> str | None:
    return None if torch.cuda.is_available() else "needs a GPU, torch finds none here"


STREAMED_TO_GPU = Placement(
    "streamed-gpu",
    "in a store, a few at a time on the GPU",
    make=stream_to_gpu,
    backends=(GpuStreamedBackend(),),
    tolerances={dtype: Tolerance() for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    why_not=_why_not,
    home=torch.device("cuda"),
    x_from=("cuda",),
    offered=False,
)
register_placement(STREAMED_TO_GPU)
