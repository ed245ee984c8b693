"""Order between what a kernel reads and writes and what others see of it, and a clock for who waits.

Without a GPU, in Triton's interpreter, all is in order as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fenced(value, ON_GPU: tl.constexpr, SCOPE: tl.constexpr = "sys"):
    """The value, once all reads and writes ahead of it are done for whom it is: the host too ("sys"), or other kernels
    of this GPU ("gpu"), which does not wait for what was written to the host. Those behind it come after."""
    if ON_GPU:
        fence: tl.constexpr = "fence.acq_rel." + SCOPE + "; mov.b32 $0, $1;"
        value = tl.inline_asm_elementwise(fence, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def microseconds(before, ON_GPU: tl.constexpr):
    """A clock. Without a GPU each look at it takes a microsecond."""
    if ON_GPU:
        clock: tl.constexpr = "mov.u64 $0, %globaltimer;"
        return tl.inline_asm_elementwise(clock, "=l", [], dtype=tl.int64, is_pure=False, pack=1) // 1000
    else:
        return before + 1
