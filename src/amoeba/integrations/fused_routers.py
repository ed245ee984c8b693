"""Fused routers of a Hugging Face model: score, choice and weights in one kernel each for forward and backward.

T tokens · K experts per token · E experts · H hidden

    with fused_routers(model) as count:         # of routers that were recognised
        model(...)

A router is recognised by evaluating it: its choices and weights for a few random tokens are those of one of our own
routers, or it stays as it is. Where experts are streamed to a GPU, the router of a captured step requests them in the
same launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core.config import RouterConfig
from amoeba.core.graph_replays import Replays
from amoeba.core.log import logger
from amoeba.integrations.experts_module import is_experts, placed_in, routers_in
from amoeba.ops.exact import OUTSIDE, looks_on
from amoeba.routing import fused_router, route

_KINDS: tuple[dict[str, Any], ...] = (
    {"score": "softmax", "renormalize": True},
    {"score": "softmax", "renormalize": False},
)  # a softmax over the chosen logits alone is the first
_TOKENS = 64
_EXPERTS = "_amoeba_experts"  # of a fused router: the module whose experts it chooses
_TOLERANCE = 1e-2  # weights may come in bf16


class _Found(NamedTuple):
    config: RouterConfig
    weight_dtype: torch.dtype | None  # None: of the logits
    ids_first: bool  # as Granite's routers before transformers 5.18: experts, weights, logits


@contextmanager
def fused_routers(model: nn.Module) -> Iterator[int]:
    changed = []
    for block in model.modules():
        if not any(is_experts(child) for child in block.children()):
            continue
        (experts, *others) = [child for child in block.children() if is_experts(child)]
        for router in routers_in(block):
            found = None if isinstance(router, _FusedRouter) else recognise(router)
            if found is not None:
                own: Any = type(router)
                changed.append((router, own))
                router.__class__ = _fused(own, found)
                router.__dict__[_EXPERTS] = None if others else experts  # no child of its own
    try:
        yield len(changed)
    finally:
        for router, own in changed:
            router.__class__ = own
            del router.__dict__[_EXPERTS]


def recognise(router: Any) -> _Found | None:
    """What it computes, if it is a linear layer whose results are the logits, the weights and the chosen experts."""
    training = router.training
    try:
        found = [_recognised(router.train(mode)) for mode in (True, False)]
    finally:
        router.train(training)
    return found[0] if found[0] == found[1] else None


@torch.no_grad()
def _recognised(router: Any) -> _Found | None:
    weight = getattr(router, "weight", None)
    others = {name for name, _ in (*router.named_parameters(), *router.named_buffers())} - {"weight", "bias"}
    if not isinstance(weight, Tensor) or weight.dim() != 2 or others or weight.is_meta:
        return None
    hidden_TH = _random(weight)
    try:
        output = router(hidden_TH)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it wants other arguments
        logger.info("a router is left unchanged: %s: %s", type(error).__name__, error)
        return None
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(each, Tensor) for each in output)):
        return None
    ids_first = not output[0].is_floating_point()
    logits_TE, weight_TK, expert_TK = output[::-1] if ids_first else output
    if not logits_TE.is_floating_point() or logits_TE.dim() != 2 or expert_TK.is_floating_point():
        return None
    if len(logits_TE.unique()) < logits_TE.shape[1]:
        return None  # among equals every choice looks right
    if not torch.equal(logits_TE, _logits(router, hidden_TH)) or weight_TK.shape != expert_TK.shape:
        return None
    for kind in _KINDS:
        config = _config(logits_TE.shape[1], expert_TK.shape[1], **kind)
        routing = route(logits_TE, config)
        same_choice = torch.equal(_chosen(logits_TE, expert_TK), _chosen(logits_TE, routing.expert_TK))
        if same_choice and torch.allclose(weight_TK.float(), routing.weight_TK.float(), atol=_TOLERANCE, rtol=0):
            return _Found(config, None if weight_TK.dtype == logits_TE.dtype else weight_TK.dtype, ids_first)
    return None


@torch.no_grad()
def rehearse(router: Any) -> None:
    """Launches what recognising this one, which is fused, launches on a GPU."""
    found: _Found | None = getattr(router, "found", None)
    if found is not None:
        route(_logits(router, router.weight.new_empty(_TOKENS, router.weight.shape[1])), found.config)


class _FusedRouter:
    found: _Found

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        in_exact_mode = looks_on()  # where one product serves with gradients and without
        kernels = not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_exact_mode
        logits_TE = _logits(self, x_TH, kernels and x_TH.device.type == "cuda")
        config, dtype, ids_first = self.found
        if (requested := _route_and_request(self.__dict__[_EXPERTS], x_TH, logits_TE, config)) is not None:
            expert_TK, weight_TK = requested
        elif kernels and fused_router.why_not(logits_TE, config) is None:
            expert_TK, weight_TK = fused_router.choose(logits_TE, config, dtype or logits_TE.dtype)
        elif fused_router.why_not(logits_TE, config) is None:
            with OUTSIDE if in_exact_mode else nullcontext():
                expert_TK, weight_TK, _ = fused_router.fused_route(logits_TE, config, None, scores=False)
        else:
            routing = route(logits_TE, config)
            expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
        output = logits_TE, weight_TK.to(logits_TE.dtype if dtype is None else dtype), expert_TK
        return output[::-1] if ids_first else output


def _route_and_request(
    experts: Any, x_TH: Tensor, logits_TE: Tensor, config: RouterConfig
) -> tuple[Tensor, Tensor] | None:
    """By one launch, where the step is captured and its experts come while it runs; else None."""
    if experts is None or torch.compiler.is_compiling():
        return None
    placed: Any = placed_in(experts)
    replays: Replays | None = getattr(placed, "replays", None)
    return None if replays is None else replays.route(placed.layer, x_TH, logits_TE, config, None)


@functools.cache
def _fused(own: type, found: _Found) -> type:
    return type(own.__name__, (_FusedRouter, own), {"found": found, "__module__": own.__module__})


@functools.cache
def _config(experts: int, top_k: int, **kind: Any) -> RouterConfig:
    return RouterConfig(experts, top_k, **kind)


def _logits(router: Any, hidden_TH: Tensor, kernels: bool = False) -> Tensor:
    """kernels: few tokens by ours, without gradients."""
    linear: Any = nn.functional.linear
    if kernels:
        from amoeba.kernels.decode.linear import linear
    return linear(hidden_TH, router.weight, getattr(router, "bias", None))


def _random(weight: Tensor) -> Tensor:
    """Tokens for which a router of this weight has logits of about one; the same each time."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_TOKENS, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    size = weight.float().norm(dim=1).mean().clamp(min=1e-6)
    return (x.to(weight.device) / size).to(weight.dtype)


def _chosen(logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """The logits of the chosen experts, which tell choices apart but for equals."""
    return logits_TE.gather(1, expert_TK).sort(dim=1).values
