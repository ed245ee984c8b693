"""Attention of one new token per row over a cache of fixed length, of which only the live keys are read.

B rows · Q query heads · G key heads · S splits · L slots of the cache · D width of a key · V width of a value

    out_BQV = attention(query_BQD, key_BGLD, value_BGLV, live_BL, scaling, sink_Q)

A slot counts where live_BL is true; blocks of slots without one are skipped, so that the time follows from the keys
there are and not from the length of the cache. Programs take the blocks alternately, which keeps them equally busy at
any fill. Sums are in fp32 and in a fixed order. Grids follow from shapes alone: it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

BLOCK = 64  # slots that a program looks at together
# In fp32, where keys pass through registers on their way to the product, fewer: this many elements of them. With 64
# slots of 256 a program asked for 144 KB of shared memory, and smaller GPUs have 99.
WIDE_ELEMENTS, FEWEST_SLOTS = 2048, 16
PROGRAMS = 1024  # about eight for each SM of the largest GPUs: a program waits for one block after the other
MOST_SPLITS = 64  # partial results that the combining program holds


def attention(
    query_BQD: Tensor,
    key_BGLD: Tensor,
    value_BGLV: Tensor,
    live_BL: Tensor,
    scaling: float,
    sink_Q: Tensor | None = None,
) -> Tensor:
    """sink_Q: a logit per head that takes its share of the softmax and adds nothing."""
    rows, heads, depth = query_BQD.shape
    _, groups, length, width = value_BGLV.shape
    per_group = heads // groups
    block = slots_at_once(max(depth, width), query_BQD.element_size())
    splits = max(1, min(cdiv(PROGRAMS, rows * groups), cdiv(length, block), MOST_SPLITS))
    query_BQD = query_BQD.contiguous()
    partial = query_BQD.new_empty((rows, heads, splits, width), dtype=torch.float32)
    # the largest logit and the sum of exponentials below it, of each split
    largest, total = (partial.new_empty((rows, heads, splits)) for _ in range(2))
    out_BQV = query_BQD.new_empty((rows, heads, width))
    overlap = can_overlap(query_BQD.device)
    launched: dict[str, Any] = {"OVERLAP": overlap, "num_warps": 4, **({"launch_pdl": True} if overlap else {})}
    _attend[(rows * groups * splits,)](
        query_BQD,
        key_BGLD,
        value_BGLV,
        live_BL,
        partial,
        largest,
        total,
        scaling,
        *key_BGLD.stride()[:3],
        *value_BGLV.stride()[:3],
        live_BL.stride(0),
        groups,
        length,
        SPLITS=splits,
        PER_GROUP=per_group,
        HEADS=max(16, next_power_of_2(per_group)),
        D=depth,
        V=width,
        BLOCK_D=max(16, next_power_of_2(depth)),
        BLOCK_V=max(16, next_power_of_2(width)),
        BLOCK_L=block,
        num_stages=1,
        **launched,
    )
    _combine[(rows * heads,)](
        partial,
        largest,
        total,
        query_BQD if sink_Q is None else sink_Q,
        out_BQV,
        heads,
        HAS_SINK=sink_Q is not None,
        SPLITS=splits,
        BLOCK_S=next_power_of_2(splits),
        V=width,
        BLOCK_V=max(16, next_power_of_2(width)),
        **launched,
    )
    return out_BQV


def slots_at_once(width: int, itemsize: int) -> int:
    if itemsize <= 2:
        return BLOCK
    return min(BLOCK, max(FEWEST_SLOTS, WIDE_ELEMENTS // next_power_of_2(width)))


@quick
@triton.jit
def _attend(
    query_BQD,
    key_BGLD,
    value_BGLV,
    live_BL,
    partial_BQSV,
    largest_BQS,
    total_BQS,
    scaling,
    key_stride_b,
    key_stride_g,
    key_stride_l,
    value_stride_b,
    value_stride_g,
    value_stride_l,
    live_stride_b,
    G,
    L,
    SPLITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:  # as in `_combine`: the next launch may begin, and this one's has
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0) % SPLITS
    group = (tl.program_id(0) // SPLITS % G).to(tl.int64)
    row = (tl.program_id(0) // SPLITS // G).to(tl.int64)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    place = (row * G + group) * PER_GROUP + head  # of a head among the B·Q
    query = tl.load(
        query_BQD + place[:, None] * D + d[None, :], mask=(head < PER_GROUP)[:, None] & (d < D)[None, :], other=0.0
    )
    keys = key_BGLD + row * key_stride_b + group * key_stride_g
    values = value_BGLV + row * value_stride_b + group * value_stride_g
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sum_HV = tl.zeros((HEADS, BLOCK_V), tl.float32)
    for first in range(split * BLOCK_L, L, SPLITS * BLOCK_L):
        slot = first + tl.arange(0, BLOCK_L)
        live = tl.load(live_BL + row * live_stride_b + slot, mask=slot < L, other=0) != 0
        if tl.max(live.to(tl.int32), axis=0) > 0:
            far = slot.to(tl.int64)
            key = tl.load(
                keys + far[None, :] * key_stride_l + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0
            )
            value = tl.load(
                values + far[:, None] * value_stride_l + v[None, :], mask=live[:, None] & (v < V)[None, :], other=0.0
            )
            logits = tl.where(live[None, :], tl.dot(query, key, input_precision="ieee") * scaling, float("-inf"))
            new = tl.maximum(largest, tl.max(logits, axis=1))
            share = tl.exp(logits - new[:, None])
            shrink = tl.exp(largest - new)
            total = total * shrink + tl.sum(share, axis=1)
            sum_HV = sum_HV * shrink[:, None]
            sum_HV += tl.dot(share.to(value.dtype), value, input_precision="ieee")
            largest = new
    out = place * SPLITS + split
    ok = head < PER_GROUP
    tl.store(largest_BQS + out, largest, mask=ok)
    tl.store(total_BQS + out, total, mask=ok)
    tl.store(partial_BQSV + out[:, None] * V + v[None, :], sum_HV, mask=ok[:, None] & (v < V)[None, :])


@quick
@triton.jit
def _combine(
    partial_BQSV,
    largest_BQS,
    total_BQS,
    sink_Q,
    out_BQV,
    Q,
    HAS_SINK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    v = tl.arange(0, BLOCK_V)
    ok = split < SPLITS
    largest = tl.load(largest_BQS + place * SPLITS + split, mask=ok, other=float("-inf"))
    total = tl.load(total_BQS + place * SPLITS + split, mask=ok, other=0.0)
    partial = tl.load(
        partial_BQSV + (place * SPLITS + split)[:, None] * V + v[None, :],
        mask=(total > 0)[:, None] & (v < V)[None, :],
        other=0.0,
    )
    over_all = tl.max(largest, axis=0)
    if HAS_SINK:
        sink = tl.load(sink_Q + place % Q).to(tl.float32)
        over_all = tl.maximum(over_all, sink)
    # a split without a live key has total 0 and counts for nothing, whatever its largest logit
    share = tl.where(total > 0, tl.exp(largest - over_all), 0.0)
    divisor = tl.sum(share * total, axis=0)
    if HAS_SINK:
        divisor += tl.exp(sink - over_all)
    out = tl.sum(partial * share[:, None], axis=0) / divisor
    tl.store(out_BQV + place * V + v, out.to(out_BQV.dtype.element_ty), mask=v < V)
