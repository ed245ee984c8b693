"""What a transport is: how rows are sent to the ranks that own their experts, and how their sums come back.

T tokens · R rows received · K experts per token · S rows sent · H hidden · W ranks

    exchange = transport.plan(sharded, x_TH, routing, gradients)      # on all ranks at once
    x_RH, expert_RK, weight_RK = exchange.dispatch(x_TH, weight_TK)
    y_TH = exchange.give_back(y_RH, "sums of the experts")
    dy_RH = exchange.send(dy_TH, "gradients of sums")

The last two are each other's adjoint, so that each is the other's backward.

`Collective` is torch's all_to_all, over gloo or NCCL, on any device. The host has to know how many rows go where, so on
a GPU each pass waits for it once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from amoeba.core.problem import OverlappedDispatch
from amoeba.parallel.agreement import agree, agreed_format, facts_of
from amoeba.parallel.ranks import Ranks, as_bytes
from amoeba.parallel.sharded import ShardedExperts
from amoeba.precision.formats import Format
from amoeba.routing.router import Routing


class Exchange(OverlappedDispatch):
    """Of one pass of one layer. Rows arrive by source, then by token.

    tokens:  of all ranks together, or the most that they may be.
    slots:   how many of the received rows have an expert here, at most; None if the host does not know.
    under_way: whether the others' rows are still under way when `dispatch` and `send` return, until `wait`.
    leaves_early: whether sums may leave before they are given back, on any of the ranks: the same on all of them.
    row_format: in which rows of x are to be sent, the same on all ranks; None: as they are.
    """

    tokens: int
    slots: int | None = None
    under_way = straight = leaves_early = False
    row_format: Format | None = None

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
    waits_on_gpu: ClassVar[bool] = False  # in each pass; a warning says so when it is chosen

    @abstractmethod
    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        """Why it cannot serve these ranks, as the rest of a sentence that begins with its name; or None."""

    def why_not_by_itself(self, device: torch.device) -> str | None:
        """Why it serves only who asks for it by name; or None."""
        return None

    @abstractmethod
    def plan(
        self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool, row_format: int = 0
    ) -> Exchange:
        """gradients: whether there will be a backward. row_format: what this rank says to `agreed_format`."""


class Route(NamedTuple):
    """Which of this rank's tokens go where. A token goes once to each rank that owns one of its experts.

    token_S:  the token of each row sent, by destination, then by token.
    sent:     rows to each rank.
    received: rows from each rank: they arrive by source, then by token.
    """

    token_S: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Collective(Transport):
    name, summary = "collective", "torch's all_to_all, by gloo or NCCL"
    waits_on_gpu = True  # for the numbers of rows

    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        if not dist.is_available():
            return "needs a torch that was built with torch.distributed"
        return None

    def plan(
        self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool, row_format: int = 0
    ) -> Exchange:
        """Says to each rank how many rows will come, after all have agreed on what they look like."""
        ranks, owners, num_tokens = sharded.ranks, sharded.owners, routing.num_tokens
        count = ranks.count
        rank_TK, local_TK = owners.find(routing.expert_TK)
        goes_TW = rank_TK.new_zeros((num_tokens, count + 1), dtype=torch.bool).scatter_(1, rank_TK, True)[:, :count]
        slots_W = torch.stack([(rank_TK == rank).sum() for rank in range(count)])
        rows, slots = torch.stack((goes_TW.sum(0), slots_W)).tolist()
        facts = facts_of(owners, x_TH, routing.weight_TK, gradients)
        numbers = [*rows, *slots, num_tokens, row_format]
        table = agree(ranks, facts, numbers, x_TH.device, "the numbers of tokens to come")
        dest_S, token_S = goes_TW.t().nonzero(as_tuple=True)  # by destination, then by token
        local_SK = torch.where(rank_TK[token_S] == dest_S[:, None], local_TK[token_S], -1)
        route = Route(token_S, rows, [line[ranks.rank] for line in table], num_tokens)
        owned, tokens = (sum(line[place] for line in table) for place in (count + ranks.rank, 2 * count))
        exchange = CollectiveExchange(ranks, route, local_SK, owned, tokens)
        exchange.row_format = agreed_format([line[-1] for line in table])
        return exchange


class CollectiveExchange(Exchange):
    def __init__(self, ranks: Ranks, route: Route, local_SK: Tensor, slots: int, tokens: int) -> None:
        self.ranks, self.route, self.local_SK, self.slots, self.tokens = ranks, route, local_SK, slots, tokens

    def dispatch(self, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        route = self.route
        # ids differ from rank to rank where weights do not, so that the two are packed here, row by row
        ids, weights = as_bytes(self.local_SK.to(torch.int32)), as_bytes(weight_TK.index_select(0, route.token_S))
        packed = self._exchange(torch.cat((ids, weights), 1), "ids and routing weights")
        ids, weights = packed.split((ids.shape[1], weights.shape[1]), 1)
        # copies: of a single row .contiguous() would be the same bytes, which begin where a number of 8 bytes cannot
        ids, weights = (part.clone(memory_format=torch.contiguous_format) for part in (ids, weights))
        return self.send(x_TH, "tokens"), ids.view(torch.int32).long(), weights.view(weight_TK.dtype)

    def send(self, rows_TH: Tensor, what: str) -> Tensor:
        return self._exchange(rows_TH.index_select(0, self.route.token_S), what)

    def _exchange(self, rows_S: Tensor, what: str) -> Tensor:
        return self.ranks.exchange(rows_S, self.route.sent, self.route.received, what)

    def give_back(self, rows_RH: Tensor, what: str) -> Tensor:
        route = self.route
        back_SH = self.ranks.exchange(rows_RH, route.received, route.sent, what)
        wide = torch.promote_types(rows_RH.dtype, torch.float32)
        total_TH = back_SH.new_zeros((route.num_tokens, rows_RH.shape[1]), dtype=wide)
        # a token occurs once in one rank's part: no two additions meet, and their order is that of the ranks
        parts = zip(back_SH.split(route.sent), route.token_S.split(route.sent), strict=True)
        for part_SH, token_S in parts:
            total_TH.index_add_(0, token_S, part_SH.to(wide))
        return total_TH.to(rows_RH.dtype)


TRANSPORT = Collective()
