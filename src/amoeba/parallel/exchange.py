"""Tokens to the owners of their experts and sums back, as autograd sees it.

T tokens · K experts per token · R rows received · H hidden

    x_RH, expert_RK, weight_RK = dispatch(exchange, x_TH, weight_TK)
    y_TH = combine(exchange, y_RH)                        # y of the local experts over these rows

A row that arrives holds the ids of its K experts as they are known here, -1 where another rank owns the expert. Such a
slot is a sentinel: it adds nothing, and its weight gets gradient zero here, so that the sum over ranks is the owner's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amoeba.parallel.ranks import Ranks
from amoeba.parallel.transports.transport import Exchange


def dispatch(exchange: Exchange, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _Dispatch.apply(exchange, x_TH, weight_TK)


def combine(exchange: Exchange, y_RH: Tensor, early: bool = False) -> Tensor:
    """early: what made y_RH takes a dy of which rows are still on their way."""
    return _Combine.apply(exchange, y_RH, early)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        x_RH, expert_RK, weight_RK = exchange.dispatch(x_TH, weight_TK)
        # a gradient that is not used here must not be requested there: it would be sent
        _, needs_x, needs_weight = ctx.needs_input_grad
        of_nothing = [] if needs_x else [x_RH]
        of_nothing += [] if needs_weight else [weight_RK]
        ctx.mark_non_differentiable(expert_RK, *of_nothing)
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
    def forward(ctx: Any, exchange: Exchange, y_RH: Tensor, early: bool) -> Tensor:
        ctx.exchange, ctx.early = exchange, early
        y_TH = exchange.give_back(y_RH, "sums of the experts")
        if exchange.leaves_early:
            # Checkpointing runs forward again up to the last tensor that is saved. What left by then has to be taken
            # there, too: else it would be taken for what leaves next.
            ctx.save_for_backward(y_TH.new_empty(0))
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, Tensor, None]:
        if ctx.exchange.leaves_early:
            # What checkpointing runs again here has exchanges of its own, by the cells in which these rows may lie.
            _ = ctx.saved_tensors
        started = ctx.exchange.start_sending(dy_TH) if ctx.early else None
        return None, ctx.exchange.send(dy_TH, "gradients of sums") if started is None else started, None


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
