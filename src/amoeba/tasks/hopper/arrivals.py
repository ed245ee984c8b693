"""Rows of other ranks in the kernel for Hopper: what goes out and what is waited for.

See `amoeba.tasks.triton.arrivals`. A block of 128 rows is sent by two warpgroups, each its half, and each half has a
flag of its own. The producer waits, as at all gates: until what was sent before is taken, and until the rows of a
product have come. Sums of dx of another rank's tokens are stored in that rank's memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.tasks.hopper.queue import BLOCK_M, ONE
from amoeba.tasks.triton.arrivals import (
    GOES,
    OWN_DY,
    SENT_TOKENS,
    cell_of,
    number,
    numbers_at,
    raise_flag,
    wait_for_received,
    wait_for_rows,
)

HALF = gl.constexpr(64)  # rows of a flag


@gluon.jit
def wait_for_tile(peers, order, row, end, PLAN: gl.constexpr):
    """Until dy of a row tile is there."""
    row_M = row + gl.arange(0, BLOCK_M, ONE)
    wanted_M = row_M < end
    wait_for_rows(peers, gl.load(order + row_M, mask=wanted_M, other=0) // PLAN.TOP_K, wanted_M, HALF, True)


@gluon.jit
def wait_for_block(peers, block, tokens, PLAN: gl.constexpr):
    """Until the rows of a block of tokens have come, and there is room for their sums."""
    token_M = block * PLAN.TOKENS + gl.arange(0, 128, ONE) % PLAN.TOKENS
    wait_for_received(peers, block, token_M, tokens, HALF, PLAN.TOKENS, PLAN.RANKS, PLAN.TAKERS, True)


@triton.jit
def _aligned(peers, like):
    # not by `numbers_at`: what is said about the result of a call is lost where the call is inlined
    return tl.multiple_of(tl.load(peers + OWN_DY).to(tl.pointer_type(like.dtype.element_ty)), 16)


@gluon.jit
def send_half(peers, dest, block, like, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """SEND: 64 rows of own dy. like: a pointer to such numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half = block * 2 + WARPGROUP
    tokens = number(peers, SENT_TOKENS)
    own = _aligned(peers, like)
    cell = cell_of(peers, dest, like, True)
    goes = numbers_at(peers, GOES, gl.uint8) + dest.to(gl.int64) * tokens
    c = gl.arange(0, 256, gl.SliceLayout(0, layout))
    for first in range(half * HALF, gl.minimum((half + 1) * HALF, tokens), 16):
        t = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
        wanted = gl.load(goes + t, mask=t < tokens, other=0) != 0
        line = t.to(gl.int64) * PLAN.H
        for column in range(0, PLAN.H, 256):
            at = line[:, None] + (column + c)[None, :]
            mask = wanted[:, None] & (column + c < PLAN.H)[None, :]
            gl.store(cell + at, gl.load(own + at, mask=mask), mask=mask)
    raise_flag(peers, dest, half)
