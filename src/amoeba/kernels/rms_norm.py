"""Root mean square norms of rows in one pass, and their backward.

N rows · H numbers of a row

    y_NH = rms_norm(x_NH, weight_H, eps=1e-6)
    sum_NH, y_NH = add_rms_norm(x_NH, added_NH, weight_H, eps=1e-6)      # of x + added, rounded to their dtype
    dx_NH, dweight_H = rms_norm_backward(dy_NH, x_NH, weight_H, eps=1e-6)

Numbers are rounded where transformers rounds them: normed ones before they meet the weight, or, if rounds_late, after
it alone. adds_one: the weight is that of a norm less one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments

ELEMENTS = 2048  # of the rows that a program takes; not measured yet
REPEATS = 8  # how often in backward, where it keeps sums for the weight
MOST = 16384  # numbers of a row, which a program holds at once


def rms_norm(
    x_NH: Tensor, weight_H: Tensor, eps: float, *, rounds_late: bool = False, adds_one: bool = False
) -> Tensor:
    return _launch(x_NH, None, None, weight_H, eps, rounds_late, adds_one)


def add_rms_norm(
    x_NH: Tensor,
    added_NH: Tensor,
    weight_H: Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
) -> tuple[Tensor, Tensor]:
    sum_NH = x_NH.new_empty(x_NH.shape)
    return sum_NH, _launch(x_NH, added_NH, sum_NH, weight_H, eps, rounds_late, adds_one)


def _launch(
    x: Tensor,
    added: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    eps: float,
    rounds_late: bool,
    adds_one: bool,
) -> Tensor:
    width = x.shape[-1]
    given = [each for each in (x, added, weight) if each is not None]
    check_arguments(
        all(each.is_contiguous() and each.dtype == x.dtype for each in given)
        and weight.shape == (width,)
        and (added is None or added.shape == x.shape)
        and 0 < width <= MOST,
        f"contiguous rows of one dtype, {MOST} numbers at most",
        x=x,
        weight=weight,
    )
    y = x.new_empty(x.shape)
    rows = x.numel() // width
    if rows:
        block = next_power_of_2(width)
        at_once, overlap = max(1, ELEMENTS // block), can_overlap(x.device)
        _rms_norm[(cdiv(rows, at_once),)](
            x, added, total, weight, y, rows, eps, H=width, BLOCK=block, ROWS=at_once, ROUNDS_LATE=rounds_late,
            ADDS_ONE=adds_one, OVERLAP=overlap, num_warps=min(16, max(4, block // 512)),
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return y


def rms_norm_backward(
    dy_NH: Tensor,
    x_NH: Tensor,
    weight_H: Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The second result is None unless it is wanted. What programs have added up of it is summed in order."""
    width = x_NH.shape[-1]
    check_arguments(x_NH.is_contiguous() and 0 < width <= MOST, f"contiguous rows, {MOST} numbers at most", x=x_NH)
    dx, rows = torch.empty_like(x_NH), x_NH.numel() // width
    block = next_power_of_2(width)
    at_once = max(1, ELEMENTS // block)
    repeats = REPEATS if of_weight else 1
    programs = cdiv(rows, at_once * repeats)
    sums = torch.empty((programs, width) if of_weight else 0, dtype=torch.float32, device=dx.device)
    if rows:
        _rms_norm_backward[(programs,)](
            dy_NH.contiguous(), x_NH, weight_H, dx, sums if of_weight else None, rows, eps, H=width, BLOCK=block,
            ROWS=at_once, ROUNDS_LATE=rounds_late, ADDS_ONE=adds_one, REPEATS=repeats,
            num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
    return dx, sums.sum(0).to(weight_H.dtype) if of_weight else None


@quick
@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, added, total, weight, y, rows, eps, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROUNDS_LATE: tl.constexpr, ADDS_ONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    at = row[:, None] * H + column[None, :]
    w = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    if ADDS_ONE:
        w += 1.0
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        v = (v + tl.load(added + at, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(total + at, v, mask=inside)
        v = v.to(tl.float32)
    normed = v * tl.rsqrt(tl.sum(v * v, axis=1) / H + eps)[:, None]
    if not ROUNDS_LATE:
        normed = normed.to(DTYPE).to(tl.float32)
    tl.store(y + at, (w * normed).to(DTYPE), mask=inside)


@quick
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    dy, x, weight, dx, sums, rows, eps, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROUNDS_LATE: tl.constexpr, ADDS_ONE: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = dx.dtype.element_ty
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    if ADDS_ONE:
        w += 1.0
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for repeat in range(REPEATS):
        row = (tl.program_id(0).to(tl.int64) * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < H)[None, :]
        at = row[:, None] * H + column[None, :]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, axis=1) / H + eps)[:, None]
        normed, g = v * scale, d * w
        along = tl.sum(g * normed, axis=1)[:, None] / H
        tl.store(dx + at, (scale * (g - normed * along)).to(DTYPE), mask=inside)
        if sums is not None:
            if ROUNDS_LATE:
                total += d * normed
            else:
                total += d * normed.to(DTYPE).to(tl.float32)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * H + column, tl.sum(total, axis=0), mask=column < H)
