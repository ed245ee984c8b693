"""The persistent product kernel of Hopper, for every plan: its loads, its products and what it does with their results.

Launched by `amoeba.kernels.hopper.gemm`, which says what it computes; other kernels are built of its parts. What these
take in common goes in tuples:

    ring    = row_bufs, matrix_bufs, full, empty            # stages in shared memory, and their barriers
    descs   = row_desc, matrix_desc                         # where stages are filled from
    place   = expert, row, n                                # of a tile: first row and column tile
    sizes   = depth, width, columns                         # of an expert's matrix; columns of the result
    results = h_desc, out_desc, bias, h, out                # what a tile's sums become
    shape   = depth, width, columns, h_stride, out_stride   # `sizes`, and rows of the results
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
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
from amoeba.kernels.hopper.tile_order import BLOCK_M, FEW_ROWS, IN_GROUPS, place_of_tile, sync_tiles
from amoeba.kernels.hopper.tma import bulk_load, gather, shared_layout
from amoeba.kernels.launch import quick

# A tile, and how much of the depth one stage holds. 4 stages and the buffers of the epilogue take 224 KB of the 227.
BLOCK_N, BLOCK_K, STAGES = 256, 64, 4
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
# At the others' progress, about a microsecond each, before a program goes on alone.
LOOKS = gl.constexpr(64)


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    BLOCK_N: ClassVar[int] = BLOCK_N
    BLOCK_K: ClassVar[int] = BLOCK_K
    STAGES: ClassVar[int] = STAGES
    GROUP_M: ClassVar[int] = GROUP_M

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
    BLOCK_M: int = BLOCK_M  # rows of a tile: these, of which each warpgroup has half, or FEW_ROWS
    SCALED: bool = False  # results are fp16 with a scale for each row of `activate.SCALED_COLUMNS`, not bf16
    HALVINGS: int = 0  # of the programs' shares, see `amoeba.kernels.launch.persistent_grid`

    @property
    def OVERLAPPED(self) -> bool:
        """Half of a tile's sums leave while the next tile's products run."""
        return self.UNROLLED and not self.ACTIVATE and not self.GATHER and not self.FEW and not self.SCALED

    @property
    def FEW(self) -> bool:
        """Both warpgroups have all rows of a tile, and each half of its columns."""
        return self.BLOCK_M == FEW_ROWS

    @property
    def OWN(self) -> tuple[int, int]:
        """Rows and columns of a stage that a warpgroup multiplies."""
        return FEW_ROWS, BLOCK_N // 2 if self.FEW else BLOCK_N

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
        return self.OWN[0], self.OWN[1] // 2

    @property
    def MATRIX(self) -> tuple[int, int]:
        """The part of a matrix that a stage holds."""
        return (BLOCK_N, BLOCK_K) if self.B_K_MAJOR else (BLOCK_K, BLOCK_N)

    @property
    def ROW_LAYOUT(self) -> Any:
        """Of a stage's rows in shared memory, as of all below for both dtypes of 16 bits."""
        return shared_layout((self.BLOCK_M, BLOCK_K), torch.bfloat16)

    @property
    def MATRIX_LAYOUT(self) -> Any:
        return shared_layout(self.MATRIX, torch.bfloat16)

    @property
    def STAGED_LAYOUT(self) -> Any:
        return shared_layout(self.STAGED, torch.bfloat16)

    @property
    def COPIED(self) -> tuple[int, int]:
        """... and as much of it as is copied at a time: a warpgroup's gates and its ups come one after the other."""
        return (self.OWN[1] // 2, BLOCK_K) if self.PAIRED else self.MATRIX


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
def _fill_stage(descs, pointers, ring, bar, stage, place, k, sizes, GATHER: gl.constexpr, PLAN: gl.constexpr):
    """Threads that gather say themselves that they have."""
    row_desc, matrix_desc = descs
    row_bufs, matrix_bufs, _, _ = ring
    expert, row, n = place
    depth, width, columns = sizes
    BLOCK_K: gl.constexpr = row_bufs.shape[2]
    BLOCK_N: gl.constexpr = matrix_bufs.shape[1] if PLAN.B_K_MAJOR else matrix_bufs.shape[2]
    MATRIX_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    BYTES: gl.constexpr = MATRIX_BYTES if GATHER else MATRIX_BYTES + row_bufs.shape[1] * BLOCK_K * 2
    matrix_buf = matrix_bufs.index(stage)
    mbarrier.expect(bar, BYTES)
    if PLAN.PAIRED:
        COPIED: gl.constexpr = PLAN.COPIED[0]
        at = expert * width + n * PLAN.COLUMNS
        for first in gl.static_range(0, PLAN.COLUMNS, COPIED):
            bulk_load(matrix_desc, [at + first, k], bar, matrix_buf.slice(2 * first, COPIED, 0))
            bulk_load(matrix_desc, [at + first + columns, k], bar, matrix_buf.slice(2 * first + COPIED, COPIED, 0))
    elif PLAN.B_K_MAJOR:
        bulk_load(matrix_desc, [expert * width + n * BLOCK_N, k], bar, matrix_buf)
    else:
        bulk_load(matrix_desc, [expert * depth + k, n * BLOCK_N], bar, matrix_buf)
    if GATHER:
        gather(row_bufs.index(stage), pointers)
    else:
        bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))


@gluon.jit
def fill_product(descs, pointers, ring, count, place, sizes, GATHER: gl.constexpr, PLAN: gl.constexpr):
    """The stages of one tile, as they come free. pointers: to the rows, where these are gathered."""
    row_bufs, _, full, empty = ring
    STAGES: gl.constexpr = row_bufs.shape[0]
    BLOCK_K: gl.constexpr = row_bufs.shape[2]
    for k in range(0, sizes[0], BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        _fill_stage(descs, pointers, ring, bar, stage, place, k, sizes, GATHER, PLAN)
        if GATHER:
            pointers += BLOCK_K
        if PLAN.GATHER:
            async_copy.mbarrier_arrive(bar, increment_count=False)
        count += 1
    return count


@gluon.jit
def _fill_unrolled(descs, pointers, ring, count, place, sizes, PLAN: gl.constexpr):
    """`fill_product` where a tile is whole turns of the ring. count: of these turns."""
    row_bufs, _, full, empty = ring
    STAGES: gl.constexpr = row_bufs.shape[0]
    BLOCK_K: gl.constexpr = row_bufs.shape[2]
    for first in range(0, sizes[0], STAGES * BLOCK_K):
        for stage in gl.static_range(STAGES):
            mbarrier.wait(empty.index(stage), (count & 1) ^ 1)
            rows = pointers
            if PLAN.GATHER:
                rows = pointers + stage * BLOCK_K
            bar = full.index(stage)
            k = first + stage * BLOCK_K
            _fill_stage(descs, rows, ring, bar, stage, place, k, sizes, PLAN.GATHER, PLAN)
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


@gluon.jit
def _produce(
    row_desc, matrix_desc, low_desc, factor_desc, x, order, table, ring, depth, rank, width, columns, x_stride, top_k,
    PLAN: gl.constexpr,
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
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, PLAN.BLOCK_M, PLAN.BLOCK_K)
        else:
            pointers = x
        descs, place, sizes = (row_desc, matrix_desc), (expert, row, n), (depth, width, columns)
        if PLAN.UNROLLED:
            count = _fill_unrolled(descs, pointers, ring, count, place, sizes, PLAN)
        else:
            count = fill_product(descs, pointers, ring, count, place, sizes, PLAN.GATHER, PLAN)
        if PLAN.LOW > 0:  # these rows are sorted
            count = fill_product((low_desc, factor_desc), x, ring, count, place, (rank, width, columns), False, PLAN)


@gluon.jit
def multiply_stage(
    acc, ring, count, more, DEPTH: gl.constexpr, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
    STAGE: gl.constexpr = None,
):  # fmt: skip
    """acc (+)= rows · matrix over the first DEPTH of a stage, begun; the stage before it is given back. more: not the
    first of a tile. acc: of half of a stage's rows, or of all rows and half of its columns. STAGE: where it is known;
    count is then of turns of the ring."""
    row_bufs, matrix_bufs, full, empty = ring
    STAGES: gl.constexpr = row_bufs.shape[0]
    HEIGHT: gl.constexpr = acc.shape[0]
    ALL_ROWS: gl.constexpr = row_bufs.shape[1] == HEIGHT
    if STAGE is None:
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    else:
        stage = STAGE
        mbarrier.wait(full.index(stage), count & 1)
    if PLAN.GATHER:
        fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    rows, matrix = row_bufs.index(stage), matrix_bufs.index(stage)
    if not ALL_ROWS:
        rows = rows.slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    rows = rows.slice(0, DEPTH, 1)
    if ALL_ROWS:
        matrix = matrix.slice(WARPGROUP * acc.shape[1], acc.shape[1], 0 if PLAN.B_K_MAJOR else 1)
    if PLAN.B_K_MAJOR:
        matrix = matrix.slice(0, DEPTH, 1).permute((1, 0))
    else:
        matrix = matrix.slice(0, DEPTH, 0)
    acc = warpgroup_mma(rows, matrix, acc, use_acc=more, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=more)
    return acc


@gluon.jit
def _begin_unrolled(acc, ring, count, begin, depth, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """`_multiply_tile` from `begin` on where a tile is whole turns of the ring, but for `_end_unrolled`: the last
    product is begun. count: of these turns."""
    for first in range(begin, depth, PLAN.STAGES * PLAN.BLOCK_K):
        for stage in gl.static_range(PLAN.STAGES):
            more = True if stage > 0 else first > 0
            acc = multiply_stage(acc, ring, count, more, PLAN.BLOCK_K, WARPGROUP, PLAN, stage)
        count += 1
    return acc, count


@gluon.jit
def _end_unrolled(acc, ring, PLAN: gl.constexpr):
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring[3].index(PLAN.STAGES - 1), count=1)
    return acc


@gluon.jit
def _multiply_tile(acc, ring, count, depth, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """acc = rows · matrix over all of the depth; a stage is given back when the product after it has started."""
    for k in range(0, depth, PLAN.BLOCK_K):
        acc = multiply_stage(acc, ring, count, k > 0, PLAN.BLOCK_K, WARPGROUP, PLAN)
        count += 1
    if PLAN.SHORT:  # the rest of that stage is zeros, or another expert's
        acc = multiply_stage(acc, ring, count, True, PLAN.LOW, WARPGROUP, PLAN)
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring[3].index((count + PLAN.STAGES - 1) % PLAN.STAGES), count=1)
    return acc, count


@gluon.jit
def _consume_whole(table, ring, staging, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """... tile by tile."""
    depth, _, columns, _, _ = shape
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = PLAN.OWN[0]
    WIDTH: gl.constexpr = PLAN.OWN[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros((HEIGHT, WIDTH), gl.float32, mma)
    count = 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(first, behind, step):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
        if not PLAN.FEW:
            row += WARPGROUP * HEIGHT
        if PLAN.UNROLLED:
            acc, count = _begin_unrolled(acc, ring, count, 0, depth, WARPGROUP, PLAN)
            acc = _end_unrolled(acc, ring, PLAN)
        else:
            acc, count = _multiply_tile(acc, ring, count, depth, WARPGROUP, PLAN)
        finish_tile(acc, staging, results, shape, expert, row, end, n, WARPGROUP, PLAN)
    tma.store_wait(0)


@gluon.jit
def _consume_overlapped(table, ring, staging, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """... where the right half of a tile's sums is carried along, rounded, and leaves while the next tile runs."""
    _, out_desc, bias, _, out = results
    depth, width, _, _, out_stride = shape
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    tiles = gl.load(table)
    column_tiles = gl.cdiv(width, BLOCK_N)
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    TURN: gl.constexpr = PLAN.STAGES * PLAN.BLOCK_K
    dtype: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HEIGHT, BLOCK_N), gl.float32, mma)
    carried = column_parts(acc, 2)[1].to(dtype)
    own = staging.index(WARPGROUP)
    carried_row, carried_end, carried_column, count = 0, 0, 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(first, behind, step):
        acc, count = _begin_unrolled(acc, ring, count, 0, TURN, WARPGROUP, PLAN)
        if tile > first:
            store_tile(carried, out, out_desc, own, out_stride, carried_row, carried_end, carried_column, width, 0)
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
        acc, count = _begin_unrolled(acc, ring, count, TURN, depth, WARPGROUP, PLAN)
        acc = _end_unrolled(acc, ring, PLAN)
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
def consume(table, ring, staging, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup's half of each tile."""
    if PLAN.OVERLAPPED:
        _consume_overlapped(table, ring, staging, results, shape, WARPGROUP, PLAN)
    else:
        _consume_whole(table, ring, staging, results, shape, WARPGROUP, PLAN)


@quick
@gluon.jit
def gemm_kernel(
    row_desc, matrix_desc, low_desc, factor_desc, h_desc, out_desc, x, order, table, bias, h, out, depth, rank,
    width, columns, x_stride, h_stride, out_stride, top_k, PLAN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    STAGES: gl.constexpr = PLAN.STAGES
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.BLOCK_M, PLAN.BLOCK_K], PLAN.ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.MATRIX[0], PLAN.MATRIX[1]], PLAN.MATRIX_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [2, PLAN.STAGED[0], PLAN.STAGED[1]], PLAN.STAGED_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # the copy engine, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    deep = depth if PLAN.SHORT else depth + rank
    ring = (row_bufs, matrix_bufs, full, empty)
    results = (h_desc, out_desc, bias, h, out)
    shape = (deep, width, columns, h_stride, out_stride)
    gl.warp_specialize(
        [
            (consume, (table, ring, staging, results, shape, gl.constexpr(0), PLAN)),
            (consume, (table, ring, staging, results, shape, gl.constexpr(1), PLAN)),
            (_produce, (
                row_desc, matrix_desc, low_desc, factor_desc, x, order, table, ring, depth, rank, width, columns,
                x_stride, top_k, PLAN,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        [216, 72 if PLAN.GATHER else (40 if PLAN.UNROLLED else 24)],
    )  # fmt: skip
