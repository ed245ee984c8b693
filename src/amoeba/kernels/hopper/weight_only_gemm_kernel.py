"""The persistent product kernel of Hopper for quantised experts: the warpgroup that fills the stages dequantises.

Launched by `amoeba.kernels.hopper.weight_only_gemm`. Rows, sums and results are those of `gemm_kernel`, whose
consumers these are. Codes come by the bulk copy engine to a ring of their own, some steps ahead; decoded, they are a
stage of the matrix like any other.

A thread has 32 numbers of each of four rows of a stage, and the scale they share (or the two, in blocks of 16). A
number is its code times its scale in fp32, rounded to bf16: what `QuantisedMatrix.dequantise` gives, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from amoeba.kernels.hopper.gemm_kernel import Plan, consume, fill_product, row_pointers, share_of_tiles
from amoeba.kernels.hopper.tile_order import clamped_place
from amoeba.kernels.hopper.tma import barrier, bulk_load, gather, reinterpret, shared_layout
from amoeba.kernels.launch import quick

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


# Of rows and decoded numbers, and of codes: with the buffers of the epilogue 224 KB of the 227.
STAGES, CODE_STAGES = 3, 3
# Numbers of a row that a thread decodes at a time.
RUN = 32


@dataclass(frozen=True)
class WeightOnlyPlan(Plan):
    STAGES: ClassVar[int] = STAGES
    CODE_STAGES: ClassVar[int] = CODE_STAGES

    BITS: int = 8  # of a code
    SCALE: str = "fp32"  # or the format of its code
    GROUP: int = 32  # numbers of a row that share a scale and go through a thread together
    ROW_BLOCK: int = 1  # rows and columns that share a scale
    COLUMN_BLOCK: int = 32
    MATRIX_SCALE: bool = False

    @property
    def CODES(self) -> tuple[int, int]:
        """Words of a stage, down and across."""
        rows, columns = self.MATRIX
        return rows, columns * self.BITS // 32

    @property
    def COPIED_CODES(self) -> tuple[int, int]:
        """... and as many as are copied at a time."""
        rows, columns = self.COPIED
        return rows, columns * self.BITS // 32

    @property
    def STORED_LAYOUT(self) -> Any:
        """Of these in shared memory."""
        return shared_layout(self.CODES, torch.int32)

    @property
    def CODES_LAYOUT(self) -> Any:
        """Who decodes which words of codes of a stage: lanes lie so that those which shared memory serves at once meet
        different banks."""
        words = RUN * self.BITS // 32
        if self.B_K_MAJOR:
            return gl.BlockedLayout([1, words], [16, 2], [4, 1], [1, 0])
        return gl.BlockedLayout([1, words], [8, 4], [2, 2], [0, 1])

    @property
    def GROUPS_LAYOUT(self) -> Any:
        """... as rows of groups that share a scale."""
        words, mine = self.GROUP * self.BITS // 32, RUN // self.GROUP
        if self.B_K_MAJOR:
            return gl.BlockedLayout([1, mine, words], [16, 2, 1], [4, 1, 1], [2, 1, 0])
        return gl.BlockedLayout([1, mine, words], [8, 4, 1], [2, 2, 1], [2, 0, 1])

    @property
    def REGISTERS(self) -> list[int]:
        """Of the second consumer, and of those who fill."""
        return [200, 104]


@gluon.jit
def _rows_of_stage(n, width, columns, LAYOUT: gl.constexpr, PLAN: gl.constexpr):
    """Of the stored matrix, where its rows are columns of the product; behind the last one, the last one again."""
    row = gl.arange(0, PLAN.BLOCK_N, LAYOUT)
    if PLAN.PAIRED:
        COPIED: gl.constexpr = PLAN.COPIED[0]
        column = n * PLAN.COLUMNS + row // (2 * COPIED) * COPIED + row % COPIED
        return gl.minimum(column, columns - 1) + row // COPIED % 2 * columns
    else:
        return gl.minimum(n * PLAN.BLOCK_N + row, width - 1)


@gluon.jit
def _load_scales(scales, k, n, width, columns, scale_shape, PLAN: gl.constexpr):
    """As they are stored, (rows, groups) of the stage at k. scales: the expert's."""
    part_rows, part_blocks, across, _ = scale_shape
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    BLOCK_K: gl.constexpr = PLAN.BLOCK_K
    layout: gl.constexpr = PLAN.GROUPS_LAYOUT
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_groups: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    if PLAN.B_K_MAJOR:
        row = _rows_of_stage(n, width, columns, of_rows, PLAN)
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
def _dequantise(code, scale, of_matrix, PLAN: gl.constexpr):
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
def _store_numbers(numbers, matrix_buf):
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    reinterpret(matrix_buf, gl.int32, numbers.shape, layout).store(numbers)


@gluon.jit
def _fetch_codes(code_desc, code_bufs, coded, slot, expert, k, n, sizes, PLAN: gl.constexpr):
    depth, width, columns = sizes
    bar = coded.index(slot)
    buffer = code_bufs.index(slot)
    mbarrier.expect(bar, PLAN.BLOCK_N * PLAN.BLOCK_K * PLAN.BITS // 8)
    if PLAN.PAIRED:
        COPIED: gl.constexpr = PLAN.COPIED[0]
        at = expert * width + n * PLAN.COLUMNS
        word = k * PLAN.BITS // 32
        for first in gl.static_range(0, PLAN.COLUMNS, COPIED):
            bulk_load(code_desc, [at + first, word], bar, buffer.slice(2 * first, COPIED, 0))
            bulk_load(code_desc, [at + first + columns, word], bar, buffer.slice(2 * first + COPIED, COPIED, 0))
    elif PLAN.B_K_MAJOR:
        bulk_load(code_desc, [expert * width + n * PLAN.BLOCK_N, k * PLAN.BITS // 32], bar, buffer)
    else:
        bulk_load(code_desc, [expert * depth + k, n * (PLAN.BLOCK_N * PLAN.BITS // 32)], bar, buffer)


@gluon.jit
def _fill(
    row_desc, code_desc, low_desc, factor_desc, x, order, table, scales, matrix_scale, rings, depth, rank, width,
    columns, scale_shape, x_stride, top_k, PLAN: gl.constexpr,
):  # fmt: skip
    """Stages as they come free: rows are sent for, then the codes of the matrix are dequantised. Codes themselves come
    CODE_STAGES steps ahead, those of the next tile too; scales a step ahead, before all waits: a fence comes later,
    which would wait for them."""
    row_bufs, matrix_bufs, code_bufs, full, empty, coded = rings
    ring, sizes = (row_bufs, matrix_bufs, full, empty), (depth, width, columns)
    BLOCK_K: gl.constexpr = PLAN.BLOCK_K
    STAGES: gl.constexpr = PLAN.STAGES
    CODE_STAGES: gl.constexpr = PLAN.CODE_STAGES
    AHEAD: gl.constexpr = CODE_STAGES * BLOCK_K
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count, decoded = 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    expert, row, end, n = clamped_place(first, table, tiles, column_tiles, 0, PLAN.GROUP_M, PLAN.ORDER)
    if first < behind:
        for slot in gl.static_range(CODE_STAGES):
            _fetch_codes(code_desc, code_bufs, coded, slot, expert, slot * BLOCK_K, n, sizes, PLAN)
    for tile in range(first, behind, step):
        more = tile + step < behind
        next_expert, next_row, next_end, next_n = clamped_place(
            tile + step, table, tiles, column_tiles, 0, PLAN.GROUP_M, PLAN.ORDER
        )
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, PLAN.BLOCK_M, BLOCK_K)
        else:
            pointers = x
        of_matrix = 1.0
        if PLAN.MATRIX_SCALE:
            of_matrix = gl.load(matrix_scale + expert)
        own = scales + expert.to(gl.int64) * scale_shape[3]
        scale = _load_scales(own, 0, n, width, columns, scale_shape, PLAN)
        for k in range(0, depth, BLOCK_K):
            next_k = gl.minimum(k + BLOCK_K, depth - BLOCK_K)
            next_scale = _load_scales(own, next_k, n, width, columns, scale_shape, PLAN)
            stage = count % STAGES
            slot = decoded % CODE_STAGES
            bar = full.index(stage)
            mbarrier.wait(coded.index(slot), (decoded // CODE_STAGES) & 1)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            if PLAN.GATHER:
                gather(row_bufs.index(stage), pointers)
                pointers += BLOCK_K
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            numbers = _dequantise(code_bufs.index(slot).load(PLAN.CODES_LAYOUT), scale, of_matrix, PLAN)
            _store_numbers(numbers, matrix_bufs.index(stage))
            fence_async_shared()
            barrier()  # all have read and written
            if PLAN.GATHER:
                mbarrier.arrive(bar, count=1)
            else:
                mbarrier.expect(bar, PLAN.BLOCK_M * BLOCK_K * 2)
            inside = k + AHEAD < depth
            if inside | more:
                _fetch_codes(
                    code_desc, code_bufs, coded, slot, gl.where(inside, expert, next_expert),
                    k + AHEAD - gl.where(inside, 0, depth), gl.where(inside, n, next_n), sizes, PLAN,
                )  # fmt: skip
            scale = next_scale
            count += 1
            decoded += 1
        if PLAN.LOW > 0:  # these rows are sorted, and their matrix is not quantised
            descs, place = (low_desc, factor_desc), (expert, row, n)
            count = fill_product(descs, x, ring, count, place, (rank, width, columns), False, PLAN)
        expert, row, end, n = next_expert, next_row, next_end, next_n


@quick
@gluon.jit
def weight_only_gemm_kernel(
    row_desc, code_desc, low_desc, factor_desc, h_desc, out_desc, x, order, table, scales, matrix_scale, bias, h, out,
    depth, rank, width, columns, part_rows, part_blocks, across, scales_of_expert, x_stride, h_stride, out_stride,
    top_k, PLAN: gl.constexpr,
):  # fmt: skip
    """part_rows, part_blocks: rows of a part of the matrix, gates or ups, and blocks of scales down it. across: scales
    in a row."""
    dtype: gl.constexpr = out.dtype.element_ty
    STAGES: gl.constexpr = PLAN.STAGES
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.BLOCK_M, PLAN.BLOCK_K], PLAN.ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.MATRIX[0], PLAN.MATRIX[1]], PLAN.MATRIX_LAYOUT)
    code_bufs = gl.allocate_shared_memory(
        gl.int32, [PLAN.CODE_STAGES, PLAN.CODES[0], PLAN.CODES[1]], PLAN.STORED_LAYOUT
    )  # fmt: skip
    staging = gl.allocate_shared_memory(dtype, [2, PLAN.STAGED[0], PLAN.STAGED[1]], PLAN.STAGED_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    coded = gl.allocate_shared_memory(gl.int64, [PLAN.CODE_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # who dequantised, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    for i in gl.static_range(PLAN.CODE_STAGES):
        mbarrier.init(coded.index(i), count=1)
    deep = depth if PLAN.SHORT else depth + rank
    ring = (row_bufs, matrix_bufs, full, empty)
    rings = (row_bufs, matrix_bufs, code_bufs, full, empty, coded)
    results = (h_desc, out_desc, bias, h, out)
    shape = (deep, width, columns, h_stride, out_stride)
    scale_shape = (part_rows, part_blocks, across, scales_of_expert)
    gl.warp_specialize(
        [
            (consume, (table, ring, staging, results, shape, gl.constexpr(0), PLAN)),
            (consume, (table, ring, staging, results, shape, gl.constexpr(1), PLAN)),
            (_fill, (
                row_desc, code_desc, low_desc, factor_desc, x, order, table, scales, matrix_scale, rings, depth, rank,
                width, columns, scale_shape, x_stride, top_k, PLAN,
            )),
        ],
        [4, 4],
        PLAN.REGISTERS,
    )  # fmt: skip
