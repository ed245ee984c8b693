"""The persistent product kernel of Hopper for experts in codes: who fills the stages decodes.

Launched by `amoeba.kernels.hopper.coded_product`. Rows, sums and results are those of `product_kernel`, whose
consumers these are. Codes go through registers, and are a stage of the matrix like any other when they are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from amoeba.kernels.hopper.coded_product_decode import decode, load_codes, load_scales
from amoeba.kernels.hopper.descriptor import barrier, bulk_load, gather
from amoeba.kernels.hopper.product_fill import fill_product, row_pointers
from amoeba.kernels.hopper.product_kernel import Plan, consume, share_of_tiles
from amoeba.kernels.hopper.scaled_product_scales import clamped_place
from amoeba.kernels.launch import quick

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
        if self.BITS == 4:
            return [184, 136]
        return [176, 152] if self.ACTIVATE or not self.GATHER else [168, 168]


@gluon.jit
def _fill(
    row_desc, low_desc, factor_desc, x, order, table, codes, scales, matrix_scale, row_bufs, matrix_bufs, full, empty,
    depth, rank, width, columns, part_rows, part_blocks, words, across, of_expert, scales_of_expert, x_stride, top_k,
    PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Stages as they come free: rows are sent for, codes of the matrix are decoded that were sent for a step ago."""
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count = 0
    first, behind, step = share_of_tiles(gl.program_id(0), gl.num_programs(0), tiles * column_tiles, PLAN.HALVINGS)
    expert, row, end, n = clamped_place(first, table, tiles, column_tiles, 0, GROUP_M, PLAN.ORDER)
    code = load_codes(codes + expert.to(gl.int64) * of_expert, 0, n, width, columns, words, PLAN, BLOCK_N, BLOCK_K)
    scale = load_scales(
        scales + expert.to(gl.int64) * scales_of_expert, 0, n, width, columns, part_rows, part_blocks, across, PLAN,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    for tile in range(first, behind, step):
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
        for k in range(0, depth, BLOCK_K):
            stage = count % STAGES
            bar = full.index(stage)
            inside = k + BLOCK_K < depth
            then = gl.where(inside, k + BLOCK_K, 0)
            at = gl.where(inside, n, next_n)
            of = gl.where(inside, expert, next_expert).to(gl.int64)
            next_code = load_codes(codes + of * of_expert, then, at, width, columns, words, PLAN, BLOCK_N, BLOCK_K)
            next_scale = load_scales(
                scales + of * scales_of_expert, then, at, width, columns, part_rows, part_blocks, across, PLAN,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            if PLAN.GATHER:
                gather(row_bufs.index(stage), pointers)
                pointers += BLOCK_K
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            decode(code, matrix_bufs.index(stage), scale, of_matrix, PLAN)
            fence_async_shared()
            barrier()  # all have written
            if PLAN.GATHER:
                mbarrier.arrive(bar, count=1)
            else:
                mbarrier.expect(bar, BLOCK_M * BLOCK_K * 2)
            code, scale = next_code, next_scale
            count += 1
        if PLAN.LOW > 0:  # these rows are sorted, and their matrix is no code
            count = fill_product(
                low_desc, factor_desc, x, row_bufs, matrix_bufs, full, empty, count, expert, row, n, rank, width,
                columns, False, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        expert, row, end, n = next_expert, next_row, next_end, next_n


@quick
@gluon.jit
def coded_product_kernel(
    row_desc, low_desc, factor_desc, h_desc, out_desc, x, order, table, codes, scales, matrix_scale, bias, h, out,
    depth, rank, width, columns, part_rows, part_blocks, words, across, of_expert, scales_of_expert, x_stride,
    h_stride, out_stride, top_k, PLAN: gl.constexpr, ROW_LAYOUT: gl.constexpr, MATRIX_LAYOUT: gl.constexpr,
    STAGE_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.MATRIX[0], PLAN.MATRIX[1]], MATRIX_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [PLAN.PARTS, BLOCK_M // 2, BLOCK_N // PLAN.PARTS], STAGE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if PLAN.GATHER else 1)  # who decoded, and 128 gathering threads
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
            (_fill, (
                row_desc, low_desc, factor_desc, x, order, table, codes, scales, matrix_scale, row_bufs, matrix_bufs,
                full, empty, depth, rank, width, columns, part_rows, part_blocks, words, across, of_expert,
                scales_of_expert, x_stride, top_k, PLAN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 4],
        PLAN.REGISTERS,
    )  # fmt: skip
