"""Recognises a module's activation as one of those that the backends compute, by evaluating it.

    activation = recognise_by_trial(module, has_gate=True)     # an Activation, or None: call the module's function

A function that learns, draws random numbers, depends on the mode or reads any other tensor is never taken for one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from amoeba.core.config import Activation, ActivationKind
from amoeba.core.log import logger
from amoeba.core.torch_internals import TorchDispatchMode, constant_when_traced, tree_leaves
from amoeba.proof.reference.experts import activate, activate_backward, join_gate_up, split_gate_up

# Where model classes keep the numbers of a clamped activation.
_LIMIT_NAMES = ("limit", "swiglu_limit")
_ALPHA_NAMES = ("alpha", "swiglu_alpha")
_KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# While torch.compile traces, no module can be tried out. These classes compute one thing, whatever their arguments.
_FUNCTION_OF_CLASS: dict[type, Callable[[Tensor], Tensor]] = {
    nn.SiLU: F.silu,
    nn.ReLU: F.relu,
    activations.SiLUActivation: F.silu,
    activations.GELUActivation: F.gelu,
    activations.GELUTanh: functools.partial(F.gelu, approximate="tanh"),
    activations.NewGELUActivation: functools.partial(F.gelu, approximate="tanh"),
    activations.ReLUSquaredActivation: lambda x: F.relu(x).square(),
}
# Relative to (1 + |gate|)·(1 + |up|). A gate that computes in fp32 whatever it is given, as the backends do for half
# precision, still counts as equal (1e-7); the two kinds of gelu do not (5e-4).
_PROBE_TOLERANCE = 1e-6


def numbers_of(module: Any) -> tuple[tuple[str, float], ...]:
    found = ((name, module.__dict__.get(name)) for name in (*_LIMIT_NAMES, *_ALPHA_NAMES))
    return tuple((name, number) for name, number in found if isinstance(number, int | float))


def recognise_by_trial(module: Any, has_gate: bool) -> Activation | None:
    """The module's activation as one that the backends compute themselves; None if it is another."""
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in (*act_fn.parameters(), *act_fn.buffers())):
        return None  # it learns, or its state may change
    function = module._apply_gate if has_gate else act_fn

    def try_out() -> Activation | None:
        found = set()
        for training in (True, False):
            with _in_mode(module, training), torch.random.fork_rng(devices=[]):
                found.add(_recognise(function, has_gate, dict(numbers_of(module))))
        return found.pop() if len(found) == 1 else None

    return _in_a_thread(try_out)


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = training
        yield
    finally:
        for inner, mode in before:
            inner.training = mode


def recognise_by_class(module: Any, has_gate: bool) -> Activation | None:
    """For torch.compile before any call. Nothing in it is specific to one instance, so that equal layers share code."""
    act_fn = getattr(module, "act_fn", None)
    act_class = type(act_fn) if isinstance(act_fn, nn.Module) else None
    # ldexp because dynamo passes a float that has changed once as a symbol; this makes it a constant again
    numbers = tuple((name, math.ldexp(number, 0)) for name, number in numbers_of(module))
    found = _recognise_class(type(module), has_gate, act_class, numbers)
    return None if found is None else Activation(*found)


@constant_when_traced
def _recognise_class(
    module_class: Any, has_gate: bool, act_class: type | None, numbers: tuple[tuple[str, float], ...]
) -> tuple | None:
    act_fn = None if act_class is None else _FUNCTION_OF_CLASS.get(act_class)
    stand_in = SimpleNamespace(**dict(numbers), act_fn=act_fn)
    function = functools.partial(module_class._apply_gate, stand_in) if has_gate else act_fn
    activation = _in_a_thread(lambda: _recognise(function, has_gate, dict(numbers)))
    return None if activation is None else astuple(activation)


def _in_a_thread(function: Callable[[], Activation | None]) -> Activation | None:
    """Everything that could bend a trial is per thread: autocast, inference mode, a default device, fake tensors, and
    the hooks of activation checkpointing, which count what the first forward saves."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()


def _recognise(function: Any, gated: bool, numbers: dict[str, float]) -> Activation | None:
    limits, alphas = (_positive(numbers, names) for names in (_LIMIT_NAMES, _ALPHA_NAMES))
    h = _probe_points(limits).requires_grad_()
    try:
        with _Watch(h) as watch:
            value = function(h)
        slope = torch.autograd.grad(value.sum(), h)[0]
        h = h.detach()
    except Exception as error:
        logger.debug("an activation could not be tried out: %s", error)
        return None
    if watch.foreign:
        return None  # its result hangs on a tensor that may change
    asked = gated, *limits, *alphas
    for activation in dict.fromkeys((*_found_before.get(asked, ()), *_candidates(gated, limits, alphas))):
        expected = activate(h, activation)
        if value.shape == expected.shape and _close(value, expected, h, activation):
            expected_slope = activate_backward(torch.ones_like(expected), h, activation)
            _found_before[asked] = (activation,)
            return activation if _close(slope, expected_slope, h, activation) else None
    return None


# With the same numbers, what a layer had is tried first in the next one: gpt-oss is the last of forty candidates.
_found_before: dict[tuple[float, ...], tuple[Activation, ...]] = {}


def _probe_points(limits: list[float]) -> Tensor:
    """(rows, 2I) in fp64; gates and ups, in either layout, lie on the curve, far out, and on both sides of a limit."""
    device = torch.device("cpu")
    ends = torch.logspace(1, 4, 12, dtype=torch.float64, device=device)
    near = torch.tensor([n * f for n in limits for f in (0.99, 1.01)], dtype=torch.float64, device=device)
    side = torch.cat((torch.linspace(0.05, 9, 61, dtype=torch.float64, device=device), ends, near))
    for limit in limits:  # at the limit itself the slope is a convention, and torch.clamp's differs between versions
        side = side[(side - limit).abs() > 1e-3 * limit]
    line = torch.cat((side, -side))
    generator = torch.Generator().manual_seed(0)
    orders = (torch.randperm(line.numel(), generator=generator, dtype=torch.int64, device=device) for _ in range(8))
    return torch.stack([line[order] for order in orders])


class _Watch(TorchDispatchMode):
    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self.foreign = False
        self._known = [argument]  # kept alive, so that no storage is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:
            known = {_storage(t) for t in self._known}
            self.foreign |= any(isinstance(t, Tensor) and _storage(t) not in known for t in tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        self._known += [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _close(value: Tensor, expected: Tensor, h: Tensor, activation: Activation) -> bool:
    size = 1 + h.abs()
    if activation.gated:
        gate, up = split_gate_up(size, activation)
        size = gate * up if value.shape == gate.shape else join_gate_up(gate * up, gate * up, activation)
    return bool(((value - expected).abs() <= _PROBE_TOLERANCE * (size + expected.abs())).all())


def _candidates(gated: bool, limits: list[float], alphas: list[float]) -> Iterator[Activation]:
    for limit in (math.inf, *limits):
        for kind in _KINDS:
            for alpha in (1.0, 1.702, *alphas) if kind == "silu" else (1.0,):
                if not gated:
                    yield Activation(kind, gated=False, alpha=alpha, limit=limit)
                    continue
                for up_shift in (0.0, 1.0):
                    for interleaved in (False, True):
                        yield Activation(kind, True, alpha, limit, up_shift, interleaved)


def _positive(numbers: dict[str, float], names: tuple[str, ...]) -> list[float]:
    found = (float(numbers[name]) for name in names if name in numbers)
    return [number for number in found if math.isfinite(number) and number > 0]
