"""The persistent kernel of Hopper's products in e4m3, for every plan: its loads, its products, what it does with them.

Launched by `amoeba.kernels.hopper.scaled_product`, which says what it computes.

Widths are multiples of 64. Where one is no multiple of 128 its last block of scales is half full: the copy engine reads
zeros behind the end of a row, gathered rows are masked, and columns behind the last one count for no scale. Blocks of a
gated matrix are counted through gates and ups, so that with an odd number of 64 gates each 128 columns of up lie in two
blocks, half in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, gather, reinterpret
from amoeba.kernels.hopper.product_kernel import place_of_tile
from amoeba.kernels.hopper.product_store import add_bias, column_parts, store_tile
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


class Ways(NamedTuple):
    """How the same bits are computed; `scaled_product.WAYS` has names for some.

    late:      a step's first product is begun before the next scales are asked for: a fence waits for loads.
    ahead:     a tile's place, its rows' tokens and its first scales are asked for while the tile before it is stored.
    behind:    gathered rows are made visible to the matrix unit by the threads that gather them, so many stages later.
    skips:     a warpgroup that has no rows of a tile multiplies nothing.
    alternate: h in bf16, or a result in fp32, leaves through two buffers in turns that take the room of one.
    flush:     silu by instructions that flush subnormal numbers: 0 for gates below -87 (where it is 1e-36 at most).
    """

    late: bool = False
    ahead: bool = False
    behind: int = 0
    skips: bool = False
    alternate: bool = False
    flush: bool = False


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
    WAYS: Ways = Ways()

    @property
    def LATE(self) -> bool:
        return self.WAYS.late

    @property
    def AHEAD(self) -> bool:
        return self.WAYS.ahead

    @property
    def BEHIND(self) -> int:
        """Of the stages that the producer has begun, the last ones that it has not made visible; 0: consumers do."""
        return self.WAYS.behind if self.GATHER else 0

    @property
    def SKIPS(self) -> bool:
        return self.WAYS.skips

    @property
    def ALTERNATE(self) -> bool:
        return self.WAYS.alternate and (self.WIDE or (self.KEEP and not self.CODED))

    @property
    def FLUSH(self) -> bool:
        return self.WAYS.flush and self.KIND == "silu"

    @property
    def FORM(self) -> str:
        """The activation, as `amoeba.kernels.activation` names it."""
        return "flushed_silu" if self.FLUSH else self.KIND

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
        return 1 if (self.ACTIVATE or self.WIDE) and not self.ALTERNATE else 2

    @property
    def STAGES(self) -> int:
        """They take up to 224 KB of the 227, together with the buffers."""
        return 4 if self.ACTIVATE or self.WIDE else 3

    @property
    def STAGED(self) -> tuple[int, int]:
        """As much of the result as leaves at a time."""
        if not self.WIDE:
            return HALF
        return (QUARTER[0], QUARTER[1] // 2) if self.ALTERNATE else QUARTER


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
                if PLAN.BEHIND > 0:
                    async_copy.commit_group()
                    if count >= PLAN.BEHIND:
                        async_copy.wait_group(PLAN.BEHIND)
                        fence_async_shared()
                        barrier()  # all have done so
                        mbarrier.arrive(full.index((count - PLAN.BEHIND) % STAGES), count=1)
                else:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            count += 1
    if PLAN.BEHIND > 0:
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        for stage in range(gl.maximum(count - PLAN.BEHIND, 0), count):
            mbarrier.arrive(full.index(stage % STAGES), count=1)


@gluon.jit
def _multiply_tile(
    row_bufs, matrix_bufs, full, empty, count, steps, there, row_scales, left_scales, right_scales, far_scales,
    next_row, next_left, next_right, next_far, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, HEIGHT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The two halves of a tile, in fp32, of the first `there` of its steps. Scales are along the depth; far ones are of the right half's last 64 columns,
    where these have others. next_row and so on: the first of each."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    left = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    right = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    near = (gl.arange(0, BLOCK, gl.SliceLayout(0, mma)) < BLOCK // 2)[None, :]
    for step in range(0, there):
        stage = count % STAGES
        of_left = next_row * next_left
        of_right = next_row * next_right
        of_far = next_row * next_far
        ahead = gl.minimum(step + 1, steps - 1)
        if not PLAN.LATE:
            next_row, next_left, next_right, next_far = _load_scales(
                row_scales + ahead, left_scales + ahead, right_scales + ahead, far_scales + ahead, PLAN
            )
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if PLAN.GATHER and PLAN.BEHIND == 0:
            fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
        if PLAN.LATE:
            next_row, next_left, next_right, next_far = _load_scales(
                row_scales + ahead, left_scales + ahead, right_scales + ahead, far_scales + ahead, PLAN
            )
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
    if PLAN.SKIPS:
        for _ in range(there, steps):
            mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
            mbarrier.arrive(empty.index(count % STAGES), count=1)
            count += 1
    return left, right, count


@gluon.jit
def _load_scales(row_scales, left_scales, right_scales, far_scales, PLAN: gl.constexpr):
    right = gl.load(right_scales)
    far = right
    if PLAN.SHIFTED:
        far = gl.load(far_scales)
    return gl.load(row_scales), gl.load(left_scales), right, far


@gluon.jit
def _place(tile, table, tiles, column_tiles, shift, GROUP_M: gl.constexpr):
    """As `place_of_tile`, `shift` rows further; behind the last tile that of the last one, without any the first row's,
    so that all may be loaded that belongs to it."""
    some = tiles > 0
    last = gl.maximum(tiles * column_tiles - 1, 0)
    expert, row, end, n = place_of_tile(gl.minimum(tile, last), table, gl.maximum(tiles, 1), column_tiles, GROUP_M)
    return gl.where(some, expert, 0), gl.where(some, row, 0) + shift, gl.where(some, end, 1), n


@gluon.jit
def _first_scales(
    row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Of a tile's rows and columns, as `_multiply_tile` takes them."""
    left, right, far = _scales_of_columns(matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK)
    return _load_scales(row_scale + m * steps, left, right, far, PLAN)


@gluon.jit
def _token_rows(order, row, end, top_k, PLAN: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which row of the scales belongs to each of a warpgroup's rows; behind the last one, that of the last one."""
    m = gl.minimum(row + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT)), end - 1)
    if PLAN.GATHER:
        m = gl.load(order + m) // top_k
    return m


@gluon.jit
def _scales_of_columns(
    matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Pointers along the depth to the scales of a tile's left half, its right half, and that one's last 64 columns."""
    if PLAN.PAIRED:
        first, second = n, n + columns // BLOCK
        far = gl.minimum(n + (columns + BLOCK // 2) // BLOCK, blocks - 1)
    else:
        first, second = 2 * n, gl.minimum(2 * n + 1, blocks - 1)
        far = second
    of_expert = matrix_scale + expert * blocks * steps  # scales are few: their number fits 32 bits
    if PLAN.AHEAD:  # one for each row, by a zero: as single numbers they are waited for between products
        of_expert += m >> 31
    return of_expert + first * steps, of_expert + second * steps, of_expert + far * steps


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
    first_buffer: gl.constexpr = WARPGROUP * PLAN.BUFFERS
    buffer = staging.index(first_buffer)
    steps = gl.cdiv(depth, BLOCK)
    blocks = gl.cdiv(width, BLOCK)
    count = 0
    if PLAN.AHEAD:
        expert, row, end, n = _place(gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, GROUP_M)
        m = _token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
        of_row, of_left, of_right, of_far = _first_scales(
            row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK
        )
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        if PLAN.AHEAD:
            next_expert, next_row, next_end, next_n = _place(
                tile + gl.num_programs(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, GROUP_M
            )
        else:
            expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M)
            row += WARPGROUP * HEIGHT
            m = _token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
            of_row, of_left, of_right, of_far = _first_scales(
                row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK
            )
        left_scales, right_scales, far_scales = _scales_of_columns(
            matrix_scale, m, expert, n, columns, blocks, steps, PLAN, BLOCK
        )
        there = steps
        if PLAN.SKIPS:
            there = gl.where(row < end, steps, 0)
        left, right, count = _multiply_tile(
            row_bufs, matrix_bufs, full, empty, count, steps, there, row_scale + m * steps, left_scales, right_scales,
            far_scales, of_row, of_left, of_right, of_far, WARPGROUP, PLAN, HEIGHT, BLOCK, STAGES,
        )  # fmt: skip
        if PLAN.AHEAD:
            m = _token_rows(order, next_row, next_end, top_k, PLAN, HEIGHT, mma)
        bias_row = bias + expert.to(gl.int64) * width
        if PLAN.PAIRED:
            column = n * BLOCK
            if PLAN.BIAS:
                left = add_bias(left, bias_row, column, columns, BLOCK)
                right = add_bias(right, bias_row + columns, column, columns, BLOCK)
            left, right = left.to(gl.bfloat16), right.to(gl.bfloat16)
            if PLAN.KEEP:
                _keep(
                    left, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, 0, blocks, WARPGROUP,
                    False, PLAN,
                )  # fmt: skip
                _keep(
                    right, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, columns, blocks,
                    WARPGROUP, True, PLAN,
                )  # fmt: skip
            left, right = left.to(gl.float32), right.to(gl.float32)
            a = gated(left, right, PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT)
            if PLAN.AHEAD:
                of_row, of_left, of_right, of_far = _first_scales(
                    row_scale, matrix_scale, m, next_expert, next_n, columns, blocks, steps, PLAN, BLOCK
                )
            _store_codes(
                a, out, out_desc, out_scale, buffer, out_stride, row, end,
                column, columns, 0, gl.cdiv(columns, BLOCK), 1 if PLAN.ALTERNATE else 0, PLAN,
            )  # fmt: skip
        else:
            for half in gl.static_range(2):
                value = right if half else left
                column = (2 * n + half) * BLOCK
                if PLAN.BIAS:
                    value = add_bias(value, bias_row, column, width, BLOCK)
                if PLAN.AHEAD and half == 1:
                    of_row, of_left, of_right, of_far = _first_scales(
                        row_scale, matrix_scale, m, next_expert, next_n, columns, blocks, steps, PLAN, BLOCK
                    )
                if PLAN.ACTIVATE:
                    value = value.to(gl.bfloat16)
                    if PLAN.KEEP:
                        _keep(
                            value, h, h_desc, h_scale, kept, h_stride, row, end, column, width, 0, blocks,
                            WARPGROUP, False, PLAN,
                        )  # fmt: skip
                    a = plain(value.to(gl.float32), PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT)
                    _store_codes(
                        a, out, out_desc, out_scale, buffer, out_stride, row,
                        end, column, width, 0, blocks, 1 if PLAN.ALTERNATE else 0, PLAN,
                    )  # fmt: skip
                elif PLAN.WIDE and PLAN.ALTERNATE:
                    _store_quarters(value, out, out_desc, staging, out_stride, row, end, column, width, first_buffer)
                elif PLAN.WIDE:
                    _store_halves(value, out, out_desc, buffer, buffer, out_stride, row, end, column, width, 0, 0, 0)
                else:
                    half_buffer = staging.index(first_buffer + half)
                    store_tile(value, out, out_desc, half_buffer, out_stride, row, end, column, width, 0, 1)
        if PLAN.AHEAD:
            expert, row, end, n = next_expert, next_row, next_end, next_n
    tma.store_wait(0)


@gluon.jit
def _keep(
    value, h, desc, scale, kept, stride, row, end, column, width, shift, blocks, WARPGROUP: gl.constexpr,
    AGAIN: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of h, rounded to bf16, to memory. AGAIN: right behind another."""
    one = kept.index(WARPGROUP * PLAN.BUFFERS)
    if PLAN.CODED:
        _store_codes(value.to(gl.float32), h, desc, scale, one, stride, row, end, column, width, shift, blocks, 0, PLAN)
    elif PLAN.ALTERNATE:
        other = kept.index(WARPGROUP * PLAN.BUFFERS + 1)
        _store_halves(value, h, desc, one, other, stride, row, end, column, width, shift, 1 if AGAIN else 0, 1)
    else:
        _store_halves(value, h, desc, one, one, stride, row, end, column, width, shift, 0, 0)


@gluon.jit
def _store_halves(
    value, out, desc, one, other, stride, row, end, column, width, shift, BEFORE: gl.constexpr, BETWEEN: gl.constexpr
):  # fmt: skip
    """A tile to memory through buffers that have half as many columns. BEFORE, BETWEEN: copies that each half need not
    wait for, see `store_tile`."""
    COLUMNS: gl.constexpr = one.shape[1]
    left, right = column_parts(value, 2)
    store_tile(left, out, desc, one, stride, row, end, column, width, shift, BEFORE)
    store_tile(right, out, desc, other, stride, row, end, column + COLUMNS, width, shift, BETWEEN)


@gluon.jit
def _store_quarters(value, out, desc, staging, stride, row, end, column, width, FIRST: gl.constexpr):
    """A tile to memory through two buffers that have a quarter of its columns, in turns."""
    COLUMNS: gl.constexpr = staging.shape[2]
    first, second, third, fourth = column_parts(value, 4)
    one, other = staging.index(FIRST), staging.index(FIRST + 1)
    store_tile(first, out, desc, one, stride, row, end, column, width, 0, 1)
    store_tile(second, out, desc, other, stride, row, end, column + COLUMNS, width, 0, 1)
    store_tile(third, out, desc, one, stride, row, end, column + 2 * COLUMNS, width, 0, 1)
    store_tile(fourth, out, desc, other, stride, row, end, column + 3 * COLUMNS, width, 0, 1)


@gluon.jit
def _store_codes(
    value, out, desc, out_scale, buffer, stride, row, end, column, width, shift, blocks, PENDING: gl.constexpr,
    PLAN: gl.constexpr,
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
    store_tile(codes, out, desc, buffer, stride, row, end, column, width, shift, PENDING)


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
    STAGED: gl.constexpr = (BLOCK // 4 if PLAN.ALTERNATE else BLOCK // 2) if PLAN.WIDE else BLOCK
    if PLAN.ALTERNATE and PLAN.KEEP:  # codes leave through the first buffer of h
        kept = gl.allocate_shared_memory(h.dtype.element_ty, [4, BLOCK_M // 2, BLOCK // 2], KEPT_LAYOUT)
        staging = reinterpret(kept, dtype, [4, BLOCK_M // 2, BLOCK], STAGE_LAYOUT)
    else:
        staging = gl.allocate_shared_memory(dtype, [2 * PLAN.BUFFERS, BLOCK_M // 2, STAGED], STAGE_LAYOUT)
        kept = staging
        if PLAN.KEEP:
            KEPT: gl.constexpr = BLOCK if PLAN.CODED else BLOCK // 2
            kept = gl.allocate_shared_memory(h.dtype.element_ty, [2, BLOCK_M // 2, KEPT], KEPT_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # the copy engine, and 128 gathering threads or one for them all
        mbarrier.init(full.index(i), count=(2 if PLAN.BEHIND > 0 else 129) if PLAN.GATHER else 1)
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
        [224, 56] if PLAN.ACTIVATE or PLAN.AHEAD else [216, 72],  # so that neither spills
    )  # fmt: skip
