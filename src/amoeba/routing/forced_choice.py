"""A choice of experts that is given instead of made: `torch.topk` over the experts answers with it.

T tokens · K experts per token · E experts · G groups of experts

    with ForcedChoice(expert_TK, num_experts=64) as forced:
        routing = route(logits_TE, config)        # or any other router that chooses by torch.topk
    forced.choices                                # how often it was asked; 0: this router chooses in another way

The router computes everything else itself, from its live logits, so the weights, and their gradients, are those it
would have found had it chosen these experts. Where it ranks groups of experts first, the groups of the given experts
win. A row of -1 keeps the router's own choice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from amoeba.core.errors import bad_value


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


def is_forced(tensor: Tensor) -> bool:
    """Whether a choice made here would be replaced. Asked by what chooses without torch.topk."""
    if has_torch_function_unary(tensor):  # any mode at all: it is asked in turn
        return bool(handle_torch_function(is_forced, (tensor,), tensor))
    return False


class ForcedChoice(TorchFunctionMode):
    """wrong: a boolean on the device that becomes True where the router's groups do not allow these experts."""

    def __init__(self, expert_TK: Tensor, num_experts: int, wrong: Tensor | None = None) -> None:
        super().__init__()
        self.expert_TK, self.num_experts, self.wrong = expert_TK, num_experts, wrong
        self.choices = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is is_forced:
            return True
        found = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            return self._replaced(found, *args, **(kwargs or {}))
        return found

    def _replaced(self, found: Any, input: Tensor, k: int, dim: int = -1, largest: bool = True, **options: Any) -> Any:
        """`found` itself, where this is no choice among experts or their groups."""
        (tokens, top_k), width = self.expert_TK.shape, input.shape[-1]
        if dim not in (-1, input.dim() - 1) or not largest or width == 0:
            return found
        rows = input.numel() // width
        if width == self.num_experts and k == top_k:
            if rows != tokens:
                remedy = "load the records of this batch"
                raise bad_value("replay", f"a pass of the {tokens} tokens that were loaded", rows, remedy)
            self.choices += 1
            forced = self.expert_TK.to(torch.int64).view(found[1].shape)
            chosen = torch.where(forced >= 0, forced, found[1])
            return _TopK(input.gather(-1, chosen), chosen)
        if input.dim() == 2 and rows == tokens and width < self.num_experts and self.num_experts % width == 0:
            return self._with_groups(input, k)
        return found

    def _with_groups(self, rank_TG: Tensor, k: int) -> Any:
        expert_TK = self.expert_TK.to(torch.int64)
        group_TK = expert_TK.clamp(min=0) // (self.num_experts // rank_TG.shape[1])
        needed_TG = torch.zeros_like(rank_TG, dtype=torch.int64).scatter_add_(1, group_TK, (expert_TK >= 0).long()) > 0
        if self.wrong is not None:
            self.wrong.logical_or_((needed_TG.sum(dim=1) > k).any())
        group = rank_TG.detach().masked_fill(needed_TG, torch.inf).topk(k, dim=1).indices
        return _TopK(rank_TG.gather(1, group), group)
