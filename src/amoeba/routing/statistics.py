"""What a router does, counted on the device: the load of each expert, dead ones, entropy, and slots that were dropped.

T tokens · K experts per token · E experts
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amoeba.core.torch_internals import inside_backward
from amoeba.routing.router import Routing, count_rows, probabilities, scores_of


class RoutingStatistics(nn.Module):
    """Statistics of a router, kept on the device, without waiting for it.

        statistics = RoutingStatistics(num_experts=64)
        statistics.record(routing)              # each step; a recompute in backward is not counted again
        statistics.summary()["max_violation"]   # a tensor: only reading it waits for the device

    The buffers are not part of checkpoints; call reset() after to_empty().
    """

    load_E: Tensor
    slots: Tensor
    dropped: Tensor
    tokens: Tensor
    scored_tokens: Tensor
    entropy_sum: Tensor
    steps: Tensor

    def __init__(self, num_experts: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.register_buffer("load_E", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        for name in ("slots", "dropped", "tokens", "scored_tokens", "steps"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("entropy_sum", torch.zeros((), dtype=torch.float32, device=device), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # .half() and .bfloat16() reach buffers too, and a sum in half precision soon stands still
        self.entropy_sum = self.entropy_sum.float()
        return self

    def record(self, routing: Routing) -> None:
        """Adds one call of the router. Without scores_TE its entropy is not counted."""
        scores_TE = None if routing.scores_TE is None else scores_of(routing, self.num_experts).detach()
        counts = self.load_E, self.slots, self.dropped, self.tokens, self.scored_tokens, self.entropy_sum, self.steps
        record_routing(routing.expert_TK, scores_TE, *counts)

    def summary(self) -> dict[str, Tensor]:
        """What happened since the last reset, as tensors on the device:

        load_E         rows per expert, dropped slots not counted
        entropy        of the normalised scores, mean over tokens, in nats; NaN when no token had scores
        max_violation  max(load) / mean(load) - 1; 0 is perfect balance (or nothing recorded)
        dead_experts   experts without a row
        drop_rate      share of slots whose id is E or above
        """
        mean_load = self.load_E.float().mean()
        violation = self.load_E.max() / mean_load - 1
        return {
            "load_E": self.load_E.clone(),
            "entropy": self.entropy_sum / self.scored_tokens,
            "max_violation": torch.where(mean_load > 0, violation, torch.zeros_like(violation)),
            "dead_experts": (self.load_E == 0).sum(),
            "drop_rate": self.dropped.float() / self.slots.clamp(min=1),
        }

    def reset(self) -> None:
        """Starts again from zero."""
        for buffer in self.buffers():
            buffer.zero_()


@torch.library.custom_op(
    "amoeba::record_routing",
    mutates_args=("load_E", "slots", "dropped", "tokens", "scored_tokens", "entropy_sum", "steps"),
)
def record_routing(
    expert_TK: Tensor,
    scores_TE: Tensor | None,
    load_E: Tensor,
    slots: Tensor,
    dropped: Tensor,
    tokens: Tensor,
    scored_tokens: Tensor,
    entropy_sum: Tensor,
    steps: Tensor,
) -> None:
    """An operator of its own so that the question below is asked at run time, also in compiled graphs."""
    if inside_backward():  # activation checkpointing runs the forward a second time
        return
    num_experts = load_E.shape[0]
    load_E += count_rows(expert_TK.reshape(1, -1), num_experts)[0]
    dropped += (expert_TK >= num_experts).sum()
    slots += expert_TK.numel()
    tokens += expert_TK.shape[0]
    steps += 1
    if scores_TE is not None:
        scored_tokens += scores_TE.shape[0]
        entropy_sum += torch.special.entr(probabilities(scores_TE)).sum()
