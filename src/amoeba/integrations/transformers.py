"""The drop-in for Hugging Face models: importing this module registers the experts implementation "amoeba".

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    import amoeba.integrations.transformers      # or: import amoeba; amoeba.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="amoeba")

The modules keep their parameters and their checkpoints. How a module's experts are stored (transposed, interleaved,
biased, ungated) is read from its flags and served by strides. Its activation is recognised by evaluating it on a few
numbers; one that is not recognised, and a norm after the expert, are called as they are.

What the first call finds out about a module is kept on the module. A later change of its act_fn, limit or alpha is
noticed; after a change of `_apply_gate` or of a flag, call `forget(module)`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amoeba.backends.composed import experts_composed
from amoeba.config import Activation, ActivationKind
from amoeba.errors import bad_value
from amoeba.experts import experts
from amoeba.reference.experts import activate, activate_backward, join_gate_up, split_gate_up
from amoeba.routing import Routing
from amoeba.weights import ExpertWeights

try:
    from transformers import activations
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        f"amoeba.register: expected transformers 5.8 or newer; got: {error}. Install it: pip install 'amoeba-moe[hf]'."
    ) from error

logger = logging.getLogger("amoeba")

NAME = "amoeba"

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
PLAN = "_amoeba_plan"


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is known about a module after its first call."""

    fused: Activation | None  # None: the module's own functions are called
    up_name: str
    has_gate: bool
    has_bias: bool
    has_norm: bool
    transposed: bool
    # what the activation was concluded from
    act_fn: Any
    numbers: tuple[tuple[str, float], ...]

    def holds(self, module: Any) -> bool:
        if self.act_fn is not module._modules.get("act_fn"):
            return False
        return not self.numbers or all(module.__dict__.get(name) == number for name, number in self.numbers)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of the module's own forward: (T, H), (T, K), (T, K) -> (T, H)."""
    plan = module.__dict__.get(PLAN)
    make = _checked if torch.compiler.is_compiling() else _unchecked
    if plan is None or not plan.holds(module):
        plan, make = _find_out(module), _checked
    gate_up, down = _tensor(module, plan.up_name), _tensor(module, "down_proj")
    gate_up_bias = down_bias = None
    if plan.has_bias:
        gate_up_bias, down_bias = _tensor(module, plan.up_name + "_bias"), _tensor(module, "down_proj_bias")
    if plan.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    x, dtype = hidden_states, hidden_states.dtype
    if dtype != gate_up.dtype and not torch.is_autocast_enabled(x.device.type):
        x = _cast_as(x, gate_up)
    routing = make(Routing, expert_TK=top_k_index, weight_TK=top_k_weights, trusted=True)
    if plan.fused is None:
        y = _call_own_functions(module, plan, x, routing, gate_up, down, gate_up_bias, down_bias)
    else:
        weights = make(
            ExpertWeights,
            gate_up_EJH=gate_up,
            down_EHI=down,
            gate_up_bias_EJ=gate_up_bias,
            down_bias_EH=down_bias,
            activation=plan.fused,
        )
        y = experts(x, routing, weights)
    return y if y.dtype == dtype else y.to(dtype)


def forget(module: nn.Module) -> None:
    """Lets every experts module inside be looked at again in its next call."""
    for inner in module.modules():
        inner.__dict__.pop(PLAN, None)


def _call_own_functions(module: Any, plan: _Plan, x_TH: Tensor, routing: Routing, *tensors: Tensor | None) -> Tensor:
    device = x_TH.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_TH, tensors = x_TH.to(dtype), tuple(None if t is None else t.to(dtype) for t in tensors)
    gate = module._apply_gate if plan.has_gate else module.act_fn
    finish = module.post_expert_norm if plan.has_norm else None
    return experts_composed(x_TH, routing, *tensors, gate=gate, finish=finish)  # type: ignore[arg-type]


def _tensor(module: Any, name: str) -> Tensor:
    """module.name, several times faster where it is an ordinary parameter (a parametrised one is not)."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def _cast_as(x_TH: Tensor, weight: Tensor) -> Tensor:
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise bad_value(
            "expert weights",
            "fp64, fp32, bf16 or fp16",
            weight.dtype,
            'load the checkpoint dequantised, or with experts_implementation="eager" if its quantisation supports it',
        )
    return x_TH.to(weight.dtype)


def _checked(kind: Any, **fields: Any) -> Any:
    return kind(**fields)


def _unchecked(kind: Any, **fields: Any) -> Any:
    """The same dataclass without its checks: they passed in the module's first call, and take 5 µs. Not traceable."""
    instance = object.__new__(kind)
    instance.__dict__.update(fields)
    return instance


def _find_out(module: Any) -> _Plan:
    has_gate, has_norm = getattr(module, "has_gate", True), getattr(module, "has_post_expert_norm", False)
    tracing = torch.compiler.is_compiling()
    activation = _recognise_by_class(module, has_gate) if tracing else _recognise_by_trial(module, has_gate)
    plan = _Plan(
        fused=None if has_norm else activation,
        up_name="gate_up_proj" if has_gate else "up_proj",
        has_gate=has_gate,
        has_bias=getattr(module, "has_bias", False),
        has_norm=has_norm,
        transposed=getattr(module, "is_transposed", False),
        act_fn=module._modules.get("act_fn"),
        numbers=_numbers(module),
    )
    if not tracing:
        module.__dict__[PLAN] = plan
        _announce(type(module).__name__, plan.fused)
    return plan


@functools.cache
def _announce(class_name: str, activation: Activation | None) -> None:
    if activation is None:
        logger.info("%s: calling the module's own activation (and norm), which is slower", class_name)
    else:
        logger.info("%s: %s", class_name, activation)


def _numbers(module: Any) -> tuple[tuple[str, float], ...]:
    found = ((name, module.__dict__.get(name)) for name in (*_LIMIT_NAMES, *_ALPHA_NAMES))
    return tuple((name, number) for name, number in found if isinstance(number, int | float))


def _recognise_by_trial(module: Any, has_gate: bool) -> Activation | None:
    """The module's activation as one that the backends compute themselves; None if it is another."""
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in (*act_fn.parameters(), *act_fn.buffers())):
        return None  # it learns, or its state may change
    function = module._apply_gate if has_gate else act_fn

    def try_out() -> Activation | None:
        found = set()
        for training in (True, False):
            with _in_mode(module, training), torch.random.fork_rng(devices=[]):
                found.add(_recognise(function, has_gate, dict(_numbers(module))))
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


def _recognise_by_class(module: Any, has_gate: bool) -> Activation | None:
    """For torch.compile before any call. Nothing in it is specific to one instance, so that equal layers share code."""
    act_fn = getattr(module, "act_fn", None)
    act_class = type(act_fn) if isinstance(act_fn, nn.Module) else None
    # ldexp because dynamo passes a float that has changed once as a symbol; this makes it a constant again
    numbers = tuple((name, math.ldexp(number, 0)) for name, number in _numbers(module))
    found = _recognise_class(type(module), has_gate, act_class, numbers)
    return None if found is None else Activation(*found)


@torch.compiler.assume_constant_result
def _recognise_class(
    module_class: Any, has_gate: bool, act_class: type | None, numbers: tuple[tuple[str, float], ...]
) -> tuple | None:
    """Tries out the class's gate with a self that has nothing but the numbers and the act_fn."""
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
    """Compares values and slopes of the function with those of every activation that the backends know."""
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
    for activation in _candidates(gated, limits, alphas):
        expected = activate(h, activation)
        if value.shape == expected.shape and _close(value, expected, h, activation):
            expected_slope = activate_backward(torch.ones_like(expected), h, activation)
            return activation if _close(slope, expected_slope, h, activation) else None
    return None


def _probe_points(limits: list[float]) -> Tensor:
    """(rows, 2I) in fp64; gates and ups, in either layout, lie on the curve, far out, and on both sides of a limit."""
    ends = torch.logspace(1, 4, 12, dtype=torch.float64)
    near = torch.tensor([n * f for n in limits for f in (0.99, 1.01)], dtype=torch.float64)
    side = torch.cat((torch.linspace(0.05, 9, 61, dtype=torch.float64), ends, near))
    line = torch.cat((side, -side))
    generator = torch.Generator().manual_seed(0)
    return torch.stack([line[torch.randperm(line.numel(), generator=generator)] for _ in range(8)])


class _Watch(TorchDispatchMode):
    """Sees whether a function uses any tensor beside its argument and those that it makes itself."""

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


def _refuse_fp8(*_: Any, **__: Any) -> Tensor:
    raise bad_value(
        "experts_implementation",
        "one that computes FP8 experts, as this model's are",
        repr(NAME),
        'load it with experts_implementation="grouped_mm", or dequantised to bf16: '
        "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))",
    )


def register() -> None:
    """Registers "amoeba" with transformers; calling it again changes nothing."""
    ExpertsInterface.register(NAME, experts_forward)
    # FP8 experts are dispatched over a registry of their own, which would fail with a KeyError in the first forward.
    finegrained_fp8.FP8ExpertsInterface.register(NAME, _refuse_fp8)
    _refuse_fp8_at_load()


def _refuse_fp8_at_load() -> None:
    original = finegrained_fp8.FP8Experts.__init__
    if hasattr(original, "_refuses_amoeba"):
        return

    @functools.wraps(original)
    def checked_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "_experts_implementation", None) == NAME:
            _refuse_fp8()
        original(self, config, *args, **kwargs)

    checked_init._refuses_amoeba = True  # type: ignore[attr-defined]
    finegrained_fp8.FP8Experts.__init__ = checked_init  # type: ignore[method-assign]


register()
