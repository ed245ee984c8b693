"""In which precision the experts of a run train, what computes it, and what it keeps: for the console and the report.

found = run_precision(model, "fp8", device)
console.say(str(found))          # experts in fp8: products of forward and ...; backend triton, ...; codes of ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from amoeba.backends import fp8, fp8_choice, fp8_triton
from amoeba.core import cost
from amoeba.core.errors import counted
from amoeba.integrations.experts_module import experts_modules, weights_of
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.precision.formats import FP8_TRAINING
from amoeba.precision.recipes import AUTO, summary_of


@dataclass(frozen=True)
class RunPrecision:
    """backend: of all layers, with the reason where it is not that of the kernels; code_bytes: of the weights' codes
    and scales, which are kept beside the weights; over_ranks: of the experts that the first rank has."""

    precision: str
    summary: str
    backend: str
    code_bytes: int
    over_ranks: bool = False

    def __str__(self) -> str:
        said = f"experts in {self.precision}: {self.summary}; backend {self.backend}"
        if not self.code_bytes:
            return said
        at_most = "at most " if self.precision == AUTO else ""
        where = " on the first rank" if self.over_ranks else ""
        return f"{said}; the weights' codes take {at_most}{self.code_bytes / 2**20:,.1f} MiB{where}"


def run_precision(model: Any, precision: str, device: torch.device) -> RunPrecision:
    """precision: another than the run's own dtype. device: where the model will be."""
    sharded = {name: placed for name, (_, placed) in sharded_modules(model).items()}
    others = (weights_of(module) for name, module in experts_modules(model).items() if name not in sharded)
    layers = [*(placed.local for placed in sharded.values()), *filter(None, others)]
    refused = [_why_not(device, weights, precision) for weights in layers]
    code_bytes = sum(
        cost.code_bytes(
            experts=weights.num_experts,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            gated=weights.activation.gated,
            format=FP8_TRAINING,
        )
        for weights, reason in zip(layers, refused, strict=True)
        if reason is None or precision != AUTO
    )
    return RunPrecision(precision, summary_of(precision), _backends(refused, precision), code_bytes, bool(sharded))


def _why_not(device: torch.device, weights: Any, precision: str) -> str | None:
    """Why the kernels do not take a layer, or None."""
    if (reason := fp8_triton.why_not_on(device, weights)) is not None:
        return f"{fp8_triton.BACKEND.name} {reason}"
    return fp8_choice.too_small(weights) if precision == AUTO else None


def _backends(refused: list[str | None], precision: str) -> str:
    """refused: for each layer why the kernels do not take it, or None."""
    kernels, torch_alone = (f"{each.BACKEND.name}, {each.BACKEND.summary}" for each in (fp8_triton, fp8))
    other = "that of the run's dtype, without fp8" if precision == AUTO else torch_alone
    reasons = list(dict.fromkeys(reason for reason in refused if reason is not None))
    if not reasons:
        return kernels
    because = f"{other} ({', '.join(reasons)})"
    left = len(refused) - refused.count(None)
    return because if left == len(refused) else f"{kernels}; for {counted(left, 'layer')} {because}"
