"""A Hugging Face model whose experts are over ranks, and what else there is to shard sharded by FSDP2.

    shard_fully(model, make_mesh(ranks, 2, "fsdp", device))

Each layer's experts over the ranks that have the same ones, each layer and what is around them over all ranks. Nothing
is divided by FSDP2, as the loss is (`amoeba.parallel.gradients`). Parameters are gathered for a pass and freed after
it; gradients are added up in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from amoeba.integrations.compiled_layers import decoder_layers
from amoeba.integrations.experts_module import ATTRIBUTE
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.parallel.mesh import RankMesh


def shard_fully(model: Any, mesh: RankMesh) -> None:
    """In place. The model is where it trains, and has no gradients yet."""
    if not mesh.shards:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    options = {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    layers = sharded_modules(model)
    apart: set[nn.Parameter] = set()
    for module, placed in layers.values():
        if mesh.of_shares is None:
            apart |= set(module.parameters())
            continue
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # a share of experts that were stored as (E, in, out) is not
        fully_shard(module, mesh=mesh.of_shares, **options)
        # what was placed would keep the whole share in memory
        shards = [module._parameters.get(f"placed_{place}") for place in range(len(placed.tensors()))]
        module.__dict__[ATTRIBUTE] = replace(module.__dict__[ATTRIBUTE], placed=placed.with_tensors(shards))
    if mesh.of_dense is not None:
        for module in (*decoder_layers(model), model):
            fully_shard(module, mesh=mesh.of_dense, ignored_params=apart, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
