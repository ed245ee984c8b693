"""LoRA's backward: two thin products of sorted rows from one read of them, with factors and with other thin rows.

T tokens · K experts per token · N = T·K routed rows · E experts · W width of the rows · P ranks, padded · S tiles

    thin_NP, sums = lora_backward(dy_TH, b_EHP, low_NP, offs_E, rank=16, scaling=2.0, order_N=order_N, ...)
    sums.write(gradient_EHR)                    # Σ over each expert's rows of rowᵀ · weight · low

`thin` is `scaling` · rows · factor, as `Addend` takes it. The sums over an expert's rows would need all of them in one
program; here each tile of rows leaves its own part in fp32 (at rank 16 an eighth of the rows in size), and a second
launch adds the parts in their order: no atomics. Rows past offs_E[-1] are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.lora.epilogue import padded_rank
from amoeba.kernels.tile_sizes import Configuration, as_many, capability_of
from amoeba.kernels.tiles import find_tile, slots, tile_constants

# block_n: columns of a step; block_k is not used. The large one takes 172 KB of shared memory and 102 registers at rank
# 32, 213 KB at rank 64 (Triton 3.9 for Hopper): rows are copied there once and multiplied twice. On an H200, rank 16,
# 131072 rows of 1024 in 64 experts, with the sum of the parts: 0.087 ms by the narrow one, 0.093 to 0.141 by others.
_NARROW, _NARROW_RANK = Configuration(128, 64, 0, 1, 4, 3), 16
_LARGE, _LARGE_RANK = Configuration(256, 64, 0, 1, 8, 4), 64
_MODEST = Configuration(128, 32, 0, 1, 8, 3)
_SMALL = Configuration(64, 32, 0, 1, 4, 2)  # for fp32, and where an expert has few rows
_FEW_ROWS = 128
# Of a sum of parts: numbers of a program, and how many of its parts are on their way from memory at a time, and one.
_SUM_BLOCK, _SUM_STAGES = 1024, 4


def widest_rank(dtype: torch.dtype) -> int:
    """Whose sums a program keeps in registers; fp32 is multiplied there, too."""
    return 32 if dtype == torch.float32 else 128


def configuration(
    rows: int, experts: int, rank: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> Configuration:
    """capability None stands for Triton's interpreter."""
    if dtype == torch.float32 or rows <= _FEW_ROWS * experts:
        return _SMALL
    large = capability is None or capability in ((9, 0), (10, 0), (10, 3))  # 227 KB of shared memory
    if large and rank <= _LARGE_RANK:
        return _NARROW if rank <= _NARROW_RANK else _LARGE
    return _MODEST


@dataclass(frozen=True)
class Sums:
    """Parts of Σ rowᵀ · low, tile after tile."""

    parts: Tensor  # (S, W, rank) in fp32
    offs_E: Tensor
    rows: int
    chosen: Configuration

    def write(self, out_EOR: Tensor, *, first: int = 0, step: int = 1, rank: int = 0) -> Tensor:
        """Of the columns first, first + step, ... of the rows, and of the ranks from `rank` on."""
        experts, columns, ranks = out_EOR.shape
        block_r = next_power_of_2(ranks)
        block_o = max(1, _SUM_BLOCK // block_r)
        columns_and_ranks = Group(
            WIDTH=self.parts.shape[1], RANK=self.parts.shape[2], COLUMNS=columns, RANKS=ranks, FIRST=first, STEP=step,
            FIRST_RANK=rank, STRIDES=out_EOR.stride(),
        )  # fmt: skip
        _add_parts[(experts, cdiv(columns, block_o))](
            self.parts,
            self.offs_E,
            out_EOR,
            OF=columns_and_ranks,
            TILES=Group(**tile_constants(self.rows, experts, self.chosen)),
            BLOCK_O=block_o,
            BLOCK_R=block_r,
            STAGES=_SUM_STAGES,
            num_warps=4,
        )
        return out_EOR


def lora_backward(
    rows: Tensor,
    factor_EWP: Tensor,
    low_NP: Tensor,
    offs_E: Tensor,
    *,
    rank: int,
    scaling: float,
    order_N: Tensor | None = None,
    weight_TK: Tensor | None = None,
    top_k: int = 1,
) -> tuple[Tensor, Sums]:
    """rows: sorted, or, with order_N, found by order // top_k. weight_TK: what each sorted row of low is multiplied by
    in the sums, at order_N. rank: the number of columns of factor and low that are not padding (`padded_rank`)."""
    count, (experts, width, padded) = low_NP.shape[0], factor_EWP.shape
    fit = rows.shape[1] == width and offs_E.shape[0] == experts and have_lines(rows, low_NP)
    block_r = padded_rank(rank)
    fit = fit and factor_EWP.is_contiguous() and rank <= widest_rank(rows.dtype)
    fit = fit and block_r <= min(padded, low_NP.shape[1])
    fit = fit and (weight_TK is None or order_N is not None)
    check_arguments(fit, "rows (., W), factors (E, W, P) and thin rows (N, P)", rows=rows, factor_EWP=factor_EWP)
    chosen = configuration(count, as_many(experts), rank, rows.dtype, capability_of(rows.device))
    thin_NP = torch.empty((count, block_r), dtype=rows.dtype, device=rows.device)
    tiles = slots(count, experts, chosen.block_m)
    parts = torch.empty((tiles, width, block_r), dtype=torch.float32, device=rows.device)
    if count:
        _lora_backward[(tiles,)](
            rows,
            factor_EWP,
            low_NP,
            order_N,
            None if weight_TK is None else weight_TK.contiguous(),
            offs_E,
            thin_NP,
            parts,
            scaling,
            OF=Group(STRIDE_ROW=rows.stride(0), STRIDE_LOW=low_NP.stride(0), WIDTH=width, PADDED=padded, TOP_K=top_k),
            TILES=Group(**tile_constants(count, experts, chosen)),
            BLOCK_W=min(chosen.block_n, max(16, next_power_of_2(width))),
            BLOCK_R=block_r,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    return thin_NP, Sums(parts, offs_E, count, chosen)


@quick
@triton.jit
def _lora_backward(
    rows,
    factor,
    low,
    order,
    weight,
    offs,
    thin,
    parts,
    scaling,
    OF: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    WIDTH: tl.constexpr = OF.WIDTH
    PADDED: tl.constexpr = OF.PADDED
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    expert, first_row, row_end, _ = find_tile(offs, TILES)
    if first_row >= row_end:
        return
    dtype: tl.constexpr = thin.dtype.element_ty
    row = first_row + tl.arange(0, BLOCK_M)
    inside = (row < row_end)[:, None]
    row_64 = row.to(tl.int64)[:, None]
    rank = tl.arange(0, BLOCK_R)[None, :]
    other = tl.load(low + row_64 * OF.STRIDE_LOW + rank, mask=inside, other=0.0)
    source = row
    if order is not None:
        slot = tl.load(order + row, mask=row < row_end, other=0)
        source = slot // OF.TOP_K
        if weight is not None:
            scale = tl.load(weight + slot, mask=row < row_end, other=0.0).to(tl.float32)
            other = (other.to(tl.float32) * scale[:, None]).to(dtype)
    column = tl.arange(0, BLOCK_W)
    row_pointers = rows + source.to(tl.int64)[:, None] * OF.STRIDE_ROW + column[None, :]
    factor_pointers = factor + expert.to(tl.int64) * (WIDTH * PADDED) + column[:, None] * PADDED + rank
    part_pointers = parts + tl.program_id(0).to(tl.int64) * (WIDTH * BLOCK_R) + column[:, None] * BLOCK_R + rank
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for done in range(0, WIDTH, BLOCK_W):
        if WIDTH % BLOCK_W == 0:
            tile = tl.load(row_pointers, mask=inside, other=0.0)
            thin_tile = tl.load(factor_pointers)
        else:
            left = column < WIDTH - done
            tile = tl.load(row_pointers, mask=inside & left[None, :], other=0.0)
            thin_tile = tl.load(factor_pointers, mask=left[:, None], other=0.0)
        total = tl.dot(tile, thin_tile, total, input_precision="ieee")
        part = tl.dot(tl.trans(tile), other, input_precision="ieee")
        tl.store(part_pointers, part, mask=(column < WIDTH - done)[:, None])
        row_pointers += BLOCK_W
        factor_pointers += BLOCK_W * PADDED
        part_pointers += BLOCK_W * BLOCK_R
    tl.store(thin + row_64 * BLOCK_R + rank, (total * scaling).to(dtype), mask=inside)


@quick
@triton.jit
def _add_parts(
    parts,
    offs,
    out,
    OF: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One expert's parts, of some columns; its slots are those that `find_tile` gives it."""
    expert = tl.program_id(0)
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    first_slot = start if TILES.SLOT_PER_ROW else start // BLOCK_M + expert
    count = (end - start + BLOCK_M - 1) // BLOCK_M
    column = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O))[:, None]
    rank = tl.arange(0, BLOCK_R)[None, :]
    inside = (column < OF.COLUMNS) & (rank < OF.RANKS)
    PART: tl.constexpr = OF.WIDTH * OF.RANK
    at = parts + first_slot.to(tl.int64) * PART + (OF.FIRST + column * OF.STEP) * OF.RANK + OF.FIRST_RANK + rank
    total = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
    for _ in tl.range(count, num_stages=STAGES):
        total += tl.load(at, mask=inside, other=0.0)
        at += PART
    place = out + expert.to(tl.int64) * OF.STRIDES[0] + column.to(tl.int64) * OF.STRIDES[1] + rank * OF.STRIDES[2]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
