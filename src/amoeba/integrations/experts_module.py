"""How a transformers experts module stores its experts (order, biases, gate), what it computes, and where they are.

E experts · H hidden · I intermediate · J = 2I or I

    experts_modules(model)                # name -> module, those that transformers hands over
    layout_of(module)                     # sizes and storage, read from its flags
    described(module)                     # the same with its activation, found out in the first call
    place(module, placement)              # its experts elsewhere; described(module).placed is where

What is found out about a module is kept on it, in one attribute. A later change of its act_fn, limit or alpha is
noticed; after a change of `_apply_gate` or of a flag, call `forget(module)`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.placement import Placement
from amoeba.core.weights import AnyExperts, ExpertWeights
from amoeba.precision.recipes import UNCHANGED, with_precision

ATTRIBUTE = "_amoeba"
ROUTER_NAMES = ("gate", "router")  # what transformers calls the router, a sibling of the experts
SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")  # and the experts that see every token
SHARED = "_amoeba_shared"  # a `SharedExperts`, where they are computed while the routed ones are under way
BACKEND = "_amoeba_backend"  # by which its experts are computed, unless "auto"
PRECISION = "_amoeba_precision"  # in which its experts train, see `integrations.precision`
LORA = "lora_factors"  # the child that holds LoRA factors, an amoeba.lora.factors.ExpertsLora


@dataclass(frozen=True)
class ExpertsLayout:
    """How a model keeps one layer's experts: what a file of factors alone does not say."""

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    interleaved: bool = False  # rows of gate and up interleaved, as in gpt-oss; else all of gate first
    transposed: bool = False  # weights stored as (E, in, out)

    def __str__(self) -> str:
        return f"{self.num_experts} experts of hidden {self.hidden} and intermediate {self.intermediate}"


@dataclass(frozen=True, eq=False, slots=True)
class ExpertsModule:
    """What is known about a module after its first call."""

    fused: Activation | None  # None: the module's own functions are called
    up_name: str
    has_gate: bool
    has_bias: bool
    has_norm: bool
    interleaved: bool
    transposed: bool
    # what the activation was concluded from
    act_fn: Any
    numbers: tuple[tuple[str, float], ...]
    # where its experts are, unless they are its own parameters
    placed: AnyExperts | None = None
    placement: Placement | None = None

    def holds(self, module: Any) -> bool:
        if self.act_fn is not module._modules.get("act_fn"):
            return False
        return not self.numbers or all(module.__dict__.get(name) == number for name, number in self.numbers)


def is_experts(module: Any) -> bool:
    """Whether transformers hands its computation over."""
    return hasattr(module, "is_concatenated")  # the decorator's mark


def experts_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def routers_in(block: nn.Module | None) -> list[Any]:
    found = [getattr(block, child, None) for child in ROUTER_NAMES]
    return [router for router in found if isinstance(router, nn.Module)]


class SharedExperts:
    """A block's shared experts, which a GPU computes while a CPU computes the routed ones.

    For blocks that call the routed ones first, with the same rows: these compute the shared ones before they wait
    (`compute`), and the block's own call gets the result. The first pass in another order ends it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, module.forward
        self._early: tuple[Tensor, int, Tensor] | None = None
        self._in_order = True
        self._installed = self._forward
        module.forward = self._installed

    def overlap(self, x: Tensor) -> bool:
        """Whether to compute them early. A module with hooks is only called by its block, which runs them."""
        module = self._module
        return (
            self._in_order
            and runs_alongside(x)
            and module.__dict__.get("forward") is self._installed
            and not (module._forward_pre_hooks or module._forward_hooks or module._backward_hooks)
        )

    def compute(self, x_TH: Tensor) -> None:
        self._early = x_TH, _version(x_TH), self._own(x_TH)

    def _forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        early, self._early = self._early, None
        if early is not None and not others and not options:
            x_TH, version, y_TH = early
            if x.data_ptr() == x_TH.data_ptr() and x.numel() == x_TH.numel() and _version(x) == version:
                return y_TH.reshape(x.shape)
        if early is not None or self.overlap(x):
            self._in_order = False
        return self._own(x, *others, **options)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def runs_alongside(x: Tensor) -> bool:
    """Whether what is computed with x does not take the CPU's time, in training: decoding so was not measured."""
    return x.is_cuda and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def overlap_shared_experts(block: nn.Module, experts: Any) -> None:
    """Has the block's shared experts, if any, computed while these are under way."""
    found = [getattr(block, name, None) for name in SHARED_NAMES]
    shared = [module for module in found if isinstance(module, nn.Module)]
    if len(shared) == 1:
        experts.__dict__[SHARED] = SharedExperts(shared[0])


def layout_of(module: Any) -> ExpertsLayout | None:
    """None for experts that are not stacked."""
    down = getattr(module, "down_proj", None)
    if not (isinstance(down, Tensor) and down.dim() == 3):
        return None
    gated, transposed = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    experts, hidden, intermediate = down.transpose(1, 2).shape if transposed else down.shape
    return ExpertsLayout(experts, hidden, intermediate, gated, _interleaved(module), transposed)


def layouts_of(model: nn.Module) -> dict[str, ExpertsLayout]:
    """Module name -> layout, for every module that holds stacked experts."""
    found = {name: layout_of(module) for name, module in experts_modules(model).items()}
    return {name: layout for name, layout in found.items() if layout is not None}


def described(module: Any) -> ExpertsModule:
    known = module.__dict__.get(ATTRIBUTE)
    return known if known is not None and known.holds(module) else find_out(module)


def is_described(module: Any) -> bool:
    return ATTRIBUTE in module.__dict__


def find_out(module: Any) -> ExpertsModule:
    from amoeba.integrations.recognise import numbers_of, recognise_by_class, recognise_by_trial

    has_gate, has_norm = getattr(module, "has_gate", True), getattr(module, "has_post_expert_norm", False)
    tracing = torch.compiler.is_compiling()
    activation = recognise_by_class(module, has_gate) if tracing else recognise_by_trial(module, has_gate)
    found = ExpertsModule(
        fused=None if has_norm else activation,
        up_name="gate_up_proj" if has_gate else "up_proj",
        has_gate=has_gate,
        has_bias=getattr(module, "has_bias", False),
        has_norm=has_norm,
        interleaved=_interleaved(module),
        transposed=getattr(module, "is_transposed", False),
        act_fn=module._modules.get("act_fn"),
        numbers=numbers_of(module),
    )
    if not tracing:
        module.__dict__[ATTRIBUTE] = found
        _announce(type(module).__name__, found.fused)
    return found


def forget(module: nn.Module) -> None:
    """Lets every experts module inside be looked at again in its next call; experts that were placed stay so."""
    for inner in module.modules():
        if placed_in(inner) is None:
            inner.__dict__.pop(ATTRIBUTE, None)


def stored(module: Any, found: ExpertsModule) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """gate_up_EJH, down_EHI and their biases: views of what the module has."""
    gate_up, down = _tensor(module, found.up_name), _tensor(module, "down_proj")
    gate_up_bias = down_bias = None
    if found.has_bias:
        gate_up_bias, down_bias = _tensor(module, found.up_name + "_bias"), _tensor(module, "down_proj_bias")
    if found.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return gate_up, down, gate_up_bias, down_bias


def weights_of(module: Any) -> AnyExperts | None:
    """Its experts as the seam takes them, wherever they are; None where its own functions have to be called."""
    found = described(module)
    if found.placed is not None or found.fused is None:
        return found.placed
    weights = ExpertWeights(*stored(module, found), activation=found.fused)
    return with_precision(weights, module.__dict__.get(PRECISION, UNCHANGED))


def placed_in(module: Any) -> AnyExperts | None:
    """Its experts, if they are no longer its own parameters."""
    known = module.__dict__.get(ATTRIBUTE)
    return None if known is None else known.placed


def placed_now(module: Any, placed: AnyExperts) -> AnyExperts:
    """Its placed experts; in other tensors where something has put such in its parameters' place, as FSDP2 does."""
    tensors = placed.tensors()
    now = [module._parameters.get(f"placed_{place}", tensor) for place, tensor in enumerate(tensors)]
    if all(one is other for one, other in zip(now, tensors, strict=True)):
        return placed
    return placed.with_tensors(now)  # type: ignore[attr-defined]  # no other kind has parameters that train


def has_placed_experts(model: nn.Module) -> bool:
    return any(placed_in(module) is not None for module in experts_modules(model).values())


def place(module: Any, placement: Placement) -> None:
    """Its experts placed elsewhere, its parameters freed. A precision that was set goes with experts that train."""
    weights = with_precision(resident(module), module.__dict__.get(PRECISION, UNCHANGED))
    hand_over(module, placement.make(weights), placement)
    module.__dict__.pop(PRECISION, None)


def hand_over(module: Any, experts: AnyExperts, placement: Placement) -> None:
    """Has a module compute with experts that are elsewhere already; its own parameters, if any, are freed.

    Those of them that are parameters become the module's, by other names, so that `model.to` moves them; where they
    train, they require gradients as its own did. Others are not visible. Saving the module raises, since its own are
    missing.
    """
    trained = any(parameter is not None and parameter.requires_grad for parameter in module._parameters.values())
    module.__dict__[ATTRIBUTE] = replace(described(module), placed=experts, placement=placement)
    leave_shapes(module)
    for place, tensor in enumerate(experts.tensors()):
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(f"placed_{place}", tensor.requires_grad_(trained and experts.trains))
    module.register_state_dict_pre_hook(_refuse_to_save)


def leave_shapes(module: Any) -> None:
    """Leaves of its parameters their shapes, as tensors on the meta device which are no parameters."""
    for name in list(module._parameters):
        parameter = module._parameters.pop(name)
        if parameter is not None:
            module.__dict__[name] = torch.empty_like(parameter, device="meta")


def take_back_shapes(module: Any, dtype: torch.dtype) -> None:
    """The opposite of `leave_shapes`: parameters of these shapes on the CPU, in this dtype, not filled yet."""
    shapes = {name: each for name, each in vars(module).items() if isinstance(each, Tensor) and each.is_meta}
    for name, shape in shapes.items():
        del module.__dict__[name]
        module.register_parameter(name, nn.Parameter(torch.empty(shape.shape, dtype=dtype, device="cpu")))


def resident(module: Any) -> ExpertWeights:
    """Its own parameters as weights; ValueError where its own functions have to be called with them."""
    found = described(module)
    if found.fused is None:
        expected = "an activation that aMoEba computes itself"
        raise bad_value("experts", expected, f"that of {type(module).__name__}", "keep the experts resident")
    with torch.no_grad():
        return ExpertWeights(*stored(module, found), activation=found.fused)


def check_own_parameters(module: Any, name: str, remedy: str) -> None:
    """ValueError where the module's experts are elsewhere."""
    known = module.__dict__.get(ATTRIBUTE)
    if known is not None and known.placed is not None:
        raise bad_value("model", "experts as ordinary tensors", f"{name}, {known.placement.summary}", remedy)


def home_of_factors(module: Any) -> tuple[torch.dtype, torch.device]:
    """Dtype and device for LoRA factors: where the experts are; fp32 for experts in half precision."""
    weights = placed_in(module) or module.down_proj
    dtype = torch.float32 if weights.dtype.itemsize < 4 else weights.dtype
    return dtype, weights.device


def stays(module: Any) -> bool:
    """Whether its experts remain where they are when the model is moved: they are none of its parameters."""
    return placed_in(module) is not None and not any(name.startswith("placed_") for name in module._parameters)


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    adapter = "save the adapter (amoeba.lora.save, and a Trainer with save_strategy='no')"
    remedy = f"{adapter}, or load the unquantised model without a placement and save that"
    check_own_parameters(module, prefix.rstrip("."), remedy)


def _interleaved(module: Any) -> bool:
    return getattr(module, "has_gate", True) and not getattr(module, "is_concatenated", True)


def _tensor(module: Any, name: str) -> Tensor:
    """module.name, several times faster where it is an ordinary parameter (a parametrised one is not)."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


@functools.cache
def _announce(class_name: str, activation: Activation | None) -> None:
    if activation is None:
        logger.info("%s: calling the module's own activation (and norm), which is slower", class_name)
    else:
        logger.info("%s: activation %s, fused", class_name, activation)


@contextmanager
def experts_left_out() -> Iterator[None]:
    """Models that this thread makes meanwhile have no expert parameters, only their shapes on the meta device.

    transformers makes a model on the meta device and gives memory to every parameter that it finds then.
    """
    from transformers import PreTrainedModel

    made, thread = PreTrainedModel.post_init, threading.get_ident()

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        if threading.get_ident() == thread:
            for module in experts_modules(self).values():
                leave_shapes(module)
        made(self)

    PreTrainedModel.post_init = post_init
    try:
        yield
    finally:
        PreTrainedModel.post_init = made
