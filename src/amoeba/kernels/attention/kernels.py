"""Causal attention of packed documents, forward and backward; the same bits each time, as no two programs add to one
number.

T tokens · N documents · Q query heads · G key and value heads · D of a head

Which keys a query sees and which queries see a key, where documents lie one after the other:

    first_T, end_T = bounds(ends_N1, tokens=32768, window=-1)

Query m sees key n when first[m] <= n <= m, which is so exactly when n <= m < end[n]. Both rise with the token, so that
the first and the last token of a tile tell what all of it needs. Tokens after the last document see nothing and are
seen by none.

Forward: a program computes BLOCK_M queries of one head. First the key blocks that all of its queries see, in a loop
without masks; then those at the diagonal and at the documents' borders. Scores are in powers of two: the scale holds
log2(e).

Backward: `query_gradient_kernel` computes dq for BLOCK_M queries of one head, and leaves delta = Σ y·dy of each query
for `key_gradient_kernel`, which computes dk and dv for BLOCK_N keys of one head, over all query heads of its group.
Both compute the probabilities anew. The second works on transposed scores (keys, queries): so probabilities enter the
next product from registers in either kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, quick

BLOCK = 256


@quick
@triton.jit(do_not_specialize=["num_ends", "steps", "window"])
def _bounds(ends, bounds, tokens, num_ends, steps, window, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)  # at last: how many ends are at or before the token, the 0 among them
    high = low + num_ends
    for _ in range(steps):
        middle = (low + high) // 2
        before = (low < high) & (tl.load(ends + middle, mask=low < high, other=0) <= token)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    inside = low < num_ends
    start = tl.load(ends + low - 1).to(tl.int32)
    end = tl.load(ends + low, mask=inside, other=0).to(tl.int32)
    first = tl.where(inside, tl.maximum(start, token - window), token + 1)
    end = tl.where(inside, tl.minimum(end, token + window + 1), token)
    tl.store(bounds + token, first, mask=token < tokens)
    tl.store(bounds + tokens + token, end, mask=token < tokens)


def bounds(ends_N1: Tensor, tokens: int, window: int) -> Tensor:
    """(2, T): the first key that each query sees; behind the last query that sees each key. window: -1 for none."""
    found = torch.empty((2, tokens), dtype=torch.int32, device=ends_N1.device)
    count = ends_N1.numel()
    window = tokens if window < 0 else min(window, tokens)
    _bounds[(cdiv(tokens, BLOCK),)](ends_N1, found, tokens, count, count.bit_length(), window, BLOCK=BLOCK)
    return found


@triton.jit
def key_blocks(first_T, row, tokens, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key blocks of the queries from `row` on: where they begin, how many come before the whole ones, how many are
    whole (all queries of the tile see all of their keys), and how many are not. The whole ones are consecutive."""
    begin = tl.load(first_T + row)
    latest = tl.load(first_T + tl.minimum(row + BLOCK_M, tokens) - 1)
    before = tl.cdiv(latest - begin, BLOCK_N)
    whole = tl.maximum((row + 1 - begin) // BLOCK_N - before, 0)
    total = tl.cdiv(tl.minimum(row + BLOCK_M, tokens) - begin, BLOCK_N)
    return begin, before, whole, total - whole


@triton.jit
def query_blocks(end_T, row, tokens, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Query blocks of the keys from `row` on, which is where they begin; else as `key_blocks`."""
    earliest = tl.load(end_T + row)
    last = tl.load(end_T + tl.minimum(row + BLOCK_N, tokens) - 1)
    before = (BLOCK_N + BLOCK_M - 2) // BLOCK_M
    whole = tl.maximum((earliest - row) // BLOCK_M - before, 0)
    total = tl.cdiv(last - row, BLOCK_M)
    return before, whole, total - whole


@triton.jit
def masked_block(index, before, whole):
    """The place among all blocks of the index-th one that is not whole."""
    return index + tl.where(index < before, 0, whole)


@triton.jit
def _accumulate(
    acc, total, most, q, k_desc, v_desc, key, column, scale, first, row, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([key, column])
    scores = tl.dot(q, k.T)
    if MASKED:
        n = key + tl.arange(0, BLOCK_N)[None, :]
        m = row + tl.arange(0, BLOCK_M)[:, None]
        scores = tl.where((n >= first[:, None]) & (n <= m), scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(most - higher)
    total = total * shrink + tl.sum(p, 1)
    v = v_desc.load([key, column])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, higher


@quick
@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, y_desc, logsumexp, bounds, tokens, scale, Q: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % Q
    row = (tl.num_programs(0) // Q - 1 - program // Q) * BLOCK_M  # the last tile of a document, the longest, first
    column = head // GROUP * D
    m = row + tl.arange(0, BLOCK_M)
    first = tl.load(bounds + m, mask=m < tokens, other=2147483647)
    begin, before, whole, masked = key_blocks(bounds, row, tokens, BLOCK_M, BLOCK_N)
    q = q_desc.load([row, head * D])
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    most = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a row may see nothing of its first blocks
    for block in range(before, before + whole):
        acc, total, most = _accumulate(
            acc, total, most, q, k_desc, v_desc, begin + block * BLOCK_N, column, scale, first, row, False, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
    for index in range(masked):
        key = begin + masked_block(index, before, whole) * BLOCK_N
        acc, total, most = _accumulate(
            acc, total, most, q, k_desc, v_desc, key, column, scale, first, row, True, BLOCK_M, BLOCK_N
        )
    sees = total > 0.0
    y = acc / tl.where(sees, total, 1.0)[:, None]
    y_desc.store([row, head * D], y.to(y_desc.dtype))
    # of a row that sees nothing: +inf, so that backward finds no probability there
    found = tl.where(sees, most + tl.log2(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(logsumexp + head.to(tl.int64) * tokens + m, found, mask=m < tokens)


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
