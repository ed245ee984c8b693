"""`activate_backward` beside LoRA factors: it makes the thin products of dh and s·a, which it has in registers.

T tokens · K experts per token · N = T·K routed rows · E experts · I intermediate · J = 2I (gate and up) or I
P ranks, joined and padded

    ds_N = activate_backward_low_rank(
        da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, scaled_a_NI, offs_E,
        scaling=2.0, b_EJP=up.b_EOP, dlow_NP=dlow, a_EPI=down.a_EPI, low_down_NR=low_down,
    )

`dlow` = scaling · dh · b and `low_down` = scaling · s·a · aᵀ would otherwise be passes of their own over N x J and NxI.
A program owns 64 whole rows of one expert, so that no sum crosses programs. Rows of sentinels are neither computed nor
written, in ds neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.config import Activation
from amoeba.kernels.activation import constants, gated_backward, plain_backward
from amoeba.kernels.arguments import check_arguments
from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.tiles import find_tile, slots

# A tile of h: so many rows and columns. Takes 128 registers with Triton 3.9 for Hopper, so that two programs of 8 warps
# share a multiprocessor; twice the columns take 193, half the warps 178. Speed not measured yet.
BLOCK_M, BLOCK_I, WARPS = 64, 32, 8
# Sums are kept in registers: 64 rows by the ranks. Beyond, thin products of their own are made.
WIDEST_RANK = 128


def activate_backward_low_rank(
    da_NI: Tensor,
    h_NJ: Tensor,
    weight_TK: Tensor,
    order_N: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    scaled_a_NI: Tensor | None,
    offs_E: Tensor,
    *,
    scaling: float,
    b_EJP: Tensor | None,
    dlow_NP: Tensor | None,
    up_rank: int,
    a_EPI: Tensor | None,
    low_down_NR: Tensor | None,
) -> Tensor:
    """As `activate_backward`; up_rank: ranks of b that are no padding. `dlow_NP` and `low_down_NR` are written where
    they are given; low_down_NR may be narrower than a_EPI, by ranks that are padding. All tensors are contiguous."""
    (rows, intermediate), experts = da_NI.shape, offs_E.shape[0]
    tensors = (da_NI, h_NJ, order_N, dh_NJ, scaled_a_NI, b_EJP, dlow_NP, a_EPI, low_down_NR)
    fit = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    fit = fit and h_NJ.shape[1] == dh_NJ.shape[1] == activation.width(intermediate)
    check_arguments(fit, "contiguous tensors", da_NI=da_NI, h_NJ=h_NJ, dh_NJ=dh_NJ, dlow_NP=dlow_NP)
    ds_N = torch.empty(rows, dtype=torch.float32, device=da_NI.device)
    if rows == 0:
        return ds_N
    _activate_backward[(slots(rows, experts, BLOCK_M),)](
        da_NI,
        h_NJ,
        weight_TK.contiguous(),
        order_N,
        offs_E,
        dh_NJ,
        scaled_a_NI,
        ds_N,
        b_EJP,
        dlow_NP,
        a_EPI,
        low_down_NR,
        scaling,
        I=intermediate,
        UP_RANK=max(16, next_power_of_2(up_rank)),
        UP_PADDED=0 if dlow_NP is None else dlow_NP.shape[1],
        DOWN_RANK=0 if low_down_NR is None else low_down_NR.shape[1],
        DOWN_PADDED=0 if a_EPI is None else a_EPI.shape[1],
        INTERLEAVED=activation.interleaved,
        **constants(activation),
        EXPERTS=experts,
        BLOCK_E=next_power_of_2(experts),
        SLOT_PER_ROW=rows < rows // BLOCK_M + experts,
        BLOCK_M=BLOCK_M,
        BLOCK_I=BLOCK_I,
        num_warps=WARPS,
    )
    return ds_N


@triton.jit
def _load(
    da_row,
    h_row,
    row_in,
    first,
    I: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """A tile of da, and of h: gates (both by turns where they are interleaved), and ups where they lie apart."""
    column = (first + tl.arange(0, BLOCK_I))[None, :]
    inside = row_in[:, None] & (column < I)
    d = tl.load(da_row + column, mask=inside, other=0.0)
    if INTERLEAVED:
        pair = (2 * first + tl.arange(0, 2 * BLOCK_I))[None, :]
        z = tl.load(h_row + pair, mask=row_in[:, None] & (pair < 2 * I), other=0.0)
    else:
        z = tl.load(h_row + column, mask=inside, other=0.0)
    up = d
    if GATED and not INTERLEAVED:
        up = tl.load(h_row + (I + column), mask=inside, other=0.0)
    return d, z, up


@triton.jit
def _add_thin(total, tile_MC, factor, column_C, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, STRIDE_RANK: tl.constexpr,
              RANK: tl.constexpr):  # fmt: skip
    """total += tile · the rows `column_C` of a thin matrix."""
    rank = tl.arange(0, RANK)
    pointers = factor + column_C[:, None] * STRIDE + rank[None, :] * STRIDE_RANK
    thin = tl.load(pointers, mask=(column_C < COLUMNS)[:, None], other=0.0)
    return tl.dot(tile_MC.to(thin.dtype), thin, total, input_precision="ieee")


@quick
@triton.jit
def _activate_backward(
    da,
    h,
    weight,
    order,
    offs,
    dh,
    scaled_a,
    ds,
    b,
    dlow,
    a_down,
    low_down,
    scaling,
    I: tl.constexpr,
    UP_RANK: tl.constexpr,
    UP_PADDED: tl.constexpr,
    DOWN_RANK: tl.constexpr,
    DOWN_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOT_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """In place, as `_activate_backward` of `activate`: hence the barrier between a tile's loads and its stores."""
    expert, first_row, row_end, _ = find_tile(offs, EXPERTS, BLOCK_E, SLOT_PER_ROW, 1, BLOCK_M, 1)
    if first_row >= row_end:
        return
    J: tl.constexpr = 2 * I if GATED else I
    dtype: tl.constexpr = dh.dtype.element_ty
    row = first_row + tl.arange(0, BLOCK_M)
    row_in = row < row_end
    slot = tl.load(order + row, mask=row_in, other=0)
    weight_M = tl.load(weight + slot, mask=row_in, other=0.0).to(tl.float32)
    # A sum over one number. Without it the compiler moves the change of layout before each thin product up to the loads
    # and computes the activation three times over.
    scale = tl.sum(tl.where(tl.arange(0, 2)[None, :] == 0, weight_M[:, None], 0.0), axis=1)[:, None]
    row_64 = row.to(tl.int64)[:, None]
    h_row, dh_row, da_row = h + row_64 * J, dh + row_64 * J, da + row_64 * I
    dot = tl.zeros((BLOCK_M, BLOCK_I), tl.float32)
    if dlow is not None:
        b += expert.to(tl.int64) * (J * UP_PADDED)
        dlow_total = tl.zeros((BLOCK_M, UP_RANK), tl.float32)
    if low_down is not None:
        a_down += expert.to(tl.int64) * (DOWN_PADDED * I)
        low_total = tl.zeros((BLOCK_M, DOWN_RANK), tl.float32)
    d, z, up = _load(da_row, h_row, row_in, 0, I, GATED, INTERLEAVED, BLOCK_I)
    for first in range(0, I, BLOCK_I):
        column_I = first + tl.arange(0, BLOCK_I)
        column = column_I[None, :]
        inside = row_in[:, None] & (column < I)
        tl.debug_barrier()
        # on their way while this tile is computed
        next_d, next_z, next_up = _load(da_row, h_row, row_in, first + BLOCK_I, I, GATED, INTERLEAVED, BLOCK_I)
        d = d.to(tl.float32)
        if INTERLEAVED:
            pair_C = 2 * first + tl.arange(0, 2 * BLOCK_I)
            gate_32, up_32 = tl.split(tl.reshape(z.to(tl.float32), (BLOCK_M, BLOCK_I, 2)))
            a, dgate, dup = gated_backward(scale * d, gate_32, up_32, KIND, ALPHA, CLAMP, LIMIT, UP_SHIFT)
            d_both = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * BLOCK_I)).to(dtype)
            tl.store(dh_row + pair_C[None, :], d_both, mask=row_in[:, None] & (pair_C < J)[None, :])
            if dlow is not None:
                dlow_total = _add_thin(dlow_total, d_both, b, pair_C, J, UP_PADDED, 1, UP_RANK)
        elif GATED:
            a, dgate, dup = gated_backward(
                scale * d, z.to(tl.float32), up.to(tl.float32), KIND, ALPHA, CLAMP, LIMIT, UP_SHIFT
            )
            dgate, dup = dgate.to(dtype), dup.to(dtype)
            tl.store(dh_row + column, dgate, mask=inside)
            tl.store(dh_row + (I + column), dup, mask=inside)
            if dlow is not None:
                dlow_total = _add_thin(dlow_total, dgate, b, column_I, I, UP_PADDED, 1, UP_RANK)
                dlow_total = _add_thin(dlow_total, dup, b + I * UP_PADDED, column_I, I, UP_PADDED, 1, UP_RANK)
        else:
            a, dz = plain_backward(scale * d, z.to(tl.float32), KIND, ALPHA, CLAMP, LIMIT)
            dz = dz.to(dtype)
            tl.store(dh_row + column, dz, mask=inside)
            if dlow is not None:
                dlow_total = _add_thin(dlow_total, dz, b, column_I, I, UP_PADDED, 1, UP_RANK)
        dot += d * a
        weighted = (scale * a).to(dtype)
        if scaled_a is not None:
            tl.store(scaled_a + row_64 * I + column, weighted, mask=inside)
        if low_down is not None:
            low_total = _add_thin(low_total, weighted, a_down, column_I, I, 1, I, DOWN_RANK)
        d, z, up = next_d, next_z, next_up
    tl.store(ds + row, tl.sum(dot, axis=1), mask=row_in)
    if dlow is not None:
        for part in tl.static_range(UP_PADDED // UP_RANK):  # zeros where ranks are padding
            place = dlow + row_64 * UP_PADDED + part * UP_RANK + tl.arange(0, UP_RANK)[None, :]
            of_part = (dlow_total * scaling).to(dtype) if part == 0 else tl.zeros((BLOCK_M, UP_RANK), dtype)
            tl.store(place, of_part, mask=row_in[:, None])
    if low_down is not None:
        place = low_down + row_64 * DOWN_RANK + tl.arange(0, DOWN_RANK)[None, :]
        tl.store(place, (low_total * scaling).to(dtype), mask=row_in[:, None])
