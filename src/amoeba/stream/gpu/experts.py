"""Experts of which a few are in slots on a GPU: the kind of weights "streamed-gpu"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amoeba.stream.experts import ExpertsInSlots

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory
    from amoeba.stream.gpu.replays import GpuReplays


@dataclass(frozen=True, eq=False)
class GpuStreamedExperts(ExpertsInSlots):
    """In a `DeviceMemory`."""

    memory: DeviceMemory = field(repr=False)

    placement = "streamed-gpu"

    @property
    def replays(self) -> GpuReplays:
        """Passes of a few tokens may be captured (`amoeba.replays`)."""
        return self.memory.replays
