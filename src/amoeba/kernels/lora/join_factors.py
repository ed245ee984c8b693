"""LoRA factors as the products take them, all of a layer in one launch: joined, padded with zeros, in the rows' dtype.

E experts · H hidden · I intermediate · J = 2I or I · R ranks of one factor · P ranks, joined and padded

    up, down = join_factors(lora, activation, x_TH.dtype)
    up.a_EPI, up.b_EOP                              # h += c (x aᵀ) bᵀ

Ranks of the pair of up are gate's, then up's, then zeros; b is zero where a column of h is gate's and a rank up's, or
the other way round. So gate and up are one product each way: x and dh are read once for both. Where gate and up share
their A, its ranks are there once and b has no such zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.weights import LoraFactors
from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.lora.epilogue import padded_rank

BLOCK, WARPS = 4096, 8


class Pair(NamedTuple):
    a_EPI: Tensor
    b_EOP: Tensor


def join_factors(lora: LoraFactors, activation: Activation, dtype: torch.dtype) -> tuple[Pair | None, Pair | None]:
    """The pairs of up and of down; None for one that has no factors."""
    up_a = None if lora.shares_a else lora.up_lora_a
    up = _Joined((lora.gate_lora_a, up_a), (lora.gate_lora_b, lora.up_lora_b), activation, dtype)
    down = _Joined((None, lora.down_lora_a), (None, lora.down_lora_b), Activation(gated=False), dtype)
    tiles = up.tiles + down.tiles
    if tiles:
        experts = (up if up.tiles else down).experts
        _join[(tiles, experts)](
            *up.tensors,
            *down.tensors,
            UP=up.constants,
            DOWN=down.constants,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return up.pair, down.pair


class _Joined:
    """One pair, not filled yet, and what the kernel wants to know of it. The factors are gate's and up's, or None; a b
    of up without an a goes with gate's."""

    def __init__(
        self,
        a: tuple[Tensor | None, Tensor | None],
        b: tuple[Tensor | None, Tensor | None],
        activation: Activation,
        dtype: torch.dtype,
    ) -> None:
        a_both, b_both = ([None if t is None else t.contiguous() for t in each] for each in (a, b))
        ranks = [0 if t is None else t.shape[1] for t in a_both]
        some_a, some_b = (next((t for t in each if t is not None), None) for each in (a_both, b_both))
        self.pair: Pair | None = None
        depth = width = rank = self.experts = 0
        if some_a is not None and some_b is not None:
            self.experts, _, depth = some_a.shape
            rank, width = padded_rank(sum(ranks)), activation.width(some_b.shape[1])
            self.pair = Pair(
                torch.empty((self.experts, rank, depth), dtype=dtype, device=some_a.device),
                torch.empty((self.experts, width, rank), dtype=dtype, device=some_a.device),
            )
        self.tensors = (*a_both, *b_both, *(self.pair or (None, None)))
        self.constants = Group(
            GATE_RANK=ranks[0],
            UP_FIRST=0 if a_both[1] is None and b_both[1] is not None else ranks[0],
            RANKS=sum(ranks),
            PADDED=rank,
            DEPTH=depth,
            WIDTH=width,
            GATED=activation.gated,
            INTERLEAVED=activation.interleaved,
        )
        self.tiles = cdiv(rank * depth, BLOCK) + cdiv(rank * width, BLOCK)


@triton.jit
def _join_a(gate, up, out, tile, expert, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """(P, depth) of one expert: rows of gate's a, rows of up's, zeros."""
    at = tile * BLOCK + tl.arange(0, BLOCK)
    rank = at // PAIR.DEPTH
    joined = tl.zeros((BLOCK,), tl.float32)
    if PAIR.GATE_RANK > 0:
        source = gate + expert * (PAIR.GATE_RANK * PAIR.DEPTH) + at
        joined += tl.load(source, mask=rank < PAIR.GATE_RANK, other=0.0).to(tl.float32)
    if PAIR.RANKS > PAIR.GATE_RANK:
        source = up + expert * ((PAIR.RANKS - PAIR.GATE_RANK) * PAIR.DEPTH) + at - PAIR.GATE_RANK * PAIR.DEPTH
        joined += tl.load(source, mask=(rank >= PAIR.GATE_RANK) & (rank < PAIR.RANKS), other=0.0).to(tl.float32)
    tl.store(out + expert * (PAIR.PADDED * PAIR.DEPTH) + at, joined.to(out.dtype.element_ty), mask=rank < PAIR.PADDED)


@triton.jit
def _join_b(gate, up, out, tile, expert, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """(width, P) of one expert. PAIR.UP_FIRST: up's ranks are the last ones, from here on."""
    at = tile * BLOCK + tl.arange(0, BLOCK)
    column, rank = at // PAIR.PADDED, at % PAIR.PADDED
    OWN: tl.constexpr = PAIR.WIDTH // 2 if PAIR.GATED else PAIR.WIDTH
    if not PAIR.GATED:
        own, of_up = column, column < PAIR.WIDTH
    elif PAIR.INTERLEAVED:
        own, of_up = column // 2, column % 2 == 1
    else:
        own, of_up = column % OWN, column >= OWN
    inside = column < PAIR.WIDTH
    joined = tl.zeros((BLOCK,), tl.float32)
    if PAIR.GATE_RANK > 0:
        source = gate + expert * (OWN * PAIR.GATE_RANK) + own * PAIR.GATE_RANK + rank
        joined += tl.load(source, mask=inside & (of_up == 0) & (rank < PAIR.GATE_RANK), other=0.0).to(tl.float32)
    if PAIR.RANKS > PAIR.UP_FIRST:
        UP_RANK: tl.constexpr = PAIR.RANKS - PAIR.UP_FIRST
        source = up + expert * (OWN * UP_RANK) + own * UP_RANK + rank - PAIR.UP_FIRST
        mine = inside & of_up & (rank >= PAIR.UP_FIRST) & (rank < PAIR.RANKS)
        joined += tl.load(source, mask=mine, other=0.0).to(tl.float32)
    tl.store(out + expert * (PAIR.WIDTH * PAIR.PADDED) + at, joined.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join_pair(gate_a, up_a, gate_b, up_b, a, b, tile, expert, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    A_TILES: tl.constexpr = (PAIR.PADDED * PAIR.DEPTH + BLOCK - 1) // BLOCK
    if tile < A_TILES:
        _join_a(gate_a, up_a, a, tile, expert, PAIR, BLOCK)
    else:
        _join_b(gate_b, up_b, b, tile - A_TILES, expert, PAIR, BLOCK)


@quick
@triton.jit
def _join(
    gate_a, up_a, gate_b, up_b, joined_a, joined_b, no_a, down_a, no_b, down_b, joined_down_a, joined_down_b,
    UP: tl.constexpr, DOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    A_TILES: tl.constexpr = (UP.PADDED * UP.DEPTH + BLOCK - 1) // BLOCK
    UP_TILES: tl.constexpr = A_TILES + (UP.PADDED * UP.WIDTH + BLOCK - 1) // BLOCK
    if tile < UP_TILES:
        if UP.RANKS > 0:
            _join_pair(gate_a, up_a, gate_b, up_b, joined_a, joined_b, tile, expert, UP, BLOCK)
    else:
        if DOWN.RANKS > 0:
            down_tile = tile - UP_TILES
            _join_pair(no_a, down_a, no_b, down_b, joined_down_a, joined_down_b, down_tile, expert, DOWN, BLOCK)
