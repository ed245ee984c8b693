"""From two functions to a differentiable operator over a kind of weights, resident or behind a handle.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · J = 2I or I

    operator = ExpertsOperator("triton", ExpertWeights, forward, backward, traced=SavedRows(torch.int32))
    y_TH = operator(problem, save="h")

    forward(problem, save) -> y_TH, saved            saved: None, unless save is "h"
    backward(problem, saved, dy_TH, needs) -> Gradients

Without a tracer, a mode or a tensor subclass an autograd function calls the two directly, and what forward saved may be
any structure of tuples and dataclasses with tensors in it. Elsewhere `torch.ops.amoeba.<name>` is called, an opaque
operator to torch.compile, autocast and activation checkpointing. A traced graph holds tensors of known shapes only:
`traced` tells them; without it backward calls forward again, unless that saves nothing. Saved between the passes are x
and what forward saves; x alone with save="inputs". LoRA factors are inputs like the weights; an A that gate and up
share is one input, gate's, whose gradient a backend gives as one, or as gate's and up's parts.

`torch.ops.amoeba.<name>_onto` has one more argument, to which y is added: for graphs that have their backward already
(see `integrations.inductor_passes`), since it has none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from amoeba.core import operators
from amoeba.core.operators import Operand, refuse_batched
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import backward_goes_on_to, has_dispatch_mode, transformed
from amoeba.core.weights import LORA_NAMES, ExpertsByHandle, LoraFactors

Result = TypeVar("Result")
Forward = Callable[[Problem, Save], tuple[Tensor, Any]]
Backward = Callable[[Problem, Any, Tensor, Needs], Gradients]

_ROUTED = (Operand("x", "Tensor", True), Operand("expert", "Tensor"), Operand("weight", "Tensor", True))
_FACTORS = tuple(Operand(name, "Tensor?", True) for name in LORA_NAMES)
_SCALING = Operand("scaling", "float")


class SavedRows(NamedTuple):
    """What forward saves, for a traced graph: see `Saved`."""

    map_dtype: torch.dtype = torch.int64
    has_maps: Callable[[Problem], bool] = lambda problem: True
    low_ranks: Callable[[Problem], tuple[int, int]] = lambda problem: (0, 0)  # widths of low_NP and low_down_NP
    h: Callable[[Problem], Tensor] | None = None  # as it is saved, unless that is (N, J) in the dtype of x

    def fake(self, problem: Problem) -> Saved:
        x_TH, weights = problem.x_TH, problem.weights
        width = weights.activation.width(weights.intermediate)
        h_NJ = x_TH.new_empty((problem.rows, width)) if self.h is None else self.h(problem)
        if not self.has_maps(problem):
            return Saved.without_maps(h_NJ)
        order_N, slot_row_N = (x_TH.new_empty(problem.rows, dtype=self.map_dtype) for _ in range(2))
        lows = (x_TH.new_empty((problem.rows, ranks) if ranks else 0) for ranks in self.low_ranks(problem))
        return Saved(h_NJ, order_N, slot_row_N, x_TH.new_empty(weights.num_experts, dtype=torch.int32), *lows)

    def nothing(self, x_TH: Tensor) -> Saved:
        return Saved.without_maps(x_TH.new_empty(0), self.map_dtype)


class ExpertsOperator:
    def __init__(
        self,
        name: str,
        kind: type,
        forward: Forward,
        backward: Backward,
        *,
        traced: SavedRows | None = None,
        saves: bool = True,
        adds_onto: bool = False,
    ) -> None:
        """saves: whether forward leaves anything for backward, ever."""
        self.name, self.kind, self.traced, self.saves = name, kind, traced, saves
        self.forward, self.backward = _without_autocast(forward), _without_autocast(_with_shared_a(backward))
        operands: Sequence[Operand] = kind.operands()  # type: ignore[attr-defined]
        tensors = [operand for operand in operands if operand.type.startswith("Tensor")]
        constants = [operand for operand in operands if not operand.type.startswith("Tensor")]
        self._tensors = (*_ROUTED, *tensors, *_FACTORS)
        self._gradient_names = tuple(operand.name for operand in self._tensors if operand.differentiable)
        # from the fields of Needs and Gradients to the tensors among the arguments, and back
        places = {operand.name: place for place, operand in enumerate(self._tensors) if operand.differentiable}
        self._place_of_need = tuple(places.get(name) for name in Needs._fields)
        self._need_of_place = tuple(
            Needs._fields.index(operand.name) if operand.differentiable else None for operand in self._tensors
        )
        results: tuple[str, ...] = ("y",)
        arguments = (*self._tensors, *constants, _SCALING)
        if traced is not None:
            results, arguments = (*results, *Saved._fields), (*arguments, Operand("save_h", "bool"))
        self._operator = operators.define(
            name,
            arguments,
            results,
            forward=self._traced_forward,
            backward=self._traced_backward,
            fake=self._fake,
            fake_backward=self._fake_contiguous if traced is None else None,
            saved=range(1, len(results)),
            overwrites_saved=True,
        )
        if adds_onto:
            operators.define_forward(
                f"{name}_onto",
                (*arguments, Operand("onto", "Tensor")),
                results,
                forward=self._forward_onto,
                fake=lambda *given: self._fake(*given[:-1]),
            )

    def __call__(self, problem: Problem, save: Save) -> Tensor:
        lora = problem.lora
        factors = () if lora is None else lora.six()
        if can_skip_dispatcher(problem.x_TH, *problem.weights.tensors(), *factors):
            if save == "nothing":
                return self.forward(problem, save)[0]
            return _Direct.apply(self, problem, save, *problem.tensors())
        return self._operator(*self._flat(problem), *(() if self.traced is None else (save == "h",)))[0]

    def problem(
        self, tensors: Sequence[Any], constants: tuple[Any, ...], scaling: float | None, weights: Any = None
    ) -> Problem:
        """Of an operator's arguments; scaling: None without LoRA; weights: where they are at hand."""
        x, expert, weight = tensors[:3]
        own, lora = tensors[3 : -len(LORA_NAMES)], None
        if scaling is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = tensors[-len(LORA_NAMES) :]
            if up_b is not None and up_a is None:
                up_a = gate_a
            lora = LoraFactors(gate_a, gate_b, up_a, up_b, down_a, down_b, scaling)
        if weights is None:
            weights = self.kind.of(own, constants)  # type: ignore[attr-defined]
        return Problem(x, expert, weight, weights, lora)

    def needs(self, wanted: Sequence[bool]) -> Needs:
        """wanted: for each tensor in the order of the arguments."""
        return Needs(*[place is not None and wanted[place] for place in self._place_of_need])

    def gradients(self, found: Gradients, needs: Needs) -> list[Tensor | None]:
        """For each tensor in the order of the arguments."""
        return [found[place] if place is not None and needs[place] else None for place in self._need_of_place]

    def dispatched_backward(self, problem: Problem, saved: Any, dy_TH: Tensor, needs: Needs) -> Gradients:
        """The same through torch, whose result has a graph: going back through it raises."""
        of_rows: tuple = ()
        if self.traced is not None:
            of_rows = (saved is not None, *(saved or self.traced.nothing(problem.x_TH)))
        flags = [getattr(needs, name) for name in self._gradient_names]
        found = self._operator.backward(*self._flat(problem), *of_rows, dy_TH, flags)
        return Gradients(**dict(zip(self._gradient_names, found, strict=True)))

    def _flat(self, problem: Problem) -> tuple[Any, ...]:
        scaling = 1.0 if problem.lora is None else problem.lora.scaling
        return (*problem.tensors(), *problem.weights.constants(), scaling)

    def _of_arguments(self, arguments: tuple) -> Problem:
        tensors, rest = arguments[: len(self._tensors)], arguments[len(self._tensors) :]
        constants, scaling = (rest[:-1], rest[-1]) if self.traced is None else (rest[:-2], rest[-2])
        has_lora = any(factor is not None for factor in tensors[-len(LORA_NAMES) :])
        return self.problem(tensors, tuple(constants), scaling if has_lora else None)

    def _traced_forward(self, *arguments: Any, onto_TH: Tensor | None = None) -> Sequence[Tensor]:
        problem = self._of_arguments(arguments)._replace(onto_TH=onto_TH)
        if self.traced is None:
            return (self.forward(problem, "nothing")[0],)
        y_TH, saved = self.forward(problem, "h" if arguments[-1] else "nothing")
        return (y_TH, *(saved or self.traced.nothing(problem.x_TH)))

    def _forward_onto(self, *arguments: Any) -> Sequence[Tensor]:
        return self._traced_forward(*arguments[:-1], onto_TH=arguments[-1])

    def _traced_backward(
        self, arguments: tuple, saved: Sequence[Tensor], gradients: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        problem, (dy_TH,) = self._of_arguments(arguments), gradients
        if self.traced is None:
            again = self.forward(problem, "h")[1] if self.saves else None
        else:
            again = Saved(*saved) if arguments[-1] else None
        named = dict(zip(self._gradient_names, needs, strict=True))
        found = self.backward(problem, again, dy_TH.contiguous(), Needs(**named))
        gradients = [getattr(found, name) for name in self._gradient_names]
        if self.traced is not None:
            return gradients
        return [None if gradient is None else gradient.contiguous() for gradient in gradients]

    def _fake_contiguous(
        self, arguments: tuple, saved: Sequence[Tensor], gradients: Sequence[Any], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        sources = [each for each, operand in zip(arguments, self._tensors, strict=False) if operand.differentiable]
        return [
            torch.empty_like(source, memory_format=torch.contiguous_format) if need and source is not None else None
            for source, need in zip(sources, needs, strict=True)
        ]

    def _fake(self, *arguments: Any) -> Sequence[Tensor]:
        x_TH = arguments[0]
        y_TH = x_TH.new_empty(x_TH.shape)
        if self.traced is None:
            return (y_TH,)
        problem = self._of_arguments(arguments)
        return (y_TH, *(self.traced.fake(problem) if arguments[-1] else self.traced.nothing(x_TH)))


def can_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """True where dispatch would change nothing: no tracing, no mode, no transform, no tensor subclass.

    Decoding one token on a CPU takes 0.2 ms; the dispatcher's way through Python is 0.03 ms of it. With gradients, its
    way through torch.library is 0.2 ms on the host, twice.
    """
    return (
        not torch.compiler.is_compiling()
        and all(tensor is None or (type(tensor) in _PLAIN and not tensor.is_meta) for tensor in tensors)
        and not has_dispatch_mode()
        and not transformed()
    )


_PLAIN = (Tensor, torch.nn.Parameter)


class _Direct(torch.autograd.Function):
    """What the operator and its autograd do, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: ExpertsOperator, problem: Problem, save: Save, *tensors: Tensor | None) -> Tensor:
        """tensors: those of the problem, for autograd to see."""
        y_TH, saved = operator.forward(problem, save)
        keep(ctx, operator, problem, save, saved)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor | None) -> tuple:
        others, operator = 3, ctx.operator
        if dy_TH is None:
            return (None,) * (others + ctx.inputs)
        problem, saved = kept(ctx)
        needs = operator.needs(ctx.needs_input_grad[others:])
        if problem.overlapped is not None:
            needs = _that_are_taken(ctx, needs)
        refuse_batched(f"amoeba::{operator.name}", dy_TH)
        if torch.is_grad_enabled() or transformed():  # second derivatives, or a transform: it says why not
            if problem.overlapped is not None:
                problem.overlapped.wait()
            found = operator.dispatched_backward(problem, saved, dy_TH, needs)
        else:
            found = operator.backward(problem, saved, dy_TH.contiguous(), needs)
        return (None,) * others + tuple(operator.gradients(found, needs))


def keep(ctx: Any, operator: ExpertsOperator, problem: Problem, save: Save, saved: Any) -> None:
    """For backward, in an autograd function's context."""
    # Saved as tensors, all of it is freed by backward, and activation checkpointing can drop it.
    tensors = problem.tensors()
    more: list[Tensor] = []
    if isinstance(saved, Saved):  # the short way for the usual structure
        ctx.saved_structure = Saved
        more += saved
    else:
        quantised_x = problem.quantised_x if save == "inputs" else None  # forward reads it again
        ctx.saved_structure = without_tensors((saved, quantised_x), more)
    weights, lora = problem.weights, problem.lora
    ctx.operator, ctx.constants, ctx.inputs = operator, weights.constants(), len(tensors)
    ctx.scaling = None if lora is None else lora.scaling
    ctx.overlapped, ctx.most_rows = problem.overlapped, problem.most_rows
    if problem.overlapped is not None:
        ctx.most_rows = problem.overlapped.room(problem.most_rows)
    # a handle does not keep alive what it stands for
    ctx.owner = weights if isinstance(weights, ExpertsByHandle) else None
    ctx.save_for_backward(*tensors, *more)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> tuple[Problem, Any]:
    """The problem, and what forward saved."""
    tensors = ctx.saved_tensors  # activation checkpointing gives them out once
    structure, rest = ctx.saved_structure, tensors[ctx.inputs :]
    saved, quantised_x = (Saved(*rest), None) if structure is Saved else _with_tensors(structure, rest)
    problem = ctx.operator.problem(tensors[: ctx.inputs], ctx.constants, ctx.scaling, ctx.owner)
    return problem._replace(most_rows=ctx.most_rows, overlapped=ctx.overlapped, quantised_x=quantised_x), saved


def _that_are_taken(ctx: Any, needs: Needs) -> Needs:
    """Where rows travel, gradients of x and of routing weights leave within the pass, and are taken by what backward
    goes on with. Where it does not go on (`torch.autograd.grad` of the experts' weights alone), they must not leave:
    they would be taken for what leaves next."""
    x, _, weight = (node is not None and backward_goes_on_to(node) for node, _ in ctx.next_functions[:3])
    return needs._replace(x=needs.x and x, weight=needs.weight and weight)


def _with_shared_a(backward: Backward) -> Backward:
    """Of an A that gate and up share, the whole gradient is that of gate's."""

    @functools.wraps(backward)
    def run(problem: Problem, saved: Any, dy_TH: Tensor, needs: Needs) -> Gradients:
        if problem.lora is None or not problem.lora.shares_a or not needs.gate_lora_a:
            return backward(problem, saved, dy_TH, needs)
        found = backward(problem, saved, dy_TH, needs._replace(up_lora_a=True))
        if found.up_lora_a is None:
            return found
        assert found.gate_lora_a is not None
        return found._replace(gate_lora_a=found.gate_lora_a + found.up_lora_a, up_lora_a=None)

    return run


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


class Whole(NamedTuple):
    """For what forward saves: something that is kept as it is, with the tensors in it, if any."""

    value: Any


class _Place(int):
    """Where a tensor was in the list."""


def without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The same structure with the tensors in its tuples and dataclasses moved to the list."""
    if value is None or isinstance(value, Whole):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _rebuilt(value, without_tensors, tensors)


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    if value is None or isinstance(value, Whole):
        return value
    if isinstance(value, _Place):
        return tensors[value]
    return _rebuilt(value, _with_tensors, tensors)


def _rebuilt(value: Any, change: Callable[[Any, Any], Any], tensors: Any) -> Any:
    if isinstance(value, tuple):
        parts = [change(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not dataclasses.is_dataclass(value):
        return value
    changed: Any = object.__new__(type(value))
    changed.__dict__.update({name: change(part, tensors) for name, part in vars(value).items()})
    return changed
