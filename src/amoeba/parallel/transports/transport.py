"""What a transport is: a way by which rows reach the ranks that own their experts, and come back again, summed.

T tokens · R rows received · K experts per token

    exchange = transport.plan(sharded, x_TH, routing, gradients)      # on all ranks at once
    x_RH, expert_RK, weight_RK = exchange.dispatch(x_TH, weight_TK)
    y_TH = exchange.give_back(y_RH, "sums of the experts")
    dy_RH = exchange.send(dy_TH, "gradients of sums")

The last two are each other's adjoint, so that each is the other's backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from amoeba.core.problem import OverlappedDispatch
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import ShardedExperts
from amoeba.routing.router import Routing


class Exchange(OverlappedDispatch):
    """Of one pass of one layer. Rows arrive by source, then by token.

    tokens:  of all ranks together, or the most that they may be.
    slots:   of the rows received, so many have an expert here, at most; None where the host does not know.
    under_way: whether the others' rows are still under way when `dispatch` and `send` return, until `wait`.
    leaves_early: whether sums may leave before they are given back, on any of the ranks: the same on all of them.
    """

    tokens: int
    slots: int | None = None
    under_way = straight = leaves_early = False

    def wait(self) -> None:
        """Rows have come."""

    def leave(self, rows_TH: Tensor, d_weight_TK: Tensor | None = None) -> None:
        """They go when they are given back."""

    @abstractmethod
    def dispatch(self, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x_RH; expert_RK, as the experts are known here and -1 for those of other ranks; and weight_RK."""

    @abstractmethod
    def send(self, rows_TH: Tensor, what: str) -> Tensor:
        """rows_RH: each token's row at each rank that it goes to. what: in a word, for who waits in vain."""

    def start_sending(self, rows_TH: Tensor) -> Tensor | None:
        """As `send`, but rows of other ranks are still on their way, and these are sent by who reads the result: see
        `amoeba.tasks.triton.arrivals`. None where that cannot be, on all ranks alike."""
        return None

    @abstractmethod
    def give_back(self, rows_RH: Tensor, what: str) -> Tensor:
        """Each token's sum over the ranks, added in the order of the ranks in fp32 or wider; 0 if it went nowhere."""


class Transport(ABC):
    name: ClassVar[str]
    summary: ClassVar[str]
    waits_on_gpu: ClassVar[bool] = False  # in each pass; nobody gets such a transport without being told

    @abstractmethod
    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        """Why it cannot serve these ranks, as the rest of a sentence that begins with its name; or None."""

    def why_not_by_itself(self, device: torch.device) -> str | None:
        """Why it serves only who asks for it by name; or None."""
        return None

    @abstractmethod
    def plan(self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool) -> Exchange:
        """gradients: whether there will be a backward."""
