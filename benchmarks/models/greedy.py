"""Whether greedy decoding chose the tokens of the plain loop, and how near a tie it was where it did not.

agreement = compare(model, ids_BS, made_BN, plain_BN)
agreement.same, agreement.first_differences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The first one of a row. margin: by how much the plain loop's token was ahead of the second there, in logits."""

    row: int
    token: int  # counted from the first new one
    margin: float


@dataclass(frozen=True)
class Agreement:
    """median_margin: of all tokens of the plain loop; a difference far below it is a tie that rounding decides."""

    same: bool
    tokens: int
    first_differences: list[Difference]
    median_margin: float | None = None


@torch.no_grad()
def compare(model: Any, ids_BS: Tensor, made_BN: Tensor, plain_BN: Tensor) -> Agreement:
    """plain_BN: what the plain loop made of the same model and prompts."""
    made_BN = made_BN.to(plain_BN.device)
    differs_BN = made_BN != plain_BN
    if not bool(differs_BN.any()):
        return Agreement(True, made_BN.numel(), [])
    count = plain_BN.shape[1]
    logits_BNV = model(input_ids=torch.cat((ids_BS, plain_BN), 1), logits_to_keep=count + 1).logits[:, :-1].float()
    best_BN2 = logits_BNV.topk(2, -1).values
    margin_BN = best_BN2[..., 0] - best_BN2[..., 1]
    first = [
        Difference(row, at := int(differs_BN[row].nonzero()[0]), float(margin_BN[row, at]))
        for row in range(len(differs_BN))
        if bool(differs_BN[row].any())
    ]
    return Agreement(False, made_BN.numel(), first, float(margin_BN.median()))
