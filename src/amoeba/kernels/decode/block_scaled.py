"""Few tokens through block-scaled experts, without gradients: codes are read once per slot and decoded in registers.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    y_TH = decode(problem)        # of BlockScaledExperts, without LoRA

As `by_slot`: up has a program per slot and columns of a, down one per token and columns of y, with the sum over k
inside; products are a multiply and add in fp32, so weights are not rounded. Two slots of one expert read its codes
twice: made for very few tokens. Slots whose id lies outside [0, E) are sentinels and add nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.activation import constants
from amoeba.kernels.block_scaled_product import decode_e2m1, decode_e4m3, decode_scales, scale_row
from amoeba.kernels.choice import capability_of
from amoeba.kernels.decode.tiles import activate, rows_of_gate_up
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.problem import Problem

# Columns of a program, of which a gated up reads two rows each, and bytes of a row at a time: 4 KB on their way at once
# from each program, by 4 warps. The best of four on an H200 when codes were still read byte by byte.
COLUMNS, BYTES, WARPS = 4, 512, 4


def decode(problem: Problem) -> Tensor:
    """y_TH, in the dtype of x. Right for every T."""
    x_TH, expert_TK, weight_TK, weights = problem[:4]
    x_TH, expert_TK, weight_TK = x_TH.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
    tokens, top_k = expert_TK.shape
    if tokens * top_k == 0:
        return torch.zeros_like(x_TH)
    experts, hidden, intermediate = weights.num_experts, weights.hidden, weights.intermediate
    gate_up, down = weights.gate_up_EJH.matrix, weights.down_EHI.matrix
    gate_up_bias, down_bias = weights.gate_up_bias_EJ, weights.down_bias_EH
    a_NI = torch.empty((tokens * top_k, intermediate), dtype=torch.float32, device=x_TH.device)
    y_TH = torch.empty_like(x_TH)
    _up[(tokens * top_k * cdiv(intermediate, COLUMNS),)](
        x_TH,
        expert_TK,
        gate_up.data,
        gate_up.scales,
        gate_up.matrix_scale,
        None if gate_up_bias is None else gate_up_bias.contiguous(),
        a_NI,
        E=experts,
        I=intermediate,
        K=top_k,
        COLUMNS=COLUMNS,
        INTERLEAVED=weights.activation.interleaved,
        **_constants(gate_up, x_TH.device),
        **constants(weights.activation),
        num_warps=WARPS,
    )
    columns = 2 * COLUMNS
    _down[(tokens * cdiv(hidden, columns),)](
        a_NI,
        expert_TK,
        weight_TK,
        down.data,
        down.scales,
        down.matrix_scale,
        None if down_bias is None else down_bias.contiguous(),
        y_TH,
        E=experts,
        H=hidden,
        K=top_k,
        COLUMNS=columns,
        **_constants(down, x_TH.device),
        num_warps=WARPS,
    )
    return y_TH


def _constants(matrix: QuantisedMatrix, device: torch.device) -> dict[str, Any]:
    """Of a stack (E, rows, columns) that is read along its columns."""
    block_rows, block_columns = matrix.format.block
    of_part = matrix.shape[1] // matrix.parts
    bits = matrix.format.element.bits
    return {
        "REDUCTION": matrix.columns,
        "DEPTH": min(BYTES * 8 // bits, max(32, next_power_of_2(matrix.columns))),
        "BITS": bits,
        "SCALE": matrix.format.scale,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
        "PART_ROWS": of_part,
        "PART_BLOCKS": cdiv(of_part, block_rows),
        "STRIDE_ROW": matrix.data.stride(1),
        "STRIDE_EXPERT": matrix.data.stride(0),
        "STRIDE_SCALE_ROW": matrix.scales.stride(1),
        "STRIDE_SCALE_EXPERT": matrix.scales.stride(0),
        "HARDWARE": (capability_of(device) or (0, 0)) >= (8, 9),
    }


@triton.jit
def _products(
    data,
    scales,
    of_matrix,
    values,
    row_R,
    row_ok,
    step,
    there,
    ROWS: tl.constexpr,
    REDUCTION: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The step-th DEPTH numbers of these rows, each times that of `values` (fp32 or x's): to be summed along each row.

    there: whether there are values; two codes of a byte are added up. Bytes are compared with the row's as they are
    counted: the compiler has to see that 16 side by side are inside or outside, or it reads them one by one.
    """
    WIDTH: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (REDUCTION * BITS + 7) // 8
    LINES: tl.constexpr = DEPTH // BLOCK_COLUMNS if DEPTH > BLOCK_COLUMNS else 1
    byte = step * WIDTH + tl.arange(0, WIDTH)
    mask = row_ok[:, None] & (byte < ROW_BYTES)[None, :]
    code = tl.load(data + row_R.to(tl.int64)[:, None] * STRIDE_ROW + byte[None, :], mask=mask, other=0)
    column = step * DEPTH + tl.arange(0, DEPTH)
    value = tl.load(values + column, mask=column < REDUCTION, other=0.0).to(tl.float32)
    value = tl.where(there, value, 0.0)  # a sentinel's may be NaN
    if BITS == 8:
        if HARDWARE:
            number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            number = decode_e4m3(code)
        product = number * value[None, :]
    else:
        even, odd = tl.split(tl.reshape(value, (WIDTH, 2)))
        product = decode_e2m1(code) * even[None, :] + decode_e2m1(code >> 4) * odd[None, :]
    line = step * DEPTH // BLOCK_COLUMNS + tl.arange(0, LINES)
    of_row = scale_row(row_R, BLOCK_ROWS, PART_ROWS, PART_BLOCKS).to(tl.int64)
    scaled = row_ok[:, None] & (line * BLOCK_COLUMNS < REDUCTION)[None, :]
    scale = decode_scales(scales + of_row[:, None] * STRIDE_SCALE_ROW + line[None, :], scaled, of_matrix, SCALE)
    return tl.reshape(tl.reshape(product, (ROWS, LINES, WIDTH // LINES)) * scale[:, :, None], (ROWS, WIDTH))


@quick
@triton.jit
def _up(
    x_TH,
    expert_TK,
    data,
    scales,
    matrix_scale,
    bias_EJ,
    a_NI,
    E: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REDUCTION: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    HARDWARE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
):
    ROWS: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    BLOCKS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    slot = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * COLUMNS
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    expert = expert.to(tl.int64)
    j, row_ok = rows_of_gate_up(first, I, GATED, INTERLEAVED, COLUMNS)
    of_matrix = 1.0
    if matrix_scale is not None:
        of_matrix = tl.load(matrix_scale + expert)
    x = x_TH + (slot // K).to(tl.int64) * REDUCTION
    data += expert * STRIDE_EXPERT
    scales += expert * STRIDE_SCALE_EXPERT
    total = tl.zeros((ROWS, DEPTH * BITS // 8), tl.float32)
    for step in range(0, (REDUCTION + DEPTH - 1) // DEPTH):
        total += _products(
            data, scales, of_matrix, x, j, row_ok, step, slot >= 0, ROWS, REDUCTION, DEPTH, BITS, SCALE, BLOCK_ROWS,
            BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS, STRIDE_ROW, STRIDE_SCALE_ROW, HARDWARE,
        )  # fmt: skip
    h = tl.sum(total, axis=1, keep_dims=True)
    if bias_EJ is not None:
        J: tl.constexpr = 2 * I if GATED else I
        h += tl.load(bias_EJ + expert * J + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    a = activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, COLUMNS, 1)
    column = first + tl.arange(0, COLUMNS)[:, None]
    tl.store(a_NI + slot.to(tl.int64) * I + column, a, mask=column < I)


@quick
@triton.jit
def _down(
    a_NI,
    expert_TK,
    weight_TK,
    data,
    scales,
    matrix_scale,
    bias_EH,
    y_TH,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    REDUCTION: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (REDUCTION + DEPTH - 1) // DEPTH
    token = tl.program_id(0) // BLOCKS
    h = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok = h < H
    total = tl.zeros((COLUMNS, DEPTH * BITS // 8), tl.float32)
    beside = tl.zeros((COLUMNS,), tl.float32)
    # one loop over k and the steps of each, so that it can run ahead from one expert into the next
    for step in range(0, K * STEPS):
        slot = token * K + step // STEPS
        expert = tl.load(expert_TK + slot).to(tl.int64)
        owned = (expert >= 0) & (expert < E)
        weight = tl.where(owned, tl.load(weight_TK + slot).to(tl.float32), 0.0)  # a sentinel's may be NaN
        expert = tl.where(owned, expert, 0)
        of_matrix = 1.0
        if matrix_scale is not None:
            of_matrix = tl.load(matrix_scale + expert)
        part = _products(
            data + expert * STRIDE_EXPERT, scales + expert * STRIDE_SCALE_EXPERT, of_matrix,
            a_NI + slot.to(tl.int64) * REDUCTION, h, row_ok, step % STEPS, owned, COLUMNS, REDUCTION, DEPTH, BITS,
            SCALE, BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS, STRIDE_ROW, STRIDE_SCALE_ROW, HARDWARE,
        )  # fmt: skip
        total += part * weight
        if bias_EH is not None:
            once = h < tl.where(owned & (step % STEPS == 0), H, 0)
            beside += tl.load(bias_EH + expert * H + h, mask=once, other=0.0).to(tl.float32) * weight
    y = tl.sum(total, axis=1) + beside
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=row_ok)
