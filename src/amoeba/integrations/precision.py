"""In which precision the experts of a Hugging Face model train, and how those of an fp8 checkpoint are multiplied.

    amoeba.set_precision(model, "fp8")
    products_of(model)              # of experts in fp8-128: quantised rows or not, why, and how far each is from fp64

The modules keep their parameters: a saved model is the one that plain transformers loads. See
`amoeba.precision.recipes`, and for frozen experts `QuantisedExperts.products`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from amoeba.backends import fp8_choice
from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.experts import experts
from amoeba.integrations import experts_module
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.precision.quantised_experts import Products, QuantisedExperts, dequantise_experts
from amoeba.precision.recipes import UNCHANGED, W8A8, check_precision, with_precision
from amoeba.routing.router import Routing

WEIGHT_ONLY = "weight_only"
# Rows of one expert by which errors of products are measured.
_ROWS = 16


def set_precision(model: nn.Module, precision: str) -> None:
    """Sets the precision in which a model's experts compute.

    precision: "fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4", "auto" for fp8 where it is faster, or
    "bf16" for the parameters' own dtype, as without this call.

    In a quantised checkpoint the experts are frozen. There "w8a8" also quantises rows to e4m3 in every pass without
    gradients, "auto" does so where it is faster, and "bf16" leaves rows unquantised."""
    modules = experts_module.experts_modules(model)
    if not modules:
        expected = "a model with experts that transformers hands over"
        raise bad_value("model", expected, type(model).__name__, "leave the precision out")
    if _quantised(model):
        set_products(model, precision)
        return
    check_precision(precision)
    sharded = {name: placed for name, (_, placed) in sharded_modules(model).items()}
    over_ranks = {name: replace(each, local=with_precision(each.local, precision)) for name, each in sharded.items()}
    for name, module in modules.items():
        if name in over_ranks:
            continue
        experts_module.check_own_parameters(module, name, "load the unquantised model, without a placement")
        experts_module.resident(module)  # says if its own activation has to be called
    from amoeba.integrations.transformers import take_over

    take_over(model)
    for name, module in modules.items():
        if name in over_ranks:
            module.__dict__[experts_module.ATTRIBUTE] = replace(
                experts_module.described(module), placed=over_ranks[name]
            )
            continue
        module.__dict__.pop(experts_module.PRECISION, None)
        if precision != UNCHANGED:
            module.__dict__[experts_module.PRECISION] = precision
    logger.info("experts: %d layers in %s", len(modules), precision)


def set_products(model: nn.Module, products: str) -> None:
    """Of block-scaled experts; other experts are left as they are."""
    found = _quantised(model)
    if found and products not in get_args(Products):
        expected = f"one of {', '.join(get_args(Products))} for quantised experts"
        raise bad_value("precision", expected, repr(products), "load the unquantised model to train its experts")
    for module, weights in found:
        changed = weights.with_products(products)  # type: ignore[arg-type]
        module.__dict__[experts_module.ATTRIBUTE] = replace(experts_module.described(module), placed=changed)


@dataclass(frozen=True)
class ProductsOfModel:
    """How passes without gradients multiply with experts in fp8-128.

    taken:  "w8a8" where rows are quantised, in some passes at least; else the dtype of x.
    errors: of "w8a8" and with rows as they are ("weight_only"), of one expert's output against fp64 on what its codes
            stand for, relative in the L2 norm, of normal rows; None where rows are never quantised.
    """

    taken: str
    reason: str
    errors: dict[str, float] | None = None

    def __str__(self) -> str:
        if self.errors is None:
            return f"products in {self.taken} ({self.reason})"
        w8a8, weight_only = (f"{100 * self.errors[each]:.2g} %" for each in (W8A8, WEIGHT_ONLY))
        return f"products {self.taken} {self.reason} (error of a layer {w8a8}, weight-only {weight_only})"


def products_of(model: nn.Module) -> ProductsOfModel | None:
    """None where no layer has experts in e4m3 that rows in e4m3 could be multiplied with."""
    found = [(module, weights) for module, weights in _quantised(model) if weights.why_not_w8a8() is None]
    if not found:
        return None
    weights = found[0][1]
    dtype = str(weights.dtype).removeprefix("torch.")
    if weights.products == UNCHANGED:
        return ProductsOfModel(dtype, "activations are not quantised")
    if all(experts_module.LORA in module._modules for module, _ in found):
        return ProductsOfModel(dtype, "w8a8 takes no LoRA factors")
    reason = fp8_choice.why_not_w8a8(weights)
    if weights.products == W8A8:
        by = "" if reason is None else f", in plain torch, as it {reason}"
        return ProductsOfModel(W8A8, f"in every pass{by}", _errors(weights))
    if reason is not None:
        return ProductsOfModel(dtype, f"w8a8 {reason}")
    fewest = fp8_choice.FEWEST_ROWS_FROZEN
    return ProductsOfModel(W8A8, f"from {fewest} rows per expert on", _errors(weights))


def _quantised(model: nn.Module) -> list[tuple[Any, QuantisedExperts]]:
    placed = [(module, experts_module.placed_in(module)) for module in experts_module.experts_modules(model).values()]
    return [(module, weights) for module, weights in placed if isinstance(weights, QuantisedExperts)]


@torch.no_grad()
def _errors(weights: QuantisedExperts) -> dict[str, float]:
    """On the CPU: a GPU may have no room for an expert in fp64."""
    tensors = [None if tensor is None else tensor.detach()[:1].cpu() for tensor in weights.tensors()]
    one = QuantisedExperts.of(tensors, weights.constants())
    generator = torch.Generator("cpu").manual_seed(0)
    x_TH = torch.randn(_ROWS, one.hidden, generator=generator, dtype=torch.float32, device="cpu")
    x_TH = x_TH.to(one.device, one.dtype)
    expert_TK = torch.zeros(_ROWS, 1, dtype=torch.int64, device=one.device)
    routing = Routing(expert_TK, torch.ones(_ROWS, 1, dtype=torch.float32, device=one.device))
    wide = dequantise_experts(one).to(torch.float64)
    truth_TH = experts(x_TH.double(), routing, wide, backend="eager")
    found = {}
    kinds: tuple[tuple[str, Products], ...] = ((W8A8, W8A8), (WEIGHT_ONLY, "bf16"))
    for name, products in kinds:
        y_TH = experts(x_TH, routing, one.with_products(products), backend="eager")
        found[name] = float((y_TH.double() - truth_TH).norm() / truth_TH.norm())
    return found
