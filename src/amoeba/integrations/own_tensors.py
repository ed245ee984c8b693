"""The parameters that only one rank has, and their names and layout in a model with all experts.

E experts

    own = own_tensors(model)["model.layers.0.mlp.experts.placed_0"]
    own.name, own.experts, own.of       # model.layers.0.mlp.experts.gate_up_proj, [4, 5, 6, 7], 8
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from amoeba.integrations.experts_module import LORA, described, experts_modules, placed_in
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.shards import rows_here


class OwnTensor(NamedTuple):
    """
    name:       of the tensor of all experts, in a process that has them.
    experts:    whose entries this rank has in its memory, in order; of: how many there are in all.
    transposed: whether that process stores it as (E, in, out), and this one as (E, out, in).
    """

    name: str
    experts: list[int]
    of: int
    transposed: bool

    def in_other_layout(self, tensor: Tensor) -> Tensor:
        """The tensor as the other process stores it, or from there as this one does."""
        return tensor.transpose(1, 2) if self.transposed and tensor.dim() == 3 else tensor


def sharded_modules(model: nn.Module) -> dict[str, tuple[Any, ShardedExperts]]:
    found = {name: (module, placed_in(module)) for name, module in experts_modules(model).items()}
    return {name: (module, placed) for name, (module, placed) in found.items() if isinstance(placed, ShardedExperts)}


def own_tensors(model: nn.Module) -> dict[str, OwnTensor]:
    """By the names that the parameters have here."""
    found: dict[str, OwnTensor] = {}
    for name, (module, placed) in sharded_modules(model).items():
        share, count = placed.owners.experts_of(placed.ranks.rank), placed.owners.num_experts
        up = described(module).up_name
        for place, leaf in enumerate((up, "down_proj", f"{up}_bias", "down_proj_bias")):
            if f"placed_{place}" in module._parameters:
                here = _here(share, module._parameters[f"placed_{place}"])
                found[f"{name}.placed_{place}"] = OwnTensor(f"{name}.{leaf}", here, count, described(module).transposed)
        factors = module._modules.get(LORA)
        for leaf, factor in [] if factors is None else factors.named_parameters():
            found[f"{name}.{LORA}.{leaf}"] = OwnTensor(f"{name}.{LORA}.{leaf}", _here(share, factor), count, False)
    return found


def _here(share: list[int], tensor: Any) -> list[int]:
    """Of the experts of a share those that FSDP2 has left on this rank."""
    rows = rows_here(tensor)
    return share if rows is None else share[rows.start : rows.stop]
