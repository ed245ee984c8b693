"""Differentiable operators: the plumbing between a forward and a backward of ours and torch, written once.

    multiply = define(
        "multiply",
        (Operand("x", "Tensor", True), Operand("weight", "Tensor", True), Operand("scale", "float")),
        results=("y",),
        forward=lambda x, weight, scale: (x @ weight * scale,),
        backward=lambda arguments, saved, gradients, needs: ...,     # one per differentiable argument, or None
        fake=lambda x, weight, scale: (x.new_empty(x.shape[0], weight.shape[1]),),
    )
    (y,) = multiply(x, weight, 2.0)

`torch.ops.amoeba.<name>` and `<name>_backward` are then known to torch.compile, autocast and activation checkpointing
as opaque operators with fakes and autograd. Backward passes work in every form; forward mode, vmap and second
derivatives raise NotImplementedError with a sentence (see `transforms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amoeba.core.differentiation import REMEDY, differentiable, once, refuse_batched
from amoeba.core.operands import Operand

Tensors = tuple[Tensor, ...]
Gradients = Sequence[Any]  # a tensor, or None

_library = torch.library.Library("amoeba", "FRAGMENT")


@dataclass(frozen=True)
class Operator:
    """Called with all arguments, it gives the results as a tuple; `backward` gives one gradient per differentiable
    argument, an empty tensor where none was asked for."""

    name: str
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]  # (*arguments, *saved results, *gradients of results, needs)

    def __call__(self, *arguments: Any) -> Tensors:
        return self.forward(*arguments)


def define(
    name: str,
    arguments: Sequence[Operand],
    results: Sequence[str],
    *,
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[[tuple, Tensors, Gradients, Sequence[bool]], Gradients],
    fake: Callable[..., Sequence[Tensor]],
    fake_backward: Callable[[tuple, Tensors, Gradients, Sequence[bool]], Gradients] | None = None,
    differentiable_results: int = 1,
    saved: Sequence[int] = (),
    keep: Callable[[tuple], tuple] = lambda arguments: arguments,
    overwrites_saved: bool = False,
    remedy: str = REMEDY,
) -> Operator:
    """Defines amoeba::<name> and its backward.

    differentiable_results: so many of the results, the first ones, have gradients.
    saved:                  which results backward gets, by their places.
    keep:                   the arguments as they are saved for backward: one that is not needed there becomes an empty
                            tensor.
    overwrites_saved:       backward may, so that is_grads_batched=True, which would run it several times, is refused.
    fake_backward:          by default a gradient is like its argument, in its strides, too, and is brought into them
                            where backward gives it in others.
    remedy:                 what to do instead of asking for second derivatives.
    """
    wanted = [place for place, argument in enumerate(arguments) if argument.differentiable]
    tensors = [place for place, argument in enumerate(arguments) if argument.type.startswith("Tensor")]
    others = [place for place in range(len(arguments)) if place not in tensors]
    count = len(arguments)
    schema = ", ".join(str(argument) for argument in arguments)
    of_results = [f"Tensor saved_{results[place]}" for place in saved]
    of_gradients = [f"Tensor? d_{result}" for result in results[:differentiable_results]]
    taken = ", ".join((schema, *of_results, *of_gradients, f"bool[{len(wanted)}] needs"))
    _library.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * len(results))})")
    _library.define(f"{name}_backward({taken}) -> ({', '.join(['Tensor'] * len(wanted))})")

    def run_backward(compute: Callable[..., Gradients]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            given, kept, gradients = args[:count], args[count : count + len(saved)], args[count + len(saved) : -1]
            empty = next(given[place] for place in tensors if given[place] is not None).new_empty
            found = compute(given, kept, gradients, args[-1])
            return _unpacked([empty(0) if gradient is None else gradient for gradient in found])

        return run

    def like_arguments(given: tuple, kept: Tensors, gradients: Gradients, needs: Sequence[bool]) -> Gradients:
        sources = (given[place] for place in wanted)
        return [
            torch.empty_like(source) if need and source is not None else None
            for source, need in zip(sources, needs, strict=True)
        ]

    def laid_as_arguments(given: tuple, kept: Tensors, gradients: Gradients, needs: Sequence[bool]) -> Gradients:
        found = backward(given, kept, gradients, needs)
        return [
            gradient if gradient is None or given[place] is None else _laid_as(given[place], gradient)
            for place, gradient in zip(wanted, found, strict=True)
        ]

    def remember(ctx: Any, inputs: tuple, output: Any) -> None:
        output = output if isinstance(output, tuple) else (output,)
        kept = keep(inputs)
        ctx.save_for_backward(*(kept[place] for place in tensors), *(output[place] for place in saved))
        ctx.others = [kept[place] for place in others]
        ctx.mark_non_differentiable(*output[differentiable_results:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple:
        gradients = gradients[:differentiable_results]
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return (None,) * count
        if overwrites_saved:
            refuse_batched(f"amoeba::{name}", present[0])
        kept = ctx.saved_tensors  # activation checkpointing gives them out once
        given: list[Any] = [None] * count
        for place, value in zip((*tensors, *others), (*kept[: len(tensors)], *ctx.others), strict=True):
            given[place] = value
        needs = [ctx.needs_input_grad[place] for place in wanted]
        found = call_backward(*given, *kept[len(tensors) :], *gradients, needs)
        out: list[Tensor | None] = [None] * count
        for place, gradient, need in zip(wanted, _packed(found), needs, strict=True):
            out[place] = gradient if need else None
        return tuple(out)

    implementations = {
        name: lambda *args: _unpacked(forward(*args)),
        f"{name}_backward": run_backward(backward if fake_backward else laid_as_arguments),
    }
    fakes = {
        name: lambda *args: _unpacked(fake(*args)),
        f"{name}_backward": run_backward(fake_backward or like_arguments),
    }
    for each, implementation in implementations.items():
        _library.impl(each, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"amoeba::{each}", fakes[each], lib=_library)
    call_backward = once(name, getattr(torch.ops.amoeba, f"{name}_backward").default, _library, remedy)
    call = differentiable(name, getattr(torch.ops.amoeba, name).default, remember, differentiate, _library)
    return Operator(name, lambda *args: _packed(call(*args)), lambda *args: _packed(call_backward(*args)))


def define_forward(
    name: str,
    arguments: Sequence[Operand],
    results: Sequence[str],
    *,
    forward: Callable[..., Sequence[Tensor]],
    fake: Callable[..., Sequence[Tensor]],
) -> None:
    """Defines amoeba::<name>, for graphs in which nothing is differentiated any more."""
    schema = ", ".join(str(argument) for argument in arguments)
    _library.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * len(results))})")
    _library.impl(name, lambda *args: _unpacked(forward(*args)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"amoeba::{name}", lambda *args: _unpacked(fake(*args)), lib=_library)


def _laid_as(source: Tensor, gradient: Tensor) -> Tensor:
    """In the strides that `torch.empty_like` tells a compiled graph, which would take it for what it is not."""
    if gradient.stride() == source.stride():
        return gradient
    strides = torch.empty_like(source, device="meta").stride()
    if gradient.stride() == strides:
        return gradient
    return torch.empty_strided(source.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _unpacked(found: Sequence[Tensor]) -> Any:
    """A schema of one result means the tensor itself."""
    return found[0] if len(found) == 1 else tuple(found)


def _packed(found: Any) -> Tensors:
    return found if isinstance(found, tuple) else (found,)
