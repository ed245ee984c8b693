"""From two functions to a backend: the custom operators, their fakes and their autograd, defined once for all backends.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

A backend supplies

    forward(Problem, keep_h) -> Kept        y_TH; with keep_h also h_NJ and the layout's tensors
    backward(Problem, Kept, dy_TH, needs) -> Gradients

and gets `torch.ops.amoeba.<name>`, which torch.compile, autocast and activation checkpointing see as one opaque,
differentiable operator. Kept between the passes: x and h (and the row maps, 16 bytes a row); x alone with `recompute`.
LoRA factors are inputs like the weights; what a backend computes with them is not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from amoeba.backends.transforms import differentiable, once, refuse_batched, transformed
from amoeba.config import Activation
from amoeba.layout import Layout, build_layout
from amoeba.weights import LORA_NAMES, LoraFactors

Result = TypeVar("Result")


class Problem(NamedTuple):
    """All that goes into the experts of one layer in one pass."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_bias_EJ: Tensor | None
    down_bias_EH: Tensor | None
    activation: Activation
    lora: LoraFactors | None = None

    @property
    def rows(self) -> int:
        return self.expert_TK.shape[0] * self.expert_TK.shape[1]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of the operator's arguments."""
        return (*self[:7], *(_NO_FACTORS if self.lora is None else self.lora.six()))

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """In the order of `Needs` and `Gradients`: all but the expert ids."""
        tensors = self.tensors()
        return (tensors[0], *tensors[2:])


class Kept(NamedTuple):
    """What forward leaves behind for backward. Without keep_h, all but y is empty and backward computes it again."""

    y_TH: Tensor
    h_NJ: Tensor
    order_N: Tensor
    slot_row_N: Tensor
    offs_E: Tensor

    @staticmethod
    def all(y_TH: Tensor, h_NJ: Tensor, layout: Layout) -> Kept:
        return Kept(y_TH, h_NJ, layout.order_N, layout.slot_row_N, layout.offs_E)

    @staticmethod
    def nothing_but(y_TH: Tensor, map_dtype: torch.dtype = torch.int64) -> Kept:
        dtypes = (map_dtype, map_dtype, torch.int32)
        return Kept(y_TH, y_TH.new_empty(0), *(y_TH.new_empty(0, dtype=dtype) for dtype in dtypes))

    @staticmethod
    def without_maps(y_TH: Tensor, h_NJ: Tensor) -> Kept:
        """Of a backend that sorts the rows again in backward."""
        return Kept.nothing_but(y_TH)._replace(h_NJ=h_NJ)

    def has_h(self) -> bool:
        return self.h_NJ.dim() == 2

    def layout(self, problem: Problem) -> Layout:
        if not self.has_h():
            return build_layout(problem.expert_TK, problem.gate_up_EJH.shape[0])
        return Layout(self.order_N, self.slot_row_N, self.offs_E, self.order_N, problem.expert_TK.shape[1])


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool
    gate_lora_a: bool = False
    gate_lora_b: bool = False
    up_lora_a: bool = False
    up_lora_b: bool = False
    down_lora_a: bool = False
    down_lora_b: bool = False


class Gradients(NamedTuple):
    x_TH: Tensor | None
    weight_TK: Tensor | None
    gate_up_EJH: Tensor | None
    down_EHI: Tensor | None
    gate_up_bias_EJ: Tensor | None
    down_bias_EH: Tensor | None
    gate_lora_a: Tensor | None = None
    gate_lora_b: Tensor | None = None
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None
    down_lora_b: Tensor | None = None

    @staticmethod
    def zeros(problem: Problem, needs: Needs) -> Gradients:
        """What no routed rows at all give."""
        sources = problem.differentiable()
        return Gradients(
            *(torch.zeros_like(t) if n and t is not None else None for t, n in zip(sources, needs, strict=True))
        )


Forward = Callable[[Problem, bool], Kept]
Backward = Callable[[Problem, Kept, Tensor, Needs], Gradients]

_TENSORS = (
    "Tensor x, Tensor expert, Tensor weight, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
    + ", ".join(f"Tensor? {name}" for name in LORA_NAMES)
)
_NUMBERS = "str kind, bool gated, float alpha, float limit, float up_shift, bool interleaved, float scaling"
_FORWARD = f"({_TENSORS}, {_NUMBERS}, bool keep_h) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"({_TENSORS}, {_NUMBERS}, Tensor h, Tensor order, Tensor slot_row, Tensor offs, Tensor dy, bool[12] needs)"
    f" -> ({', '.join(['Tensor'] * 12)})"
)
_NO_FACTORS = (None,) * len(LORA_NAMES)
_NUM_TENSORS, _NUM_NUMBERS = 7 + len(LORA_NAMES), 7

_library = torch.library.Library("amoeba", "FRAGMENT")


@dataclass(frozen=True)
class Operator:
    """The differentiable operator of one backend."""

    name: str
    dispatched: Callable[..., tuple[Tensor, ...]]
    dispatched_backward: Callable[..., tuple[Tensor, ...]]
    plain: Forward
    plain_backward: Backward

    def __call__(self, problem: Problem, *, keep_h: bool, gradient: bool) -> Tensor:
        factors = () if problem.lora is None else problem.lora.six()
        if nobody_watches(problem.x_TH, problem.gate_up_EJH, problem.down_EHI, *factors):
            if not gradient:
                return self.plain(problem, False).y_TH
            return _Direct.apply(self, keep_h, problem.activation, _scaling(problem), *problem.tensors())
        return self.dispatched(*problem.tensors(), *_flat(problem.activation), _scaling(problem), keep_h)[0]


def nobody_watches(*tensors: Tensor | None) -> bool:
    """True where dispatch would change nothing: no tracing, no mode, no transform, no tensor subclass.

    Decoding one token on a CPU takes 0.2 ms; the dispatcher's way through Python is 0.03 ms of it. With gradients, its
    way through torch.library is 0.2 ms on the host, twice.
    """
    return (
        not torch.compiler.is_compiling()
        and all(tensor is None or (type(tensor) in _PLAIN and not tensor.is_meta) for tensor in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and not transformed()
    )


_PLAIN = (Tensor, torch.nn.Parameter)


class _Direct(torch.autograd.Function):
    """What the dispatched operator and its autograd do, without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, keep_h: bool, activation: Activation, scaling: float, *tensors: Tensor | None
    ) -> Tensor:
        kept = operator.plain(_of_tensors(tensors, activation, scaling), keep_h)
        ctx.operator, ctx.activation, ctx.scaling = operator, activation, scaling
        ctx.save_for_backward(*tensors, *kept[1:])
        ctx.set_materialize_grads(False)
        return kept.y_TH

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        others = 4
        if dy is None:
            return (None,) * (others + _NUM_TENSORS)
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[others:]
        tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
        needs = Needs(wanted[0], *wanted[2:])  # expert ids have no gradient
        refuse_batched(f"amoeba::{ctx.operator.name}", dy)
        if torch.is_grad_enabled() or transformed():  # second derivatives, or a transform: it says why not
            numbers = (*_flat(ctx.activation), ctx.scaling)
            found: tuple = ctx.operator.dispatched_backward(*tensors, *numbers, *kept, dy, list(needs))
        else:
            problem = _of_tensors(tensors, ctx.activation, ctx.scaling)
            found = ctx.operator.plain_backward(problem, Kept(dy, *kept), dy.contiguous(), needs)
        x, *rest = (g if need else None for g, need in zip(found, needs, strict=True))
        return (None,) * others + (x, None, *rest)


def define_operator(
    name: str,
    forward: Forward,
    backward: Backward,
    *,
    map_dtype: torch.dtype = torch.int64,
    keeps_maps: Callable[[Problem], bool] = lambda problem: True,
) -> Operator:
    """Registers amoeba::<name> and amoeba::<name>_backward.

    map_dtype: of order_N and slot_row_N. keeps_maps: whether forward keeps them beside h for such a problem.
    """
    forward, backward = _without_autocast(forward), _without_autocast(backward)

    def forward_impl(*args: object) -> tuple[Tensor, ...]:
        return tuple(forward(_problem(args), args[-1]))

    def backward_impl(*args: object) -> tuple[Tensor, ...]:
        problem = _problem(args)
        h, order, slot_row, offs, dy, needs = args[_NUM_TENSORS + _NUM_NUMBERS :]
        kept = Kept(dy, h, order, slot_row, offs)  # type: ignore[arg-type]
        gradients = backward(problem, kept, dy.contiguous(), Needs(*needs))  # type: ignore[attr-defined, misc]
        return tuple(problem.x_TH.new_empty(0) if g is None else g for g in gradients)

    _library.define(f"{name}{_FORWARD}")
    _library.define(f"{name}_backward{_BACKWARD}")
    _library.impl(name, forward_impl, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", backward_impl, "CompositeExplicitAutograd")
    fake = functools.partial(_fake_forward, map_dtype=map_dtype, keeps_maps=keeps_maps)
    torch.library.register_fake(f"amoeba::{name}", fake, lib=_library)
    torch.library.register_fake(f"amoeba::{name}_backward", _fake_backward, lib=_library)
    backward_op = once(name, getattr(torch.ops.amoeba, f"{name}_backward").default, _library)
    return Operator(name, _differentiable(name, backward_op), backward_op, forward, backward)


def _without_autocast(function: Callable[..., Result]) -> Callable[..., Result]:
    """Its dtypes are its own affair: autocast would cast what it computes in fp32 on purpose."""

    @functools.wraps(function)
    def run(problem: Problem, *others: Any) -> Result:
        device = problem.x_TH.device.type
        if not torch.is_autocast_enabled(device):
            return function(problem, *others)
        with torch.autocast(device, enabled=False):
            return function(problem, *others)

    return run


def _differentiable(name: str, backward_op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
        _, h, order, slot_row, offs = output
        ctx.save_for_backward(*inputs[:_NUM_TENSORS], h, order, slot_row, offs)
        ctx.mark_non_differentiable(h, order, slot_row, offs)
        ctx.set_materialize_grads(False)
        ctx.numbers = inputs[_NUM_TENSORS : _NUM_TENSORS + _NUM_NUMBERS]  # type: ignore[attr-defined]

    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor | None, *_: object) -> tuple:
        inputs = _NUM_TENSORS + _NUM_NUMBERS + 1
        if dy is None:
            return (None,) * inputs
        refuse_batched(f"amoeba::{name}", dy)
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad  # type: ignore[attr-defined]
        needs = [wanted[0], *wanted[2:_NUM_TENSORS]]  # expert ids have no gradient
        found = backward_op(*saved[:_NUM_TENSORS], *ctx.numbers, *saved[_NUM_TENSORS:], dy, needs)  # type: ignore[attr-defined]
        x, *others = (g if need else None for g, need in zip(found, needs, strict=True))
        return (x, None, *others) + (None,) * (_NUM_NUMBERS + 1)

    return differentiable(name, getattr(torch.ops.amoeba, name).default, keep, backward, _library)


def _fake_forward(*args: object, map_dtype: torch.dtype, keeps_maps: Callable[[Problem], bool]) -> tuple[Tensor, ...]:
    problem, keep_h = _problem(args), args[-1]
    x = problem.x_TH
    if not keep_h:
        return tuple(Kept.nothing_but(x.new_empty(x.shape), map_dtype))
    experts, width = problem.gate_up_EJH.shape[:2]
    if not keeps_maps(problem):
        return tuple(Kept.without_maps(x.new_empty(x.shape), x.new_empty((problem.rows, width))))
    order, slot_row = (x.new_empty(problem.rows, dtype=map_dtype) for _ in range(2))
    offs = x.new_empty(experts, dtype=torch.int32)
    return x.new_empty(x.shape), x.new_empty((problem.rows, width)), order, slot_row, offs


def _fake_backward(*args: object) -> tuple[Tensor, ...]:
    problem, needs = _problem(args), Needs(*args[-1])  # type: ignore[misc]
    return tuple(
        torch.empty_like(source) if need and isinstance(source, Tensor) else problem.x_TH.new_empty(0)
        for source, need in zip(problem.differentiable(), needs, strict=True)
    )


def _flat(activation: Activation) -> tuple[str, bool, float, float, float, bool]:
    return (
        activation.kind,
        activation.gated,
        activation.alpha,
        activation.limit,
        activation.up_shift,
        activation.interleaved,
    )


def _scaling(problem: Problem) -> float:
    return 1.0 if problem.lora is None else problem.lora.scaling


def _problem(args: tuple) -> Problem:
    """From the operator's arguments; what comes after the numbers is not looked at."""
    *activation, scaling = args[_NUM_TENSORS : _NUM_TENSORS + _NUM_NUMBERS]
    return _of_tensors(args[:_NUM_TENSORS], Activation(*activation), scaling)


def _of_tensors(tensors: tuple, activation: Activation, scaling: float) -> Problem:
    x, expert, weight, gate_up, down, gate_up_bias, down_bias, *factors = tensors
    lora = None
    if any(factor is not None for factor in factors):
        gate_a, gate_b, up_a, up_b, down_a, down_b = factors
        lora = LoraFactors(gate_a, gate_b, up_a, up_b, down_a, down_b, scaling)
    return Problem(x, expert, weight, gate_up, down, gate_up_bias, down_bias, activation, lora)
