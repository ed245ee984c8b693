"""What streaming did so far, in numbers that follow from the cache's counters and the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from amoeba.stream.sizes import show_size


@dataclass(frozen=True)
class StreamReport:
    """Of all passes since the experts were attached, the warm-up token's too."""

    store: Literal["packed", "folder"]
    ram_bytes: int  # the budget
    rest_bytes: int  # of it, the model without its experts
    slot_bytes: int  # of it, experts in memory
    expert_bytes: int  # of all experts in the store
    slots: list[int]  # of each layer
    experts: list[int]
    policy: str
    tokens: int
    requested: int  # distinct experts of a layer in a pass, over all layers and passes
    hits: int  # of them, were in memory already
    hit_rate: float
    read_bytes: int
    read_bytes_per_token: float
    waited_seconds: float  # for reads, while there was nothing else to compute
    waited_seconds_per_token: float
    trace: str | None  # the file that was recorded

    def __str__(self) -> str:
        slots = sorted(set(self.slots))
        per_layer = str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
        of = max(self.experts)
        return (
            f"experts: {100 * self.hit_rate:.1f} % of {self.requested} in memory ({per_layer} of {of} per layer, "
            f"{show_size(self.slot_bytes)}), {show_size(self.read_bytes_per_token)} read per token, waited "
            f"{1e3 * self.waited_seconds_per_token:.1f} ms per token"
        )
