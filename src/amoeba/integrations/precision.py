"""In which precision the experts of a Hugging Face model train.

    amoeba.set_precision(model, "fp8")

The modules keep their parameters: optimizers, checkpoints and `save_pretrained` see nothing of it, and a saved model is
the one that plain transformers loads. Of experts over ranks each rank computes its own so. See
`amoeba.precision.recipes`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import nn

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import (
    ATTRIBUTE,
    PRECISION,
    check_own_parameters,
    described,
    experts_modules,
    resident,
)
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.precision.recipes import UNCHANGED, check_precision, with_precision

logger = logging.getLogger("amoeba")


def set_precision(model: nn.Module, precision: str) -> None:
    """precision: "fp8", "fp8-ste", "fp8-saved", "fp8-all", "auto" for fp8 where it is faster, or "bf16" for the
    dtype that the parameters have, as without this call."""
    check_precision(precision)
    modules = experts_modules(model)
    if not modules:
        expected = "a model with experts that transformers hands over"
        raise bad_value("model", expected, type(model).__name__, "leave the precision out")
    over_ranks = {
        name: replace(placed, local=with_precision(placed.local, precision))
        for name, (_, placed) in sharded_modules(model).items()
    }
    for name, module in modules.items():
        if name in over_ranks:
            continue
        check_own_parameters(module, name, "load the unquantised model, without a placement")
        resident(module)  # says if its own activation has to be called
    from amoeba.integrations.transformers import register

    register()
    model.set_experts_implementation("amoeba")  # type: ignore[operator]
    for name, module in modules.items():
        if name in over_ranks:
            module.__dict__[ATTRIBUTE] = replace(described(module), placed=over_ranks[name])
            continue
        module.__dict__.pop(PRECISION, None)
        if precision != UNCHANGED:
            module.__dict__[PRECISION] = precision
    logger.info("experts: %d layers in %s", len(modules), precision)
