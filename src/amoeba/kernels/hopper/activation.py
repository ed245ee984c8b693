"""The activation's backward with LoRA on Hopper, in Gluon: all that is made of dh and of a, from one pass over memory.

N = T·K routed rows · E experts · I intermediate · J = 2I · R rank of a factor · P ranks, joined and padded

    found = activate_backward(da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, offs_E, table, up=Up(...), down=...)
    found.ds_N, found.dlow_NP                       # <da', a>, and c · dh · B as `Addend` takes it
    found.db.write(gradient_EIR, first=..., rank=...), found.da_down.write(gradient_ERI.mT)

dh and ds are those of `amoeba.kernels.activate.activate_backward`, after which others read dh and s·a again. Here a
tile of them goes from registers to shared memory, and the matrix unit multiplies it there: dh · B, and the part that
these 128 rows have in Σ dhᵀ · low and in Σ (s·a)ᵀ · dlow_down (`amoeba.kernels.thin_pair` adds the parts up, without
atomics). So dh is written once and not read, and s·a is not written at all. Rows from offs_E[-1] on are neither read
nor written, their ds_N is 0. `dh_NJ` may be `h_NJ`: the thread that loads a number of h overwrites it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from amoeba.config import Activation
from amoeba.kernels.activation import constants, gated_backward
from amoeba.kernels.arguments import check_arguments, have_lines
from amoeba.kernels.configuration import Configuration
from amoeba.kernels.hopper.descriptor import shared_layout
from amoeba.kernels.hopper.product import BLOCK_M
from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.thin_pair import Sums
from amoeba.kernels.tiles import slots

# Columns of a step: the second product has as many rows, and the matrix unit multiplies no fewer.
BLOCK = 64
WARPS = 8
WIDEST_RANK = 64


class Up(NamedTuple):
    """Of gate and up: b as `join_factors` makes it, c · x Aᵀ, how many ranks are gate's and how many up's."""

    b_EOP: Tensor
    low_NP: Tensor
    gate_rank: int
    up_rank: int
    scaling: float


class Down(NamedTuple):
    """Of down: c · dy B, and its rank."""

    dlow_NP: Tensor
    rank: int


class Found(NamedTuple):
    ds_N: Tensor
    dlow_NP: Tensor
    db: Sums  # of (J, R), columns as in h
    da_down: Sums  # of (I, R)


def serves(activation: Activation, rows: int, experts: int, intermediate: int, rank: int) -> bool:
    """rank: the largest. Where experts have few rows, the parts of the sums would outweigh what is saved."""
    plain = activation.gated and not activation.interleaved and intermediate % BLOCK == 0
    return plain and rank <= WIDEST_RANK and rows >= BLOCK_M * experts


def activate_backward(
    da_NI: Tensor,
    h_NJ: Tensor,
    weight_TK: Tensor,
    order_N: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    offs_E: Tensor,
    table: Tensor,
    *,
    up: Up,
    down: Down,
) -> Found:
    rows, intermediate = da_NI.shape
    experts, width, padded = up.b_EOP.shape
    fit = have_lines(da_NI, h_NJ, dh_NJ, up.low_NP, down.dlow_NP) and order_N.is_contiguous()
    fit = fit and h_NJ.shape[1] == dh_NJ.shape[1] == width == 2 * intermediate and up.b_EOP.is_contiguous()
    check_arguments(fit, "rows that are contiguous inside", da_NI=da_NI, h_NJ=h_NJ, dh_NJ=dh_NJ, b_EOP=up.b_EOP)
    block_r, block_d = (max(16, next_power_of_2(rank)) for rank in (up.gate_rank + up.up_rank, down.rank))
    tiles = slots(rows, experts, BLOCK_M)
    ds_N = torch.zeros(rows, dtype=torch.float32, device=da_NI.device)
    dlow_NP = torch.empty((rows, padded), dtype=da_NI.dtype, device=da_NI.device)
    parts = torch.empty((tiles, width, block_r), dtype=torch.float32, device=da_NI.device)
    down_parts = torch.empty((tiles, intermediate, block_d), dtype=torch.float32, device=da_NI.device)
    _bound(activation, up.gate_rank, up.up_rank, block_r, block_d, padded, da_NI.dtype)[(tiles,)](
        da_NI,
        h_NJ,
        weight_TK.contiguous(),
        order_N,
        offs_E,
        table,
        dh_NJ,
        ds_N,
        up.b_EOP,
        up.low_NP,
        dlow_NP,
        parts,
        down.dlow_NP,
        down_parts,
        up.scaling,
        intermediate,
        da_NI.stride(0),
        h_NJ.stride(0),
        dh_NJ.stride(0),
        up.low_NP.stride(0),
        down.dlow_NP.stride(0),
    )
    tile = Configuration(BLOCK_M, BLOCK, 0, 1, WARPS, 1)
    return Found(ds_N, dlow_NP, Sums(parts, offs_E, rows, tile), Sums(down_parts, offs_E, rows, tile))


@cache
def _bound(
    activation: Activation, gate_rank: int, up_rank: int, block_r: int, block_d: int, padded: int, dtype: torch.dtype
) -> Any:
    named = constants(activation)
    del named["GATED"]
    return activation_kernel.bound(
        **named,
        GATE_RANK=gate_rank,
        UP_RANK=up_rank,
        PADDED=padded,
        TILE_LAYOUT=shared_layout((BLOCK_M, BLOCK), dtype),
        FACTOR_LAYOUT=shared_layout((BLOCK, block_r), dtype),
        LOW_LAYOUT=shared_layout((BLOCK_M, block_r), dtype),
        DOWN_LAYOUT=shared_layout((BLOCK_M, block_d), dtype),
        BLOCK_M=BLOCK_M,
        BLOCK=BLOCK,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=WARPS,
    )


@gluon.jit
def _load_thin(source, stride, row, end, COUNT: gl.constexpr, RANKS: gl.constexpr):
    """COUNT rows of RANKS numbers, zeros from `end` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // RANKS, RANKS // 8], [8, 1], [1, 0])
    n = row + gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    r = gl.arange(0, RANKS, gl.SliceLayout(0, layout))
    return gl.load(source + n.to(gl.int64)[:, None] * stride + r[None, :], mask=(n < end)[:, None], other=0.0)


@gluon.jit
def _store_part(part, parts, line, FIRST: gl.constexpr, RANKS: gl.constexpr):
    """The ranks from FIRST on of the columns from `line` on."""
    layout: gl.constexpr = part.type.layout
    c = line + gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
    r = gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    own = (r >= FIRST) & (r < FIRST + RANKS)
    gl.store(parts + (c * part.shape[1])[:, None] + r[None, :], part, mask=own[None, :])


@quick
@gluon.jit
def activation_kernel(
    da, h, weight, order, offs_E, table, dh, ds, factor, low, dlow, parts, dlow_down, down_parts, scaling, intermediate,
    da_stride, h_stride, dh_stride, low_stride, down_stride, KIND: gl.constexpr, ALPHA: gl.constexpr,
    CLAMP: gl.constexpr, LIMIT: gl.constexpr, UP_SHIFT: gl.constexpr, GATE_RANK: gl.constexpr, UP_RANK: gl.constexpr,
    PADDED: gl.constexpr, TILE_LAYOUT: gl.constexpr, FACTOR_LAYOUT: gl.constexpr, LOW_LAYOUT: gl.constexpr,
    DOWN_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """One program owns whole rows of one expert, so that ds and dh · B need no second pass."""
    dtype: gl.constexpr = dh.dtype.element_ty
    tile = gl.program_id(0)
    if tile >= gl.load(table):
        return
    expert = gl.load(table + 4 + tile * 4)
    row = gl.load(table + 4 + tile * 4 + 1)
    end = gl.load(table + 4 + tile * 4 + 2)
    start = gl.load(offs_E + expert - 1, mask=expert > 0, other=0)
    place = (start // BLOCK_M + expert + (row - start) // BLOCK_M).to(gl.int64)  # as `find_tile` numbers them
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [8, 1], [1, 0])
    of_rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_R, 16])
    of_columns: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_R // 2, 16])
    of_down: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_D // 2, 16])
    gates = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK], TILE_LAYOUT)
    ups = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK], TILE_LAYOUT)
    scaled = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK], TILE_LAYOUT)
    gate_factor = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK_R], FACTOR_LAYOUT)
    up_factor = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK_R], FACTOR_LAYOUT)
    of_low = _load_thin(low, low_stride, row, end, BLOCK_M, BLOCK_R)
    thin = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_R], LOW_LAYOUT, of_low)
    of_dlow = _load_thin(dlow_down, down_stride, row, end, BLOCK_M, BLOCK_D)
    down_thin = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], DOWN_LAYOUT, of_dlow)

    m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    c = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    own = m < end
    inside = own[:, None]
    scale = gl.load(weight + gl.load(order + m, mask=own, other=0), mask=own, other=0.0).to(gl.float32)[:, None]
    da_at = da + m.to(gl.int64)[:, None] * da_stride + c[None, :]
    h_at = h + m.to(gl.int64)[:, None] * h_stride + c[None, :]
    dh_at = dh + m.to(gl.int64)[:, None] * dh_stride + c[None, :]
    factor += expert.to(gl.int64) * 2 * intermediate * PADDED
    parts += place * 2 * intermediate * BLOCK_R
    down_parts += place * intermediate * BLOCK_D

    total = gl.zeros((BLOCK_M, BLOCK_R), gl.float32, of_rows)
    zeros = gl.zeros((BLOCK, BLOCK_R), gl.float32, of_columns)
    down_zeros = gl.zeros((BLOCK, BLOCK_D), gl.float32, of_down)
    ds_row = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, layout))
    d = gl.load(da_at, mask=inside, other=0.0)
    gate = gl.load(h_at, mask=inside, other=0.0)
    up = gl.load(h_at + intermediate, mask=inside, other=0.0)
    gate_lines = _load_thin(factor, PADDED, 0, intermediate, BLOCK, BLOCK_R)
    up_lines = _load_thin(factor, PADDED, intermediate, 2 * intermediate, BLOCK, BLOCK_R)
    for column in range(0, intermediate, BLOCK):
        d = d.to(gl.float32)
        a, dgate, dup = gated_backward(
            scale * d, gate.to(gl.float32), up.to(gl.float32), KIND, ALPHA, CLAMP, LIMIT, UP_SHIFT
        )
        ds_row += gl.sum(d * a, axis=1)
        dgate = dgate.to(dtype)
        dup = dup.to(dtype)
        gates.store(dgate)
        ups.store(dup)
        scaled.store((scale * a).to(dtype))
        gate_factor.store(gate_lines)
        up_factor.store(up_lines)
        # Threads wrote, the matrix unit reads as another party. The fence waits for all that a thread has under way,
        # so the loads of the next columns and the stores of these come after it.
        fence_async_shared()
        total = warpgroup_mma(gates, gate_factor, total, is_async=True)
        total = warpgroup_mma(ups, up_factor, total, is_async=True)
        of_gate = warpgroup_mma(gates.permute((1, 0)), thin, zeros, use_acc=False, is_async=True)
        of_up = warpgroup_mma(ups.permute((1, 0)), thin, zeros, use_acc=False, is_async=True)
        of_a = warpgroup_mma(scaled.permute((1, 0)), down_thin, down_zeros, use_acc=False, is_async=True)
        ahead = column + BLOCK
        more = inside & (ahead < intermediate)
        d = gl.load(da_at + BLOCK, mask=more, other=0.0)
        gate = gl.load(h_at + BLOCK, mask=more, other=0.0)
        up = gl.load(h_at + BLOCK + intermediate, mask=more, other=0.0)
        gate_lines = _load_thin(factor, PADDED, ahead, intermediate, BLOCK, BLOCK_R)
        up_lines = _load_thin(factor, PADDED, ahead + intermediate, 2 * intermediate, BLOCK, BLOCK_R)
        gl.store(dh_at, dgate, mask=inside)
        gl.store(dh_at + intermediate, dup, mask=inside)
        total, of_gate, of_up, of_a = warpgroup_mma_wait(0, deps=(total, of_gate, of_up, of_a))
        _store_part(of_gate, parts, column, 0, GATE_RANK)
        _store_part(of_up, parts, column + intermediate, GATE_RANK, UP_RANK)
        _store_part(of_a, down_parts, column, 0, BLOCK_D)
        da_at += BLOCK
        h_at += BLOCK
        dh_at += BLOCK

    gl.store(ds + m, ds_row, mask=own)
    n = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_rows))
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, of_rows))
    dlow_at = dlow + n.to(gl.int64)[:, None] * PADDED + r[None, :]
    gl.store(dlow_at, (total * scaling).to(dtype), mask=(n < end)[:, None])
    for padding in gl.static_range(BLOCK_R, PADDED, BLOCK_R):
        gl.store(dlow_at + padding, gl.zeros((BLOCK_M, BLOCK_R), dtype, of_rows), mask=(n < end)[:, None])
