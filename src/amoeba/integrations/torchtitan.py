"""Our experts as those of torchtitan, through its overrides.

    --override.imports amoeba.integrations.torchtitan.amoeba_experts

R routed rows, sorted by expert · E experts · D model · F of an expert

Dispatch, combine, router, shared experts and parallelism stay torchtitan's. The weights are those of its
`FusedGroupedExperts`, so they are sharded and saved as it does: checkpoints have the stock layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts

from amoeba.core.config import Activation
from amoeba.core.weights import ExpertWeights
from amoeba.experts import experts
from amoeba.routing.router import Routing

ACTIVATION = Activation("silu", interleaved=True)


class AmoebaGroupedExperts(FusedGroupedExperts):
    """Computes in bf16, as torchtitan's do. Rows after the last expert's are padding: they cost nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        gate_up_EF2D, down_EDF = (
            weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w13, self.w2_EDF)
        )
        weights = ExpertWeights(gate_up_EF2D.flatten(1, 2).bfloat16(), down_EDF.bfloat16(), activation=ACTIVATION)
        row_R = torch.arange(len(x_RD), dtype=torch.int64, device=x_RD.device)
        expert_R = torch.searchsorted(num_tokens_per_expert_E.cumsum(0), row_R, right=True)  # E for padding
        routing = Routing(expert_R[:, None], torch.ones_like(row_R, dtype=torch.float32)[:, None])
        return experts(x_RD.bfloat16(), routing, weights).type_as(x_RD)


@override(target=GroupedExperts.Config, exact=True, description="aMoEba computes the routed experts.")
def amoeba_experts(config: Any) -> AmoebaGroupedExperts.Config:
    return derive(fused_grouped_experts(config), AmoebaGroupedExperts.Config)
