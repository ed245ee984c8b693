"""The persistent product kernel of Hopper for experts in codes: who fills the stages decodes.

Launched by `amoeba.kernels.hopper.coded_product`. Rows, sums and results are those of `product_kernel`, whose
consumers these are. Codes come by the bulk copy engine to a ring of their own, some steps ahead; decoded, they are a
stage of the matrix like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from amoeba.kernels.hopper.coded_product_decode import decode, load_scales, store_numbers
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, gather
from amoeba.kernels.hopper.product_fill import fill_product, row_pointers
from amoeba.kernels.hopper.product_kernel import Plan, consume, share_of_tiles
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
        """Of the second consumer, and of those who fill."""
        return [200, 104]


@gluon.jit
def _fetch_codes(
    code_desc, code_bufs, coded, slot, expert, k, n, depth, width, columns, PLAN: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
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


@gluon.jit
def _fill(
    row_desc, code_desc, low_desc, factor_desc, x, order, table, scales, matrix_scale, row_bufs, matrix_bufs,
    code_bufs, full, empty, coded, depth, rank, width, columns, part_rows, part_blocks, across, scales_of_expert,
    x_stride, top_k, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Stages as they come free: rows are sent for, then the codes of the matrix are decoded. Codes themselves come
    CODE_STAGES steps ahead, those of the next tile too; scales a step ahead, before all waits: a fence comes later,
    which would wait for them."""
    AHEAD: gl.constexpr = CODE_STAGES * BLOCK_K
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count, decoded = 0, 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    expert, row, end, n = clamped_place(first, table, tiles, column_tiles, 0, GROUP_M, PLAN.ORDER)
    if first < behind:
        for slot in gl.static_range(CODE_STAGES):
            _fetch_codes(
                code_desc, code_bufs, coded, slot, expert, slot * BLOCK_K, n, depth, width, columns, PLAN, BLOCK_N,
                BLOCK_K,
            )  # fmt: skip
    for tile in range(first, behind, step):
        more = tile + step < behind
        next_expert, next_row, next_end, next_n = clamped_place(
            tile + step, table, tiles, column_tiles, 0, GROUP_M, PLAN.ORDER
        )
        if PLAN.GATHER:
            pointers = row_pointers(x, order, row, end, x_stride, top_k, BLOCK_M, BLOCK_K)
        else:
            pointers = x
        of_matrix = 1.0
        if PLAN.MATRIX_SCALE:
            of_matrix = gl.load(matrix_scale + expert)
        own = scales + expert.to(gl.int64) * scales_of_expert
        scale = load_scales(own, 0, n, width, columns, part_rows, part_blocks, across, PLAN, BLOCK_N, BLOCK_K)
        for k in range(0, depth, BLOCK_K):
            next_scale = load_scales(
                own, gl.minimum(k + BLOCK_K, depth - BLOCK_K), n, width, columns, part_rows, part_blocks, across, PLAN,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
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
            numbers = decode(code_bufs.index(slot).load(PLAN.CODES_LAYOUT), scale, of_matrix, PLAN)
            store_numbers(numbers, matrix_bufs.index(stage))
            fence_async_shared()
            barrier()  # all have read and written
            if PLAN.GATHER:
                mbarrier.arrive(bar, count=1)
            else:
                mbarrier.expect(bar, BLOCK_M * BLOCK_K * 2)
            inside = k + AHEAD < depth
            if inside | more:
                _fetch_codes(
                    code_desc, code_bufs, coded, slot, gl.where(inside, expert, next_expert),
                    k + AHEAD - gl.where(inside, 0, depth), gl.where(inside, n, next_n), depth, width, columns, PLAN,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
            scale = next_scale
            count += 1
            decoded += 1
        if PLAN.LOW > 0:  # these rows are sorted, and their matrix is no code
            count = fill_product(
                low_desc, factor_desc, x, row_bufs, matrix_bufs, full, empty, count, expert, row, n, rank, width,
                columns, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        expert, row, end, n = next_expert, next_row, next_end, next_n


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
    staging = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, BLOCK_N // 2], STAGE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    coded = gl.allocate_shared_memory(gl.int64, [CODE_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # who decoded, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    for i in gl.static_range(CODE_STAGES):
        mbarrier.init(coded.index(i), count=1)
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
            (_fill, (
                row_desc, code_desc, low_desc, factor_desc, x, order, table, scales, matrix_scale, row_bufs,
                matrix_bufs, code_bufs, full, empty, coded, depth, rank, width, columns, part_rows, part_blocks,
                across, scales_of_expert, x_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODE_STAGES,
                GROUP_M,
            )),
        ],
        [4, 4],
        PLAN.REGISTERS,
    )  # fmt: skip
