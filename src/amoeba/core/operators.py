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
as opaque operators with fakes and autograd. torch.func.grad and torch.func.vjp work as torch.autograd does. Forward
mode (torch.func.jvp, torch.autograd.forward_ad), vmap and second derivatives raise NotImplementedError: left to torch,
an operator without a rule for forward mode has a tangent of 0, or none at all.

Operators take tensors, numbers and strings, not objects. A dataclass is taken apart, also one inside another:

    operands_of(Activation)               # (Operand("kind", "str"), Operand("gated", "bool"), ...)
    Activation(*(getattr(activation, operand.name) for operand in operands_of(Activation)))      # an equal one
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from amoeba.core.torch_internals import is_batch_of_gradients, transformed

_SCALARS = {str: "str", bool: "bool", int: "int", float: "float"}


class Operand(NamedTuple):
    """One argument: its name and its type as an operator's schema has them."""

    name: str
    type: str
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def operands_of(kind: Any) -> tuple[Operand, ...]:
    found: list[Operand] = []
    hints: dict[str, Any] = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += operands_of(hint)
        else:
            has_tensor = hint is Tensor or Tensor in typing.get_args(hint)
            found.append(Operand(field.name, _schema_type(kind, field.name, hint), has_tensor))
    return tuple(found)


def _schema_type(kind: type, name: str, hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "str"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner, *others = (part for part in typing.get_args(hint) if part is not type(None))
        if not others:
            return _schema_type(kind, name, inner) + "?"
    if hint is Tensor:
        return "Tensor"
    if hint in _SCALARS:
        return _SCALARS[hint]
    raise TypeError(f"{kind.__name__}.{name}: operators take tensors, numbers and strings, this is {hint}")


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


Tensors = tuple[Tensor, ...]
Gradients = Sequence[Any]  # a tensor, or None

_library = torch.library.Library("amoeba", "FRAGMENT")
implementations: dict[str, Callable[..., Any]] = {}  # by the operator's whole name, as torch calls them


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

    differentiable_results: the number of results, from the first on, that have gradients.
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

    own = {
        name: lambda *args: _unpacked(forward(*args)),
        f"{name}_backward": run_backward(backward if fake_backward else laid_as_arguments),
    }
    fakes = {
        name: lambda *args: _unpacked(fake(*args)),
        f"{name}_backward": run_backward(fake_backward or like_arguments),
    }
    for each, implementation in own.items():
        _implement(each, implementation)
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
    _implement(name, lambda *args: _unpacked(forward(*args)))
    torch.library.register_fake(f"amoeba::{name}", lambda *args: _unpacked(fake(*args)), lib=_library)


def _implement(name: str, implementation: Callable[..., Any]) -> None:
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    implementations[f"amoeba::{name}"] = implementation


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
