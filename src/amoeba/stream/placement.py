"""Streamed experts as placements, in memory and on a GPU: made out of resident ones, through a store in memory, to be
proven.

A user streams from a folder or a packed store (`amoeba.stream.attach`), where no expert is ever resident. Importing
this module registers both placements and their backends; nothing below it knows of either.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from amoeba.backends.triton import DECODE_TOKENS
from amoeba.core.errors import bad_value
from amoeba.core.placement import Placement, Tolerance
from amoeba.core.weights import ExpertWeights
from amoeba.placements import register_placement
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.cpu.backend import StreamedBackend
from amoeba.stream.cpu.memory import ExpertMemory, StreamedExperts
from amoeba.stream.gpu.backend import GpuStreamedBackend
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.memory import DeviceMemory, GpuStreamedExperts
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.layers import DTYPES, StoredExperts, layer_entry
from amoeba.stream.store.store import Store

# Tokens that decode, times as many experts as a token may have; beyond that all of a layer are streamed.
MOST_IDS = DECODE_TOKENS * 32


class MemoryStore(Store):
    """Resident experts of one layer, copied, in the order of a store."""

    def __init__(self, weights: StoredExperts) -> None:
        if weights.dtype not in DTYPES.values():
            raise bad_value("experts", f"one of {', '.join(DTYPES)}", weights.dtype, "keep them resident")
        activation, format, row_parts = replace(weights.activation, interleaved=False), None, 1
        down_format = None
        if isinstance(weights, QuantisedExperts):
            activation, format, row_parts = weights.activation, weights.format, weights.parts
            down_format = weights.down_format
        sizes = weights.num_experts, weights.hidden, weights.intermediate
        has_bias = weights.gate_up_bias_EJ is not None
        if has_bias != (weights.down_bias_EH is not None):
            raise bad_value("experts", "biases of both projections or of none", "of one", "keep them resident")
        entry = layer_entry("experts", *sizes, activation, weights.dtype, has_bias, format, row_parts, down_format)
        self.layers, self.rest = (entry,), {}
        self._blobs = aligned_buffer(entry.experts * entry.expert_bytes).view(entry.experts, -1)
        tensors = list(weights.tensors())
        if weights.activation != activation:
            tensors[::2] = (None if rows is None else _gates_first(rows) for rows in tensors[::2])  # of gate and up
        for view, tensor in zip(entry.weights(self._blobs).tensors(), tensors, strict=True):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())

    def _read(self, layer: int, expert: int, memory: Memory) -> None:
        memory.tensor.copy_(self._blobs[expert])

    def close(self) -> None:
        """There are no files."""


def _gates_first(rows: Tensor) -> Tensor:
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def stream_from_memory(weights: StoredExperts, slots: int | None = None) -> StreamedExperts:
    """slots: None for half of the experts, so that a pass may take several waves."""
    if slots is None:
        slots = max(1, weights.num_experts // 2)
    return ExpertMemory(MemoryStore(weights), [slots]).layers[0]


STREAMED = Placement(
    "streamed",
    "in a store, a few at a time in memory",
    make=stream_from_memory,
    backends=(StreamedBackend(),),
    tolerances={dtype: Tolerance() for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    home=torch.device("cpu"),
    x_from=("cpu",),
    offered=False,
)
register_placement(STREAMED)


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
