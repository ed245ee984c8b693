"""Which ways of differentiating our operators there are: backward passes, and a sentence for every other.

    multiply_backward = once("multiply", torch.ops.amoeba.multiply_backward.default, library)
    multiply = differentiable("multiply", torch.ops.amoeba.multiply.default, keep, backward, library)

What comes back is called like the operator. torch.func.grad and torch.func.vjp work as torch.autograd does. Forward
mode (torch.func.jvp, torch.autograd.forward_ad), vmap and second derivatives raise NotImplementedError: left to torch,
an operator without a rule for forward mode has a tangent of 0, or none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from amoeba.core.torch_internals import is_batch_of_gradients, transformed

REMEDY = "Use the functions of amoeba.proof.reference under autograd where you need them."


def reverse_only(title: str) -> type[Function]:
    """To derive an autograd function from which has a backward and refuses what else torch could ask of it."""

    class ReverseOnly(Function):
        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(
                f"{title}: forward-mode differentiation is not implemented; got a tangent (as torch.func.jvp, jacfwd, "
                "hessian and torch.autograd.forward_ad pass it). Use backward, torch.func.grad or torch.func.vjp, or "
                "the functions of amoeba.proof.reference."
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            raise NotImplementedError(
                f"{title}: vmap is not implemented; got a batch of {info.batch_size} (as torch.func.vmap, jacrev and "
                "hessian make it). Flatten the batch into the tokens, or call it once for each."
            )

    return ReverseOnly


def refuse_batched(title: str, dy: Tensor) -> None:
    """For a backward that may overwrite what was kept for it: is_grads_batched=True would run it several times."""
    if is_batch_of_gradients(dy):
        raise NotImplementedError(
            f"{title}: several gradients at once are not implemented; got a batch of them (is_grads_batched=True, or "
            "vectorize=True). Use retain_graph=True and call backward once for each."
        )


def differentiable(
    name: str,
    op: Callable[..., Any],
    keep: Callable[..., None],
    backward: Callable[..., Any],
    library: torch.library.Library,
) -> Callable[..., Any]:
    """Registers the autograd of amoeba::<name>; what comes back is the operator, also for the transforms of torch.func.

    keep(ctx, inputs, output) and backward(ctx, *gradients), as torch.library.register_autograd takes them.
    """
    torch.library.register_autograd(f"amoeba::{name}", backward, setup_context=keep, lib=library)
    # torch.library's own autograd function is of the kind that torch.func does not take
    members = {"forward": _of(op), "setup_context": staticmethod(keep), "backward": staticmethod(backward)}
    function: Any = type(f"Amoeba_{name}", (reverse_only(f"amoeba::{name}"),), members)

    def call(*args: Any) -> Any:
        return function.apply(*args) if transformed() else op(*args)

    return call


def once(name: str, op: Callable[..., Any], library: torch.library.Library, remedy: str = REMEDY) -> Callable[..., Any]:
    """The same for amoeba::<name>_backward, which has no backward of its own."""

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    def twice(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"amoeba::{name}: second derivatives are not implemented; got a backward through a backward. {remedy}"
        )

    return differentiable(f"{name}_backward", op, keep, twice, library)


def _of(op: Callable[..., Any]) -> staticmethod:
    def forward(*args: Any) -> Any:
        return op(*args)

    return staticmethod(forward)
