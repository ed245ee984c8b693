"""A captured pass whose router has asked for its experts as well (kernels/route_and_ask.py): its slots are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from amoeba.core.replays import CannotCapture

Given = tuple[Tensor, Tensor]  # x_TH and weight_TK of a pass


@dataclass(frozen=True, eq=False)
class Routed:
    """given: what the host gets, where it may compute experts."""

    layer: int
    expert_TK: Tensor
    slot_TK: Tensor
    given: Given | None

    def slots_of(self, layer: int, expert_TK: Tensor, given: Given | None) -> Tensor:
        """Of the pass over the experts that comes next: it has to be the same one."""
        mine = [self.layer, *_places((self.expert_TK, *(self.given or ())))]
        if mine != [layer, *_places((expert_TK, *(given or ())))]:
            raise CannotCapture("the router of a layer asked, and its experts got another routing, or other rows")
        return self.slot_TK


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
