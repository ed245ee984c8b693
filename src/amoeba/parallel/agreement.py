"""What ranks must agree on before they exchange rows, and how they compare it.

table = agree(ranks, alike, [number of tokens], device, "the numbers of tokens to come")
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.ranks import Ranks
from amoeba.precision.formats import FP8_128_ROWS, FP8_TRAINING_ROWS, Format

# In which rows of x are sent. A rank says it by its place here, which ANY of them can be for a rank without experts.
ROW_FORMATS: tuple[Format | None, ...] = (None, FP8_TRAINING_ROWS, FP8_128_ROWS)
ANY = -1
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def facts_of(owners: Owners, x_TH: Tensor, weight_TK: Tensor, gradients: bool) -> dict[str, int]:
    """gradients: whether there will be a backward."""
    return {
        "experts": owners.num_experts,
        "experts per token": weight_TK.shape[1],
        "hidden": x_TH.shape[1],
        "dtype of x": _DTYPES.index(x_TH.dtype),
        "dtype of the routing weights": _DTYPES.index(weight_TK.dtype),
        "gradients": int(gradients),
        "gradient of x": int(gradients and x_TH.requires_grad),
        "gradient of the routing weights": int(gradients and weight_TK.requires_grad),
    }


def agreed_format(told: Sequence[int]) -> Format | None:
    """told: by each rank. Rows stay as they are unless all ranks with experts want them in the same format."""
    wanted = set(told) - {ANY}
    return ROW_FORMATS[wanted.pop()] if len(wanted) == 1 else None


def agree(
    ranks: Ranks, facts: dict[str, int], numbers: Sequence[int], device: torch.device, what: str
) -> list[list[int]]:
    """The numbers of each rank. ValueError on every rank alike, so that all of them stop, where the facts differ."""
    table = ranks.gather([*facts.values(), *numbers], device, what)
    for place, name in enumerate(facts):
        values = [line[place] for line in table]
        if len(set(values)) > 1:
            told = ", ".join(f"{_value(name, value)} on rank {rank}" for rank, value in enumerate(values))
            raise bad_value(
                name, "the same on all ranks of the group", told, "call the layer in the same way on every rank"
            )
    return [line[len(facts) :] for line in table]


def _value(name: str, value: int) -> str:
    if name.startswith("dtype"):
        return str(_DTYPES[value])
    return str(bool(value)) if name.startswith("gradient") else str(value)
