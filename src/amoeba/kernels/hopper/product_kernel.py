"""The persistent product kernel of Hopper, for every plan: its loads, its products and what it does with their results.

Launched by `amoeba.kernels.hopper.product`, which says what it computes; other kernels are built of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl
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
from amoeba.kernels.hopper.descriptor import bulk_load, bulk_store, gather
from amoeba.kernels.launch import quick

# A tile, and how much of the depth one stage holds. 4 stages and the buffers of the epilogue take 224 KB of the 227.
BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    ACTIVATE: bool  # write act(product) instead of the product
    GATHER: bool  # rows are those of x, found by order // top_k, instead of sorted ones
    B_K_MAJOR: bool  # the matrix is stored (O, W), rows along the summed dimension
    BIAS: bool
    KEEP: bool  # write the product as well as what its activation gives
    LOW: (
        int  # more of the depth comes from other tensors (`amoeba.kernels.addend`), in steps of so much; 0: it does not
    )
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0
    HALVINGS: int = 0  # of the programs' shares, see `amoeba.kernels.programs`

    @property
    def PAIRED(self) -> bool:
        """A tile holds columns of the gate and the same columns of up."""
        return self.ACTIVATE and self.GATED

    @property
    def SHORT(self) -> bool:
        """One step, shorter than others, takes what comes from the other tensors."""
        return 0 < self.LOW < BLOCK_K

    @property
    def COLUMNS(self) -> int:
        """Columns of the result that a tile holds."""
        return BLOCK_N // 2 if self.PAIRED else BLOCK_N

    @property
    def MATRIX(self) -> tuple[int, int]:
        """The part of a matrix that a stage holds."""
        return (BLOCK_N, BLOCK_K) if self.B_K_MAJOR else (BLOCK_K, BLOCK_N)

    @property
    def COPIED(self) -> tuple[int, int]:
        """... and as much of it as is copied at a time: gate and up come one after the other."""
        return (self.COLUMNS, BLOCK_K) if self.PAIRED else self.MATRIX


@dataclass(frozen=True)
class Constants:
    """A plan as the compiler takes it: each of its values is a compile-time constant."""

    plan: Any

    def __getattr__(self, name: str) -> tl.constexpr:
        if not name.isupper():
            raise AttributeError(name)
        return tl.constexpr(getattr(self.plan, name))


@gluon.jit
def share_of_tiles(program, programs, tiles, HALVINGS: gl.constexpr):
    """The first tile of a program, behind its last one, and the step between them."""
    if HALVINGS == 0:
        return program, tiles, programs
    else:
        at_once = programs // (HALVINGS + 1)
        turn = program // at_once
        left = tiles >> turn  # for the programs from this turn on
        after = (left >> 1) * (1 - turn // HALVINGS)  # none after the last one
        return tiles - left + program % at_once, tiles - after, at_once


@gluon.jit
def place_of_tile(tile, table, tiles, column_tiles, GROUP_M: gl.constexpr):
    """Expert, first row, end of the expert's rows, and column tile of a tile."""
    group_size = GROUP_M * column_tiles
    group = tile // group_size
    first = group * GROUP_M
    height = gl.minimum(tiles - first, GROUP_M)
    inside = tile - group * group_size
    entry = table + 4 + (first + inside % height) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), inside // height


@gluon.jit
def fill_product(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width, columns,
    GATHER: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The stages of one tile, as they come free. pointers: to the rows, where these are gathered."""
    MATRIX_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    BYTES: gl.constexpr = MATRIX_BYTES if GATHER else MATRIX_BYTES + BLOCK_M * BLOCK_K * 2
    for k in range(0, depth, BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        matrix_buf = matrix_bufs.index(stage)
        mbarrier.expect(bar, BYTES)
        if PLAN.PAIRED:
            at = expert * width + n * PLAN.COLUMNS
            gate_buf = matrix_buf.slice(0, PLAN.COLUMNS, 0)
            up_buf = matrix_buf.slice(PLAN.COLUMNS, PLAN.COLUMNS, 0)
            bulk_load(matrix_desc, [at, k], bar, gate_buf)
            bulk_load(matrix_desc, [at + columns, k], bar, up_buf)
        elif PLAN.B_K_MAJOR:
            bulk_load(matrix_desc, [expert * width + n * BLOCK_N, k], bar, matrix_buf)
        else:
            bulk_load(matrix_desc, [expert * depth + k, n * BLOCK_N], bar, matrix_buf)
        if GATHER:
            gather(row_bufs.index(stage), pointers)
            pointers += BLOCK_K
        else:
            bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
        if PLAN.GATHER:
            async_copy.mbarrier_arrive(bar, increment_count=False)
        count += 1
    return count


@gluon.jit
def row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """To the first of the depth of a tile's rows; behind the last one, to the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
    token = gl.load(order + sorted_row) // top_k
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    return x + (token.to(gl.int64) * x_stride)[:, None] + k[None, :]


@gluon.jit
def _produce(
    row_desc, matrix_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, full, empty, depth, rank,
    width, columns, x_stride, top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count = 0
    mine, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(mine, behind, step):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M)
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M, BLOCK_K)
        else:
            pointers = x
        count = fill_product(
            row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width,
            columns, PLAN.GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        if PLAN.LOW > 0:  # these rows are sorted
            count = fill_product(
                low_desc, factor_desc, x, row_bufs, matrix_bufs, full, empty, count, expert, row, n, rank, width,
                columns, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@gluon.jit
def multiply_stage(
    acc, row_bufs, matrix_bufs, full, empty, count, more, DEPTH: gl.constexpr, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc (+)= rows · matrix over the first DEPTH of a stage, begun; the stage before it is given back. more: not the
    first of a tile."""
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    if PLAN.GATHER:
        fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0).slice(0, DEPTH, 1)
    if PLAN.B_K_MAJOR:
        matrix = matrix_bufs.index(stage).slice(0, DEPTH, 1).permute((1, 0))
    else:
        matrix = matrix_bufs.index(stage).slice(0, DEPTH, 0)
    acc = warpgroup_mma(rows, matrix, acc, use_acc=more, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=more)
    return acc


@gluon.jit
def _multiply_tile(
    acc, row_bufs, matrix_bufs, full, empty, count, depth, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
    HEIGHT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc = rows · matrix over all of the depth; a stage is given back when the product after it has started."""
    for k in range(0, depth, BLOCK_K):
        acc = multiply_stage(
            acc, row_bufs, matrix_bufs, full, empty, count, k > 0, BLOCK_K, WARPGROUP, PLAN, HEIGHT, STAGES
        )
        count += 1
    if PLAN.SHORT:  # the rest of that stage is zeros, or another expert's
        acc = multiply_stage(
            acc, row_bufs, matrix_bufs, full, empty, count, True, PLAN.LOW, WARPGROUP, PLAN, HEIGHT, STAGES
        )
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    return acc, count


@gluon.jit
def _consume(
    table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, depth, width, columns,
    h_stride, out_stride, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, add the bias, activate, store."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HEIGHT, BLOCK_N), gl.float32, mma)
    buffer = staging.index(WARPGROUP)
    count = 0
    mine, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(mine, behind, step):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M)
        acc, count = _multiply_tile(
            acc, row_bufs, matrix_bufs, full, empty, count, depth, WARPGROUP, PLAN, HEIGHT, BLOCK_K, STAGES
        )
        row += WARPGROUP * HEIGHT
        column = n * PLAN.COLUMNS
        bias_row = bias + expert.to(gl.int64) * width
        left, right = column_parts(acc, 2)
        if PLAN.PAIRED:
            if PLAN.BIAS:
                left = add_bias(left, bias_row, column, columns, HALF)
                right = add_bias(right, bias_row + columns, column, columns, HALF)
            if PLAN.KEEP:
                store_tile(left, h, h_desc, buffer, h_stride, row, end, column, columns, 0)
                store_tile(right, h, h_desc, buffer, h_stride, row, end, column, columns, columns)
            a = gated(left, right, PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT, PLAN.UP_SHIFT)
            store_tile(a, out, out_desc, buffer, out_stride, row, end, column, columns, 0)
        else:
            for half in gl.static_range(2):
                value = right if half else left
                at = column + half * HALF
                if PLAN.BIAS:
                    value = add_bias(value, bias_row, at, width, HALF)
                if PLAN.ACTIVATE:
                    if PLAN.KEEP:
                        store_tile(value, h, h_desc, buffer, h_stride, row, end, at, width, 0)
                    value = plain(value, PLAN.KIND, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT)
                store_tile(value, out, out_desc, buffer, out_stride, row, end, at, width, 0)
    tma.store_wait(0)


@gluon.jit
def add_bias(tile, bias, column, width, COLUMNS: gl.constexpr):
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, tile.type.layout))
    return tile + gl.load(bias + n, mask=n < width, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def column_parts(tile, PARTS: gl.constexpr):
    """A tile's left and right half, or its four quarters."""
    HEIGHT: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    left, right = tile.reshape((HEIGHT, 2, WIDTH // 2)).permute((0, 2, 1)).split()
    if PARTS == 2:
        return left, right
    else:
        first, second = left.reshape((HEIGHT, 2, WIDTH // 4)).permute((0, 2, 1)).split()
        third, fourth = right.reshape((HEIGHT, 2, WIDTH // 4)).permute((0, 2, 1)).split()
        return first, second, third, fourth


@gluon.jit
def wait_for_buffer(whole, PENDING: gl.constexpr):
    """Until the copies by the engine have read their buffers, all but the last PENDING. whole: it copies this, too."""
    if PENDING == 0:
        tma.store_wait(0)
    elif whole:
        tma.store_wait(PENDING)
    else:
        tma.store_wait(0)  # nothing is copied now: the next ones may count on it


@gluon.jit
def store_tile(value, out, desc, buffer, stride, row, end, column, width, shift, PENDING: gl.constexpr = 0):
    """A tile to memory: by the copy engine where it is whole, under a mask where rows or columns end inside it.

    PENDING: of the copies by the engine, so many of the last ones do not read from this buffer.
    """
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    whole = (row + HEIGHT <= end) & (column + COLUMNS <= width)
    wait_for_buffer(whole, PENDING)
    buffer.store(value.to(out.dtype.element_ty))
    if whole:
        fence_async_shared()
        bulk_store(desc, [row, column + shift], buffer)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
        m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        pointers = out + m.to(gl.int64)[:, None] * stride + (n + shift)[None, :]
        gl.store(pointers, buffer.load(layout), mask=(m < end)[:, None] & (n < width)[None, :])


@quick
@gluon.jit
def product_kernel(
    row_desc, matrix_desc, low_desc, factor_desc, h_desc, out_desc, x, order, table, bias, h, out, depth, rank,
    width, columns, x_stride, h_stride, out_stride, top_k, PLAN: gl.constexpr, ROW_LAYOUT: gl.constexpr,
    MATRIX_LAYOUT: gl.constexpr, STAGE_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], ROW_LAYOUT)
    if PLAN.B_K_MAJOR:
        matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], MATRIX_LAYOUT)
    else:
        matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], MATRIX_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, BLOCK_N // 2], STAGE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # the copy engine, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    deep = depth if PLAN.SHORT else depth + rank
    gl.warp_specialize(
        [
            (_consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, deep, width,
                columns, h_stride, out_stride, gl.constexpr(0), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (_consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, deep, width,
                columns, h_stride, out_stride, gl.constexpr(1), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (_produce, (
                row_desc, matrix_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, full, empty,
                depth, rank, width, columns, x_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        [216, 72 if PLAN.GATHER else 24],
    )  # fmt: skip
