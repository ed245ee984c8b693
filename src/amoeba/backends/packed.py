"""Packed experts inside torch: their operator, its fake and its autograd.

T tokens · K experts per token · H hidden

    y_TH = run(packed, x_TH, routing, lora, recompute=False)

The weights are no tensors, so the operator gets a handle by which it finds them. Without a tracer, a mode or a tensor
subclass an autograd function is used, which keeps h between the passes; a traced graph holds tensors of known shapes
only, and there h is computed again in backward. A GPU's x comes through pinned memory, and y, dx and dweight go back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.backends.operator import nobody_watches
from amoeba.backends.transforms import differentiable, once, refuse_batched, transformed
from amoeba.cpu import passes
from amoeba.cpu.node import PassNeeds
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.transfer import deliver, to_host
from amoeba.routing import Routing
from amoeba.weights import LORA_NAMES, LoraFactors

_NUM_TENSORS = 3 + len(LORA_NAMES)
_TENSORS = "Tensor x, Tensor expert, Tensor weight, " + ", ".join(f"Tensor? {name}" for name in LORA_NAMES)
_library = torch.library.Library("amoeba", "FRAGMENT")
_library.define(f"packed({_TENSORS}, float scaling, Tensor handle) -> Tensor")
_library.define(
    f"packed_backward({_TENSORS}, float scaling, Tensor handle, Tensor dy, bool[8] needs)"
    f" -> ({', '.join(['Tensor'] * 8)})"
)


def run(packed: PackedExperts, x_TH: Tensor, routing: Routing, lora: LoraFactors | None, recompute: bool) -> Tensor:
    lora = lora or LoraFactors()
    tensors = x_TH, routing.expert_TK, routing.weight_TK, *lora.six()
    if not nobody_watches(*tensors):
        return _dispatched(*tensors, lora.scaling, packed.handle)
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if gradient:
        return _Direct.apply(packed, "x" if recompute else "h", lora.scaling, *tensors)
    return _forward(packed, lora, tensors, "nothing")[0]


class _Direct(torch.autograd.Function):
    """What the operator and its autograd do, without the dispatcher, and with h kept."""

    @staticmethod
    def forward(ctx: Any, packed: PackedExperts, keep: passes.Keep, scaling: float, *tensors: Tensor | None) -> Tensor:
        y_TH, left = _forward(packed, _factors(tensors, scaling), tensors, keep)
        assert left is not None
        # Saved as tensors, all that is kept is freed by backward, and activation checkpointing can drop it.
        kept: list[Tensor] = []
        ctx.caches = [_without_tensors(cache, kept) for cache in left.caches]
        ctx.packed, ctx.factors, ctx.scaling = packed, left.factors, scaling
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor | None) -> tuple:
        others = 3
        if dy_TH is None:
            return (None,) * (others + _NUM_TENSORS)
        saved = ctx.saved_tensors  # activation checkpointing gives them out once
        tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
        wanted = ctx.needs_input_grad[others:]
        needs = [wanted[0], *wanted[2:]]  # expert ids have no gradient
        refuse_batched("amoeba::packed", dy_TH)
        if torch.is_grad_enabled() or transformed():  # second derivatives, or a transform: it says why not
            handle = ctx.packed.handle
            found: tuple = _dispatched_backward(*tensors, ctx.scaling, handle, dy_TH, needs)
        else:
            left = passes.Left(tuple(_with_tensors(cache, kept) for cache in ctx.caches), ctx.factors)
            found = _backward(ctx.packed, left, tensors, ctx.scaling, dy_TH, PassNeeds(*needs))
        x, *rest = (gradient if need else None for gradient, need in zip(found, needs, strict=True))
        return (None,) * others + (x, None, *rest)


def _forward(
    packed: PackedExperts, lora: LoraFactors, tensors: tuple[Tensor | None, ...], keep: passes.Keep
) -> tuple[Tensor, passes.Left | None]:
    x_TH, expert_TK, weight_TK = tensors[:3]
    assert x_TH is not None and expert_TK is not None and weight_TK is not None
    rows_TH, id_TK, scale_TK = to_host(x_TH, expert_TK, weight_TK)
    y_TH, left = passes.forward(packed, lora, rows_TH.contiguous(), id_TK, scale_TK, keep)
    return deliver(y_TH, x_TH.dtype, x_TH.device), left


def _backward(
    packed: PackedExperts,
    left: passes.Left,
    tensors: tuple[Tensor | None, ...],
    scaling: float,
    dy_TH: Tensor,
    needs: PassNeeds,
) -> tuple[Tensor | None, ...]:
    (rows_TH,) = to_host(dy_TH)
    lora = _factors(tensors, scaling)
    found = passes.backward(packed, lora, left, rows_TH.contiguous(), needs)
    x_TH, _, weight_TK = tensors[:3]
    assert x_TH is not None and weight_TK is not None
    return (
        None if found.x_TH is None else deliver(found.x_TH, x_TH.dtype, x_TH.device),
        None if found.weight_TK is None else deliver(found.weight_TK, weight_TK.dtype, weight_TK.device),
        *(getattr(found, name) for name in LORA_NAMES),
    )


def _factors(tensors: Sequence[Tensor | None], scaling: float) -> LoraFactors:
    gate_a, gate_b, up_a, up_b, down_a, down_b = tensors[3:]
    return LoraFactors(gate_a, gate_b, up_a, up_b, down_a, down_b, scaling)


def _operator(*args: Any) -> Tensor:
    *tensors, scaling, handle = args
    return _forward(PackedExperts.of_handle(handle), _factors(tensors, scaling), tuple(tensors), "nothing")[0]


def _operator_backward(*args: Any) -> tuple[Tensor, ...]:
    *tensors, scaling, handle, dy_TH, needs = args
    packed, lora = PackedExperts.of_handle(handle), _factors(tensors, scaling)
    _, left = _forward(packed, lora, tuple(tensors), "h")
    assert left is not None
    found = _backward(packed, left, tuple(tensors), scaling, dy_TH, PassNeeds(*needs))
    return tuple(tensors[0].new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    x, _expert, weight, *factors = args[:_NUM_TENSORS]
    sources = (x, weight, *factors)
    return tuple(
        torch.empty_like(source, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for source, need in zip(sources, args[-1], strict=True)
    )


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.scaling, handle = inputs
    ctx.save_for_backward(*tensors, handle)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy_TH: Tensor | None) -> tuple:
    if dy_TH is None:
        return (None,) * (_NUM_TENSORS + 2)
    *tensors, handle = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [wanted[0], *wanted[2:_NUM_TENSORS]]
    found = _dispatched_backward(*tensors, ctx.scaling, handle, dy_TH, needs)
    x, *rest = (gradient if need else None for gradient, need in zip(found, needs, strict=True))
    return (x, None, *rest, None, None)


_library.impl("packed", _operator, "CompositeExplicitAutograd")
_library.impl("packed_backward", _operator_backward, "CompositeExplicitAutograd")
torch.library.register_fake("amoeba::packed", lambda x, *_: x.new_empty(x.shape), lib=_library)
torch.library.register_fake("amoeba::packed_backward", _fake_backward, lib=_library)
_dispatched_backward = once("packed", torch.ops.amoeba.packed_backward.default, _library)
_dispatched = differentiable("packed", torch.ops.amoeba.packed.default, _keep, _differentiate, _library)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor was."""

    index: int


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The same dataclass with its tensors, also those of dataclasses in it, moved to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _replaced(value, lambda inner: _without_tensors(inner, tensors))


def _with_tensors(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    return _replaced(value, lambda inner: _with_tensors(inner, tensors))


def _replaced(value: Any, change: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    changed = copy.copy(value)
    for part in dataclasses.fields(value):
        object.__setattr__(changed, part.name, change(getattr(value, part.name)))
    return changed
