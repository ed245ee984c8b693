"""Cross-entropy of rows of logits, and its gradient written over them.

T tokens · V vocabulary

    cross_entropy_(logits_TV, label_T, loss_T, gradient=True)

Each program takes one row. Where it fits into registers it is read once, and its exponentials, divided by their sum,
are the gradient but for the label's. A longer row takes a pass for its logsumexp and, where the gradient is wanted, a
second one that replaces the logits by softmax - one-hot. A label outside [0, V) counts for nothing: loss and gradient
are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines

IN_REGISTERS = 32768  # columns: 32 a thread, with as many threads as there can be
COLUMNS, WARPS = 4096, 16  # of a block of a longer row; fewer rows at a time leave more of them in the cache


def cross_entropy_(logits_TV: Tensor, label_T: Tensor, loss_T: Tensor, *, gradient: bool) -> None:
    """loss_T (fp32) = -log softmax(logits)[label]; with `gradient` the logits become their gradient of loss_T's sum."""
    rows, columns = logits_TV.shape
    fit = have_lines(logits_TV) and label_T.is_contiguous() and loss_T.is_contiguous()
    check_arguments(
        fit and label_T.shape == loss_T.shape == (rows,),
        "logits with contiguous rows, and a label and a place for the loss of each",
        logits_TV=logits_TV,
        label_T=label_T,
        loss_T=loss_T,
    )
    if rows == 0:
        return
    arguments = logits_TV, label_T, loss_T, columns, logits_TV.stride(0)
    whole = next_power_of_2(columns)
    if whole <= IN_REGISTERS:
        _row_in_registers[(rows,)](*arguments, BLOCK=whole, GRADIENT=gradient, num_warps=max(1, whole // 1024))
    else:
        _long_row[(rows,)](*arguments, BLOCK=COLUMNS, GRADIENT=gradient, num_warps=WARPS)


@triton.jit
def _row(logits, labels, columns, stride):
    """This program's row, where it begins, its label, whether that counts, and the label's logit: read before any warp
    can have written gradients, as the reductions that follow let none go on before all are there."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = (label >= 0) & (label < columns)
    return row, logits, label, counts, tl.load(logits + tl.where(counts, label, 0)).to(tl.float32)


@quick
@triton.jit
def _row_in_registers(logits, labels, losses, columns, stride, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    row, logits, label, counts, picked = _row(logits, labels, columns, stride)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    logit = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(logit, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    exponential = tl.exp(logit - shift)
    total = tl.sum(exponential, axis=0)
    tl.store(losses + row, tl.where(counts, shift + tl.log(total) - picked, 0.0))
    if GRADIENT:
        found = exponential * (1.0 / total) - tl.where(column == label, 1.0, 0.0)
        tl.store(logits + column, tl.where(counts, found, 0.0).to(logits.dtype.element_ty), mask=inside)


@quick
@triton.jit
def _long_row(logits, labels, losses, columns, stride, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    row, logits, label, counts, picked = _row(logits, labels, columns, stride)
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + column < columns
        logit = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, logit, propagate_nan=tl.PropagateNan.ALL)
        # lanes that have seen nothing but -inf stay at 0
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(logit - shift)
        largest = larger
    highest = tl.max(largest, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    logsumexp = shift + tl.log(tl.sum(total * tl.exp(largest - shift), axis=0))
    tl.store(losses + row, tl.where(counts, logsumexp - picked, 0.0))
    if GRADIENT:
        for start in range(0, columns, BLOCK):
            inside = start + column < columns
            logit = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            probability = tl.exp(logit - logsumexp)
            found = probability - tl.where(start + column == label, 1.0, 0.0)
            found = tl.where(counts, found, 0.0)
            tl.store(logits + start + column, found.to(logits.dtype.element_ty), mask=inside)
