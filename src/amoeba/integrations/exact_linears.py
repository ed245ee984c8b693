"""Linear layers of a Hugging Face model in exact mode on a GPU, in few launches.

M rows · K summed · N columns · R LoRA rank

    with few_launches(model):       # while `ExactOperators` looks on; elsewhere modules are what they were
        model(...)

The projections of queries, keys and values are one launch: the first that is called computes all three. PEFT's layers
add their factors' part in the launch of the large product, in fp32 and rounded once. What is not as simple (biases,
dropout, several adapters, fp32) stays with the layer's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.operators import reverse_only
from amoeba.ops.exact import OUTSIDE, looks_on, product

_JOINED = "q_proj", "k_proj", "v_proj"
_OF_PEFT = "base_layer", "lora_A", "lora_B", "lora_dropout", "scaling"
_OTHERS, _MADE = "_amoeba_others", "_amoeba_made"  # of a first one, and of those that it computes


@contextmanager
def few_launches(model: nn.Module) -> Iterator[None]:
    changed: list[tuple[Any, Any]] = []

    def change(module: Any, mixed: Any) -> None:
        own: Any = type(module)
        changed.append((module, own))
        module.__class__ = _mixed(mixed, own)

    for module in list(model.modules()):
        linears = [getattr(module, name, None) for name in _JOINED]
        if all(_is_plain(each) for each in linears) and len({each.in_features for each in linears}) == 1:  # type: ignore[union-attr]
            first, *others = linears
            change(first, _First)
            first.__dict__[_OTHERS] = others  # no children of its own
            for each in others:
                change(each, _Other)
        elif all(hasattr(module, name) for name in _OF_PEFT):
            change(module, _WithFactors)
    try:
        yield
    finally:
        for module, own in changed:
            module.__class__ = own
            for name in (_OTHERS, _MADE):
                module.__dict__.pop(name, None)


@functools.cache
def _mixed(mixed: type, own: type) -> Any:
    return type(own.__name__, (mixed, own), {"__module__": own.__module__})


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.bias is None


def _kernels(x: Tensor, weights: list[Tensor], rank: int = 0) -> Any:
    from amoeba.kernels import exact_linear

    return exact_linear if looks_on() and exact_linear.why_not(x, weights, rank) is None else None


class _First:
    def forward(self, input: Tensor) -> Tensor:
        others = self.__dict__[_OTHERS]
        weights = [self.weight, *(each.weight for each in others)]  # type: ignore[attr-defined]
        if _kernels(input, weights) is not None:
            with OUTSIDE:
                found = _Linears.apply(input.reshape(-1, input.shape[-1]), *weights)
                own, *more = (each.view(*input.shape[:-1], each.shape[-1]) for each in found)
            for module, made in zip(others, more, strict=True):
                module.__dict__[_MADE] = input, made
            return own
        return super().forward(input)  # type: ignore[misc]


class _Other:
    def forward(self, input: Tensor) -> Tensor:
        of, made = self.__dict__.pop(_MADE, (None, None))
        return made if of is input else super().forward(input)  # type: ignore[misc]


class _Linears(reverse_only("exact mode's linear layers")):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        from amoeba.kernels.exact_linear import linears

        ctx.save_for_backward(x_MK if any(ctx.needs_input_grad[1:]) else None, *weights)
        return tuple(linears(x_MK, weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, *weights = ctx.saved_tensors
        dx_MK = None
        if ctx.needs_input_grad[0]:
            dx_MK = gradients[0] @ weights[0]
            for dy_MN, weight_NK in zip(gradients[1:], weights[1:], strict=True):
                dx_MK.addmm_(dy_MN, weight_NK)
        needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        return dx_MK, *(dy_MN.mT @ x_MK if need else None for dy_MN, need in needed)


# --- PEFT's layers


def _factors(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """Where its only active adapter is a plain one."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1 or not _is_plain(layer.base_layer):
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in getattr(layer, "lora_variant", ()):
        return None
    dropout, a, b = layer.lora_dropout[name], layer.lora_A[name], layer.lora_B[name]
    if type(dropout) is not nn.Identity or not (_is_plain(a) and _is_plain(b)):
        return None
    plain = a.weight.dtype == b.weight.dtype == torch.float32
    return (a.weight, b.weight, float(layer.scaling[name])) if plain else None


class _WithFactors:
    def forward(self, x: Tensor, *more: Any, **others: Any) -> Tensor:
        found = None if more or others else _factors(self)
        if found is not None:
            a_RK, b_NR, scaling = found
            weight = self.base_layer.weight  # type: ignore[attr-defined]
            if _kernels(x, [weight], a_RK.shape[0]) is not None:
                with OUTSIDE:
                    y = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), weight, a_RK, b_NR, scaling)
                    return y.view(*x.shape[:-1], y.shape[-1])
        return super().forward(x, *more, **others)  # type: ignore[misc]


class _LoraLinear(reverse_only("exact mode's linear layers")):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
        from amoeba.kernels.exact_linear import linear_with_factors

        low_MR = product(x_MK[None], a_RK.mT[None])[0]
        ctx.save_for_backward(x_MK, weight_NK, a_RK, b_NR, low_MR)
        ctx.scaling = scaling
        return linear_with_factors(x_MK, weight_NK, low_MR, b_NR, scaling)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK, a_RK, b_NR, low_MR = ctx.saved_tensors
        of_x, of_weight, of_a, of_b, _ = ctx.needs_input_grad
        wide_MN = dy_MN.float()
        dlow_MR = (wide_MN @ b_NR) * ctx.scaling
        dx = torch.addmm((dlow_MR @ a_RK).to(dy_MN.dtype), dy_MN, weight_NK) if of_x else None
        dweight = dy_MN.mT @ x_MK if of_weight else None
        da = dlow_MR.mT @ x_MK.float() if of_a else None
        db = wide_MN.mT @ low_MR * ctx.scaling if of_b else None
        return dx, dweight, da, db, None
