"""The persistent product kernel of Hopper, for every plan: its loads, its products and what it does with their results.

Launched by `amoeba.kernels.hopper.gemm`, which says what it computes; other kernels are built of its parts.
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

from amoeba.kernels.hopper.epilogue import add_bias, column_parts, finish_tile, store_tile
from amoeba.kernels.hopper.tile_order import BLOCK_M, IN_GROUPS, place_of_tile, sync_tiles
from amoeba.kernels.hopper.tma import bulk_load, gather
from amoeba.kernels.launch import quick


@gluon.jit
def _fill_stage(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, bar, stage, expert, row, k, n, depth, width, columns,
    GATHER: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Threads that gather say themselves that they have."""
    MATRIX_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    BYTES: gl.constexpr = MATRIX_BYTES if GATHER else MATRIX_BYTES + BLOCK_M * BLOCK_K * 2
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
    else:
        bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))


@gluon.jit
def fill_product(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width, columns,
    GATHER: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The stages of one tile, as they come free. pointers: to the rows, where these are gathered."""
    for k in range(0, depth, BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        _fill_stage(
            row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, bar, stage, expert, row, k, n, depth, width,
            columns, GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATHER:
            pointers += BLOCK_K
        if PLAN.GATHER:
            async_copy.mbarrier_arrive(bar, increment_count=False)
        count += 1
    return count


@gluon.jit
def fill_unrolled(
    row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth, width, columns,
    PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`fill_product` where a tile is whole turns of the ring. count: of these turns."""
    for first in range(0, depth, STAGES * BLOCK_K):
        for stage in gl.static_range(STAGES):
            mbarrier.wait(empty.index(stage), (count & 1) ^ 1)
            rows = pointers
            if PLAN.GATHER:
                rows = pointers + stage * BLOCK_K
            bar = full.index(stage)
            _fill_stage(
                row_desc, matrix_desc, rows, row_bufs, matrix_bufs, bar, stage, expert, row, first + stage * BLOCK_K,
                n, depth, width, columns, PLAN.GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if PLAN.GATHER:
                async_copy.mbarrier_arrive(bar, increment_count=False)
        if PLAN.GATHER:
            pointers += STAGES * BLOCK_K
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


# A tile, and how much of the depth one stage holds. 4 stages and the buffers of the epilogue take 224 KB of the 227.
BLOCK_N, BLOCK_K, STAGES = 256, 64, 4
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
# At the others' progress, about a microsecond each, before a program goes on alone.
LOOKS = gl.constexpr(64)


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    ACTIVATE: bool  # write act(product) instead of the product
    GATHER: bool  # rows are those of x, found by order // top_k, instead of sorted ones
    B_K_MAJOR: bool  # the matrix is stored (O, W), rows along the summed dimension
    BIAS: bool
    KEEP: bool  # write the product as well as what its activation gives
    LOW: int  # steps in which more of the depth comes from other tensors (`amoeba.kernels.lora.epilogue`); 0: none does
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0
    UNROLLED: bool = False  # a tile is whole turns of the ring of stages: each stage has code of its own
    TILE_SYNC: bool = False  # programs wait for one another at each tile, so that they read what they share together
    ORDER: int = IN_GROUPS  # of tiles, see `amoeba.kernels.hopper.tile_order`
    HALVINGS: int = 0  # of the programs' shares, see `amoeba.kernels.launch.persistent_grid`

    @property
    def FORM(self) -> str:
        """The activation, as `amoeba.kernels.activation` names it."""
        return "fast_silu" if self.KIND == "silu" else self.KIND

    @property
    def OVERLAPPED(self) -> bool:
        """Half of a tile's sums leave while the next tile's products run."""
        return self.UNROLLED and not self.ACTIVATE and not self.GATHER

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
    def STAGED(self) -> tuple[int, int]:
        """As many of a warpgroup's sums as leave at a time."""
        return BLOCK_M // 2, BLOCK_N // 2

    @property
    def MATRIX(self) -> tuple[int, int]:
        """The part of a matrix that a stage holds."""
        return (BLOCK_N, BLOCK_K) if self.B_K_MAJOR else (BLOCK_K, BLOCK_N)

    @property
    def COPIED(self) -> tuple[int, int]:
        """... and as much of it as is copied at a time: gate and up come one after the other."""
        return (self.COLUMNS, BLOCK_K) if self.PAIRED else self.MATRIX


@dataclass(frozen=True, repr=False)
class Constants:
    """A plan as the compiler takes it: each of its values is a compile-time constant."""

    plan: Any

    def __getattr__(self, name: str) -> tl.constexpr:
        if not name.isupper():
            raise AttributeError(name)
        return tl.constexpr(getattr(self.plan, name))

    def __repr__(self) -> str:
        """Compiled kernels are kept under it, so it has all that they were made from."""
        names = sorted(name for name in dir(self.plan) if name.isupper())
        return f"{type(self.plan).__name__}({', '.join(f'{name}={getattr(self.plan, name)!r}' for name in names)})"


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
def _produce(
    row_desc, matrix_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, full, empty, depth, rank,
    width, columns, x_stride, top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count = 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    looked = 0
    for tile in range(first, behind, step):
        if PLAN.TILE_SYNC:
            looked = sync_tiles(table + 1, tile - first, behind, looked, LOOKS)
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M, BLOCK_K)
        else:
            pointers = x
        if PLAN.UNROLLED:
            count = fill_unrolled(
                row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth,
                width, columns, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            count = fill_product(
                row_desc, matrix_desc, pointers, row_bufs, matrix_bufs, full, empty, count, expert, row, n, depth,
                width, columns, PLAN.GATHER, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        if PLAN.LOW > 0:  # these rows are sorted
            count = fill_product(
                low_desc, factor_desc, x, row_bufs, matrix_bufs, full, empty, count, expert, row, n, rank, width,
                columns, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@gluon.jit
def multiply_stage(
    acc, row_bufs, matrix_bufs, full, empty, count, more, DEPTH: gl.constexpr, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr, STAGE: gl.constexpr = None,
):  # fmt: skip
    """acc (+)= rows · matrix over the first DEPTH of a stage, begun; the stage before it is given back. more: not the
    first of a tile. STAGE: where it is known; count is then of turns of the ring."""
    if STAGE is None:
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    else:
        stage = STAGE
        mbarrier.wait(full.index(stage), count & 1)
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
def _begin_unrolled(
    acc, row_bufs, matrix_bufs, full, empty, count, begin, depth, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
    HEIGHT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`_multiply_tile` from `begin` on where a tile is whole turns of the ring, but for `_end_unrolled`: the last
    product is begun. count: of these turns."""
    for first in range(begin, depth, STAGES * BLOCK_K):
        for stage in gl.static_range(STAGES):
            more = True if stage > 0 else first > 0
            acc = multiply_stage(
                acc, row_bufs, matrix_bufs, full, empty, count, more, BLOCK_K, WARPGROUP, PLAN, HEIGHT, STAGES, stage
            )
        count += 1
    return acc, count


@gluon.jit
def _end_unrolled(acc, empty, STAGES: gl.constexpr):
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(STAGES - 1), count=1)
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
def _consume_whole(
    table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, depth, width, columns,
    h_stride, out_stride, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """... tile by tile."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HEIGHT, BLOCK_N), gl.float32, mma)
    count = 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(first, behind, step):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        if PLAN.UNROLLED:
            acc, count = _begin_unrolled(
                acc, row_bufs, matrix_bufs, full, empty, count, 0, depth, WARPGROUP, PLAN, HEIGHT, BLOCK_K, STAGES
            )
            acc = _end_unrolled(acc, empty, STAGES)
        else:
            acc, count = _multiply_tile(
                acc, row_bufs, matrix_bufs, full, empty, count, depth, WARPGROUP, PLAN, HEIGHT, BLOCK_K, STAGES
            )
        finish_tile(
            acc, staging, h_desc, out_desc, bias, h, out, expert, row + WARPGROUP * HEIGHT, end, n, width, columns,
            h_stride, out_stride, WARPGROUP, PLAN, BLOCK_N,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _consume_overlapped(
    table, row_bufs, matrix_bufs, full, empty, staging, out_desc, bias, out, depth, width, out_stride,
    WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """... where the right half of a tile's sums is carried along, rounded, and leaves while the next tile runs."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(width, BLOCK_N)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    TURN: gl.constexpr = STAGES * BLOCK_K
    dtype: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HEIGHT, BLOCK_N), gl.float32, mma)
    carried = column_parts(acc, 2)[1].to(dtype)
    own = staging.index(WARPGROUP)
    carried_row, carried_end, carried_column, count = 0, 0, 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(first, behind, step):
        acc, count = _begin_unrolled(
            acc, row_bufs, matrix_bufs, full, empty, count, 0, TURN, WARPGROUP, PLAN, HEIGHT, BLOCK_K, STAGES
        )
        if tile > first:
            store_tile(carried, out, out_desc, own, out_stride, carried_row, carried_end, carried_column, width, 0)
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        acc, count = _begin_unrolled(
            acc, row_bufs, matrix_bufs, full, empty, count, TURN, depth, WARPGROUP, PLAN, HEIGHT, BLOCK_K, STAGES
        )
        acc = _end_unrolled(acc, empty, STAGES)
        row += WARPGROUP * HEIGHT
        column = n * BLOCK_N
        left, right = column_parts(acc, 2)
        if PLAN.BIAS:
            bias_row = bias + expert.to(gl.int64) * width
            left = add_bias(left, bias_row, column, width, HALF)
            right = add_bias(right, bias_row, column + HALF, width, HALF)
        store_tile(left, out, out_desc, own, out_stride, row, end, column, width, 0)
        carried = right.to(dtype)
        carried_row, carried_end, carried_column = row, end, column + HALF
    if first < behind:
        store_tile(carried, out, out_desc, own, out_stride, carried_row, carried_end, carried_column, width, 0)
    tma.store_wait(0)


@gluon.jit
def consume(
    table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, depth, width, columns,
    h_stride, out_stride, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows."""
    if PLAN.OVERLAPPED:
        _consume_overlapped(
            table, row_bufs, matrix_bufs, full, empty, staging, out_desc, bias, out, depth, width, out_stride,
            WARPGROUP, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
        )  # fmt: skip
    else:
        _consume_whole(
            table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, depth, width, columns,
            h_stride, out_stride, WARPGROUP, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
        )  # fmt: skip


@quick
@gluon.jit
def gemm_kernel(
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
            (consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, deep, width,
                columns, h_stride, out_stride, gl.constexpr(0), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (consume, (
                table, row_bufs, matrix_bufs, full, empty, staging, h_desc, out_desc, bias, h, out, deep, width,
                columns, h_stride, out_stride, gl.constexpr(1), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (_produce, (
                row_desc, matrix_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, full, empty,
                depth, rank, width, columns, x_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        [216, 72 if PLAN.GATHER else (40 if PLAN.UNROLLED else 24)],
    )  # fmt: skip
