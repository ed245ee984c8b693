"""Missing experts that the CPU computes in host memory instead of copying them over the link.

    miss="move"   every missing expert is moved into a slot: the bits of resident experts
    miss="cpu"    the CPU computes them, and slots stay as they are
    miss="auto"   both at once, split so that link and CPU are done together, by what each took lately; and while the
                  link has little to do, an expert that was computed is moved too, for the next passes

Inside of graphs alone, for a few tokens, and for experts that are in host memory; prompts, training and what is on the
disk are moved. The kernel of the request writes x, ids and weights to a buffer (kernels/expert_request.py), serve.cpp
decides, and what the CPU core decodes with computes (compute.h), with bf16 or fp32 weights and sums in fp32, in the
order of expert ids. Another kernel adds that sum to what the experts in slots gave: within the tolerance of bf16, and
with `auto` not always the same last bits, since time decides who computes what.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.node_library import activation_number
from amoeba.stream.gpu.device import copy_rate
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.serve_library import Blobs, ComputeRequest, serving_library
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.store.layers import LayerEntry
from amoeba.system.machine import usable_cores

logger = logging.getLogger("amoeba")

Miss = Literal["move", "cpu", "auto"]
MISSES: tuple[Miss, ...] = get_args(Miss)
# Of a pass that is handed over, and experts of each: for more, weights pass by several times.
MOST_TOKENS, MOST_TOP_K = 8, 32


def check_miss(miss: str) -> None:
    if miss not in MISSES:
        raise bad_value(
            "miss",
            f"one of {', '.join(MISSES)}",
            repr(miss),
            "with move, results are bitwise those of resident experts",
        )


def make_host_compute(pool: SlotPool, miss: str) -> HostCompute | None:
    """None, with a word on why, where misses cannot be computed here."""
    check_miss(miss)
    if miss == "move":
        return None
    if (reason := _why_not(pool)) is not None:
        logger.warning("missing experts are copied to the GPU instead of being computed on the CPU: %s", reason)
        return None
    return HostCompute(pool, miss)


def _why_not(pool: SlotPool) -> str | None:
    if pool.device.why_not_captured() is not None or pool.device.calls() is None:
        return "steps cannot be captured here"
    if serving_library() is None:
        return "the compiled server is not available"
    reasons = [_why_not_layer(entry) for entry in pool.store.layers]
    if all(reasons):
        return reasons[0]
    return None if any(pool.host_slots) else "none are in host memory"


def _why_not_layer(entry: LayerEntry) -> str | None:
    if entry.format is not None:
        return f"the CPU core reads bfloat16 and float32, not {entry.format.name}"
    if entry.dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU core reads bfloat16 and float32, not {entry.dtype}"
    return "experts with biases" if entry.has_bias else None


class HostCompute:
    """blobs: of each layer, for serve.cpp."""

    def __init__(self, pool: SlotPool, miss: str) -> None:
        from amoeba.kernels.mailbox import HostComputeBuffer

        self.miss = miss
        device, layers = pool.device, pool.store.layers
        hidden, ids = max(entry.hidden for entry in layers), MOST_TOKENS * MOST_TOP_K
        x, y = (device.mapped(MOST_TOKENS * hidden).view(torch.float32) for _ in range(2))
        expert, weight = device.mapped(2 * ids).view(torch.int64), device.mapped(ids).view(torch.float32)
        words = device.mapped(32)  # each on a line of the processor's cache: one side writes it, the other one looks
        self.buffer = buffer = HostComputeBuffer(x, expert, weight, words[:1], y, words[16:17])
        self._entries = layers
        self.blobs = [_blobs(*each) for each in zip(layers, pool.tiers, pool.host_slots, strict=True)]
        library: Any = serving_library()
        self._library = library
        # one core is left to who serves
        self._computer = library.amoeba_computer_new(max(1, usable_cores() - 1))
        self._delete = weakref.finalize(self, library.amoeba_computer_delete, self._computer)
        rate = copy_rate(device).bytes_per_second
        places = (each.data_ptr() for each in (x, expert, weight, buffer.arrived, y, buffer.word))
        self._compute = ComputeRequest(self._computer, MISSES.index(miss), 1 / rate, 0, 0, *places)
        self._address = ctypes.addressof(self._compute)

    def __str__(self) -> str:
        split = "the CPU computes some of them, as is quicker" if self.miss == "auto" else "the CPU computes them"
        return f"misses: {split} (within bf16's tolerance of resident experts, not their bits)"

    def takes(self, layer: int, weight_TK: Tensor) -> bool:
        """Whether such a pass over the layer is handed over."""
        tokens, top_k = weight_TK.shape
        return bool(self.blobs[layer].count) and tokens <= MOST_TOKENS and top_k <= MOST_TOP_K

    def expect(self, shape: torch.Size | None) -> None:
        """The next request is of T x K ids; None: it is not handed over."""
        self._compute.tokens, self._compute.top_k = (0, 0) if shape is None else shape

    def address(self, layer: int) -> int:
        """For serve.cpp; 0 where the next request is not handed over."""
        return self._address if self._compute.tokens else 0

    @property
    def seconds(self) -> float:
        """That an expert took lately; 0: none yet."""
        return self._library.amoeba_computer_seconds(self._computer) if self._delete.alive else 0.0

    def wait(self) -> None:
        """Until the CPU computes nothing."""
        if self._delete.alive:
            self._library.amoeba_computer_wait(self._computer)

    def close(self) -> None:
        self._delete()


def _blobs(entry: LayerEntry, tiers: LayerTiers, host_slots: int) -> Blobs:
    if not host_slots or _why_not_layer(entry) is not None:
        return Blobs()
    offsets = {part.name: part.offset for part in entry.parts}
    activation = entry.activation
    return Blobs(
        *(tiers.first_blob, entry.expert_bytes, entry.dtype.itemsize, host_slots),
        *(offsets["gate_up_JH"], offsets["down_HI"]),
        *(entry.hidden, entry.intermediate, activation.width(entry.intermediate), activation_number(activation.kind)),
        *(activation.alpha, activation.limit, activation.up_shift),
    )
