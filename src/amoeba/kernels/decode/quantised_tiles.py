"""Tiles of block-scaled experts for few tokens: codes as they are loaded, and what they stand for.

E experts · J rows of a stored matrix

    code = tl.load(...)                                         # bytes: two numbers each where BITS is 4
    low, high = pair_e2m1(code)                                 # fp16, times 2^-14

Bytes are compared with the row's as they are counted: the compiler has to see that 16 side by side are inside or
outside together, or it reads them one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.dequantise import load_scales, scale_row, unpack_e4m3
from amoeba.kernels.quantise import BY_BITS

# Bytes b0 b1 b2 b3 to the high bytes of four halves; of each, both nibbles' sign to bit 15 and the rest to bits 9 to
# 11.
_PAIR_E2M1 = tl.constexpr("""
{
    .reg .b32 u, v, s;
    prmt.b32 u, $4, 0, 0x1404;
    prmt.b32 v, $4, 0, 0x3424;
    shl.b32 s, u, 4;
    and.b32 s, s, 0x80008000;
    shl.b32 $0, u, 1;
    lop3.b32 $0, $0, 0x0E000E00, s, 0xEA;
    shl.b32 s, v, 4;
    and.b32 s, s, 0x80008000;
    shl.b32 $1, v, 1;
    lop3.b32 $1, $1, 0x0E000E00, s, 0xEA;
    and.b32 s, u, 0x80008000;
    shr.b32 $2, u, 3;
    lop3.b32 $2, $2, 0x0E000E00, s, 0xEA;
    and.b32 s, v, 0x80008000;
    shr.b32 $3, v, 3;
    lop3.b32 $3, $3, 0x0E000E00, s, 0xEA;
}
""")
PAIR_SCALE = tl.constexpr(16384.0)
# The same to bits 6 to 8, which are the number times 2^-126 in bf16, times a scale that is 2^63 too large: what is
# multiplied is exact from 2^-62 to 2^64 and 2^-63 of what it stands for. Larger scales give infinities.
_SCALED_PAIR_E2M1 = tl.constexpr("""
{
    .reg .b32 u, v, s, none;
    mov.b32 none, 0x80008000;
    prmt.b32 u, $4, 0, 0x1404;
    prmt.b32 v, $4, 0, 0x3424;
    shl.b32 s, u, 4;
    and.b32 s, s, 0x80008000;
    shr.b32 $0, u, 2;
    lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
    shl.b32 s, v, 4;
    and.b32 s, s, 0x80008000;
    shr.b32 $1, v, 2;
    lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
    and.b32 s, u, 0x80008000;
    shr.b32 $2, u, 6;
    lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
    and.b32 s, v, 0x80008000;
    shr.b32 $3, v, 6;
    lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
    fma.rn.bf16x2 $0, $0, $5, none;
    fma.rn.bf16x2 $1, $1, $7, none;
    fma.rn.bf16x2 $2, $2, $5, none;
    fma.rn.bf16x2 $3, $3, $7, none;
}
""")
RAISED = tl.constexpr(2.0**63)
# The same numbers in another order, with nine integer instructions for eight of them instead of sixteen (Hopper starts
# one every other clock; multiplications go elsewhere): of eight numbers the pairs (0, 4), (1, 5), (2, 6) and (3, 7) lie
# at the same place of a word's two halves. One multiplication brings a nibble's sign to bit 15 and the rest to bits 6
# to 8; what else it leaves is masked.
_SCALED_LANES_E2M1 = tl.constexpr("""
{
    .reg .b32 v, none;
    mov.b32 none, 0x80008000;
    shr.b32 v, $4, 8;
    and.b32 $0, $4, 0x000F000F;
    mul.lo.u32 $0, $0, 0x1040;
    and.b32 $0, $0, 0x81C081C0;
    and.b32 $1, $4, 0x00F000F0;
    mul.lo.u32 $1, $1, 0x104;
    and.b32 $1, $1, 0x81C081C0;
    and.b32 $2, v, 0x000F000F;
    mul.lo.u32 $2, $2, 0x1040;
    and.b32 $2, $2, 0x81C081C0;
    and.b32 $3, v, 0x00F000F0;
    mul.lo.u32 $3, $3, 0x104;
    and.b32 $3, $3, 0x81C081C0;
    fma.rn.bf16x2 $0, $0, $5, none;
    fma.rn.bf16x2 $1, $1, $5, none;
    fma.rn.bf16x2 $2, $2, $5, none;
    fma.rn.bf16x2 $3, $3, $5, none;
}
""")
# Four exponents to their powers of two times 2^63, each in both halves of a word: what is too large is infinite. Four
# integer instructions, where a minimum and a multiplication of each byte took sixteen.
_RAISED_E8M0 = tl.constexpr("""
{
    .reg .b32 raise, none;
    mov.b32 raise, 0x5F005F00;
    mov.b32 none, 0x80008000;
    prmt.b32 $0, $4, 0, 0x4040;
    prmt.b32 $1, $4, 0, 0x4141;
    prmt.b32 $2, $4, 0, 0x4242;
    prmt.b32 $3, $4, 0, 0x4343;
    mul.lo.u32 $0, $0, 128;
    mul.lo.u32 $1, $1, 128;
    mul.lo.u32 $2, $2, 128;
    mul.lo.u32 $3, $3, 128;
    fma.rn.bf16x2 $0, $0, raise, none;
    fma.rn.bf16x2 $1, $1, raise, none;
    fma.rn.bf16x2 $2, $2, raise, none;
    fma.rn.bf16x2 $3, $3, raise, none;
}
""")


@triton.jit
def number_e4m3(code, HARDWARE: tl.constexpr):
    """fp32, or fp16 where a GPU converts it: exact in both."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return unpack_e4m3(code)


@triton.jit
def pair_e2m1(code):
    """Of the low four bits and of the high ones, in fp16, divided by PAIR_SCALE: as if e2m1's bits were fp16's."""
    if not BY_BITS:
        return tl.inline_asm_elementwise(
            _PAIR_E2M1, "=&r,=&r,=&r,=&r,r", [code], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    low = (((code & 7).to(tl.uint16) << 9) | ((code & 8).to(tl.uint16) << 12)).to(tl.uint16)
    high = (((code & 0x70).to(tl.uint16) << 5) | ((code & 0x80).to(tl.uint16) << 8)).to(tl.uint16)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def is_lowered(dtype: tl.constexpr, BITS: tl.constexpr):
    """Whether `scaled_pair_e2m1` gives numbers times 2^-63."""
    return BITS == 4 and dtype == tl.bfloat16 and not BY_BITS


@triton.jit
def scaled_pair_e2m1(
    code,
    scales,
    there,
    dtype: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of codes (HEIGHT, WIDTH) and pointers to scales (HEIGHT, LINES): the numbers of the low four bits and of the high
    ones, by one instruction for two of them and their scale; see `is_lowered`."""
    if dtype == tl.bfloat16 and not BY_BITS:
        return _by_instructions(code, scales, there, _SCALED_PAIR_E2M1, SCALE, HEIGHT, LINES, WIDTH)
    low, high = pair_e2m1(code)
    scale = load_scales(scales, there, 1.0, SCALE) * PAIR_SCALE
    return scaled(low, scale, HEIGHT, LINES, WIDTH).to(dtype), scaled(high, scale, HEIGHT, LINES, WIDTH).to(dtype)


@triton.jit
def scaled_lanes_e2m1(
    code,
    scales,
    there,
    dtype: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `scaled_pair_e2m1`, in the order of `lanes`: of eight numbers 0, 4, 1, 5, and 2, 6, 3, 7."""
    if dtype == tl.bfloat16 and not BY_BITS:
        return _by_instructions(code, scales, there, _SCALED_LANES_E2M1, SCALE, HEIGHT, LINES, WIDTH)
    low, high = scaled_pair_e2m1(code, scales, there, dtype, SCALE, HEIGHT, LINES, WIDTH)
    return lanes(tl.reshape(tl.join(low, high), (HEIGHT, 2 * WIDTH)), HEIGHT, WIDTH)


@triton.jit
def lanes(value, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Of rows of 2 WIDTH numbers two tensors with WIDTH each, as the instructions give them: of eight numbers
    0, 4, 1, 5, and 2, 6, 3, 7."""
    bits = tl.reshape(value, (HEIGHT, WIDTH // 4, 2, 2, 2))  # of a number's place in its eight
    first, second = tl.split(tl.permute(bits, (0, 1, 4, 2, 3)))
    return tl.reshape(first, (HEIGHT, WIDTH)), tl.reshape(second, (HEIGHT, WIDTH))


@triton.jit
def _by_instructions(
    code,
    scales,
    there,
    INSTRUCTIONS: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # the scale in bf16, twice in a word
    if SCALE == "e8m0":
        words = tl.inline_asm_elementwise(
            _RAISED_E8M0,
            "=&r,=&r,=&r,=&r,r",
            [tl.load(scales, mask=there, other=0)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        raised = load_scales(scales, there, 1.0, SCALE) * RAISED
        half = raised.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True) >> 16  # exact: e4m3 has 3 bits
        words = (half * 0x00010001).to(tl.int32, bitcast=True)
    words = tl.broadcast_to(words[:, :, None], (HEIGHT, LINES, WIDTH // LINES))
    return tl.inline_asm_elementwise(
        INSTRUCTIONS,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [code, tl.reshape(words, (HEIGHT, WIDTH))],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def scaled(number, scale, HEIGHT: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """fp32, of numbers (HEIGHT, WIDTH) and scales (HEIGHT, LINES)."""
    blocks = tl.reshape(number.to(tl.float32), (HEIGHT, LINES, WIDTH // LINES))
    return tl.reshape(blocks * scale[:, :, None], (HEIGHT, WIDTH))


@triton.jit
def places_of_scales(
    scales, row_R, row_ok, step, DEPTH: tl.constexpr, LINES: tl.constexpr, REDUCTION: tl.constexpr, MATRIX: tl.constexpr
):
    """Pointers (R, LINES) to those of the step-th DEPTH columns, and which there are."""
    if DEPTH >= MATRIX.BLOCK_COLUMNS:
        first = step * LINES
    else:
        first = step * DEPTH // MATRIX.BLOCK_COLUMNS
    line = first + tl.arange(0, LINES)
    of_row = scale_row(row_R, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS).to(tl.int64)
    there = row_ok[:, None]
    if REDUCTION % DEPTH != 0:
        there &= (line < (REDUCTION + MATRIX.BLOCK_COLUMNS - 1) // MATRIX.BLOCK_COLUMNS)[None, :]
    return scales + of_row[:, None] * MATRIX.STRIDE_SCALE_ROW + line[None, :], there
