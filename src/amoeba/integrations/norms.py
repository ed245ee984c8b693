"""Root mean square norms of a Hugging Face model, recognised by evaluating them.

form = recognise(module)        # a Norm, or None: it is something else
by_core(model)                  # each by the C++ core where no gradient is taken
with one_launch(model):         # each by our kernel, with gradients; for exact mode
    model(...)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core import operators
from amoeba.core.operators import Operand
from amoeba.core.torch_internals import has_dispatch_mode
from amoeba.cpu.core import load_core
from amoeba.cpu.pointers import CPU
from amoeba.ops.exact import OUTSIDE

_TOKENS = 4
MOST = 16384  # numbers of a row, of amoeba.kernels.rms_norm, which may not be imported here


class Norm(NamedTuple):
    eps: float
    rounds_late: bool  # after the weight, not before
    adds_one: bool = False  # to the weight, as Gemma's and Qwen3-Next's


@torch.no_grad()
def recognise(module: Any) -> Norm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not isinstance(weight, Tensor) or weight.dim() != 1 or names != {"weight"} or not isinstance(eps, float):
        return None
    if len(weight) > MOST or module._forward_hooks or module._forward_pre_hooks:
        return None
    x, random = random_like(weight, _TOKENS, len(weight)), random_like(weight, len(weight))
    try:
        given = torch.func.functional_call(module, {"weight": random}, (x,))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it wants other arguments
        return None
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    for form, expected in (
        (Norm(eps, False), random * normed.to(x.dtype)),
        (Norm(eps, True), (random * normed).to(x.dtype)),
        (Norm(eps, True, True), ((1 + random.float()) * normed).to(x.dtype)),
    ):
        if isinstance(given, Tensor) and torch.equal(given, expected):
            return form
    return None


def random_like(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """In its dtype, on the CPU: a model on the meta device has no numbers, and the host would wait for a GPU's."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like.dtype)


@contextmanager
def one_launch(model: nn.Module) -> Iterator[None]:
    changed: list[tuple[Any, Any, Norm]]
    changed = [(module, type(module), form) for module in model.modules() if (form := recognise(module)) is not None]
    for module, own, form in changed:
        module.__class__ = _fused(own, form, _FusedNorm)
    try:
        yield
    finally:
        for module, own, _ in changed:
            module.__class__ = own


def by_core(model: nn.Module) -> None:
    """From now on those in fp32 are computed by the C++ core where no gradient is taken, in one pass."""
    for module in model.modules():
        if (form := recognise(module)) is not None:
            own: Any = type(module)
            module.__class__ = _fused(own, form, _CoreNorm)


@functools.cache
def _fused(own: Any, form: Norm, by: type) -> Any:
    return type(own.__name__, (by, own), {"form": form, "__module__": own.__module__})


class _CoreNorm:
    """Mixed in before the norm's own class."""

    form: Norm

    def forward(self, hidden_states: Tensor, *more: Any, **others: Any) -> Tensor:
        weight: Any = self.weight  # type: ignore[attr-defined]
        is_wide = hidden_states.dtype == weight.dtype == torch.float32 and hidden_states.device == weight.device == CPU
        if not is_wide or more or others or torch.is_grad_enabled() or not hidden_states.numel():
            return super().forward(hidden_states, *more, **others)  # type: ignore[misc]
        return load_core().rms_norm(hidden_states, weight.detach(), self.form.eps, adds_one=self.form.adds_one)


class _FusedNorm:
    form: Norm

    def forward(self, hidden_states: Tensor, *more: Any, **others: Any) -> Tensor:
        weight: Any = self.weight  # type: ignore[attr-defined]
        if hidden_states.dtype != weight.dtype or more or others:  # norms of Mamba layers take a gate
            return super().forward(hidden_states, *more, **others)  # type: ignore[misc]
        with OUTSIDE:
            return _RmsNorm.apply(hidden_states, weight, *self.form)


def _forward(x: Tensor, weight: Tensor, eps: float, rounds_late: bool, adds_one: bool) -> tuple[Tensor]:
    from amoeba.kernels.rms_norm import rms_norm

    return (rms_norm(x, weight, eps, rounds_late=rounds_late, adds_one=adds_one),)


_FLAGS = Operand("rounds_late", "bool"), Operand("adds_one", "bool")
operators.define_forward(
    "exact_rms_norm",
    (*(Operand(name, "Tensor") for name in ("x", "weight")), Operand("eps", "float"), *_FLAGS),
    results=("y",),
    forward=_forward,
    fake=lambda x, *_: (torch.empty_like(x),),
)


class _RmsNorm(operators.reverse_only("exact mode's norm")):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *form: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.form = Norm(*form)
        if has_dispatch_mode():
            return torch.ops.amoeba.exact_rms_norm(x, weight, *form)
        return _forward(x, weight, *form)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from amoeba.kernels.rms_norm import rms_norm_backward

        x, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy, x, weight, of_weight=ctx.needs_input_grad[1], **ctx.form._asdict())
        return dx, dweight, None, None, None
