"""Products of sorted rows with their experts' matrices, both quantised: fp8-128, mxfp8 and nvfp4, in plain Triton.

N routed rows · E experts · I in · O out

    multiply(x, gate_up, offs_E, h_NJ, order_N=order_N, top_k=K)       # Q(x) · Q(W)ᵀ, in fp32, rounded once

Rows are those of `amoeba.kernels.grouped_gemm`. Called as `amoeba.kernels.hopper.fp8_gemm.multiply`, with offs_E for
its table.

| operands | product | sm_89 | sm_90 | sm_100 | sm_120 |
|---|---|---|---|---|---|
| e4m3, fp32 scales of 128 | tl.dot, scaled every 128 of the depth | mma e4m3 | wgmma e4m3 | tcgen05 f8f6f4 | mma e4m3 |
| mxfp8 | tl.dot_scaled, or emulated | bf16, emulated | bf16, emulated | tcgen05 mxf8f6f4 | mma mxf8f6f4 |
| nvfp4 | tl.dot_scaled, or emulated | bf16, emulated | bf16, emulated | tcgen05 mxf4nvf4 | mma mxf4nvf4 |

This is what they compile to. **They have never run on sm_89, sm_100 or sm_120**: no number of theirs was checked there,
and nothing was timed. Emulated products dequantise tiles to bf16, in which both formats are exact; so does nvfp4 in
Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.dequantise import scale_row, unpack_e2m1
from amoeba.kernels.gemm_tiles import finish_tile, of_result, tile_of
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.quantise import BY_BITS, decode
from amoeba.kernels.tile_sizes import Configuration, capability_of
from amoeba.kernels.tiles import find_tile, rows_of_tile, slots
from amoeba.precision.quantised import QuantisedMatrix

# A step of the depth is 128 numbers: as many as share a scale of fp8-128. Chosen by what the compiled kernels need, and
# not timed: tiles of fewer than 128 rows are no native product of sm_100, and where sums are scaled by hand wider tiles
# spill. Emulated products have both operands in registers, from which Triton 3.6 must not feed Hopper's matrix unit
# (triton #9433; the emulation of `tl.dot_scaled`, which does, gave wrong gradients in mxfp8 on an H200, 2026-11-18).
# Tiles of 32 rows are multiplied by other instructions.
FEW_ROWS = 32  # per expert
_FEW, _EMULATED = Configuration(32, 128, 128, 1, 4, 3), Configuration(32, 64, 128, 8, 4, 3)
_WIDE, _NARROW = Configuration(128, 128, 128, 8, 8, 3), Configuration(128, 64, 128, 8, 8, 3)


def _tile(rows: int, experts: int, scale: str, emulated: bool) -> Configuration:
    if emulated:
        return _EMULATED
    if cdiv(rows, experts) <= FEW_ROWS and scale != "e4m3":  # nvfp4 in 32 rows: Triton 3.6 cannot compile it for sm_100
        return _FEW
    return _NARROW if scale == "fp32" else _WIDE


def _is_emulated(scale: str, device: torch.device) -> bool:
    """Before Blackwell, which has the products of mxfp8 and nvfp4. `tl.dot_scaled` would emulate them as well, but for
    e4m3 scales it aborts the process (Triton 3.6 on Hopper), and its interpreter takes them for e8m0 (3.9)."""
    capability = capability_of(device)
    return scale == "e4m3" if capability is None else scale != "fp32" and capability < (10, 0)


def multiply(
    rows_NW: QuantisedMatrix,
    matrix_EOW: QuantisedMatrix,
    offs_E: Tensor,
    out_NO: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
) -> None:
    """out[n] = rows[n] · matrix[e]ᵀ + bias[e]; with order_N the rows are gathered, rows[order[n] // top_k].

    rows and matrix: in formats of the same element and kind of scale; blocks of one row, and of any height."""
    rows, columns = out_NO.shape
    experts, height, reduction = matrix_EOW.shape
    left, right = rows_NW.format, matrix_EOW.format
    same = (left.element, left.scale, left.block[1]) == (right.element, right.scale, right.block[1])
    fit = height == columns and rows_NW.columns == reduction and offs_E.shape[0] == experts and have_lines(out_NO)
    check_arguments(
        fit and same and left.block[0] == 1,
        "(N, I) and (E, O, I) quantised alike, and (N, O)",
        rows=rows_NW.data,
        matrix=matrix_EOW.data,
        out=out_NO,
    )
    if rows == 0:
        return
    emulated = _is_emulated(left.scale, out_NO.device)
    chosen = _tile(rows, experts, left.scale, emulated)
    of_part = height // matrix_EOW.parts
    _multiply_quantised[(slots(rows, experts, chosen.block_m) * cdiv(columns, chosen.block_n),)](
        rows_NW.data,
        rows_NW.scales,
        rows_NW.matrix_scale,
        matrix_EOW.data,
        matrix_EOW.scales,
        matrix_EOW.matrix_scale,
        offs_E,
        out_NO,
        order_N,
        bias_EO,
        PRODUCT=Group(
            TOP_K=top_k,
            **of_result(out_NO, bias_EO),
            **tile_of(chosen, rows, experts, columns),
            REDUCTION=reduction,
            COLUMNS=columns,
            QUANTISED=False,
        ),
        OPERANDS=Group(
            SCALE=left.scale,
            EMULATED=emulated,
            BITS=left.element.bits,
            BLOCK=left.block[1],
            STRIDE_ROW=rows_NW.data.stride(0),
            STRIDE_ROW_SCALE=rows_NW.scales.stride(0),
            STRIDE_EXPERT=matrix_EOW.data.stride(0),
            STRIDE_COLUMN=matrix_EOW.data.stride(1),
            STRIDE_EXPERT_SCALE=matrix_EOW.scales.stride(0),
            STRIDE_COLUMN_SCALE=matrix_EOW.scales.stride(1),
            BLOCK_ROWS=right.block[0],
            PART_ROWS=of_part,
            PART_BLOCKS=cdiv(of_part, right.block[0]),
        ),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


@triton.jit
def _numbers(packed, scale, ROWS: tl.constexpr, DEPTH: tl.constexpr, OPERANDS: tl.constexpr):
    """(ROWS, DEPTH) of codes and scales (ROWS, DEPTH / BLOCK). In bf16 both formats are exact."""
    if OPERANDS.BITS == 4:
        value = tl.reshape(tl.join(unpack_e2m1(packed), unpack_e2m1(packed >> 4)), (ROWS, DEPTH))
        wide = decode(scale)
    else:
        value = decode(packed)
        wide = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # neither byte 0 nor 255 is written
    blocks = tl.reshape(value, (ROWS, DEPTH // OPERANDS.BLOCK, OPERANDS.BLOCK)) * wide[:, :, None]
    numbers = tl.reshape(blocks, (ROWS, DEPTH))
    return numbers if BY_BITS else numbers.to(tl.bfloat16)  # a dot of bf16 is wrong in the interpreter


@triton.jit
def _add_step(result, row_tile, row_scale, matrix_tile, matrix_scale, PRODUCT: tl.constexpr, OPERANDS: tl.constexpr):
    """Of (M, K) and (N, K), packed along K, with a scale for each block of it."""
    if OPERANDS.SCALE == "fp32":
        if BY_BITS:
            product = tl.dot(decode(row_tile), tl.trans(decode(matrix_tile)), input_precision="ieee")
        else:
            left = row_tile.to(tl.float8e4nv, bitcast=True)
            right = tl.trans(matrix_tile.to(tl.float8e4nv, bitcast=True))
            product = tl.dot(left, right, input_precision="ieee")
        return result + product * (row_scale * tl.trans(matrix_scale))  # one of each
    elif OPERANDS.EMULATED:
        left = _numbers(row_tile, row_scale, PRODUCT.BLOCK_M, PRODUCT.BLOCK_K, OPERANDS)
        right = _numbers(matrix_tile, matrix_scale, PRODUCT.BLOCK_N, PRODUCT.BLOCK_K, OPERANDS)
        return tl.dot(left, tl.trans(right), result, input_precision="ieee")
    elif OPERANDS.SCALE == "e8m0":
        left = row_tile.to(tl.float8e4nv, bitcast=True)
        right = tl.trans(matrix_tile.to(tl.float8e4nv, bitcast=True))
        return tl.dot_scaled(left, row_scale, "e4m3", right, matrix_scale, "e4m3", result)
    else:
        left_scale = row_scale.to(tl.float8e4nv, bitcast=True)
        right_scale = matrix_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(row_tile, left_scale, "e2m1", tl.trans(matrix_tile), right_scale, "e2m1", result)


@quick
@triton.jit
def _multiply_quantised(
    codes,
    scales,
    row_scales,
    matrix,
    matrix_scales,
    scale_of_matrix,
    offs_E,
    out_NO,
    order_N,
    bias_EO,
    PRODUCT: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    P: tl.constexpr = PRODUCT
    BLOCK: tl.constexpr = OPERANDS.BLOCK
    PER_BYTE: tl.constexpr = 8 // OPERANDS.BITS
    STEP: tl.constexpr = P.BLOCK_K // PER_BYTE
    GROUPS: tl.constexpr = P.BLOCK_K // BLOCK
    BLOCKS: tl.constexpr = (P.REDUCTION + BLOCK - 1) // BLOCK
    # bytes of a row: codes of four bits fill whole blocks, with zeros
    STORED: tl.constexpr = BLOCKS * BLOCK // 2 if PER_BYTE == 2 else P.REDUCTION
    EVEN: tl.constexpr = P.REDUCTION % P.BLOCK_K == 0
    expert, row, row_end, column_tile = find_tile(offs_E, PRODUCT)
    if row >= row_end:
        return
    row_M, source_M = rows_of_tile(order_N, row, row_end, order_N is not None, P.TOP_K, P.BLOCK_M)
    column_N = column_tile * P.BLOCK_N + tl.arange(0, P.BLOCK_N)
    inside_N = column_N < P.COLUMNS
    read_N = tl.minimum(column_N, P.COLUMNS - 1)  # columns do not mix either
    byte_K = tl.arange(0, STEP)
    block_G = tl.arange(0, GROUPS)
    wide_M = source_M.to(tl.int64)
    wide_expert = expert.to(tl.int64)
    row_at = codes + (wide_M * OPERANDS.STRIDE_ROW)[:, None] + byte_K[None, :]
    matrix_at = matrix + wide_expert * OPERANDS.STRIDE_EXPERT
    matrix_at += (read_N.to(tl.int64) * OPERANDS.STRIDE_COLUMN)[:, None] + byte_K[None, :]
    row_scale_at = scales + (wide_M * OPERANDS.STRIDE_ROW_SCALE)[:, None] + block_G[None, :]
    line_N = scale_row(read_N, OPERANDS.BLOCK_ROWS, OPERANDS.PART_ROWS, OPERANDS.PART_BLOCKS)
    scale_at = matrix_scales + wide_expert * OPERANDS.STRIDE_EXPERT_SCALE
    scale_at += (line_N * OPERANDS.STRIDE_COLUMN_SCALE)[:, None] + block_G[None, :]
    result = tl.zeros((P.BLOCK_M, P.BLOCK_N), dtype=tl.float32)
    for done in range(0, P.REDUCTION, P.BLOCK_K):
        if EVEN:
            row_tile = tl.load(row_at)
            matrix_tile = tl.load(matrix_at)
            row_scale = tl.load(row_scale_at)
            matrix_scale = tl.load(scale_at)
        else:
            left_K = (byte_K < STORED - done // PER_BYTE)[None, :]
            left_G = (block_G < BLOCKS - done // BLOCK)[None, :]
            row_tile = tl.load(row_at, mask=left_K, other=0)
            matrix_tile = tl.load(matrix_at, mask=left_K, other=0)
            row_scale = tl.load(row_scale_at, mask=left_G, other=0)
            matrix_scale = tl.load(scale_at, mask=left_G, other=0)
        result = _add_step(result, row_tile, row_scale, matrix_tile, matrix_scale, PRODUCT, OPERANDS)
        row_at += STEP
        matrix_at += STEP
        row_scale_at += GROUPS
        scale_at += GROUPS
    if row_scales is not None:
        result *= tl.load(row_scales + source_M)[:, None] * tl.load(scale_of_matrix + expert)
    finish_tile(result, expert, row, row_M, row_end, column_N, inside_N, out_NO, bias_EO, None, None, PRODUCT)
