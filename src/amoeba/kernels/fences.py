"""Memory fences between kernels, hosts and peers, and a clock for waiting kernels.

Without a GPU, in Triton's interpreter, all is in order as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FENCE = tl.constexpr("fence.acq_rel.sys; mov.b32 $0, $1;")


@triton.jit
def fenced(value, ON_GPU: tl.constexpr):
    """The value, once all reads and writes ahead of it are done for the host too. Those behind it come after."""
    if ON_GPU:
        value = tl.inline_asm_elementwise(_FENCE, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def microseconds(before, ON_GPU: tl.constexpr):
    """A clock. Without a GPU each look at it takes a microsecond."""
    if ON_GPU:
        clock: tl.constexpr = "mov.u64 $0, %globaltimer;"
        return tl.inline_asm_elementwise(clock, "=l", [], dtype=tl.int64, is_pure=False, pack=1) // 1000
    else:
        return before + 1
