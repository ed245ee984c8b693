"""From sorted rows back to tokens: gather-and-sum, and the weights' gradient.

T tokens · K experts per token · N = T·K routed rows · H hidden

    combine(rows_NH, slot_row_TK, weight_TK, y_TH)            # y[t] = Σ_k weight[t, k] · rows[slot_row[t, k]]
    combine(rows_NH, slot_row_TK, weight_TK, y_TH, onto_TH)   # y[t] = onto[t] + that
    slot_gradient(ds_N, slot_row_TK, None, d_weight_TK)       # d_weight[t, k] = ds[slot_row[t, k]]

`slot_row_TK` holds sorted rows, and N for a sentinel: such a slot is not read and adds
nothing. Row buffers have N rows or more, contiguous inside (stride 1), with any stride between them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.tiles import column_block

WARPS = 4
# Elements that a combining program loads, over all its K rows: 16 KB of bf16 on their way at once. 4.2 to 4.4
# TB/s on an H200 at K = 8 and 16, of 4.3 copied (2026-11-15); other sizes were not tried.
COMBINE_TILE = 8192
COMBINE_BLOCKS = (1024, 4096)  # narrowest (16 bytes of bf16 per thread) and widest block
# Rows whose loads are issued together; a K above it is walked in steps of STEP.
MOST_AT_ONCE, STEP = 12, 8
SLOTS = 1024


def sums_of(rows_NH: Tensor, top_k: int, out_TH: Tensor | None = None, onto_TH: Tensor | None = None) -> dict[str, Any]:
    """Constants of the kernels that add up a token's rows."""
    hidden = rows_NH.shape[1]
    at_once, block = combine_block(hidden, top_k)
    of_sums = Group(
        K=top_k,
        H=hidden,
        ROW_STRIDE=rows_NH.stride(0),
        OUT_STRIDE=hidden if out_TH is None else out_TH.stride(0),
        ONTO_STRIDE=0 if onto_TH is None else onto_TH.stride(0),
        AT_ONCE=at_once,
        BLOCK=block,
    )
    return {"SUMS": of_sums, "num_warps": WARPS}


@triton.jit
def combine_tile(token, column_block, rows, slot_row, weight, out, onto, num_rows, SUMS: tl.constexpr):
    """One block of columns of a token; `token` is int64."""
    column = column_block * SUMS.BLOCK + tl.arange(0, SUMS.BLOCK)
    if onto is not None:
        residual = tl.load(onto + token * SUMS.ONTO_STRIDE + column, mask=column < SUMS.H, other=0.0).to(tl.float32)
    total = sum_of_slots(token, column, rows, slot_row, weight, num_rows, SUMS)
    if onto is not None:  # rounded before, as a sum of two tensors is
        total = total.to(out.dtype.element_ty).to(tl.float32) + residual
    tl.store(out + token * SUMS.OUT_STRIDE + column, total.to(out.dtype.element_ty), mask=column < SUMS.H)


@triton.jit
def sum_of_slots(token, column, rows, slot_row, weight, num_rows, SUMS: tl.constexpr):
    """In fp32, in the order of k."""
    K: tl.constexpr = SUMS.K
    total = tl.zeros((SUMS.BLOCK,), tl.float32)
    for first in range(0, K, SUMS.AT_ONCE):
        for step in tl.static_range(SUMS.AT_ONCE):  # unrolled: the loads do not wait for one another
            slot = token * K + first + step
            row = tl.load(slot_row + slot, mask=first + step < K, other=num_rows).to(tl.int64)
            width = tl.where(row < num_rows, SUMS.H, 0)  # the row of a sentinel has no columns
            values = tl.load(rows + row * SUMS.ROW_STRIDE + column, mask=column < width, other=0.0).to(tl.float32)
            if weight is not None:
                values *= tl.load(weight + slot, mask=row < num_rows, other=0.0).to(tl.float32)
            total += values
    return total


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _combine(rows, slot_row, weight, out, onto, num_rows, SUMS: tl.constexpr):
    COLUMN_BLOCKS: tl.constexpr = (SUMS.H + SUMS.BLOCK - 1) // SUMS.BLOCK
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64)
    combine_tile(token, program % COLUMN_BLOCKS, rows, slot_row, weight, out, onto, num_rows, SUMS)


def combine_block(hidden: int, top_k: int) -> tuple[int, int]:
    """Rows whose loads are issued together, and columns of a block."""
    narrowest, widest = COMBINE_BLOCKS
    at_once = top_k if top_k <= MOST_AT_ONCE else STEP
    return at_once, column_block(hidden, min(widest, max(narrowest, COMBINE_TILE // next_power_of_2(at_once))))


def combine(
    rows_NH: Tensor,
    slot_row_TK: Tensor,
    weight_TK: Tensor | None,
    out_TH: Tensor,
    onto_TH: Tensor | None = None,
    *,
    sentinel: int | None = None,
) -> Tensor:
    """out[t] = Σ_k weight[t, k] · rows[slot_row[t, k]], in fp32 and in the order of k; weight None stands for ones.
    With `onto`, that sum is rounded, and onto[t] is added to it.

    sentinel: from this row on slots have none; given where these are some of the tokens alone, else T·K."""
    tokens, hidden = out_TH.shape
    top_k = slot_row_TK.shape[1]
    fit = have_lines(rows_NH, out_TH) and slot_row_TK.is_contiguous() and slot_row_TK.shape[0] == tokens
    fit = fit and rows_NH.shape[1] == hidden and (weight_TK is None or weight_TK.shape == slot_row_TK.shape)
    fit = fit and (onto_TH is None or (have_lines(onto_TH) and onto_TH.shape == out_TH.shape))
    given = {"rows_NH": rows_NH, "slot_row_TK": slot_row_TK, "out_TH": out_TH, "onto_TH": onto_TH}
    check_arguments(fit, "rows that are contiguous inside", **given)
    if tokens == 0:
        return out_TH
    _combine[(tokens * cdiv(hidden, combine_block(hidden, top_k)[1]),)](
        rows_NH,
        slot_row_TK,
        None if weight_TK is None else weight_TK.contiguous(),
        out_TH,
        onto_TH,
        slot_row_TK.numel() if sentinel is None else sentinel,
        **sums_of(rows_NH, top_k, out_TH, onto_TH),
    )
    return out_TH


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _slot_gradient(ds, slot_row, extra, out, num_rows, SLOTS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slot_gradient_tile(slot, slot < num_rows, ds, slot_row, extra, out, num_rows)


@triton.jit
def slot_gradient_tile(slot, inside, ds, slot_row, extra, out, num_rows):
    """Those of the slots that are `inside`."""
    row = tl.load(slot_row + slot, mask=inside, other=num_rows)
    owned = row < num_rows
    gradient = tl.load(ds + row, mask=owned, other=0.0).to(tl.float32)
    if extra is not None:
        gradient += tl.load(extra + slot, mask=owned, other=0.0).to(tl.float32)
    tl.store(out + slot, gradient.to(out.dtype.element_ty), mask=inside)


def slot_gradient(ds_N: Tensor, slot_row_TK: Tensor, extra_TK: Tensor | None, out_TK: Tensor) -> Tensor:
    """out[t, k] = ds[slot_row[t, k]] + extra[t, k]; 0 for sentinels."""
    rows = slot_row_TK.numel()
    fit = slot_row_TK.is_contiguous() and out_TK.is_contiguous() and ds_N.is_contiguous() and out_TK.numel() == rows
    fit = fit and (extra_TK is None or (extra_TK.is_contiguous() and extra_TK.numel() == rows))
    check_arguments(fit, "contiguous tensors", ds_N=ds_N, slot_row_TK=slot_row_TK, extra_TK=extra_TK, out_TK=out_TK)
    if rows:
        grid = (cdiv(rows, SLOTS),)
        _slot_gradient[grid](ds_N, slot_row_TK, extra_TK, out_TK, rows, SLOTS=SLOTS, num_warps=WARPS)
    return out_TK
