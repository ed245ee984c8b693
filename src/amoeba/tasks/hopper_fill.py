"""What the producer of the kernel for Hopper does with a task that is passed on: it fills its stages.

See `amoeba.tasks.hopper_kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.hopper.gemm_kernel import fill_product, row_pointers
from amoeba.tasks.decoder import ACTIVATE, COMBINE, DOWN, DOWN_WEIGHTS, UP, UP_WEIGHTS
from amoeba.tasks.hopper_queue import BLOCK_K, BLOCK_M, BLOCK_N, STAGES
from amoeba.tasks.hopper_row_passes import fill_lines, fill_tokens
from amoeba.tasks.hopper_tiles import fill_gradients


@gluon.jit
def fill_task(
    descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows, intermediate,
    bundle, PLAN: gl.constexpr,
):  # fmt: skip
    """count: of stages so far; returned with those of this task."""
    down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc = descriptors
    dy, x, da, dh, _ = sources
    row_bufs, matrix_bufs, left_bufs, da_bufs, h_bufs, token_bufs, full, empty = ring
    if kind == DOWN:
        pointers = row_pointers(dy, order, row, end, PLAN.H, PLAN.TOP_K, BLOCK_M, BLOCK_K)
        count = fill_product(
            dh_rows_desc, down_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, part, PLAN.H,
            PLAN.I, PLAN.I, True, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    elif kind == UP:
        count = fill_product(
            dh_rows_desc, gate_up_desc, dy, row_bufs, matrix_bufs, full, empty, count, expert, row, part, PLAN.J,
            PLAN.H, PLAN.H, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    elif kind == DOWN_WEIGHTS:
        count = fill_gradients(
            scaled_a_desc, dy, da, order, left_bufs, matrix_bufs, full, empty, count, part, row, end, bundle,
            PLAN.I, PLAN.DA_STRIDE, PLAN.I_TILES, PLAN.DOWN_TILES, PLAN,
        )  # fmt: skip
    elif kind == UP_WEIGHTS:
        count = fill_gradients(
            dh_desc, x, dh, order, left_bufs, matrix_bufs, full, empty, count, part, row, end, bundle,
            PLAN.J, PLAN.J, PLAN.J_TILES, PLAN.UP_TILES, PLAN,
        )  # fmt: skip
    elif kind == ACTIVATE:
        count = fill_lines(
            da_lines_desc, h_lines_desc, da_bufs, h_bufs, full, empty, count, row, end, intermediate, PLAN
        )
    elif kind == COMBINE:
        dx = da + rows.to(gl.int64) * PLAN.DX_AT  # they lie one behind the other: fewer pointers in registers
        count = fill_tokens(item, dx, slot_row, token_bufs, full, empty, count, tokens, rows, PLAN)
    return count
