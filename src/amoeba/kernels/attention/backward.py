"""Causal attention of packed documents, backward: the same bits each time, as no two programs add to one number.

T tokens · Q query heads · G key and value heads · D of a head

`query_gradient_kernel` computes dq for BLOCK_M queries of one head, and leaves delta = Σ y·dy of each query for
`key_gradient_kernel`, which computes dk and dv for BLOCK_N keys of one head, over all query heads of its group. Both
compute the probabilities anew. The second works on transposed scores (keys, queries): so probabilities enter the next
product from registers in either kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.attention.bounds import key_blocks, masked_block, query_blocks
from amoeba.kernels.launch import quick

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)  # the scale of scores without log2(e)


@triton.jit
def _add_dq(
    dq, q, dy, logsumexp, delta, k_desc, v_desc, key, column, scale, first, row, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([key, column])
    v = v_desc.load([key, column])
    scores = tl.dot(q, k.T)
    dp = tl.dot(dy, v.T)
    p = tl.exp2(scores * scale - logsumexp[:, None])
    if MASKED:
        n = key + tl.arange(0, BLOCK_N)[None, :]
        m = row + tl.arange(0, BLOCK_M)[:, None]
        p = tl.where((n >= first[:, None]) & (n <= m), p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@quick
@triton.jit
def query_gradient_kernel(
    q_desc, k_desc, v_desc, y_desc, dy_desc, dq_desc, logsumexp, delta, bounds, tokens, scale, Q: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % Q
    row = (tl.num_programs(0) // Q - 1 - program // Q) * BLOCK_M  # the last tile of a document, the longest, first
    column = head // GROUP * D
    m = row + tl.arange(0, BLOCK_M)
    first = tl.load(bounds + m, mask=m < tokens, other=2147483647)
    begin, before, whole, masked = key_blocks(bounds, row, tokens, BLOCK_M, BLOCK_N)
    dy = dy_desc.load([row, head * D])
    y = y_desc.load([row, head * D])
    delta_m = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    of_head = head.to(tl.int64) * tokens
    tl.store(delta + of_head + m, delta_m, mask=m < tokens)
    logsumexp_m = tl.load(logsumexp + of_head + m, mask=m < tokens, other=float("inf"))
    q = q_desc.load([row, head * D])
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for block in range(before, before + whole):
        dq = _add_dq(
            dq, q, dy, logsumexp_m, delta_m, k_desc, v_desc, begin + block * BLOCK_N, column, scale, first, row, False,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for index in range(masked):
        key = begin + masked_block(index, before, whole) * BLOCK_N
        dq = _add_dq(
            dq, q, dy, logsumexp_m, delta_m, k_desc, v_desc, key, column, scale, first, row, True, BLOCK_M, BLOCK_N
        )
    dq_desc.store([row, head * D], (dq * (scale * LN_2)).to(dq_desc.dtype))


@triton.jit
def _add_dk_and_dv(
    dk, dv, k, v, q_desc, dy_desc, logsumexp, delta, query, head, tokens, scale, end, row, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    q = q_desc.load([query, head * D])
    dy = dy_desc.load([query, head * D])
    m = query + tl.arange(0, BLOCK_M)
    of_head = head.to(tl.int64) * tokens
    if MASKED:
        logsumexp_m = tl.load(logsumexp + of_head + m, mask=m < tokens, other=float("inf"))
        delta_m = tl.load(delta + of_head + m, mask=m < tokens, other=0.0)
    else:
        logsumexp_m = tl.load(logsumexp + of_head + m)
        delta_m = tl.load(delta + of_head + m)
    scores = tl.dot(k, q.T)
    dp = tl.dot(v, dy.T)
    p = tl.exp2(scores * scale - logsumexp_m[None, :])
    if MASKED:
        n = row + tl.arange(0, BLOCK_N)[:, None]
        p = tl.where((m[None, :] >= n) & (m[None, :] < end[:, None]), p, 0.0)
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    ds = p * (dp - delta_m[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@quick
@triton.jit
def key_gradient_kernel(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, logsumexp, delta, bounds, tokens, scale, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    key_head = program % G
    row = program // G * BLOCK_N
    n = row + tl.arange(0, BLOCK_N)
    end = tl.load(bounds + tokens + n, mask=n < tokens, other=0)
    before, whole, masked = query_blocks(bounds + tokens, row, tokens, BLOCK_M, BLOCK_N)
    k = k_desc.load([row, key_head * D])
    v = v_desc.load([row, key_head * D])
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for index in range(whole * GROUP):  # the heads of the group in turns: one long loop
        query = row + (before + index // GROUP) * BLOCK_M
        dk, dv = _add_dk_and_dv(
            dk, dv, k, v, q_desc, dy_desc, logsumexp, delta, query, key_head * GROUP + index % GROUP, tokens, scale,
            end, row, False, D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for index in range(masked * GROUP):
        query = row + masked_block(index // GROUP, before, whole) * BLOCK_M
        dk, dv = _add_dk_and_dv(
            dk, dv, k, v, q_desc, dy_desc, logsumexp, delta, query, key_head * GROUP + index % GROUP, tokens, scale,
            end, row, True, D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    dk_desc.store([row, key_head * D], (dk * (scale * LN_2)).to(dk_desc.dtype))
    dv_desc.store([row, key_head * D], dv.to(dv_desc.dtype))
