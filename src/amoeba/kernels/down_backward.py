"""Backward of the down projection and the activation: one product with a fused epilogue.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

Per sorted row n of expert e, token t = order_N[n] // top_k and routing weight s:
    dA' = dy[t] @ down[e];  dh = act'(h) ∘ (s·dA');  scaled_a = s·act(h);  ds = <dA', act(h)>
dA' stays in registers. ds is summed without atomics: every tile of columns leaves its part, and the parts are added in
a fixed order. Rows past offs_E[-1] are not written, and what ds holds for them is undefined.

    ds_N = down_backward(dy_TH, down_EHI, offs_E, h_NJ, weight_TK, activation, dh_NJ, scaled_a_NI, order_N, top_k=K)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.kernels.activation import gated_backward, group, plain_backward
from amoeba.kernels.constants import Group
from amoeba.kernels.gemm_tiles import accumulate, halves, of_matrix, of_rows, tile_of
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.tile_sizes import Configuration, Product, configuration_on
from amoeba.kernels.tiles import find_tile, rows_of_tile, slots

# Elements of a tile that the epilogue handles at a time, per thread: the accumulator, gate, up and their gradients all
# want registers. Found by compiling for sm80 and sm90 until nothing spilled; speed not measured yet.
EPILOGUE_ELEMENTS = 16
SMALLEST_SLICE = 32  # columns: 64 bytes of a row, two sectors of memory


def down_backward(
    dy_TH: Tensor,
    down_EHI: Tensor,
    offs_E: Tensor,
    h_NJ: Tensor,
    weight_TK: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    scaled_a_NI: Tensor | None,
    order_N: Tensor,
    *,
    top_k: int,
    configuration: Configuration | None = None,
) -> Tensor:
    """Writes dh and, where it is asked for, s·a; returns ds_N in fp32. dh may be the memory of h itself."""
    rows, width = h_NJ.shape
    experts, hidden, intermediate = down_EHI.shape
    fit = width == activation.width(intermediate) and dy_TH.shape[1] == hidden and offs_E.shape[0] == experts
    fit = fit and dy_TH.dtype == down_EHI.dtype and order_N.shape[0] == rows and weight_TK.numel() >= rows
    fit = fit and dh_NJ.shape == h_NJ.shape and (scaled_a_NI is None or scaled_a_NI.shape == (rows, intermediate))
    fit = fit and have_lines(h_NJ, dh_NJ, scaled_a_NI)
    check_arguments(fit, "shapes that go together, h and dh contiguous inside", dy_TH=dy_TH, h_NJ=h_NJ, dh_NJ=dh_NJ)
    product = Product(rows, experts, hidden, intermediate, dy_TH.dtype)
    chosen = configuration or configuration_on(h_NJ.device, "down_backward", product)
    column_tiles = cdiv(intermediate, chosen.block_n)
    part_CN = torch.empty(column_tiles, rows, dtype=torch.float32, device=h_NJ.device)
    if rows == 0:
        return part_CN.sum(0)
    _down_backward[(slots(rows, experts, chosen.block_m) * column_tiles,)](
        dy_TH,
        down_EHI,
        offs_E,
        h_NJ,
        weight_TK.reshape(-1),
        dh_NJ,
        scaled_a_NI,
        part_CN,
        order_N,
        rows,
        PRODUCT=Group(
            **of_rows(dy_TH, top_k),
            **of_matrix(down_EHI),
            **tile_of(chosen, rows, experts, intermediate),
            **of_epilogue(h_NJ, dh_NJ, scaled_a_NI, chosen, activation),
        ),
        ACTIVATION=group(activation),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        # A product fused into the first addition of ds leaves the lanes that hold the same sum with different bits, and
        # which of them is stored would be the hardware's choice.
        enable_fp_fusion=False,
    )
    return part_CN[0] if column_tiles == 1 else part_CN.sum(0)


def of_epilogue(
    h_NJ: Tensor, dh_NJ: Tensor, scaled_a_NI: Tensor | None, chosen: Configuration, activation: Activation
) -> dict[str, int]:
    return {
        "STRIDE_H_ROW": h_NJ.stride(0),
        "STRIDE_DH_ROW": dh_NJ.stride(0),
        "STRIDE_A_ROW": 0 if scaled_a_NI is None else scaled_a_NI.stride(0),
        "SLICES": number_of_slices(chosen, activation),
    }


def number_of_slices(chosen: Configuration, activation: Activation) -> int:
    """In how many slices of columns the epilogue takes a tile."""
    per_thread = chosen.block_m * chosen.block_n // (32 * chosen.num_warps)
    if per_thread < 1:  # elements held by several threads would be read again after dh has overwritten them
        raise bad_value("configuration", "an element for each thread", chosen, "use larger blocks or fewer warps")
    doubled = 2 if activation.interleaved else 1  # gate and up come in one tile there, twice as wide
    return max(1, min(doubled * per_thread // EPILOGUE_ELEMENTS, doubled * chosen.block_n // SMALLEST_SLICE))


@triton.jit
def _slices(tile, SLICES: tl.constexpr):
    """The tile's columns split into this many tiles, a power of 2, from left to right. An epilogue that takes them one
    after the other needs registers for one slice's intermediate values only."""
    if SLICES == 1:
        return (tile,)
    else:
        left, right = halves(tile, False)
        return _slices(left, SLICES // 2) + _slices(right, SLICES // 2)


@triton.jit
def _epilogue(
    da,
    h_NJ,
    dh_NJ,
    scaled_a_NI,
    scale_M,
    valid_M,
    row,
    first_column,
    PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Everything that follows from the columns of dA' beginning at `first_column`; returns their part of ds."""
    P: tl.constexpr = PRODUCT
    WIDTH: tl.constexpr = P.BLOCK_N // P.SLICES
    EVEN_COLUMNS: tl.constexpr = P.COLUMNS % P.BLOCK_N == 0
    local_M = tl.arange(0, P.BLOCK_M)
    column = first_column + tl.arange(0, WIDTH)
    mask = valid_M[:, None]
    if not EVEN_COLUMNS:
        mask = mask & (column < P.COLUMNS)[None, :]
    # Wide arithmetic on the scalar, narrow offsets on the tile: pointers to whole tiles would fill the registers.
    h = h_NJ + row * P.STRIDE_H_ROW + (local_M * P.STRIDE_H_ROW)[:, None]
    dh = dh_NJ + row * P.STRIDE_DH_ROW + (local_M * P.STRIDE_DH_ROW)[:, None]
    dtype: tl.constexpr = dh_NJ.dtype.element_ty
    if ACTIVATION.GATED:
        if ACTIVATION.INTERLEAVED:
            both = 2 * first_column + tl.arange(0, 2 * WIDTH)
            both_mask = valid_M[:, None]
            if not EVEN_COLUMNS:
                both_mask = both_mask & (both < 2 * P.COLUMNS)[None, :]
            gate, up = halves(tl.load(h + both[None, :], mask=both_mask, other=0.0), True)
        else:
            gate = tl.load(h + column[None, :], mask=mask, other=0.0)
            up = tl.load(h + P.COLUMNS + column[None, :], mask=mask, other=0.0)
        scaled_da = da * scale_M[:, None]
        a, dgate, dup = gated_backward(scaled_da, gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
        if ACTIVATION.INTERLEAVED:
            pair = tl.reshape(tl.join(dgate.to(dtype), dup.to(dtype)), (P.BLOCK_M, 2 * WIDTH))
            tl.store(dh + both[None, :], pair, mask=both_mask)
        else:
            tl.store(dh + column[None, :], dgate.to(dtype), mask=mask)
            tl.store(dh + P.COLUMNS + column[None, :], dup.to(dtype), mask=mask)
    else:
        z = tl.load(h + column[None, :], mask=mask, other=0.0).to(tl.float32)
        a, dz = plain_backward(da * scale_M[:, None], z, ACTIVATION)
        tl.store(dh + column[None, :], dz.to(dtype), mask=mask)
    if scaled_a_NI is not None:
        scaled_a = scaled_a_NI + row * P.STRIDE_A_ROW + (local_M * P.STRIDE_A_ROW)[:, None] + column[None, :]
        tl.store(scaled_a, (a * scale_M[:, None]).to(scaled_a_NI.dtype.element_ty), mask=mask)
    return tl.sum(da * a, 1)  # columns past I have da = 0


@triton.jit
def down_backward_tile(
    expert,
    row,
    row_end,
    column_tile,
    dy_TH,
    down_EHI,
    h_NJ,
    weight_R,
    dh_NJ,
    scaled_a_NI,
    part_CN,
    order_N,
    rows,
    PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One tile of dA' and all that follows from it; `row` is before `row_end`."""
    P: tl.constexpr = PRODUCT
    row_M, source_M = rows_of_tile(order_N, row, row_end, True, P.TOP_K, P.BLOCK_M)
    first_column = column_tile * P.BLOCK_N
    column_N = first_column + tl.arange(0, P.BLOCK_N)
    matrix = down_EHI + expert.to(tl.int64) * P.STRIDE_EXPERT
    da = accumulate(dy_TH, matrix, source_M, column_N, column_N < P.COLUMNS, P.COLUMNS % P.BLOCK_N == 0, PRODUCT)
    valid_M = row_M < row_end
    slot_M = tl.load(order_N + row_M, mask=valid_M, other=0)
    scale_M = tl.load(weight_R + slot_M, mask=valid_M, other=0.0).to(tl.float32)
    slices = _slices(da, P.SLICES)
    part_M = tl.zeros((P.BLOCK_M,), dtype=tl.float32)
    for s in tl.static_range(P.SLICES):
        part_M += _epilogue(
            slices[s], h_NJ, dh_NJ, scaled_a_NI, scale_M, valid_M, row.to(tl.int64),
            first_column + s * (P.BLOCK_N // P.SLICES), PRODUCT, ACTIVATION,
        )  # fmt: skip
    tl.store(part_CN + column_tile.to(tl.int64) * rows + row_M, part_M, mask=valid_M)


@quick
@triton.jit(do_not_specialize=["rows"])
def _down_backward(
    dy_TH,
    down_EHI,
    offs_E,
    h_NJ,
    weight_R,
    dh_NJ,
    scaled_a_NI,
    part_CN,
    order_N,
    rows,
    PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    expert, row, row_end, column_tile = find_tile(offs_E, PRODUCT)
    if row >= row_end:
        return
    down_backward_tile(
        expert, row, row_end, column_tile, dy_TH, down_EHI, h_NJ, weight_R, dh_NJ, scaled_a_NI, part_CN, order_N,
        rows, PRODUCT, ACTIVATION,
    )  # fmt: skip
