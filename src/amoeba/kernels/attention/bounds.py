"""Which keys a query sees and which queries see a key, where documents lie one after the other.

T tokens · N documents

    first_T, end_T = bounds(ends_N1, tokens=32768, window=-1)

Query m sees key n when first[m] <= n <= m, which is so exactly when n <= m < end[n]. Both rise with the token, so that
the first and the last token of a tile tell what all of it needs. Tokens after the last document see nothing and are
seen by none.
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
