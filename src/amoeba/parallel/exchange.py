"""Tokens to the owners of their experts and sums back, as autograd sees it.

T tokens · K experts per token · R rows received · S rows sent · H hidden · W ranks

    exchange = plan_exchange(ranks, owners, transport, x_TH, expert_TK, weight_TK, gradients)
    x_RH, expert_RK, weight_RK = exchange.dispatch(x_TH, weight_TK)
    y_TH = exchange.combine(y_RH)                         # y of the local experts over these rows

A row that arrives holds the ids of its K experts as they are known here, -1 where another rank owns the expert. Such a
slot is a sentinel: it adds nothing, and its weight gets gradient zero here, so that the sum over ranks is the owner's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amoeba.errors import bad_value
from amoeba.parallel.owners import Owners
from amoeba.parallel.ranks import Ranks, as_bytes
from amoeba.parallel.transports.transport import Route, Transport

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Exchange(NamedTuple):
    ranks: Ranks
    transport: Transport
    route: Route
    local_SK: Tensor
    slots: int  # of the rows received, those with an expert here

    def dispatch(self, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _Dispatch.apply(self, x_TH, weight_TK)

    def combine(self, y_RH: Tensor) -> Tensor:
        return _Combine.apply(self, y_RH)

    def send(self, rows: Tensor, what: str) -> Tensor:
        return self.transport.send_rows(self.ranks, self.route, rows, what)

    def give_back(self, rows: Tensor, what: str) -> Tensor:
        return self.transport.return_rows(self.ranks, self.route, rows, what)


def plan_exchange(
    ranks: Ranks,
    owners: Owners,
    transport: Transport,
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gradients: bool,
) -> Exchange:
    """Says to each rank how many rows will come, after all have agreed on what they look like.

    gradients: whether there will be a backward.
    """
    (num_tokens, top_k), count = expert_TK.shape, ranks.count
    rank_TK, local_TK = owners.find(expert_TK)
    goes_TW = rank_TK.new_zeros((num_tokens, count + 1), dtype=torch.bool).scatter_(1, rank_TK, True)[:, :count]
    facts = {
        "experts": owners.num_experts,
        "experts per token": top_k,
        "hidden": x_TH.shape[1],
        "dtype of x": _DTYPES.index(x_TH.dtype),
        "dtype of the routing weights": _DTYPES.index(weight_TK.dtype),
        "gradients": int(gradients),
        "gradient of x": int(gradients and x_TH.requires_grad),
        "gradient of the routing weights": int(gradients and weight_TK.requires_grad),
    }
    slots_W = torch.stack([(rank_TK == rank).sum() for rank in range(count)])
    numbers = torch.stack((goes_TW.sum(0), slots_W)).tolist()
    table = ranks.gather([*facts.values(), *numbers[0], *numbers[1]], x_TH.device, "the numbers of tokens to come")
    _check_agreed(list(facts), table)
    counts = [line[len(facts) : len(facts) + count] for line in table]
    slots = sum(line[len(facts) + count + ranks.rank] for line in table)
    dest_S, token_S = goes_TW.t().nonzero(as_tuple=True)  # by destination, then by token
    local_SK = torch.where(rank_TK[token_S] == dest_S[:, None], local_TK[token_S], -1)
    route = Route(token_S, counts[ranks.rank], [line[ranks.rank] for line in counts], num_tokens)
    return Exchange(ranks, transport, route, local_SK, slots)


def _check_agreed(names: list[str], table: list[list[int]]) -> None:
    """On every rank alike, so that all of them stop."""
    for place, name in enumerate(names):
        values = [line[place] for line in table]
        if len(set(values)) > 1:
            told = ", ".join(f"{_value(name, value)} on rank {rank}" for rank, value in enumerate(values))
            raise bad_value(name, "the same on all ranks of the group", told, "call the layer alike on every rank")


def _value(name: str, value: int) -> str:
    if name.startswith("dtype"):
        return str(_DTYPES[value])
    return str(bool(value)) if name.startswith("gradient") else str(value)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        ranks, route, local_SK = exchange.ranks, exchange.route, exchange.local_SK
        # ids differ from rank to rank where weights do not, so that the two are packed here, row by row
        ids, weights = as_bytes(local_SK.to(torch.int32)), as_bytes(weight_TK.index_select(0, route.token_S))
        packed = ranks.exchange(torch.cat((ids, weights), 1), route.sent, route.received, "ids and routing weights")
        ids, weights = packed.split((ids.shape[1], weights.shape[1]), 1)
        # copies: of a single row .contiguous() would be the same bytes, which begin where a number of 8 bytes cannot
        ids, weights = (part.clone(memory_format=torch.contiguous_format) for part in (ids, weights))
        expert_RK, weight_RK = ids.view(torch.int32).long(), weights.view(weight_TK.dtype)
        x_RH = exchange.send(x_TH, "tokens")
        ctx.mark_non_differentiable(expert_RK)
        return x_RH, expert_RK, weight_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RH: Tensor, _: Tensor, dweight_RK: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        exchange, (_, needs_x, needs_weight) = ctx.exchange, ctx.needs_input_grad
        dx_TH = exchange.give_back(dx_RH, "gradients of tokens") if needs_x else None
        dweight_TK = exchange.give_back(dweight_RK, "gradients of routing weights") if needs_weight else None
        return None, dx_TH, dweight_TK


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, y_RH: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.give_back(y_RH, "sums of the experts")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.send(dy_TH, "gradients of sums")


def copied(ranks: Ranks, tensor: Tensor) -> Tensor:
    """What all ranks have alike and use each for its own experts: its gradient is the sum of theirs."""
    return _Copied.apply(ranks, tensor)


def summed(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over the ranks, of which all go on alike, so that the gradient of each summand is that of the sum."""
    return _Summed.apply(ranks, tensor)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, tensor: Tensor) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ranks.add_up(gradient, "gradients of the same tokens")


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, tensor: Tensor) -> Tensor:
        return ranks.add_up(tensor, "sums of the experts")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
