"""Load counts of a router, and the gradient that balances them.

T tokens · N = T·K chosen slots · E experts

    count_experts(expert_N, count_E1)                     # += how often each was chosen, and ids outside [0, E)
    add_entropy(logits_TE, totals, unit)                  # += T, and the entropy of softmax(logits) in these units
    balance_gradient(logits_TE, count_E, pull, z_pull)    # of pull · Σ_e count_e Σ_t p_te + z_pull · Σ_t logsumexp_t²

Sums over programs are made of integers, so they are the same in whatever order they come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments

IDS_AT_ONCE = 1024
TILE_ELEMENTS = 4096


def count_experts(expert_N: Tensor, count_E1: Tensor) -> None:
    """count_E1 (int64): of each expert, and at the end of ids outside [0, E)."""
    fit = expert_N.is_contiguous() and count_E1.is_contiguous()
    check_arguments(fit, "contiguous", expert_N=expert_N, count_E1=count_E1)
    ids, experts = expert_N.numel(), count_E1.numel() - 1
    if ids:
        _count[(cdiv(ids, IDS_AT_ONCE),)](
            expert_N, count_E1, ids, experts, BLOCK=IDS_AT_ONCE, BINS=next_power_of_2(experts + 2), num_warps=4
        )


def add_entropy(logits_TE: Tensor, totals: Tensor, unit: float) -> None:
    """totals: tokens and entropy, int64; the latter in this many nats."""
    rows, experts = logits_TE.shape
    tile = _tile(experts)
    check_arguments(logits_TE.is_contiguous(), "contiguous", logits_TE=logits_TE)
    if rows:
        _entropy[(cdiv(rows, tile["ROWS"]),)](logits_TE, totals, rows, experts, UNIT=unit, **tile, num_warps=4)


def balance_gradient(logits_TE: Tensor, count_E: Tensor, pull: float, z_pull: float) -> Tensor:
    """In the dtype of the logits."""
    rows, experts = logits_TE.shape
    tile = _tile(experts)
    fit = logits_TE.is_contiguous() and count_E.is_contiguous()
    check_arguments(fit, "contiguous", logits_TE=logits_TE, count_E=count_E)
    dlogits_TE = torch.empty_like(logits_TE)
    if rows:
        _gradient[(cdiv(rows, tile["ROWS"]),)](
            logits_TE, count_E, dlogits_TE, rows, experts, float(pull), float(z_pull), **tile, num_warps=4
        )
    return dlogits_TE


def _tile(experts: int) -> dict[str, int]:
    columns = next_power_of_2(experts)
    return {"ROWS": max(1, TILE_ELEMENTS // columns), "COLUMNS": columns}


@quick
@triton.jit
def _count(ids, counts, length, experts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + place, mask=place < length, other=0)
    chosen = tl.where((chosen >= 0) & (chosen < experts), chosen, experts)
    chosen = tl.where(place < length, chosen, experts + 1).to(tl.int32)
    found = tl.histogram(chosen, BINS)
    expert = tl.arange(0, BINS)
    tl.atomic_add(counts + expert, found.to(tl.int64), mask=(expert <= experts) & (found > 0), sem="relaxed")


@triton.jit
def _softmax(logits, rows, experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places and mask of a tile, its probabilities and the logsumexp of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (expert < experts)[None, :]
    place = row[:, None] * experts + expert[None, :]
    logit = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(logit, axis=1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(logit - highest[:, None])
    total = tl.sum(weight, axis=1)
    total = tl.where(row < rows, total, 1.0)
    return place, inside, row, expert, logit, weight / total[:, None], highest + tl.log(total)


@quick
@triton.jit
def _entropy(logits, totals, rows, experts, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    _, inside, row, _, logit, probability, logsumexp = _softmax(logits, rows, experts, ROWS, COLUMNS)
    terms = tl.where(inside & (probability > 0), probability * (logsumexp[:, None] - logit), 0.0)
    units = (tl.sum(terms, axis=1) / UNIT + 0.5).to(tl.int64)
    tl.atomic_add(totals, tl.sum((row < rows).to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(totals + 1, tl.sum(tl.where(row < rows, units, 0), axis=0), sem="relaxed")


@quick
@triton.jit
def _gradient(logits, counts, dlogits, rows, experts, pull, z_pull, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place, inside, _, expert, _, probability, logsumexp = _softmax(logits, rows, experts, ROWS, COLUMNS)
    slope = pull * tl.load(counts + expert, mask=expert < experts, other=0).to(tl.float32)
    mean = tl.sum(probability * slope[None, :], axis=1)
    found = probability * (slope[None, :] - mean[:, None] + 2 * z_pull * logsumexp[:, None])
    tl.store(dlogits + place, found.to(dlogits.dtype.element_ty), mask=inside)
