"""Queries and keys rotated in one launch, with the roundings of transformers' `apply_rotary_pos_emb`; and back.

    q_BQTD, k_BGTD = rotate(q_BQTD, k_BGTD, cos_RTD, sin_RTD)
    dq_BQTD, dk_BGTD = rotate(dq_BQTD, dk_BGTD, cos_RTD, sin_RTD, backward=True)

What comes out lies token after token, as what transformers gives in: heads of a token side by side.

B rows · T tokens · Q query heads · G key heads · D of a head, even · R rows of the rotations: B, or 1 for all
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick

HEADS = 8  # of a program
WARPS = 4


def rotate(
    q_BQTD: Tensor, k_BGTD: Tensor, cos_RTD: Tensor, sin_RTD: Tensor, *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    (batch, queries, tokens, size), keys = q_BQTD.shape, k_BGTD.shape[1]
    q, k, cos, sin = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (q_BQTD, k_BGTD, cos_RTD, sin_RTD)
    )
    q_out, k_out = (
        torch.empty((batch, tokens, heads, size), dtype=q.dtype, device=q.device) for heads in (queries, keys)
    )
    if batch * tokens:
        shared = cos.shape[0] == 1
        _rotate[(batch * tokens, cdiv(queries, HEADS) + cdiv(keys, HEADS))](
            q, k, cos, sin, q_out, k_out, tokens, *q.stride()[:3], *k.stride()[:3],
            *(0 if shared else each.stride(0) for each in (cos, sin)), cos.stride(1), sin.stride(1),
            Q=queries, G=keys, D=size, HALF=next_power_of_2(size // 2), HEADS=HEADS, BACKWARD=backward,
            num_warps=WARPS, enable_fp_fusion=False,  # which would leave out the rounding of a product before the sum
        )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def why_not(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    size = q.shape[-1]
    if any(each.dtype != q.dtype or each.dim() != 4 or each.shape[-1] != size for each in (q, k)) or size % 2:
        return "takes heads of one even size and one dtype"
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[1:] != (q.shape[2], size) or cos.dtype != q.dtype:
        return "takes rotations for all of a head, in its dtype"
    return None if cos.shape[0] in (1, q.shape[0]) else "takes rotations for each row, or for all"


@quick
@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    q, k, cos, sin, q_out, k_out, tokens, q_row, q_head, q_token, k_row, k_head, k_token, cos_row, sin_row, cos_token,
    sin_token, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row, token, block = place // tokens, place % tokens, tl.program_id(1)
    BLOCKS: tl.constexpr = (Q + HEADS - 1) // HEADS
    inner = tl.arange(0, HALF)
    inside = inner < D // 2
    cos += row * cos_row + token * cos_token
    sin += row * sin_row + token * sin_token
    cos_1 = tl.load(cos + inner, mask=inside, other=0.0)[None, :]
    cos_2 = tl.load(cos + D // 2 + inner, mask=inside, other=0.0)[None, :]
    sin_1 = tl.load(sin + inner, mask=inside, other=0.0)[None, :]
    sin_2 = tl.load(sin + D // 2 + inner, mask=inside, other=0.0)[None, :]
    if block < BLOCKS:
        _rotate_heads(
            q + row * q_row + token * q_token, q_head, q_out + place * (Q * D), block * HEADS, cos_1, cos_2, sin_1,
            sin_2, inner, inside, Q, D, HEADS, BACKWARD,
        )  # fmt: skip
    else:
        _rotate_heads(
            k + row * k_row + token * k_token, k_head, k_out + place * (G * D), (block - BLOCKS) * HEADS, cos_1,
            cos_2, sin_1, sin_2, inner, inside, G, D, HEADS, BACKWARD,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    x, stride, out, first, cos_1, cos_2, sin_1, sin_2, inner, inside, COUNT: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    head = first + tl.arange(0, HEADS)
    mask = (head < COUNT)[:, None] & inside[None, :]
    source = x + (head * stride)[:, None] + inner[None, :]
    target = out + (head * D)[:, None] + inner[None, :]
    one = tl.load(source, mask=mask, other=0.0)
    two = tl.load(source + D // 2, mask=mask, other=0.0)
    if BACKWARD:
        tl.store(target, _sum(one, cos_1, two, sin_2), mask=mask)
        tl.store(target + D // 2, _sum(two, cos_2, -one, sin_1), mask=mask)
    else:
        tl.store(target, _sum(one, cos_1, -two, sin_1), mask=mask)
        tl.store(target + D // 2, _sum(two, cos_2, one, sin_2), mask=mask)


@triton.jit
def _sum(a, b, c, d):
    """a b + c d: each product rounded, and then their sum."""
    dtype: tl.constexpr = a.dtype
    if dtype == tl.float32:
        return tl.fma(a, b, c * d)
    else:
        first = (a.to(tl.float32) * b.to(tl.float32)).to(dtype)
        second = (c.to(tl.float32) * d.to(tl.float32)).to(dtype)
        return (first.to(tl.float32) + second.to(tl.float32)).to(dtype)
