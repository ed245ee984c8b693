"""The persistent kernel of Hopper's products in e4m3, for every plan: its loads, its products, what it does with them.

Launched by `amoeba.kernels.hopper.scaled_product`, which says what it computes.

Widths are multiples of 64. Where one is no multiple of 128 its last block of scales is half full: the copy engine reads
zeros behind the end of a row, gathered rows are masked, and columns behind the last one count for no scale. Blocks of a
gated matrix are counted through gates and ups, so that with an odd number of 64 gates each 128 columns of up lie in two
blocks, half in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from amoeba.kernels.activation import gated, plain
from amoeba.kernels.hopper.descriptor import bulk_load, gather
from amoeba.kernels.hopper.product_kernel import place_of_tile
from amoeba.kernels.hopper.product_store import add_bias, store_tile
from amoeba.kernels.launch import quick
from amoeba.kernels.quantise import encode, finite_size, power_of_two

E4M3 = torch.float8_e4m3fn
# A stage holds so much of the depth, and so many columns share a scale.
BLOCK = 128
# A tile.
BLOCK_M, BLOCK_N = 128, 256
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
ROWS, HALF = (BLOCK_M, BLOCK), (BLOCK_M // 2, BLOCK)
QUARTER = (BLOCK_M // 2, BLOCK // 2)


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    ACTIVATE: bool  # write act(product) in e4m3 instead of the product
    GATHER: bool  # rows are those of tokens, found by order // top_k, instead of sorted ones
    BIAS: bool
    KEEP: bool  # write the product in bf16 as well as what its activation gives
    WIDE: bool = False  # write the product in fp32
    CODED: bool = False  # what KEEP writes is in e4m3
    CUT: bool = False  # the last block of a width is half full
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0

    @property
    def PAIRED(self) -> bool:
        """A tile holds columns of the gate and the same columns of up."""
        return self.ACTIVATE and self.GATED

    @property
    def SHIFTED(self) -> bool:
        """A tile's columns of up may lie in two blocks."""
        return self.PAIRED and self.CUT

    @property
    def COLUMNS(self) -> int:
        """Columns of the result that a tile holds."""
        return BLOCK if self.PAIRED else BLOCK_N

    @property
    def COPIED(self) -> tuple[int, int]:
        """As much of a matrix as is copied at a time: gate and up come one after the other."""
        return self.COLUMNS, BLOCK

    @property
    def BUFFERS(self) -> int:
        """Of the epilogue, for each warpgroup: with two, one is filled while the copy engine reads the other. It is
        worth a stage where nothing but bf16 is written: 3 % of down and dx, while up loses 8 % (H200, 2026-11-16)."""
        return 1 if self.ACTIVATE or self.WIDE else 2

    @property
    def STAGES(self) -> int:
        """They take up to 224 KB of the 227, together with the buffers."""
        return 5 - self.BUFFERS

    @property
    def STAGED(self) -> tuple[int, int]:
        """As much of the result as leaves at a time."""
        return QUARTER if self.WIDE else HALF


@gluon.jit
def _produce(
    row_desc, matrix_desc, rows, order, table, row_bufs, matrix_bufs, full, empty, depth, width, columns, row_stride,
    top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free."""
    BYTES: gl.constexpr = BLOCK_N * BLOCK if PLAN.GATHER else (BLOCK_N + BLOCK_M) * BLOCK
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M)
        pointers = rows
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        if PLAN.GATHER:
            sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
            token = gl.load(order + sorted_row) // top_k
            k_offset = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            pointers = rows + (token.to(gl.int64) * row_stride)[:, None] + k_offset[None, :]
        at = expert * width + n * PLAN.COLUMNS
        for k in range(0, depth, BLOCK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            matrix_buf = matrix_bufs.index(stage)
            mbarrier.expect(bar, BYTES)
            if PLAN.PAIRED:
                bulk_load(matrix_desc, [at, k], bar, matrix_buf.slice(0, BLOCK, 0))
                bulk_load(matrix_desc, [at + columns, k], bar, matrix_buf.slice(BLOCK, BLOCK, 0))
            else:
                bulk_load(matrix_desc, [at, k], bar, matrix_buf)
            if PLAN.GATHER:
                if PLAN.CUT:
                    there = (k + gl.arange(0, BLOCK, gl.SliceLayout(0, layout)) < depth)[None, :]
                    gather(row_bufs.index(stage), pointers, mask=there)
                else:
                    gather(row_bufs.index(stage), pointers)
                pointers += BLOCK
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            count += 1


@gluon.jit
def _multiply_tile(
    row_bufs, matrix_bufs, full, empty, count, depth, row_scales, left_scales, right_scales, far_scales,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr, HEIGHT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The two halves of a tile, in fp32. Scales are along the depth; far ones are of the right half's last 64 columns,
    where these have others."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    left = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    right = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    steps = gl.cdiv(depth, BLOCK)
    near = (gl.arange(0, BLOCK, gl.SliceLayout(0, mma)) < BLOCK // 2)[None, :]
    next_row, next_left, next_right = gl.load(row_scales), gl.load(left_scales), gl.load(right_scales)
    next_far = next_right
    if PLAN.SHIFTED:
        next_far = gl.load(far_scales)
    for step in range(0, steps):
        stage = count % STAGES
        of_left = next_row * next_left
        of_right = next_row * next_right
        of_far = next_row * next_far
        ahead = gl.minimum(step + 1, steps - 1)
        next_row = gl.load(row_scales + ahead)
        next_left = gl.load(left_scales + ahead)
        next_right = gl.load(right_scales + ahead)
        if PLAN.SHIFTED:
            next_far = gl.load(far_scales + ahead)
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if PLAN.GATHER:
            fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
        rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
        matrix = matrix_bufs.index(stage)
        found = warpgroup_mma(rows, matrix.slice(0, BLOCK, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        left += found * of_left[:, None]
        found = warpgroup_mma(rows, matrix.slice(BLOCK, BLOCK, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.arrive(empty.index(stage), count=1)
        if PLAN.SHIFTED:
            right += found * gl.where(near, of_right[:, None], of_far[:, None])
        else:
            right += found * of_right[:, None]
        count += 1
    return left, right, count


@gluon.jit
def _consume(
    table, row_bufs, matrix_bufs, full, empty, staging, kept, h_desc, out_desc, order, row_scale, matrix_scale,
    bias, h, h_scale, out, out_scale, depth, width, columns, h_stride, out_stride, top_k, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, add the bias, activate, quantise, store."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    buffer = staging.index(WARPGROUP * PLAN.BUFFERS)
    h_buffer = kept.index(WARPGROUP)
    steps = gl.cdiv(depth, BLOCK)
    blocks = gl.cdiv(width, BLOCK)
    count = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M)
        row += WARPGROUP * HEIGHT
        m = gl.minimum(row + gl.arange(0, HEIGHT, gl.SliceLayout(1, mma)), end - 1)
        if PLAN.GATHER:
            m = gl.load(order + m) // top_k
        if PLAN.PAIRED:
            first, second = n, n + columns // BLOCK
            far = gl.minimum(n + (columns + BLOCK // 2) // BLOCK, blocks - 1)
        else:
            first, second = 2 * n, gl.minimum(2 * n + 1, blocks - 1)
            far = second
        of_expert = matrix_scale + expert * blocks * steps  # scales are few: their number fits 32 bits
        left, right, count = _multiply_tile(
            row_bufs, matrix_bufs, full, empty, count, depth, row_scale + m * steps,
            of_expert + first * steps, of_expert + second * steps, of_expert + far * steps, WARPGROUP, PLAN, HEIGHT,
            BLOCK, STAGES,
        )  # fmt: skip
        bias_row = bias + expert.to(gl.int64) * width
        if PLAN.PAIRED:
            column = n * BLOCK
            if PLAN.BIAS:
                left = add_bias(left, bias_row, column, columns, BLOCK)
                right = add_bias(right, bias_row + columns, column, columns, BLOCK)
            left, right = left.to(gl.bfloat16), right.to(gl.bfloat16)
            if PLAN.KEEP:
                _keep(left, h, h_desc, h_scale, h_buffer, h_stride, row, end, column, columns, 0, blocks, PLAN)
                _keep(right, h, h_desc, h_scale, h_buffer, h_stride, row, end, column, columns, columns, blocks, PLAN)
            left, right = left.to(gl.float32), right.to(gl.float32)
            a = gated(left, right, PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT)
            of_row = gl.cdiv(columns, BLOCK)
            _store_codes(a, out, out_desc, out_scale, buffer, out_stride, row, end, column, columns, 0, of_row, PLAN)
        else:
            for half in gl.static_range(2):
                value = right if half else left
                column = (2 * n + half) * BLOCK
                if PLAN.BIAS:
                    value = add_bias(value, bias_row, column, width, BLOCK)
                if PLAN.ACTIVATE:
                    value = value.to(gl.bfloat16)
                    if PLAN.KEEP:
                        _keep(value, h, h_desc, h_scale, h_buffer, h_stride, row, end, column, width, 0, blocks, PLAN)
                    a = plain(value.to(gl.float32), PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT)
                    _store_codes(
                        a, out, out_desc, out_scale, buffer, out_stride, row, end, column, width, 0, blocks, PLAN
                    )
                elif PLAN.WIDE:
                    _store_halves(value, out, out_desc, buffer, out_stride, row, end, column, width, 0)
                else:
                    half_buffer = staging.index(WARPGROUP * PLAN.BUFFERS + half)
                    store_tile(value, out, out_desc, half_buffer, out_stride, row, end, column, width, 0, 1)
    tma.store_wait(0)


@gluon.jit
def _keep(value, h, desc, scale, buffer, stride, row, end, column, width, shift, blocks, PLAN: gl.constexpr):
    """A tile of h, rounded to bf16, to memory."""
    if PLAN.CODED:
        wide = value.to(gl.float32)
        _store_codes(wide, h, desc, scale, buffer, stride, row, end, column, width, shift, blocks, PLAN)
    else:
        _store_halves(value, h, desc, buffer, stride, row, end, column, width, shift)


@gluon.jit
def _store_halves(value, out, desc, buffer, stride, row, end, column, width, shift):
    """A tile to memory through a buffer that has half as many columns."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    left, right = value.reshape((HEIGHT, 2, COLUMNS)).permute((0, 2, 1)).split()
    store_tile(left, out, desc, buffer, stride, row, end, column, width, shift)
    store_tile(right, out, desc, buffer, stride, row, end, column + COLUMNS, width, shift)


@gluon.jit
def _store_codes(
    value, out, desc, out_scale, buffer, stride, row, end, column, width, shift, blocks, PLAN: gl.constexpr
):  # fmt: skip
    """128 columns of a tile to memory, in e4m3, and a scale for each of its rows, of which a whole row has `blocks`."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    if PLAN.CUT:
        n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, value.type.layout))
        value = gl.where((n < width)[None, :], value, 0.0)
    scale, inverse = power_of_two(gl.max(finite_size(value), 1))
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, value.type.layout))
    at = out_scale + m * blocks + (column + shift) // COLUMNS
    gl.store(at, scale, mask=(m < end) & (column < width))
    codes = encode(value * inverse[:, None]).to(gl.float8e4nv, bitcast=True)
    store_tile(codes, out, desc, buffer, stride, row, end, column, width, shift)


@quick
@gluon.jit
def scaled_product_kernel(
    row_desc, matrix_desc, h_desc, out_desc, rows, row_scale, matrix_scale, order, table, bias, h, h_scale, out,
    out_scale, depth, width, columns, row_stride, h_stride, out_stride, top_k, PLAN: gl.constexpr,
    ROW_LAYOUT: gl.constexpr, MATRIX_LAYOUT: gl.constexpr, STAGE_LAYOUT: gl.constexpr, KEPT_LAYOUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    row_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK], ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK], MATRIX_LAYOUT)
    dtype: gl.constexpr = out.dtype.element_ty
    STAGED: gl.constexpr = BLOCK // 2 if PLAN.WIDE else BLOCK
    staging = gl.allocate_shared_memory(dtype, [2 * PLAN.BUFFERS, BLOCK_M // 2, STAGED], STAGE_LAYOUT)
    kept = staging
    if PLAN.KEEP:
        KEPT: gl.constexpr = BLOCK if PLAN.CODED else BLOCK // 2
        kept = gl.allocate_shared_memory(h.dtype.element_ty, [2, BLOCK_M // 2, KEPT], KEPT_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # the copy engine, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    gl.warp_specialize(
        [
            (_consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, kept, h_desc, out_desc, order, row_scale,
                matrix_scale, bias, h, h_scale, out, out_scale, depth, width, columns, h_stride, out_stride, top_k,
                gl.constexpr(0), PLAN, BLOCK_M, BLOCK, STAGES, GROUP_M,
            )),
            (_consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, kept, h_desc, out_desc, order, row_scale,
                matrix_scale, bias, h, h_scale, out, out_scale, depth, width, columns, h_stride, out_stride, top_k,
                gl.constexpr(1), PLAN, BLOCK_M, BLOCK, STAGES, GROUP_M,
            )),
            (_produce, (
                row_desc, matrix_desc, rows, order, table, row_bufs, matrix_bufs, full, empty, depth, width, columns,
                row_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK, STAGES, GROUP_M,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        [224, 56] if PLAN.ACTIVATE else [216, 72],  # so that neither spills
    )  # fmt: skip
