"""Products of two warpgroups in turns, so that the matrix unit has one to work on while the other is added up.

    begin_turns(WARPGROUP, PLAN)                                    # once
    found = product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)    # begun, as by warpgroup_mma
    end_turns(WARPGROUP, PLAN)                                      # once

Left to themselves both warpgroups begin when a stage is full, share the matrix unit, and are done at the same time:
then it waits for both while they add up. Both begin as many products, the first warpgroup's first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def begin_turns(WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.IN_TURNS and WARPGROUP == 1:
        _do("bar.arrive 8, 256; mov.b32 $0, 0;")


@gluon.jit
def product_in_turn(rows, matrix, zero, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The other warpgroup's next product comes behind this one."""
    if PLAN.IN_TURNS:
        if WARPGROUP == 0:
            _do("bar.sync 8, 256; mov.b32 $0, 0;")
        else:
            _do("bar.sync 9, 256; mov.b32 $0, 0;")
    found = warpgroup_mma(rows, matrix, zero, use_acc=False, is_async=True)
    if PLAN.IN_TURNS:
        if WARPGROUP == 0:
            _do("bar.arrive 9, 256; mov.b32 $0, 0;")
        else:
            _do("bar.arrive 8, 256; mov.b32 $0, 0;")
    return found


@gluon.jit
def end_turns(WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The first warpgroup takes the turn that the other one has left to it: no barrier stays half full."""
    if PLAN.IN_TURNS and WARPGROUP == 0:
        _do("bar.sync 8, 256; mov.b32 $0, 0;")


@gluon.jit
def _do(INSTRUCTIONS: gl.constexpr):
    """By each thread. Gluon has no barrier of two warpgroups; the compiler numbers its own ones from 0."""
    gl.inline_asm_elementwise(INSTRUCTIONS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
