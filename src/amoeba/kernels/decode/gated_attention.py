"""Queries, gates, keys and values of a step, from the joined projection on, for attention as Qwen3-Next's.

B rows, a token each · Q query heads · G key and value heads · D of a head · C = 2·(Q + G)·D · R of D that are rotated
L slots of a cache · P rows of the rotations

    q_BQD, gate_BQD = norm_rotate_gated(qkv_BC, q_weight_D, k_weight_D, cos_PR, sin_PR, key_BGLD, value_BGLD, slot, ...)

A row of qkv_BC holds each head of queries with its gate behind it, then keys, then values. Queries and keys are normed
by weights to which one is added, the first R of a head are rotated, and keys and values are written into the cache.
What comes back of gates is their sigmoid. Numbers are rounded where transformers rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines


def norm_rotate_gated(
    qkv_BC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    slot: Tensor,
    *,
    query_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """slot (1,) or (B,): none is kept behind the last."""
    rows, groups, length, size = key_BGLD.shape
    tables, rotated = cos_PR.shape
    check_arguments(
        qkv_BC.shape == (rows, 2 * (query_heads + groups) * size)
        and have_lines(qkv_BC)
        and key_BGLD.shape == value_BGLD.shape
        and all(each.is_contiguous() for each in (key_BGLD, value_BGLD, cos_PR, sin_PR, q_weight_D, k_weight_D))
        and q_weight_D.shape == k_weight_D.shape == (size,)
        and cos_PR.shape == sin_PR.shape
        and size & (size - 1) == 0
        and 0 < rotated <= size
        and rotated % 2 == 0
        and tables in (1, rows)
        and slot.shape in ((1,), (rows,)),
        "rows of all heads with gates, a power of two wide, and a cache for them, contiguous",
        qkv=qkv_BC,
        key=key_BGLD,
        cos=cos_PR,
    )
    q_BQD, gate_BQD = (qkv_BC.new_empty((rows, query_heads, size)) for _ in range(2))
    if rows:
        overlap = can_overlap(qkv_BC.device)
        _norm_rotate_gated[(rows, query_heads + 2 * groups)](
            qkv_BC, q_BQD, gate_BQD, key_BGLD, value_BGLD, q_weight_D, k_weight_D, cos_PR, sin_PR, slot, length, eps,
            STRIDE=qkv_BC.stride(0), TABLES=tables > 1, SLOTS=slot.shape[0] > 1, Q=query_heads, G=groups, D=size,
            R=rotated, OVERLAP=overlap, num_warps=1, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return q_BQD, gate_BQD


@triton.jit
def _normed(x, weight, at, mask, scale, DTYPE: tl.constexpr):
    number = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale
    return (number * (1.0 + tl.load(weight + at, mask=mask, other=0.0).to(tl.float32))).to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(x, weight, cos, sin, eps, D: tl.constexpr, R: tl.constexpr, DTYPE: tl.constexpr):
    d = tl.arange(0, D)
    first, turned = d < R // 2, d < R
    own = tl.load(x + d).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, axis=0) / D + eps)
    other = _normed(x, weight, tl.where(first, d + R // 2, d - R // 2), turned, scale, DTYPE)
    other *= tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)
    own = _normed(x, weight, d, d < D, scale, DTYPE) * tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)
    return (own.to(DTYPE).to(tl.float32) + tl.where(first, -other, other).to(DTYPE).to(tl.float32)).to(DTYPE)


@quick
@triton.jit
def _norm_rotate_gated(
    qkv, q, gate, keys, values, q_weight, k_weight, cos, sin, slot, length, eps, STRIDE: tl.constexpr,
    TABLES: tl.constexpr, SLOTS: tl.constexpr, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = q.dtype.element_ty
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    qkv += row * STRIDE
    if TABLES:
        cos += row * R
        sin += row * R
    if SLOTS:
        slot += row
    place = tl.load(slot)
    if head < Q:
        out = (row * Q + head) * D + d
        x = qkv + head * (2 * D)
        tl.store(q + out, _rotated(x, q_weight, cos, sin, eps, D, R, DTYPE))
        tl.store(gate + out, tl.sigmoid(tl.load(x + D + d).to(tl.float32)).to(DTYPE))
    elif place < length:
        x = qkv + 2 * Q * D + (head - Q) * D
        kept = ((row * G + (head - Q) % G) * length + place) * D + d
        if head < Q + G:
            tl.store(keys + kept, _rotated(x, k_weight, cos, sin, eps, D, R, DTYPE))
        else:
            tl.store(values + kept, tl.load(x + d))
