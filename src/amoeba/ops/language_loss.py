"""The loss of a language model from its last hidden states, without all logits in memory at once.

T tokens · H hidden · V vocabulary

    loss = linear_cross_entropy(hidden_TH, weight_VH, label_T)       # the sum over tokens whose label is in [0, V)
    loss = loss / count                                              # as transformers divides it

Logits are made for a part of the tokens, turned into their gradient on the spot and used up, so that memory holds one
part's logits, in the dtype of the hidden states. Gradients of hidden states and weight are ready when forward ends.
In exact mode the logits have its bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.ops import exact

# The logits of a part: 4096 tokens of a vocabulary of 32768 in bf16
PART_BYTES = 256 * 2**20

_TRITON = importlib.util.find_spec("triton") is not None


def linear_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Σ_t -log softmax(hidden_t · weightᵀ + bias)[label_t], in fp32 or wider; labels not in [0, V) are left out."""
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise bad_value(
            "hidden_TH and weight_VH",
            "shapes (T, H) and (V, H)",
            f"{tuple(hidden_TH.shape)} and {tuple(weight_VH.shape)}",
            "flatten batch and sequence",
        )
    if label_T.shape != hidden_TH.shape[:1]:
        raise bad_value(
            "label_T", f"shape ({hidden_TH.shape[0]},), one per token", tuple(label_T.shape), "flatten it as the tokens"
        )
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_TH, weight_VH = hidden_TH.to(dtype), weight_VH.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    multiply = _exactly if exact.looks_on() else torch.nn.functional.linear
    with exact.OUTSIDE:
        return _LinearCrossEntropy.apply(hidden_TH, weight_VH, label_T, bias_V, multiply)


def _exactly(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    return exact.product(hidden_TH[None], weight_VH.mT[None], bias_N=bias_V, dtype=hidden_TH.dtype)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, bias_V: Tensor | None, multiply: Callable
    ) -> Tensor:
        with torch.autocast(hidden_TH.device.type, enabled=False):
            loss, *gradients = _computed(hidden_TH, weight_VH, label_T, bias_V, multiply, ctx.needs_input_grad)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple:
        dhidden_TH, dweight_VH, dbias_V = (
            None if gradient is None else gradient * d_loss.to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return dhidden_TH, dweight_VH, None, dbias_V, None


def _computed(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    label_T: Tensor,
    bias_V: Tensor | None,
    multiply: Callable[..., Tensor],
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    tokens, vocabulary = hidden_TH.shape[0], weight_VH.shape[0]
    part = max(1, PART_BYTES // (vocabulary * hidden_TH.element_size()))
    wanted = needs[0] or needs[1] or needs[3]
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)  # of sums, over vocabulary and parts
    loss_T = torch.empty(tokens, dtype=wide, device=hidden_TH.device)
    dhidden_TH = torch.empty_like(hidden_TH) if needs[0] else None
    sums_VH = torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device) if needs[1] else None
    sums_V = torch.zeros(vocabulary, dtype=wide, device=weight_VH.device) if needs[3] else None
    for start in range(0, tokens, part):
        rows = slice(start, min(tokens, start + part))
        logits_TV = multiply(hidden_TH[rows], weight_VH, bias_V)
        _cross_entropy_(logits_TV, label_T[rows].contiguous(), loss_T[rows], wanted)
        if dhidden_TH is not None:
            torch.mm(logits_TV, weight_VH, out=dhidden_TH[rows])
        if sums_VH is not None:
            _add_product_(sums_VH, logits_TV.T, hidden_TH[rows])
        if sums_V is not None:
            sums_V += logits_TV.sum(0, dtype=wide)
        del logits_TV  # before the next part's are made
    return (
        loss_T.sum(),
        dhidden_TH,
        None if sums_VH is None else sums_VH.to(weight_VH.dtype),
        None if sums_V is None or bias_V is None else sums_V.to(bias_V.dtype),
    )


def _cross_entropy_(logits_TV: Tensor, label_T: Tensor, loss_T: Tensor, gradient: bool) -> None:
    """Fills loss_T; with `gradient`, replaces the logits by theirs."""
    if logits_TV.is_cuda and logits_TV.dtype != torch.float64 and _TRITON:
        from amoeba.kernels.cross_entropy import cross_entropy_

        return cross_entropy_(logits_TV, label_T, loss_T, gradient=gradient)
    counts_T = (label_T >= 0) & (label_T < logits_TV.shape[1])
    place_T1 = torch.where(counts_T, label_T, 0).unsqueeze(1)
    wide_TV = logits_TV.to(loss_T.dtype)
    logsumexp_T1 = wide_TV.logsumexp(1, keepdim=True)
    loss_T.copy_((logsumexp_T1 - wide_TV.gather(1, place_T1)).squeeze(1) * counts_T)
    if gradient:
        torch.exp(wide_TV - logsumexp_T1, out=wide_TV)
        wide_TV.scatter_add_(1, place_T1, -torch.ones_like(logsumexp_T1))
        logits_TV.copy_(wide_TV.mul_(counts_T.unsqueeze(1)))


def _add_product_(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """sums (fp32 or wider) += left @ right."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right)
    elif sums.is_cuda:
        torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    else:
        sums += (left @ right).float()
