"""`ranks`: expert parallelism. Tokens go to the owners of their experts, each rank computes its share, sums come back.

T tokens · K experts per token · R rows received · H hidden

What computes the share is the backend of its own kind of weights, chosen as for any call, with LoRA, gradients and
recompute. Only the way there and back is here.

The way, as autograd sees it:

    x_RH, expert_RK, weight_RK, _ = dispatch(exchange, x_TH, weight_TK)
    y_TH = combine(exchange, y_RH)                        # y of the local experts over these rows

A row that arrives holds the ids of its K experts as they are known here, -1 where another rank owns the expert. Such a
slot is a sentinel: it adds nothing, and its weight gets gradient zero here, so that the sum over ranks is the owner's.

Rows are sent quantised where the experts read them only so: half of the bytes, and the same numbers, since the scales
of a row depend on that row alone.

Importing `amoeba.parallel` registers the backend and the placement `ranks`; nothing below knows of either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from amoeba.backends import fp8_choice
from amoeba.backends.backend import Backend, Request
from amoeba.backends.experts_operator import can_skip_dispatcher
from amoeba.backends.fp8_triton import why_not_there
from amoeba.backends.registry import backends_of, choose, explain
from amoeba.core.placement import Placement, Tolerance
from amoeba.core.torch_internals import transformed
from amoeba.core.weights import ExpertWeights
from amoeba.parallel.agreement import ANY, ROW_FORMATS
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import ShardedExperts, shard_experts
from amoeba.parallel.transports.choice import choose_transport
from amoeba.parallel.transports.transport import Exchange
from amoeba.placements import register_placement
from amoeba.precision.formats import Format
from amoeba.precision.quantised import QuantisedMatrix, pack_rows, packed_bytes, quantise, unpack_rows
from amoeba.precision.recipes import OF_ALL_TOKENS
from amoeba.routing.router import Routing


class RanksBackend(Backend):
    name, summary, kinds = "ranks", "each rank computes the experts that it owns", (ShardedExperts,)

    def why_not(self, request: Request) -> str | None:
        sharded = _sharded(request)
        if torch.compiler.is_compiling() or transformed():
            return (
                "sends a number of rows that depends on the data, which torch.compile and torch.func cannot trace yet"
            )
        if sharded.ranks.count > 1 and sharded.local.placement == OF_ALL_TOKENS:
            return f"has some of the tokens, but {OF_ALL_TOKENS} needs scales over all of them: use fp8, or one process"
        transport, refused = choose_transport(sharded.transport, sharded.ranks, request.x_TH.device)
        if transport is None:
            return "has no transport between these ranks: " + "; ".join(
                f"{name} {why}" for name, why in refused.items()
            )
        if sharded.local_backend == "auto" and sharded.own_experts:
            inner = explain(_share(request, request.x_TH, request.routing, request.routing.num_tokens))
            if inner.backend is None:
                return f"has no backend for its own experts: {inner.reasons}"
        return None

    def why_waits(self, request: Request, trains: bool) -> str | None:
        if _sharded(request).ranks.count > 1:
            return "are on several ranks, and the host watches over each exchange between them"
        share = _share(request, request.x_TH, request.routing, request.routing.num_tokens)
        inner = explain(share).backend if share.weights.num_experts else None
        return None if inner is None else inner.why_waits(share, trains)

    def run(self, request: Request) -> Tensor:
        sharded = _sharded(request)
        if sharded.ranks.count == 1:
            return self._compute_share(request, request.x_TH, request.routing, request.routing.num_tokens)
        return self._run_same(request) if sharded.tokens == "same" else self._run_own(request)

    def _run_own(self, request: Request) -> Tensor:
        """Each rank has its own tokens."""
        sharded, x_TH, routing = _sharded(request), request.x_TH, request.routing
        transport, _ = choose_transport(sharded.transport, sharded.ranks, x_TH.device)
        assert transport is not None
        exchange = transport.plan(sharded, x_TH, routing, _trains(request), _row_format(request))
        x_RH, expert_RK, weight_RK, packed = dispatch(exchange, x_TH, routing.weight_TK)
        if exchange.row_format is not None:
            request = replace(request, quantised_x=unpack_rows(packed, x_TH.shape[1], exchange.row_format))
        # it may be a guess, see `OverlappedDispatch.room`
        most_rows = None if exchange.slots is None else max(exchange.slots, 1)
        mine = Routing(expert_RK, weight_RK, trusted=True, most_rows=most_rows)
        y_RH = self._compute_share(request, x_RH, mine, exchange.tokens, exchange)
        return combine(exchange, y_RH, _starts_early(sharded, x_RH))

    def _run_same(self, request: Request) -> Tensor:
        """All ranks have the same tokens."""
        sharded, x_TH, weight_TK = _sharded(request), request.x_TH, request.routing.weight_TK
        ranks = sharded.ranks
        rank_TK, local_TK = sharded.owners.find(request.routing.expert_TK)
        mine_TK = torch.where(rank_TK == ranks.rank, local_TK, -1)
        slots = max(int((mine_TK >= 0).sum()), 1) if mine_TK.device.type == "cpu" else None  # a GPU would be waited for
        routing = Routing(mine_TK, copied(ranks, weight_TK), trusted=True, most_rows=slots)
        return summed(ranks, self._compute_share(request, copied(ranks, x_TH), routing, routing.num_tokens))

    def _compute_share(
        self, request: Request, x_RH: Tensor, routing: Routing, tokens: int, exchange: Exchange | None = None
    ) -> Tensor:
        """tokens: of all ranks."""
        share = _share(request, x_RH, routing, tokens)
        backend = None if share.weights.num_experts == 0 else choose(_sharded(request).local_backend, share)
        if exchange is not None and (exchange.under_way or exchange.straight):
            if getattr(backend, "overlaps", False) and can_skip_dispatcher(*_tensors(share)):
                share = replace(share, overlapped=exchange)
            else:
                if exchange.under_way:
                    exchange.wait()
                exchange.under_way = exchange.straight = False
        if exchange is not None and (share.overlapped is None or share.lora is not None):  # whose rows are saved, too
            share = replace(share, routing=replace(routing, most_rows=exchange.room(routing.most_rows)))
        return _Nothing.apply(x_RH, *_tensors(share)[1:]) if backend is None else backend.run(share)


def _starts_early(sharded: ShardedExperts, x_RH: Tensor) -> bool:
    """Whether backward begins before all rows of dy are there, on all ranks alike: they were told the same backend, and
    each has experts for it. Who takes such a dy gives dx back."""
    name, owners = sharded.local_backend, sharded.owners
    named = [backend for backend in backends_of(type(sharded.local), x_RH.device) if backend.name == name]
    everyone = all(owners.experts_of(rank) for rank in range(owners.ranks))
    return everyone and x_RH.requires_grad and any(backend.starts_early for backend in named)


def _share(request: Request, x_RH: Tensor, routing: Routing, tokens: int) -> Request:
    """What is left for the experts that this rank owns. Where precision is "auto", the rows of all ranks decide, so
    that all of them compute as one process with these tokens would."""
    sharded = _sharded(request)
    share = replace(request, x_TH=x_RH, routing=routing, weights=sharded.local)
    return replace(share, weights=fp8_choice.settled(share, tokens * routing.top_k, sharded.num_experts))


def _row_format(request: Request) -> int:
    """What this rank says about the rows that it wants, see `agreed_format`: quantised where each backend that may take
    them quantises them first, and nothing reads them otherwise."""
    sharded, x_TH = _sharded(request), request.x_TH
    share = replace(request, weights=sharded.local)
    name = sharded.local_backend
    serving = [each for each in backends_of(type(sharded.local), sharded.device) if name in ("auto", each.name)]
    wanted: set[Format | None] = {each.row_format(share) for each in serving}
    if wanted != {None}:
        wanted = {each.row_format(share) for each in serving if each.why_not(share) is None}
    format = wanted.pop() if len(wanted) == 1 and can_skip_dispatcher(*_tensors(share)) else None
    if format is None or packed_bytes(x_TH.shape[1], format) >= x_TH.shape[1] * x_TH.element_size():
        return ANY if sharded.own_experts == 0 and type(sharded.local) is ExpertWeights else 0
    return ROW_FORMATS.index(format)


def _quantised(x_TH: Tensor, format: Format) -> QuantisedMatrix:
    if why_not_there(x_TH.device, x_TH) is not None:
        return quantise(x_TH, format)
    from amoeba.kernels.quantise import quantise_rows  # the same bits; needs Triton

    return quantise_rows(x_TH.contiguous(), format=format)


def _trains(request: Request) -> bool:
    """Whether there will be a backward. A rank without experts has empty ones, which ask for gradients as others do."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in _tensors(request))


def _tensors(request: Request) -> tuple[Tensor | None, ...]:
    factors = () if request.lora is None else request.lora.six()
    return (request.x_TH, request.routing.weight_TK, *request.weights.tensors(), *factors)


class _Nothing(torch.autograd.Function):
    """What no experts give: zeros, and zeros for gradients, so that a rank without experts goes back as others do."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, *others: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RH, *others)
        return torch.zeros_like(x_RH)

    @staticmethod
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(tensor) if needs else None for tensor, needs in pairs)


def _sharded(request: Request) -> ShardedExperts:
    assert isinstance(request.weights, ShardedExperts)
    return request.weights


def dispatch(exchange: Exchange, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_RH, expert_RK, weight_RK, and rows as they were sent. Where these are quantised, x_RH has their shape, their
    gradient and no numbers."""
    return _Dispatch.apply(exchange, x_TH, weight_TK)


def combine(exchange: Exchange, y_RH: Tensor, early: bool = False) -> Tensor:
    """early: what made y_RH takes a dy of which rows are still on their way."""
    return _Combine.apply(exchange, y_RH, early)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.exchange, format = exchange, exchange.row_format
        rows_TH = x_TH if format is None else pack_rows(_quantised(x_TH, format))
        sent_RH, expert_RK, weight_RK = exchange.dispatch(rows_TH, weight_TK)
        x_RH, packed = sent_RH, sent_RH.new_empty(0)
        if format is not None:
            if exchange.under_way:
                exchange.wait()
            x_RH, packed = x_TH.new_zeros((1, x_TH.shape[1])).expand(sent_RH.shape[0], -1), sent_RH
        # a gradient that is not used here must not be requested there: it would be sent
        _, needs_x, needs_weight = ctx.needs_input_grad
        of_nothing = [] if needs_x else [x_RH]
        of_nothing += [] if needs_weight else [weight_RK]
        ctx.mark_non_differentiable(expert_RK, packed, *of_nothing)
        return x_RH, expert_RK, weight_RK, packed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dx_RH: Tensor, _: Tensor, dweight_RK: Tensor, __: Tensor
    ) -> tuple[None, Tensor | None, Tensor | None]:
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


def _why_not() -> str | None:
    if not dist.is_available():
        return "needs a torch that was built with torch.distributed"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "needs several processes with torch.distributed set up, as torchrun starts them"
    return None


RANKS = Placement(
    "ranks",
    "over the ranks of torch.distributed",
    make=shard_experts,
    backends=(RanksBackend(),),
    tolerances={dtype: Tolerance() for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)},
    why_not=_why_not,
    offered=False,  # to one process, which is all that doctor and bench have; over ranks the commands take it
)
register_placement(RANKS)
