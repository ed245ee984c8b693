"""Codes of weights to bf16 in shared memory, for Hopper's products with them.

A thread has 32 numbers of each of four rows of a stage, and the scale they share (or the two, in blocks of 16). A
number is its code times its scale in fp32, rounded to bf16: what `QuantisedMatrix.dequantise` gives, bit by bit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.hopper.descriptor import reinterpret

# A word of four codes of e4m3 and their scale to two words of two numbers.
_E4M3 = gl.constexpr("""
{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    .reg .f32 p, q, r, s;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 p, a;
    cvt.f32.f16 q, b;
    cvt.f32.f16 r, c;
    cvt.f32.f16 s, d;
    mul.f32 p, p, $3;
    mul.f32 q, q, $3;
    mul.f32 r, r, $3;
    mul.f32 s, s, $3;
    cvt.rn.bf16x2.f32 $0, q, p;
    cvt.rn.bf16x2.f32 $1, s, r;
}
""")
# A word of eight codes of e2m1 to four words of two numbers. The nibbles of a byte come to the lower ends of a word's
# halves; one multiplication brings a nibble's sign to bit 15 and the rest to bits 6 to 8, which is the number times
# 2^-126 in bf16; what else it leaves is masked. The scale is a power of two, in both halves of a word: neither product
# rounds, unless what comes out is below 2^-126.
_PAIR_BY_POWER = """
    prmt.b32 {out}, $4, upper, {bytes};
    and.b32 {out}, {out}, 0x000F000F;
    mul.lo.u32 {out}, {out}, 0x1040;
    and.b32 {out}, {out}, 0x81C081C0;
    fma.rn.bf16x2 {out}, {out}, raise, none;
    fma.rn.bf16x2 {out}, {out}, $5, none;
"""
# The same where a scale is any number of fp32 below 2^113, here times 2^14: of the nibbles fp16 is made, which is 2^-14
# of them.
_PAIR = """
    prmt.b32 v, $4, upper, {bytes};
    and.b32 w, v, 0x00080008;
    and.b32 v, v, 0x00070007;
    mul.lo.u32 w, w, 0x1000;
    mad.lo.u32 v, v, 0x200, w;
    mov.b32 {{a, b}}, v;
    cvt.f32.f16 p, a;
    cvt.f32.f16 q, b;
    mul.f32 p, p, $5;
    mul.f32 q, q, $5;
    cvt.rn.bf16x2.f32 {out}, q, p;
"""


def _of_word(pair: str) -> str:
    return "shr.u32 upper, $4, 4;" + "".join(
        pair.format(bytes=f"0x{i + 4}{i + 4}{i}{i}", out=f"${i}") for i in range(4)
    )


_CONSTANTS = "mov.b32 raise, 0x7E807E80; mov.b32 none, 0x80008000;"
_E2M1_BY_POWER = gl.constexpr("{ .reg .b32 upper, raise, none;" + _CONSTANTS + _of_word(_PAIR_BY_POWER) + "}")
_E2M1 = gl.constexpr("{ .reg .b32 upper, v, w; .reg .b16 a, b; .reg .f32 p, q;" + _of_word(_PAIR) + "}")
_RAISED = gl.constexpr(16384.0)


@gluon.jit
def _rows_of_stage(n, width, columns, LAYOUT: gl.constexpr, PLAN: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the stored matrix, where its rows are columns of the product; behind the last one, the last one again."""
    row = gl.arange(0, BLOCK_N, LAYOUT)
    if PLAN.PAIRED:
        return gl.minimum(n * PLAN.COLUMNS + row % PLAN.COLUMNS, columns - 1) + row // PLAN.COLUMNS * columns
    else:
        return gl.minimum(n * BLOCK_N + row, width - 1)


@gluon.jit
def load_scales(
    scales, k, n, width, columns, part_rows, part_blocks, across, PLAN: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """As they are stored, (rows, groups) of the stage at k. scales: the expert's. across: in a row."""
    layout: gl.constexpr = PLAN.GROUPS_LAYOUT
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_groups: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    if PLAN.B_K_MAJOR:
        row = _rows_of_stage(n, width, columns, of_rows, PLAN, BLOCK_N)
        column = k + gl.arange(0, BLOCK_K // PLAN.GROUP, of_groups) * PLAN.GROUP
    else:
        row = k + gl.arange(0, BLOCK_K, of_rows)
        column = gl.minimum(n * BLOCK_N + gl.arange(0, BLOCK_N // PLAN.GROUP, of_groups) * PLAN.GROUP, width - 1)
    if PLAN.ROW_BLOCK > 1:
        second = (row >= part_rows).to(gl.int32)  # of two parts, or none
        row = second * part_blocks + (row - second * part_rows) // PLAN.ROW_BLOCK
    return gl.load(scales + (row * across)[:, None] + (column // PLAN.COLUMN_BLOCK)[None, :])


@gluon.jit
def _e4m3_to_float(code):
    """fp32 of codes in uint8."""
    size = (code & 127).to(gl.int32)
    bits = (size << 20) | ((code & 128).to(gl.int32) << 24)  # the number times 2^-120
    value = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36
    return gl.where(size == 127, float("nan"), value)


@gluon.jit
def _power(code):
    """The exponents' powers of two in bf16, in both halves of a word."""
    exponent = code.to(gl.int32)
    half = gl.where(exponent == 0, 0x40, gl.where(exponent == 255, 0x7FC0, exponent << 7))
    return half * 0x10001


@gluon.jit
def _e8m0_to_float(code):
    exponent = code.to(gl.int32)
    bits = gl.where(exponent == 0, 1 << 22, gl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def decode(code, scale, of_matrix, PLAN: gl.constexpr):
    """The numbers of a stage, two in a word, of words of codes and scales as they are stored. of_matrix: the expert's,
    where the format has it."""
    ROWS: gl.constexpr = code.shape[0]
    WORDS: gl.constexpr = code.shape[1]
    IN_GROUP: gl.constexpr = PLAN.GROUP * PLAN.BITS // 32
    layout: gl.constexpr = PLAN.GROUPS_LAYOUT
    code = gl.convert_layout(code.reshape((ROWS, WORDS // IN_GROUP, IN_GROUP)), layout, assert_trivial=True)
    if PLAN.SCALE == "e4m3":
        scale = _e4m3_to_float(scale) * of_matrix
    elif PLAN.SCALE == "e8m0" and PLAN.BITS == 8:
        scale = _e8m0_to_float(scale)
    if PLAN.BITS == 8:
        first, second = gl.inline_asm_elementwise(
            _E4M3, "=r,=r,r,f", [code, scale[:, :, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        pairs = gl.join(first, second)
    else:
        if PLAN.SCALE == "e8m0":
            first, second, third, fourth = gl.inline_asm_elementwise(
                _E2M1_BY_POWER, "=&r,=&r,=&r,=&r,r,r", [code, _power(scale)[:, :, None]],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            first, second, third, fourth = gl.inline_asm_elementwise(
                _E2M1, "=&r,=&r,=&r,=&r,r,f", [code, (scale * _RAISED)[:, :, None]],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
    return pairs.reshape((ROWS, WORDS * 16 // PLAN.BITS))


@gluon.jit
def store_numbers(numbers, matrix_buf):
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    reinterpret(matrix_buf, gl.int32, numbers.shape, layout).store(numbers)
