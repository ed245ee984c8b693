"""Causal attention of packed documents, forward.

T tokens · Q query heads · G key and value heads · D of a head

A program computes BLOCK_M queries of one head. First the key blocks that all of its queries see, in a loop without
masks; then those at the diagonal and at the documents' borders. Scores are in powers of two: the scale holds log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.attention.bounds import key_blocks, masked_block
from amoeba.kernels.launch import quick


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
