"""The activation on sorted rows and its backward: one pass over memory each, 16 bytes per access.

T tokens · K experts per token · N = T·K routed rows · E experts · I intermediate · J = 2I (gate and up) or I

    activate(h_NJ, activation, a_NI, offs_E)                        # a = act(h); with bias_EJ also h += bias
    ds_N = activate_backward(da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, scaled_a_NI, offs_E)

Everything is computed in fp32 and rounded once. Rows from offs_E[-1] on are those of sentinels: they are neither
computed nor written (ds_N is 0 there). Rows are contiguous inside (stride 1), their stride is free. In the backward
`dh_NJ` may be `h_NJ` and `scaled_a_NI` may be `da_NI`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels.activation import gated, gated_backward, group, plain, plain_backward
from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.quantise import BLOCK, load_codes, store_codes
from amoeba.kernels.tiles import column_block, expert_of_row
from amoeba.precision.quantised import QuantisedMatrix

# Elements of `a` per tile; 4 warps share them. Forward: 16 per thread, 64 bytes of bf16 on their way at once, 32
# registers. Backward: 8 per thread, 48 bytes, 48 registers (with 16 the compiler takes 77 and puts a third of the loads
# off). A tile must not have fewer elements than its threads hold in 16-byte pieces, see `_activate_backward`. Register
# counts are those of Triton 3.6 for Hopper; on an H200 4.0 to 4.3 TB/s forward
# and 3.9 to 4.1 backward, of 4.3 copied (2026-11-15); other sizes were not tried.
FORWARD_TILE, BACKWARD_TILE = 2048, 1024
WARPS = 4
# Columns of a line. Backward: two warpgroups share a line of at most this width, see `amoeba.tasks.hopper.backward`.
WIDEST_BLOCK, WIDEST_BACKWARD = 1024, 512
# Of dA' in fp16 for which a row has one scale; a line has no more of them.
SCALED_COLUMNS = 128


@triton.jit
def _lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """0, 1, ... BLOCK - 1.

    Where 16 bytes of h are gates and ups by turns, a thread that loads them holds 8 bytes of `a`. The detour by // and
    % tells the compiler to access `a` and da in such pieces too, so that they stay with that thread: in pieces of 16
    bytes every tile of them goes through shared memory, at the price of many registers (128 instead of 74).
    """
    lane = tl.arange(0, BLOCK)
    if INTERLEAVED:
        PIECE: tl.constexpr = 64 // DTYPE.primitive_bitwidth
        lane = (lane // PIECE) * PIECE + lane % PIECE
    return lane


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _activate(
    h,
    out,
    offs,
    bias,
    num_rows,
    SIZES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    I: tl.constexpr = SIZES.I
    NUM_EXPERTS: tl.constexpr = SIZES.NUM_EXPERTS
    HAS_BIAS: tl.constexpr = bias is not None
    INTERLEAVED: tl.constexpr = ACTIVATION.INTERLEAVED
    COLUMN_BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first_row = (program // COLUMN_BLOCKS) * ROWS
    first_column = (program % COLUMN_BLOCKS) * BLOCK
    if offs is not None:
        num_rows = tl.minimum(num_rows, tl.load(offs + NUM_EXPERTS - 1))
        if first_row >= num_rows:
            return
    row = first_row + tl.arange(0, ROWS)
    row_in = (row < num_rows)[:, None]
    column = (first_column + _lanes(BLOCK, h.dtype.element_ty, INTERLEAVED))[None, :]
    inside = row_in & (column < I)
    h_row = h + row.to(tl.int64)[:, None] * SIZES.H_STRIDE
    bias_row = bias  # only read where there is a bias
    if HAS_BIAS:
        expert = tl.minimum(expert_of_row(offs, row, NUM_EXPERTS, SIZES.EXPERTS_PADDED), NUM_EXPERTS - 1)
        bias_row = bias + expert.to(tl.int64)[:, None] * SIZES.BIAS_STRIDE

    if INTERLEAVED:
        pair = (2 * first_column + tl.arange(0, 2 * BLOCK))[None, :]
        pair_inside = row_in & (pair < 2 * I)
        both = _load(h_row + pair, bias_row, pair, pair_inside, HAS_BIAS)
        if HAS_BIAS:
            tl.store(h_row + pair, both, mask=pair_inside)
        gate, up = tl.split(tl.reshape(both.to(tl.float32), (ROWS, BLOCK, 2)))
        a = gated(gate, up, ACTIVATION)
    elif ACTIVATION.GATED:
        up_column = I + column
        gate = _load(h_row + column, bias_row, column, inside, HAS_BIAS)
        up = _load(h_row + up_column, bias_row, up_column, inside, HAS_BIAS)
        if HAS_BIAS:  # after both loads: neither waits for a store
            tl.store(h_row + column, gate, mask=inside)
            tl.store(h_row + up_column, up, mask=inside)
        a = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
    else:
        z = _load(h_row + column, bias_row, column, inside, HAS_BIAS)
        if HAS_BIAS:
            tl.store(h_row + column, z, mask=inside)
        a = plain(z.to(tl.float32), ACTIVATION)
    tl.store(out + row.to(tl.int64)[:, None] * SIZES.OUT_STRIDE + column, a.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load(address, bias_row, column, inside, HAS_BIAS: tl.constexpr):
    """h or h + bias. The sum is rounded before it is activated: the activation is that of the h which is kept."""
    z = tl.load(address, mask=inside, other=0.0)
    if HAS_BIAS:
        z = (z.to(tl.float32) + tl.load(bias_row + column, mask=inside, other=0.0).to(tl.float32)).to(z.dtype)
    return z


def activate(
    h_NJ: Tensor, activation: Activation, out_NI: Tensor, offs_E: Tensor | None = None, bias_EJ: Tensor | None = None
) -> Tensor:
    """out = act(h) on the rows before offs_E[-1] (all rows without offs_E). With a bias, h += bias[expert] in place."""
    rows, intermediate = h_NJ.shape[0], out_NI.shape[1]
    fit = have_lines(h_NJ, out_NI, bias_EJ) and h_NJ.shape[1] == activation.width(intermediate)
    fit = fit and out_NI.shape[0] >= rows and (bias_EJ is None or offs_E is not None)
    check_arguments(fit, "rows that are contiguous inside, and offs_E with a bias", h_NJ=h_NJ, out_NI=out_NI)
    if rows == 0:
        return out_NI
    block = column_block(intermediate, WIDEST_BLOCK)
    tile_rows = FORWARD_TILE // block
    experts = 1 if offs_E is None else offs_E.shape[0]
    _activate[(cdiv(rows, tile_rows) * cdiv(intermediate, block),)](
        h_NJ,
        out_NI,
        offs_E,
        bias_EJ,
        rows,
        SIZES=Group(
            I=intermediate,
            H_STRIDE=h_NJ.stride(0),
            OUT_STRIDE=out_NI.stride(0),
            BIAS_STRIDE=0 if bias_EJ is None else bias_EJ.stride(0),
            NUM_EXPERTS=experts,
            EXPERTS_PADDED=next_power_of_2(experts),
        ),
        ACTIVATION=group(activation),
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out_NI


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _activate_backward(
    da,
    da_scales,
    h,
    h_scales,
    weight,
    order,
    offs,
    dh,
    scaled_a,
    ds,
    codes,
    scales,
    num_rows,
    SIZES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns whole rows, so that ds needs no second pass and no atomics.

    In place: every element of h and da is loaded exactly once, by the program that overwrites it. The thread that
    stores an element need not be the one that loaded it (that is the compiler's choice), hence the barrier between a
    tile's loads and its stores. A tile with fewer elements than threads would be loaded twice over by the idle ones;
    its size excludes that.
    """
    I: tl.constexpr = SIZES.I
    INTERLEAVED: tl.constexpr = ACTIVATION.INTERLEAVED
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    owned_rows = tl.minimum(num_rows, tl.load(offs + SIZES.NUM_EXPERTS - 1))
    if first_row >= owned_rows:
        tl.store(ds + row, tl.zeros((ROWS,), tl.float32), mask=row < num_rows)
        return
    row_in = row < owned_rows
    slot = tl.load(order + row, mask=row_in, other=0)
    scale = tl.load(weight + slot, mask=row_in, other=0.0).to(tl.float32)[:, None]
    row_64 = row.to(tl.int64)[:, None]
    h_row = h + row_64 * SIZES.H_STRIDE
    dh_row = dh + row_64 * SIZES.DH_STRIDE
    dot = tl.zeros((ROWS, BLOCK), tl.float32)
    for first_column in range(0, I, BLOCK):
        column = (first_column + _lanes(BLOCK, h.dtype.element_ty, INTERLEAVED))[None, :]
        inside = row_in[:, None] & (column < I)
        d = tl.load(da + row_64 * SIZES.DA_STRIDE + column, mask=inside, other=0.0)
        if da_scales is not None:  # of a line
            place = row.to(tl.int64) * SIZES.SCALES + first_column // 128
            d = d.to(tl.float32) * tl.load(da_scales + place, mask=row_in, other=0.0)[:, None]
        if INTERLEAVED:
            pair = (2 * first_column + tl.arange(0, 2 * BLOCK))[None, :]
            pair_inside = row_in[:, None] & (pair < 2 * I)
            both = tl.load(h_row + pair, mask=pair_inside, other=0.0)
            tl.debug_barrier()
            d = d.to(tl.float32)
            gate, up = tl.split(tl.reshape(both.to(tl.float32), (ROWS, BLOCK, 2)))
            a, dgate, dup = gated_backward(scale * d, gate, up, ACTIVATION)
            d_both = tl.reshape(tl.join(dgate, dup), (ROWS, 2 * BLOCK))
            tl.store(dh_row + pair, d_both.to(dh.dtype.element_ty), mask=pair_inside)
        elif ACTIVATION.GATED:
            if h_scales is None:
                gate = tl.load(h_row + column, mask=inside, other=0.0)
                up = tl.load(h_row + (I + column), mask=inside, other=0.0)
            else:
                gate = load_codes(h, h_scales, row, row_in, first_column, I, 2 * I, 0, ROWS, BLOCK)
                up = load_codes(h, h_scales, row, row_in, first_column, I, 2 * I, I, ROWS, BLOCK)
            tl.debug_barrier()
            d, gate, up = d.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
            a, dgate, dup = gated_backward(scale * d, gate, up, ACTIVATION)
            dgate, dup = dgate.to(dh.dtype.element_ty), dup.to(dh.dtype.element_ty)
            tl.store(dh_row + column, dgate, mask=inside)
            tl.store(dh_row + (I + column), dup, mask=inside)
            if codes is not None:
                store_codes(dgate.to(tl.float32), codes, scales, row, row_in, first_column, I, 2 * I, 0, ROWS, BLOCK)
                store_codes(dup.to(tl.float32), codes, scales, row, row_in, first_column, I, 2 * I, I, ROWS, BLOCK)
        else:
            if h_scales is None:
                z = tl.load(h_row + column, mask=inside, other=0.0)
            else:
                z = load_codes(h, h_scales, row, row_in, first_column, I, I, 0, ROWS, BLOCK)
            tl.debug_barrier()
            d = d.to(tl.float32)
            a, dz = plain_backward(scale * d, z.to(tl.float32), ACTIVATION)
            dz = dz.to(dh.dtype.element_ty)
            tl.store(dh_row + column, dz, mask=inside)
            if codes is not None:
                store_codes(dz.to(tl.float32), codes, scales, row, row_in, first_column, I, I, 0, ROWS, BLOCK)
        dot += d * a
        if scaled_a is not None:
            scaled_at = scaled_a + row_64 * SIZES.SCALED_A_STRIDE + column
            tl.store(scaled_at, (scale * a).to(scaled_a.dtype.element_ty), mask=inside)
    tl.store(ds + row, tl.sum(dot, axis=1), mask=row < num_rows)


def has_whole_blocks(activation: Activation, intermediate: int) -> bool:
    """Whether none of the blocks of a row of h or dh, 128 columns each, holds gates and ups."""
    return not activation.gated or intermediate % BLOCK == 0


def backward_block(intermediate: int, scaled: bool) -> int:
    """Columns of a line. scaled: dA' is in fp16 with scales."""
    return column_block(intermediate, SCALED_COLUMNS if scaled else WIDEST_BACKWARD)


def scales_of_row(intermediate: int) -> int:
    """Two for each tile of the product that makes dA', which has 256 columns."""
    return 2 * cdiv(intermediate, 2 * SCALED_COLUMNS)


def new_scales(da_NI: Tensor) -> Tensor:
    """Of dA' in fp16, one for 128 columns of a row. In bf16 its rounding is a fifth of the squared error of dx, and a
    third of that of the routing weights' gradient."""
    rows, intermediate = da_NI.shape
    return torch.empty((rows, scales_of_row(intermediate)), dtype=torch.float32, device=da_NI.device)


def activate_backward(
    da_NI: Tensor,
    h_NJ: Tensor | QuantisedMatrix,
    weight_TK: Tensor,
    order_N: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    scaled_a_NI: Tensor | None,
    offs_E: Tensor,
    quantised_dh: QuantisedMatrix | None = None,
    da_scales_NB: Tensor | None = None,
) -> Tensor:
    """From da' (no scale in it yet) and s = weight[order]: writes dh = act'(h)·s·da' and s·a, returns ds_N = <da', a>.

    ds_N is fp32, one entry per routed row (order_N). `dh_NJ` may be `h_NJ`, `scaled_a_NI` may be `da_NI`.
    quantised_dh: gets dh, as it was rounded, in e4m3 as well (see `amoeba.kernels.quantise`); no block of it may hold
    gates and ups (`has_whole_blocks`). h may be in e4m3, too; I is a multiple of 64 then. In neither case gates are
    interleaved with ups.
    da_scales_NB: da' is in fp16, of which these are the scales (`new_scales`), whatever dtype its memory says.
    """
    rows, intermediate = order_N.shape[0], da_NI.shape[1]
    h_scales = None
    if isinstance(h_NJ, QuantisedMatrix):
        h_scales, h_NJ = h_NJ.scales, h_NJ.data
    in_blocks = quantised_dh is not None or h_scales is not None
    fit = have_lines(da_NI, h_NJ, dh_NJ, scaled_a_NI) and order_N.is_contiguous()
    fit = fit and h_NJ.shape[1] == dh_NJ.shape[1] == activation.width(intermediate)
    fit = fit and not (in_blocks and (activation.interleaved or intermediate % (BLOCK // 2)))
    fit = fit and (quantised_dh is None or has_whole_blocks(activation, intermediate))
    check_arguments(fit, "rows that are contiguous inside", da_NI=da_NI, h_NJ=h_NJ, dh_NJ=dh_NJ, order_N=order_N)
    ds_N = torch.empty(rows, dtype=torch.float32, device=da_NI.device)
    if rows == 0:
        return ds_N
    block = backward_block(intermediate, scaled=da_scales_NB is not None)
    if in_blocks:
        block = max(block, BLOCK)  # of which a row has one scale
    tile_rows = BACKWARD_TILE // block
    _activate_backward[(cdiv(rows, tile_rows),)](
        da_NI if da_scales_NB is None else da_NI.view(torch.float16),
        da_scales_NB,
        h_NJ,
        h_scales,
        weight_TK.contiguous(),
        order_N,
        offs_E,
        dh_NJ,
        scaled_a_NI,
        ds_N,
        None if quantised_dh is None else quantised_dh.data,
        None if quantised_dh is None else quantised_dh.scales,
        rows,
        SIZES=Group(
            I=intermediate,
            DA_STRIDE=da_NI.stride(0),
            H_STRIDE=h_NJ.stride(0),
            DH_STRIDE=dh_NJ.stride(0),
            SCALED_A_STRIDE=0 if scaled_a_NI is None else scaled_a_NI.stride(0),
            NUM_EXPERTS=offs_E.shape[0],
            SCALES=scales_of_row(intermediate),
        ),
        ACTIVATION=group(activation),
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return ds_N
