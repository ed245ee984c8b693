"""What the row passes share: how wide a tile is, and which expert a sorted row belongs to.

E experts · N routed rows

    block = column_block(2880, most=1024)              # 1024: three blocks, 1/16 of the lanes idle
    expert = expert_of_row(offs, row, E, E_PADDED)     # inside a kernel; E for rows past the last expert's

Widths and row strides go into the row passes as compile-time constants: a model has few of them, and a width that is a
multiple of 8 but not of 16 still gets 16-byte accesses, which the launcher's own divisibility test (16) would refuse.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from amoeba.kernels.launch import cdiv, next_power_of_2

# A block narrower than 64 elements (128 bytes of bf16, one cache line) is only used for narrower rows.
NARROWEST_BLOCK = 64
# Idle lanes cost instructions, not bytes: a wider block is taken as long as no more than this share idles. Not measured
# yet.
IDLE_SHARE = 1 / 16


@cache
def column_block(width: int, most: int) -> int:
    """The widest power of two up to `most` that leaves few lanes idle in the last block of a row."""
    if width < NARROWEST_BLOCK:
        return min(most, max(16, next_power_of_2(width)))
    candidates = [1 << bit for bit in range(most.bit_length() - 1, -1, -1) if 1 << bit >= min(NARROWEST_BLOCK, most)]

    def idle(block: int) -> float:
        return 1 - width / (cdiv(width, block) * block)

    return next((block for block in candidates if idle(block) <= IDLE_SHARE), min(candidates, key=idle))


@triton.jit
def expert_of_row(offs, row, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """Expert of each of a vector of sorted rows: how many experts end at or before it."""
    index = tl.arange(0, EXPERTS_PADDED)
    end = tl.load(offs + index, mask=index < NUM_EXPERTS, other=2147483647)
    return tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
