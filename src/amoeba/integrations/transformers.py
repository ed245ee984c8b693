"""The drop-in for Hugging Face models: importing this module registers the experts implementation "amoeba".

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    import amoeba.integrations.transformers      # or: import amoeba; amoeba.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="amoeba")

The modules keep their parameters and their checkpoints. How a module's experts are stored (transposed, interleaved,
biased, ungated) is read from its flags and served by strides. Its activation is recognised by evaluating it on a few
numbers; one that is not recognised, and a norm after the expert, are called as they are.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import ExpertsInterface

from amoeba.backends.composed import experts_composed
from amoeba.config import Activation, ActivationKind
from amoeba.errors import bad_value
from amoeba.experts import experts
from amoeba.routing import Routing
from amoeba.weights import ExpertWeights

logger = logging.getLogger("amoeba")

NAME = "amoeba"

# Where model classes keep the numbers of a clamped activation.
_LIMIT_NAMES = ("limit", "swiglu_limit")
_ALPHA_NAMES = ("alpha", "swiglu_alpha")
_KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# While torch.compile traces, nothing can be evaluated; then these classes are recognised by name.
_KIND_OF_CLASS: dict[str, ActivationKind] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
# A gate that computes in fp32 whatever it is given (the backends do so for half precision) still counts as equal.
_PROBE_TOLERANCE = 1e-6


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any
) -> Tensor:
    """What transformers calls in place of the module's own forward: (T, H), (T, K), (T, K) -> (T, H)."""
    flag = module.__dict__.get
    has_gate, transposed = flag("has_gate", True), flag("is_transposed", False)
    gate_up = module.gate_up_proj if has_gate else module.up_proj
    down = module.down_proj
    gate_up_bias = down_bias = None
    if flag("has_bias", False):
        gate_up_bias = module.gate_up_proj_bias if has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if top_k_index.dim() == 1:
        top_k_index, top_k_weights = top_k_index[:, None], top_k_weights[:, None]
    routing = Routing(top_k_index, top_k_weights, trusted=True)
    x = hidden_states
    if x.dtype != gate_up.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(gate_up.dtype)

    activation = recognised_activation(module)
    if activation is not None and not flag("has_post_expert_norm", False):
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, activation)
        return experts(x, routing, weights).to(hidden_states.dtype)
    gate = module._apply_gate if has_gate else module.act_fn
    finish = module.post_expert_norm if flag("has_post_expert_norm", False) else None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        gate_up_bias, down_bias = (b if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    y = experts_composed(x, routing, gate_up, down, gate_up_bias, down_bias, gate=gate, finish=finish)
    return y.to(hidden_states.dtype)


def recognised_activation(module: Any) -> Activation | None:
    """The module's activation as one that the backends compute themselves; None if it is another."""
    known = module.__dict__.get("_amoeba_activation", False)
    if known is not False:
        return known
    if torch.compiler.is_compiling():
        return _by_class(module)
    activation = _by_probe(module)
    module._amoeba_activation = activation
    _announce(type(module).__name__, activation)
    return activation


def _by_class(module: Any) -> Activation | None:
    act_fn = getattr(module, "act_fn", None)
    kind = _KIND_OF_CLASS.get(type(act_fn).__name__)
    default = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    if kind is None or not default:
        return None
    if not getattr(module, "has_gate", True):
        return Activation(kind, gated=False)
    return Activation(kind) if getattr(module, "is_concatenated", True) else None


def _by_probe(module: Any) -> Activation | None:
    gated = getattr(module, "has_gate", True)
    act_fn: Any = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters()):
        return None  # it learns: only the function itself can give its gradient
    h = torch.cat((torch.linspace(-9, 9, 128), torch.linspace(12, -12, 128))).double()
    h = h[torch.randperm(256, generator=torch.Generator().manual_seed(0))].view(2, 128)
    try:
        with torch.no_grad():
            got = module._apply_gate(h) if gated else act_fn(h)
    except Exception as error:
        logger.debug("the activation of %s could not be tried out: %s", type(module).__name__, error)
        return None
    for activation in _candidates(module, gated):
        expected = _reference_activation(h, activation)
        if got.shape == expected.shape and torch.allclose(
            got.double(), expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE
        ):
            return activation
    return None


def _candidates(module: Any, gated: bool) -> Iterator[Activation]:
    limits = [math.inf, *_numbers(module, _LIMIT_NAMES)]
    alphas = [1.0, 1.702, *_numbers(module, _ALPHA_NAMES)]
    for limit in limits:
        for kind in _KINDS:
            for alpha in alphas if kind == "silu" else [1.0]:
                if not gated:
                    yield Activation(kind, gated=False, alpha=alpha, limit=limit)
                    continue
                for up_shift in (0.0, 1.0):
                    for interleaved in (False, True):
                        yield Activation(kind, True, alpha, limit, up_shift, interleaved)


def _numbers(module: Any, names: tuple[str, ...]) -> list[float]:
    found = (getattr(module, name, None) for name in names)
    return [float(n) for n in found if isinstance(n, int | float) and math.isfinite(n) and n > 0]


def _reference_activation(h: Tensor, activation: Activation) -> Tensor:
    from amoeba.reference.experts import activate

    return activate(h, activation)


@functools.cache
def _announce(class_name: str, activation: Activation | None) -> None:
    if activation is None:
        logger.info("%s: activation not recognised, calling the module's own function", class_name)
    else:
        logger.info("%s: %s", class_name, activation)


def _refuse_fp8(*_: Any, **__: Any) -> Tensor:
    raise bad_value(
        "experts_implementation",
        "one that computes FP8 experts, this checkpoint holds FP8 experts",
        repr(NAME),
        'load it with experts_implementation="grouped_mm", or dequantised to bf16: '
        "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))",
    )


def register() -> None:
    """Registers "amoeba" with transformers; calling it again changes nothing."""
    ExpertsInterface.register(NAME, experts_forward)
    # FP8 experts dispatch over a registry of their own, which would fail with a KeyError in the first forward.
    finegrained_fp8.FP8ExpertsInterface.register(NAME, _refuse_fp8)
    original = finegrained_fp8.FP8Experts.__init__
    if getattr(original, "_amoeba_checked", False):
        return

    @functools.wraps(original)
    def refuse_at_load(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "_experts_implementation", None) == NAME:
            _refuse_fp8()
        original(self, config, *args, **kwargs)

    refuse_at_load._amoeba_checked = True  # type: ignore[attr-defined]
    finegrained_fp8.FP8Experts.__init__ = refuse_at_load  # type: ignore[method-assign]


register()
