"""A list of tiles in two: those whose rows all come from some of the tokens, and the others.

N = T·K routed rows

    own, rest = split_table(table, order_N, first * K, last * K)        # of the tokens from first up to last

A product over one list and then over the other computes the same tiles as over the whole one, so also the same bits.
Rows of an expert are sorted by their tokens: the first and the last row of a tile tell of all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.hopper.product_kernel import BLOCK_M
from amoeba.kernels.launch import quick

_BLOCK = 1024


def split_table(table: Tensor, order_N: Tensor, first_slot: int, last_slot: int) -> tuple[Tensor, Tensor]:
    """table: of `tile_table`."""
    inside, outside = torch.empty_like(table), torch.empty_like(table)
    _split_table[(1,)](table, order_N, inside, outside, first_slot, last_slot, BLOCK_M=BLOCK_M, BLOCK=_BLOCK)
    return inside, outside


@quick
@triton.jit(do_not_specialize=["first_slot", "last_slot"])
def _split_table(table, order_N, inside, outside, first_slot, last_slot, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.load(table)
    inner = tiles * 0
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        real = tile < tiles
        entry = table + 4 + tile * 4
        expert = tl.load(entry, mask=real, other=0)
        row = tl.load(entry + 1, mask=real, other=0)
        end = tl.load(entry + 2, mask=real, other=1)
        first = tl.load(order_N + row, mask=real, other=0)
        last = tl.load(order_N + tl.minimum(row + BLOCK_M, end) - 1, mask=real, other=0)
        is_inside = real & (first >= first_slot) & (last < last_slot)
        before = inner + tl.cumsum(is_inside.to(tl.int32), axis=0) - is_inside.to(tl.int32)
        at = 4 + 4 * tl.where(is_inside, before, tile - before)
        for place in tl.static_range(3):
            value = expert if place == 0 else (row if place == 1 else end)
            tl.store(inside + at + place, value, mask=is_inside)
            tl.store(outside + at + place, value, mask=real & (is_inside == 0))
        inner += tl.sum(is_inside.to(tl.int32), axis=0)
    tl.store(inside, inner)
    tl.store(outside, tiles - inner)
