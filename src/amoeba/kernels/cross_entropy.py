"""Cross-entropy of rows of logits, and its gradient written over them.

T tokens · V vocabulary

    cross_entropy_(logits_TV, label_T, loss_T, gradient=True)

Each program takes one row: a pass for its logsumexp, and, where the gradient is wanted, a second one that replaces the
logits by softmax - one-hot; the row is then still in the cache. A label outside [0, V) counts for nothing: loss and
gradient are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.arguments import check_arguments, have_lines
from amoeba.kernels.launch import next_power_of_2, quick

COLUMNS = 4096  # of a block; 8 warps then read 16 bytes a thread four times


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
    block = min(COLUMNS, next_power_of_2(columns))
    _kernel[(rows,)](
        logits_TV,
        label_T,
        loss_T,
        columns,
        logits_TV.stride(0),
        BLOCK=block,
        GRADIENT=gradient,
        num_warps=8 if block >= 2048 else 4,
    )


@quick
@triton.jit
def _kernel(logits, labels, losses, columns, stride, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    counts = (label >= 0) & (label < columns)
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
    picked = tl.load(logits + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, logsumexp - picked, 0.0))
    if GRADIENT:
        for start in range(0, columns, BLOCK):
            inside = start + column < columns
            logit = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            probability = tl.exp(logit - logsumexp)
            found = probability - tl.where(start + column == label, 1.0, 0.0)
            found = tl.where(counts, found, 0.0)
            tl.store(logits + start + column, found.to(logits.dtype.element_ty), mask=inside)
