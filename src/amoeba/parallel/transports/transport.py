"""What a transport is: rows to the ranks that own their experts, and back again, summed.

T tokens · S rows sent · R rows received · W ranks

    rows_RH = transport.send_rows(ranks, route, x_TH, "tokens")
    y_TH = transport.return_rows(ranks, route, y_RH, "sums of the experts")

The two are each other's adjoint, so that each is the other's backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from amoeba.parallel.ranks import Ranks


class Route(NamedTuple):
    """Which of this rank's tokens go where. A token goes once to each rank that owns one of its experts.

    token_S:  the token of each row sent, by destination, then by token.
    sent:     rows to each rank.
    received: rows from each rank: they arrive by source, then by token, which is the order of row ids.
    """

    token_S: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Transport(ABC):
    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        """Why it cannot serve these ranks, as the rest of a sentence that begins with its name; or None."""

    @abstractmethod
    def send_rows(self, ranks: Ranks, route: Route, rows_TH: Tensor, what: str) -> Tensor:
        """rows_RH: each token's row at each rank that it goes to. what: in a word, for who waits in vain."""

    @abstractmethod
    def return_rows(self, ranks: Ranks, route: Route, rows_RH: Tensor, what: str) -> Tensor:
        """Each token's sum over the ranks, added in the order of the ranks in fp32 or wider; 0 if it went nowhere."""
