"""In which precision the experts of a run train, what computes it, and what it keeps: for the console and the report.

found = run_precision(model, "fp8", device)
console.say(str(found))          # experts in fp8: products of forward and ...; backend triton, ...; codes of ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from amoeba import cost
from amoeba.backends.registry import backends_of
from amoeba.integrations.experts_module import layouts_of
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.precision.formats import FP8_TRAINING
from amoeba.precision.recipes import AUTO, Fp8Experts, summary_of


@dataclass(frozen=True)
class RunPrecision:
    """code_bytes: of the weights' codes and scales, which are kept beside the weights of all layers; over_ranks: of the
    experts that the first rank has."""

    precision: str
    summary: str
    backend: str
    code_bytes: int
    over_ranks: bool = False

    def __str__(self) -> str:
        at_most = "at most " if self.precision == AUTO else ""
        where = " on the first rank" if self.over_ranks else ""
        codes = f"the weights' codes take {at_most}{self.code_bytes / 2**20:,.1f} MiB{where}"
        return f"experts in {self.precision}: {self.summary}; backend {self.backend}; {codes}"


def run_precision(model: Any, precision: str, device: torch.device) -> RunPrecision:
    """precision: another than the run's own dtype."""
    backends = backends_of(Fp8Experts, device)
    backends = backends[:1] if device.type == "cpu" else backends  # a GPU's layers may be of a shape that some refuse
    own = {name: placed.own_experts for name, (_, placed) in sharded_modules(model).items()}
    code_bytes = sum(
        cost.code_bytes(
            experts=own.get(name, layout.num_experts),
            hidden=layout.hidden,
            intermediate=layout.intermediate,
            gated=layout.gated,
            format=FP8_TRAINING,
        )
        for name, layout in layouts_of(model).items()
    )
    how = " or else ".join(f"{backend.name}, {backend.summary}" for backend in backends)
    return RunPrecision(precision, summary_of(precision), how, code_bytes, bool(own))
