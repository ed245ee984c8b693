"""Experts of which a few are in slots on a GPU: the kind of weights "streamed-gpu"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.routing.router import Routing, route
from amoeba.stream.experts import ExpertsInSlots

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory
    from amoeba.stream.gpu.replays import GpuReplays


@dataclass(frozen=True, eq=False)
class GpuStreamedExperts(ExpertsInSlots):
    """In a `DeviceMemory`."""

    memory: DeviceMemory = field(repr=False)

    placement = "streamed-gpu"

    def route(self, x_TH: Tensor, logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None = None) -> Routing:
        """As `amoeba.routing.route` without training, for the pass of x_TH over these experts that comes next. In a
        step that is captured the router's kernel asks for the experts as well, where it can: one launch less."""
        found = self.memory.replays.route(self.layer, x_TH, logits_TE, config, bias_E)
        return route(logits_TE, config, bias_E=bias_E) if found is None else Routing(*found, trusted=True)

    @property
    def replays(self) -> GpuReplays:
        """Passes of a few tokens may be captured (`amoeba.core.replays`)."""
        return self.memory.replays
