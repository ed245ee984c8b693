"""`collective`: torch's all_to_all, over gloo or NCCL, on any device.

T tokens · K experts per token · R rows received · S rows sent · H hidden · W ranks

The host has to know how many rows go where, so on a GPU each pass waits for it once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from amoeba.parallel.agreement import agree, facts_of
from amoeba.parallel.ranks import Ranks, as_bytes
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.transports.transport import Exchange, Transport
from amoeba.routing.router import Routing


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

    def plan(self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool) -> Exchange:
        """Says to each rank how many rows will come, after all have agreed on what they look like."""
        ranks, owners, num_tokens = sharded.ranks, sharded.owners, routing.num_tokens
        count = ranks.count
        rank_TK, local_TK = owners.find(routing.expert_TK)
        goes_TW = rank_TK.new_zeros((num_tokens, count + 1), dtype=torch.bool).scatter_(1, rank_TK, True)[:, :count]
        slots_W = torch.stack([(rank_TK == rank).sum() for rank in range(count)])
        rows, slots = torch.stack((goes_TW.sum(0), slots_W)).tolist()
        facts = facts_of(owners, x_TH, routing.weight_TK, gradients)
        table = agree(ranks, facts, [*rows, *slots, num_tokens], x_TH.device, "the numbers of tokens to come")
        dest_S, token_S = goes_TW.t().nonzero(as_tuple=True)  # by destination, then by token
        local_SK = torch.where(rank_TK[token_S] == dest_S[:, None], local_TK[token_S], -1)
        route = Route(token_S, rows, [line[ranks.rank] for line in table], num_tokens)
        owned, tokens = (sum(line[place] for line in table) for place in (count + ranks.rank, 2 * count))
        return CollectiveExchange(ranks, route, local_SK, owned, tokens)


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
