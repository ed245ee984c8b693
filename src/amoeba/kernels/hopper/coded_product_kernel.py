"""The persistent product kernel of Hopper for experts in codes: who multiplies decodes, too.

Launched by `amoeba.kernels.hopper.coded_product`. Rows, sums and results are those of `product_kernel`. Codes come by
the bulk copy engine to a ring of their own. While the matrix unit multiplies a stage, the two warpgroups that wait for
it decode the next one, a half each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from amoeba.kernels.hopper.coded_product_decode import decode, load_scales, scales_of_columns, store_numbers
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, gather
from amoeba.kernels.hopper.order import place_of_tile
from amoeba.kernels.hopper.product_fill import fill_product, row_pointers
from amoeba.kernels.hopper.product_kernel import Plan, multiply_stage, share_of_tiles
from amoeba.kernels.hopper.product_store import finish_tile
from amoeba.kernels.hopper.scaled_product_scales import clamped_place
from amoeba.kernels.launch import quick

# Of rows and decoded numbers, and of codes: with the buffers of the epilogue 224 KB of the 227.
STAGES, CODE_STAGES = 3, 3
# Numbers of a row that a thread decodes at a time.
RUN = 32


@dataclass(frozen=True)
class CodedPlan(Plan):
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
        """Of the second consumer, and of those who fetch."""
        return [216, 72 if self.GATHER else 40]


@gluon.jit
def _fetch_codes(
    code_desc, code_bufs, coded, read, fetched, expert, k, n, depth, width, columns, PLAN: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, CODE_STAGES: gl.constexpr,
):  # fmt: skip
    slot = fetched % CODE_STAGES
    mbarrier.wait(read.index(slot), ((fetched // CODE_STAGES) & 1) ^ 1)
    bar = coded.index(slot)
    buffer = code_bufs.index(slot)
    mbarrier.expect(bar, BLOCK_N * BLOCK_K * PLAN.BITS // 8)
    if PLAN.PAIRED:
        at = expert * width + n * PLAN.COLUMNS
        bulk_load(code_desc, [at, k * PLAN.BITS // 32], bar, buffer.slice(0, PLAN.COLUMNS, 0))
        bulk_load(code_desc, [at + columns, k * PLAN.BITS // 32], bar, buffer.slice(PLAN.COLUMNS, PLAN.COLUMNS, 0))
    elif PLAN.B_K_MAJOR:
        bulk_load(code_desc, [expert * width + n * BLOCK_N, k * PLAN.BITS // 32], bar, buffer)
    else:
        bulk_load(code_desc, [expert * depth + k, n * (BLOCK_N * PLAN.BITS // 32)], bar, buffer)
    return fetched + 1


@gluon.jit
def _fetch(
    row_desc, code_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, code_bufs, full, empty, coded,
    read, depth, rank, width, columns, x_stride, top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Rows as stages come free, codes ahead of them."""
    AHEAD: gl.constexpr = (CODE_STAGES - 1) * BLOCK_K
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count, fetched = 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    for tile in range(first, behind, step):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, GROUP_M, PLAN.ORDER)
        for k in range(0, AHEAD, BLOCK_K):
            fetched = _fetch_codes(
                code_desc, code_bufs, coded, read, fetched, expert, k, n, depth, width, columns, PLAN, BLOCK_N,
                BLOCK_K, CODE_STAGES,
            )  # fmt: skip
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M, BLOCK_K)
        else:
            pointers = x
        for k in range(0, depth, BLOCK_K):
            if k + AHEAD < depth:
                fetched = _fetch_codes(
                    code_desc, code_bufs, coded, read, fetched, expert, k + AHEAD, n, depth, width, columns, PLAN,
                    BLOCK_N, BLOCK_K, CODE_STAGES,
                )  # fmt: skip
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            if PLAN.GATHER:
                gather(row_bufs.index(stage), pointers)
                pointers += BLOCK_K
                async_copy.mbarrier_arrive(bar, increment_count=False)
                mbarrier.arrive(bar, count=1)  # in the place of the copy engine's, which has nothing to bring
            else:
                mbarrier.expect(bar, BLOCK_M * BLOCK_K * 2)
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            count += 1
        if PLAN.LOW > 0:  # these rows are sorted, and their matrix is no code
            count = fill_product(
                low_desc, factor_desc, x, row_bufs, matrix_bufs, full, empty, count, expert, row, n, rank, width,
                columns, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@gluon.jit
def _decode_half(
    code_bufs, matrix_bufs, empty, coded, read, ready, count, decoded, scale, of_matrix, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the matrix of step `count`, of the codes of step `decoded`."""
    stage = count % STAGES
    slot = decoded % CODE_STAGES
    HALF: gl.constexpr = PLAN.CODES[0] // 2
    mbarrier.wait(coded.index(slot), (decoded // CODE_STAGES) & 1)
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    code = code_bufs.index(slot).slice(WARPGROUP * HALF, HALF, 0).load(PLAN.CODES_LAYOUT)
    store_numbers(decode(code, scale, of_matrix, PLAN), matrix_bufs.index(stage), WARPGROUP)
    fence_async_shared()
    barrier()  # all have read and written
    mbarrier.arrive(ready.index(decoded % STAGES), count=1)
    mbarrier.arrive(read.index(slot), count=1)


@gluon.jit
def _consume(
    table, row_bufs, matrix_bufs, code_bufs, full, empty, coded, read, ready, staging, h_desc, out_desc, scales,
    matrix_scale, bias, h, out, depth, rank, width, columns, part_rows, part_blocks, across, scales_of_expert,
    h_stride, out_stride, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile's rows, and of each stage's codes: those of the next step are decoded while the
    matrix unit multiplies."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    HEIGHT: gl.constexpr = BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HEIGHT, BLOCK_N), gl.float32, mma)
    count, decoded, used = 0, 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    expert, row, end, n = clamped_place(first, table, tiles, column_tiles, 0, GROUP_M, PLAN.ORDER)
    own = scales + expert.to(gl.int64) * scales_of_expert
    of_columns = scales_of_columns(n, width, columns, part_rows, part_blocks, across, WARPGROUP, PLAN, BLOCK_N)
    of_matrix = 1.0
    if PLAN.MATRIX_SCALE:
        of_matrix = gl.load(matrix_scale + expert)
    scale = load_scales(own, of_columns, 0, part_rows, part_blocks, across, WARPGROUP, PLAN, BLOCK_K)
    if first < behind:
        _decode_half(
            code_bufs, matrix_bufs, empty, coded, read, ready, count, decoded, scale, of_matrix, WARPGROUP, PLAN,
            STAGES, CODE_STAGES,
        )  # fmt: skip
        decoded += 1
    scale = load_scales(own, of_columns, BLOCK_K, part_rows, part_blocks, across, WARPGROUP, PLAN, BLOCK_K)
    for tile in range(first, behind, step):
        more = tile + step < behind
        next_expert, next_row, next_end, next_n = clamped_place(
            tile + step, table, tiles, column_tiles, 0, GROUP_M, PLAN.ORDER
        )
        next_own = scales + next_expert.to(gl.int64) * scales_of_expert
        of_next = scales_of_columns(next_n, width, columns, part_rows, part_blocks, across, WARPGROUP, PLAN, BLOCK_N)
        next_matrix = 1.0
        if PLAN.MATRIX_SCALE:
            next_matrix = gl.load(matrix_scale + next_expert)
        for k in range(0, depth, BLOCK_K):
            mbarrier.wait(ready.index(used % STAGES), (used // STAGES) & 1)  # both have decoded
            acc = multiply_stage(
                acc, row_bufs, matrix_bufs, full, empty, count, k > 0, BLOCK_K, WARPGROUP, PLAN, HEIGHT, STAGES
            )
            count += 1
            used += 1
            last = k + BLOCK_K >= depth
            inside = k + 2 * BLOCK_K < depth
            next_scale = load_scales(
                gl.where(inside, own, next_own), gl.where(inside, of_columns, of_next),
                k + 2 * BLOCK_K - gl.where(inside, 0, depth), part_rows, part_blocks, across, WARPGROUP, PLAN,
                BLOCK_K,
            )  # fmt: skip
            if (k + BLOCK_K < depth) | (more & (PLAN.LOW == 0)):
                _decode_half(
                    code_bufs, matrix_bufs, empty, coded, read, ready, count, decoded, scale,
                    gl.where(last, next_matrix, of_matrix), WARPGROUP, PLAN, STAGES, CODE_STAGES,
                )  # fmt: skip
                decoded += 1
                scale = next_scale
        if PLAN.LOW > 0:
            DEPTH: gl.constexpr = PLAN.LOW if PLAN.SHORT else BLOCK_K
            for k in range(0, rank, BLOCK_K):
                acc = multiply_stage(
                    acc, row_bufs, matrix_bufs, full, empty, count, True, DEPTH, WARPGROUP, PLAN, HEIGHT, STAGES
                )
                count += 1
            if more:
                _decode_half(
                    code_bufs, matrix_bufs, empty, coded, read, ready, count, decoded, scale, next_matrix, WARPGROUP,
                    PLAN, STAGES, CODE_STAGES,
                )  # fmt: skip
                decoded += 1
            scale = load_scales(
                next_own, of_next, BLOCK_K, part_rows, part_blocks, across, WARPGROUP, PLAN, BLOCK_K
            )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        finish_tile(
            acc, staging, h_desc, out_desc, bias, h, out, expert, row + WARPGROUP * HEIGHT, end, n, width, columns,
            h_stride, out_stride, WARPGROUP, PLAN, BLOCK_N,
        )  # fmt: skip
        expert, row, end, n = next_expert, next_row, next_end, next_n
        own, of_columns, of_matrix = next_own, of_next, next_matrix
    tma.store_wait(0)


@quick
@gluon.jit
def coded_product_kernel(
    row_desc, code_desc, low_desc, factor_desc, h_desc, out_desc, x, order, table, scales, matrix_scale, bias, h, out,
    depth, rank, width, columns, part_rows, part_blocks, across, scales_of_expert, x_stride, h_stride, out_stride,
    top_k, PLAN: gl.constexpr, ROW_LAYOUT: gl.constexpr, MATRIX_LAYOUT: gl.constexpr, CODE_LAYOUT: gl.constexpr,
    STAGE_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.MATRIX[0], PLAN.MATRIX[1]], MATRIX_LAYOUT)
    code_bufs = gl.allocate_shared_memory(gl.int32, [CODE_STAGES, PLAN.CODES[0], PLAN.CODES[1]], CODE_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [PLAN.PARTS, BLOCK_M // 2, BLOCK_N // PLAN.PARTS], STAGE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    coded = gl.allocate_shared_memory(gl.int64, [CODE_STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [CODE_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # the copy engine, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
        mbarrier.init(ready.index(i), count=2)
    for i in gl.static_range(CODE_STAGES):
        mbarrier.init(coded.index(i), count=1)
        mbarrier.init(read.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                table, row_bufs, matrix_bufs, code_bufs, full, empty, coded, read, ready, staging, h_desc, out_desc,
                scales, matrix_scale, bias, h, out, depth, rank, width, columns, part_rows, part_blocks, across,
                scales_of_expert, h_stride, out_stride, gl.constexpr(0), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                CODE_STAGES, GROUP_M,
            )),
            (_consume, (
                table, row_bufs, matrix_bufs, code_bufs, full, empty, coded, read, ready, staging, h_desc, out_desc,
                scales, matrix_scale, bias, h, out, depth, rank, width, columns, part_rows, part_blocks, across,
                scales_of_expert, h_stride, out_stride, gl.constexpr(1), PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                CODE_STAGES, GROUP_M,
            )),
            (_fetch, (
                row_desc, code_desc, low_desc, factor_desc, x, order, table, row_bufs, matrix_bufs, code_bufs, full,
                empty, coded, read, depth, rank, width, columns, x_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK_K,
                STAGES, CODE_STAGES, GROUP_M,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        PLAN.REGISTERS,
    )  # fmt: skip
