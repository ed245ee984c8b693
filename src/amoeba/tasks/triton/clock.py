"""What a kernel writes down of a task: which it was, where it ran, and when.

    came = now(trace, INTERPRETED)                                         # inside a kernel
    note_task(trace, ticket, kind, item, part, came, started, INTERPRETED)

`trace` is int64: the interpreter's clock, which goes by one at each look, then FIELDS numbers for each ticket. A GPU's
clock counts nanoseconds, in steps of its own: 32 ns to 1 µs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

FIELDS = ("kind", "item", "part", "multiprocessor", "came", "started", "ended")
_FIELDS = tl.constexpr(len(FIELDS))


@triton.jit
def now(trace, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.atomic_add(trace, 1)
    else:
        return cuda.globaltimer()


@triton.jit
def note_task(trace, ticket, kind, item, part, came, started, INTERPRETED: tl.constexpr):
    tl.debug_barrier()  # all threads of the program are through
    ended = now(trace, INTERPRETED)
    line = trace + 1 + ticket.to(tl.int64) * _FIELDS
    tl.store(line, kind.to(tl.int64))
    tl.store(line + 1, item.to(tl.int64))
    tl.store(line + 2, part.to(tl.int64))
    if INTERPRETED:
        tl.store(line + 3, 0)
    else:
        tl.store(line + 3, cuda.smid().to(tl.int64))
    tl.store(line + 4, came)
    tl.store(line + 5, started)
    tl.store(line + 6, ended)
