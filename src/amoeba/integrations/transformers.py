"""The drop-in for Hugging Face models: importing this module registers the experts implementation "amoeba".

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    import amoeba.integrations.transformers      # or: import amoeba; amoeba.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="amoeba")

The modules keep their parameters and their checkpoints. How a module's experts are stored (transposed, interleaved,
biased, ungated) is read from its flags; an activation that is not recognised, and a norm after the expert, are called
as they are. What the first call finds out about a module is kept on it, see `experts_module`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from amoeba.backends.custom_activation import experts_composed
from amoeba.core.errors import bad_value
from amoeba.core.weights import AnyExperts, ExpertWeights, LoraFactors
from amoeba.experts import experts, submit_experts
from amoeba.integrations.coverage import coverage
from amoeba.integrations.experts_module import (
    ATTRIBUTE,
    BACKEND,
    LORA,
    PRECISION,
    SHARED,
    ExpertsModule,
    SharedExperts,
    check_own_parameters,
    described,
    experts_modules,
    find_out,
    forget,
    placed_now,
    stored,
)
from amoeba.integrations.quantised_models import experts_of_fp8_module, take_over_quantised
from amoeba.precision.recipes import Fp8Experts
from amoeba.routing.router import Routing

try:
    from transformers import PreTrainedModel
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        f"amoeba.register: expected transformers 5.8 or newer; got: {error}. Install it: pip install 'amoeba-moe[hf]'."
    ) from error

NAME = "amoeba"

__all__ = ["NAME", "experts_forward", "forget", "register"]


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of the module's own forward: (T, H), (T, K), (T, K) -> (T, H)."""
    found = module.__dict__.get(ATTRIBUTE)
    make = _checked if torch.compiler.is_compiling() else _unchecked
    if found is None or not found.holds(module):
        found, make = find_out(module), _checked
    routing = make(Routing, expert_TK=top_k_index, weight_TK=top_k_weights, trusted=True)
    adapter = module._modules.get(LORA)
    if found.placed is not None:
        shared = module.__dict__.get(SHARED)
        placed, backend = placed_now(module, found.placed), module.__dict__.get(BACKEND, "auto")
        return _through_placed(placed, hidden_states, routing, adapter, shared, backend)
    gate_up, down, gate_up_bias, down_bias = stored(module, found)
    x, dtype = hidden_states, hidden_states.dtype
    if dtype != gate_up.dtype and not torch.is_autocast_enabled(x.device.type):
        x = _cast_as(x, gate_up)
    lora = None if adapter is None else adapter.factors()
    if found.fused is None:
        y = _call_own_functions(module, found, x, routing, lora, gate_up, down, gate_up_bias, down_bias)
    else:
        recipe = module.__dict__.get(PRECISION)
        weights = make(
            ExpertWeights if recipe is None else Fp8Experts,
            gate_up_EJH=gate_up,
            down_EHI=down,
            gate_up_bias_EJ=gate_up_bias,
            down_bias_EH=down_bias,
            activation=found.fused,
            **({} if recipe is None else {"recipe": recipe}),
        )
        y = experts(x, routing, weights, lora=lora, backend=module.__dict__.get(BACKEND, "auto"))
    return y if y.dtype == dtype else y.to(dtype)


def _through_placed(
    weights: AnyExperts,
    x_TH: Tensor,
    routing: Routing,
    adapter: Any,
    shared: SharedExperts | None = None,
    backend: str = "auto",
) -> Tensor:
    """x may be in any dtype and wherever these experts take it from. shared: computed meanwhile."""
    lora = None if adapter is None else adapter.factors(weights.device)
    device = x_TH.device.type  # those that train are cast as resident ones are
    with torch.autocast(device, enabled=weights.trains and torch.is_autocast_enabled(device)):
        rows_TH = x_TH.to(weights.dtype)
        if shared is None or not shared.overlap(x_TH):
            return experts(rows_TH, routing, weights, lora=lora, backend=backend).to(x_TH.dtype)
        ticket = submit_experts(rows_TH, routing, weights, lora=lora)
    shared.compute(x_TH)
    return ticket.sync().to(x_TH.dtype)


def _call_own_functions(
    module: Any, found: ExpertsModule, x_TH: Tensor, routing: Routing, lora: LoraFactors | None, *tensors: Tensor | None
) -> Tensor:
    device = x_TH.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_TH, tensors = x_TH.to(dtype), tuple(None if t is None else t.to(dtype) for t in tensors)
    gate = module._apply_gate if found.has_gate else module.act_fn
    finish = module.post_expert_norm if found.has_norm else None
    lora = None if lora is None else lora.to(x_TH.dtype)
    return experts_composed(
        x_TH,
        routing,
        *tensors,  # type: ignore[arg-type]
        gate=gate,
        finish=finish,
        lora=lora,
        interleaved=found.interleaved,
    )


def _cast_as(x_TH: Tensor, weight: Tensor) -> Tensor:
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        remedy = "load the checkpoint dequantised, or with "
        remedy += 'experts_implementation="eager" if its quantisation supports it'
        raise bad_value("expert weights", "fp64, fp32, bf16 or fp16", weight.dtype, remedy)
    return x_TH.to(weight.dtype)


def _checked(kind: Any, **fields: Any) -> Any:
    return kind(**fields)


def _unchecked(kind: Any, **fields: Any) -> Any:
    """The same dataclass without its checks: they passed in the module's first call, and take 5 µs. Not traceable."""
    instance = object.__new__(kind)
    instance.__dict__.update(fields)
    return instance


def fp8_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The same for experts that transformers itself keeps in FP8; they are frozen, whatever their parameters say."""
    if described(module).fused is None:
        expected = "an activation that aMoEba computes itself"
        raise bad_value("experts", expected, f"that of {type(module).__name__}", 'use experts_implementation="eager"')
    dtype = hidden_states.dtype if hidden_states.dtype.itemsize > 1 else torch.bfloat16
    routing = Routing(top_k_index, top_k_weights, trusted=True)
    adapter = module._modules.get(LORA)
    backend = module.__dict__.get(BACKEND, "auto")
    return _through_placed(experts_of_fp8_module(module, dtype), hidden_states, routing, adapter, backend=backend)


def register() -> None:
    """Registers "amoeba" with transformers; calling it again changes nothing."""
    ExpertsInterface.register(NAME, experts_forward)
    # FP8 experts that a quantizer of transformers made are dispatched over a registry of their own.
    finegrained_fp8.FP8ExpertsInterface.register(NAME, fp8_experts_forward)
    take_over_quantised(NAME)
    _tell_of_others()


def take_over(model: Any) -> None:
    """Has a model compute its experts by aMoEba from now on."""
    register()
    model.set_experts_implementation(NAME)


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
        try:
            # transformers would compute with the shapes that were left of placed experts, without an error
            remedy = f'keep experts_implementation="{NAME}", or load the model anew for {experts_implementation!r}'
            for name, module in experts_modules(self).items():
                if getattr(getattr(module, "config", None), "_experts_implementation", NAME) != NAME:
                    check_own_parameters(module, name, remedy)
        except ValueError:
            asked(self, NAME)
            raise
        if experts_implementation == NAME:
            _warn_of_others(self)

    post_init._tells_of_others = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init
    PreTrainedModel.set_experts_implementation = set_experts_implementation


def _warn_of_others(model: Any) -> None:
    found = coverage(model)
    if found.others:
        warnings.warn(f'{type(model).__name__}, experts_implementation="{NAME}": experts by {found}', stacklevel=3)


register()
