"""LoRA factors as our kernels take them: one pair for gate and up together, ranks padded, in the dtype of the rows.

E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank, of the joined factors: gate's, up's, zeros

    pair = of_up(lora, activation, x_TH.dtype, smallest=16)
    pair.a_ERI, pair.b_EOR                                    # h += c (x aᵀ) bᵀ
    split_up(da_ERI, db_EOR, lora, activation, needs)                # gradients by name

Joined, gate and up are one product each way: x and dh are read once for both. b is zero where a column of h is gate's
and a rank up's, or the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.config import Activation
from amoeba.cpu.pointers import place_of
from amoeba.kernels.addend import padded_rank
from amoeba.problem import Needs
from amoeba.weights import LoraFactors


class Pair(NamedTuple):
    a_ERI: Tensor
    b_EOR: Tensor


def of_up(lora: LoraFactors, activation: Activation, dtype: torch.dtype, smallest: int) -> Pair | None:
    """smallest: see `padded_rank`."""
    parts = _parts(lora, activation)
    if not parts:
        return None
    experts, _, hidden = parts[0].a.shape
    intermediate = parts[0].b.shape[1]
    rank = padded_rank(sum(part.a.shape[1] for part in parts), smallest)
    a_ERI = parts[0].a.new_zeros((experts, rank, hidden), dtype=dtype)
    b_EOR = parts[0].b.new_zeros((experts, activation.width(intermediate), rank), dtype=dtype)
    for part in parts:
        a_ERI[:, part.ranks].copy_(part.a)
        b_EOR[:, part.rows, part.ranks].copy_(part.b)
    return Pair(a_ERI, b_EOR)


def of_down(lora: LoraFactors, dtype: torch.dtype, smallest: int) -> Pair | None:
    a, b = lora.down_lora_a, lora.down_lora_b
    if a is None or b is None:
        return None
    own = a.shape[1]
    rank = padded_rank(own, smallest)
    if rank == own and all(_as_it_is(factor, dtype) for factor in (a, b)):
        return Pair(a, b)
    a_ERI = a.new_zeros((a.shape[0], rank, a.shape[2]), dtype=dtype)
    b_EOR = b.new_zeros((*b.shape[:2], rank), dtype=dtype)
    a_ERI[:, :own].copy_(a)
    b_EOR[:, :, :own].copy_(b)
    return Pair(a_ERI, b_EOR)


def split_up(
    da_ERI: Tensor | None, db_EOR: Tensor | None, lora: LoraFactors, activation: Activation, needs: Needs
) -> dict[str, Tensor]:
    """Gradients of gate's and up's factors by name, those that are needed, from those of the joined ones."""
    found: dict[str, Tensor] = {}
    for part in _parts(lora, activation):
        if da_ERI is not None and getattr(needs, f"{part.name}_lora_a"):
            found[f"{part.name}_lora_a"] = torch.empty_like(part.a).copy_(da_ERI[:, part.ranks])
        if db_EOR is not None and getattr(needs, f"{part.name}_lora_b"):
            found[f"{part.name}_lora_b"] = torch.empty_like(part.b).copy_(db_EOR[:, part.rows, part.ranks])
    return found


def _as_it_is(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bulk copy engine can read it."""
    return factor.dtype == dtype and factor.is_contiguous() and place_of(factor) % 16 == 0


class _Part(NamedTuple):
    name: str
    a: Tensor
    b: Tensor
    rows: slice  # of joined b
    ranks: slice


def _parts(lora: LoraFactors, activation: Activation) -> list[_Part]:
    """Gate and up, where they have factors."""
    found: list[_Part] = []
    ranks = 0
    for place, (name, a, b) in enumerate(
        (("gate", lora.gate_lora_a, lora.gate_lora_b), ("up", lora.up_lora_a, lora.up_lora_b))
    ):
        if a is None or b is None:
            continue
        own, intermediate = a.shape[1], b.shape[1]
        if not activation.gated:
            rows = slice(None)
        elif activation.interleaved:
            rows = slice(place, None, 2)
        else:
            rows = slice(place * intermediate, (place + 1) * intermediate)
        found.append(_Part(name, a, b, rows, slice(ranks, ranks + own)))
        ranks += own
    return found
