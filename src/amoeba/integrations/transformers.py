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
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.backends.composed import experts_composed
from amoeba.config import Activation
from amoeba.errors import bad_value
from amoeba.experts import experts
from amoeba.integrations.coverage import coverage
from amoeba.lora.experts_lora import CHILD as LORA
from amoeba.routing import Routing
from amoeba.weights import ExpertWeights, LoraFactors

try:
    from transformers import PreTrainedModel
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ExpertsInterface

    from amoeba.integrations.recognise import numbers_of, recognise_by_class, recognise_by_trial
except ImportError as error:
    raise ImportError(
        f"amoeba.register: expected transformers 5.8 or newer; got: {error}. Install it: pip install 'amoeba-moe[hf]'."
    ) from error

logger = logging.getLogger("amoeba")

NAME = "amoeba"

PLAN = "_amoeba_plan"
PACKED = "_amoeba_packed"  # where `placement` leaves a module's packed experts


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
    if PACKED in module.__dict__:
        from amoeba.integrations.placement import experts_forward_packed

        return experts_forward_packed(module, hidden_states, top_k_index, top_k_weights)
    plan = module.__dict__.get(PLAN)
    make = _checked if torch.compiler.is_compiling() else _unchecked
    if plan is None or not plan.holds(module):
        plan, make = _find_out(module), _checked
    gate_up, down, gate_up_bias, down_bias = _stored(module, plan)
    x, dtype = hidden_states, hidden_states.dtype
    if dtype != gate_up.dtype and not torch.is_autocast_enabled(x.device.type):
        x = _cast_as(x, gate_up)
    routing = make(Routing, expert_TK=top_k_index, weight_TK=top_k_weights, trusted=True)
    adapter = module._modules.get(LORA)
    lora = None if adapter is None else adapter.factors()
    if plan.fused is None:
        y = _call_own_functions(module, plan, x, routing, lora, gate_up, down, gate_up_bias, down_bias)
    else:
        weights = make(
            ExpertWeights,
            gate_up_EJH=gate_up,
            down_EHI=down,
            gate_up_bias_EJ=gate_up_bias,
            down_bias_EH=down_bias,
            activation=plan.fused,
        )
        y = experts(x, routing, weights, lora=lora)
    return y if y.dtype == dtype else y.to(dtype)


def plan_of(module: Any) -> _Plan:
    """What is known about an experts module, found out now if it was not called yet."""
    plan = module.__dict__.get(PLAN)
    return plan if plan is not None and plan.holds(module) else _find_out(module)


def expert_weights(module: Any, plan: _Plan) -> ExpertWeights:
    """The module's own tensors as the seam takes them."""
    assert plan.fused is not None
    return ExpertWeights(*_stored(module, plan), activation=plan.fused)


def forget(module: nn.Module) -> None:
    """Lets every experts module inside be looked at again in its next call."""
    for inner in module.modules():
        inner.__dict__.pop(PLAN, None)


def _call_own_functions(
    module: Any, plan: _Plan, x_TH: Tensor, routing: Routing, lora: LoraFactors | None, *tensors: Tensor | None
) -> Tensor:
    device = x_TH.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_TH, tensors = x_TH.to(dtype), tuple(None if t is None else t.to(dtype) for t in tensors)
    gate = module._apply_gate if plan.has_gate else module.act_fn
    finish = module.post_expert_norm if plan.has_norm else None
    lora = None if lora is None else lora.to(x_TH.dtype)
    interleaved = plan.has_gate and not getattr(module, "is_concatenated", True)
    return experts_composed(
        x_TH,
        routing,
        *tensors,  # type: ignore[arg-type]
        gate=gate,
        finish=finish,
        lora=lora,
        interleaved=interleaved,
    )


def _stored(module: Any, plan: _Plan) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """gate_up_EJH, down_EHI and their biases: views of what the module has."""
    gate_up, down = _tensor(module, plan.up_name), _tensor(module, "down_proj")
    gate_up_bias = down_bias = None
    if plan.has_bias:
        gate_up_bias, down_bias = _tensor(module, plan.up_name + "_bias"), _tensor(module, "down_proj_bias")
    if plan.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return gate_up, down, gate_up_bias, down_bias


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
    activation = recognise_by_class(module, has_gate) if tracing else recognise_by_trial(module, has_gate)
    plan = _Plan(
        fused=None if has_norm else activation,
        up_name="gate_up_proj" if has_gate else "up_proj",
        has_gate=has_gate,
        has_bias=getattr(module, "has_bias", False),
        has_norm=has_norm,
        transposed=getattr(module, "is_transposed", False),
        act_fn=module._modules.get("act_fn"),
        numbers=numbers_of(module),
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
    _tell_of_others()


def _tell_of_others() -> None:
    """Has a model say which of its experts it does not hand over, when it is made and when it is asked to."""
    made, asked = PreTrainedModel.post_init, PreTrainedModel.set_experts_implementation
    if hasattr(made, "_tells_of_others"):
        return

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        made(self)
        if getattr(self.config, "_experts_implementation", None) == NAME:
            _warn_of_others(self)

    @functools.wraps(asked)
    def set_experts_implementation(self: Any, experts_implementation: Any) -> None:
        asked(self, experts_implementation)
        if experts_implementation == NAME:
            _warn_of_others(self)

    post_init._tells_of_others = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
    PreTrainedModel.set_experts_implementation = set_experts_implementation  # type: ignore[method-assign]


def _warn_of_others(model: Any) -> None:
    found = coverage(model)
    if found.others:
        warnings.warn(f'{type(model).__name__}, experts_implementation="{NAME}": experts by {found}', stacklevel=3)


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
