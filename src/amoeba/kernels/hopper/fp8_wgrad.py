"""Weight gradients in e4m3 on Hopper, in Gluon: for each expert the sum over its blocks of 128 rows of leftᵀ · right.

E experts · B blocks of 128 rows of one expert · M columns of the left side, N of the right one

    weight_gradient(dh, x, blocks, heaviest_E, d_gate_up_EJH)
    weight_gradient(scaled_a, dy, blocks, heaviest_E, d_down_EHI.transpose(1, 2))

Both sides are transposed copies, see `amoeba.kernels.quantise`: the left one has a scale for each 128 x 1,
the right one a scale for each column, which is applied when all blocks are summed. (With 128 x 1 on both sides the
product took 1.9 times as long: dev/log, 2026-11-17.) out may be stored (E, N, M): then it is given transposed. M
and N are multiples of 64.

A persistent kernel as `amoeba.kernels.hopper.wgrad`: a tile is 128 x 256, one warp fills stages (codes by the bulk
copy engine, scales by asynchronous copies), and two warpgroups have 64 x 256 each, as two products of the matrix unit
through one transient result, which is added to sums in fp32 after each block. Tiles may reach over the end of a block's
columns into the next block: such sums are not stored. An expert without rows gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from amoeba.kernels.hopper.epilogue import rounded
from amoeba.kernels.hopper.gemm_kernel import Constants
from amoeba.kernels.hopper.tma import bulk_load, descriptor, gather, shared_layout
from amoeba.kernels.hopper.wgrad_kernel import place_of_turn, store_piece
from amoeba.kernels.launch import quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.launch.persistent_grid import programs
from amoeba.kernels.quantise import BLOCK, RowBlocks, Transposed

E4M3 = torch.float8_e4m3fn
# A tile of the gradient. 3 stages and four buffers for results take 210 KB; with 4 stages and smaller buffers it took
# 2 to 7 % longer (H200, dev/log, 2026-11-17).
BLOCK_M, BLOCK_N, STAGES, BUFFERS = 128, 256, 3, 2
# Tiles along M that sweep N together.
GROUP = 8


@dataclass(frozen=True)
class Plan:
    TRANSPOSED: bool
    BLOCK_M: int = BLOCK_M
    BLOCK_N: int = BLOCK_N
    BLOCK: int = BLOCK
    STAGES: int = STAGES
    BUFFERS: int = BUFFERS  # of a warpgroup, each for half of its sums
    GROUP: int = GROUP

    @property
    def REGISTERS(self) -> list[int]:
        """Of the second multiplying warpgroup and of the warp that feeds; the first one has what is left."""
        return [224, 56]

    @property
    def STAGED(self) -> tuple[int, int]:
        return (self.BLOCK, self.BLOCK_M // 2) if self.TRANSPOSED else (self.BLOCK_M // 2, self.BLOCK)

    @property
    def STAGING(self) -> list[int]:
        return [2 * self.BUFFERS, *self.STAGED]


@gluon.jit
def _produce(
    left_desc, right_desc, left_scale, owners, ring, experts, height, width, PLAN: gl.constexpr
):  # fmt: skip
    """Fills the stages, block after block and tile after tile, as they come free."""
    left_bufs, right_bufs, scale_bufs, full, empty = ring
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    m_tiles = gl.cdiv(height, BLOCK_M)
    n_tiles = gl.cdiv(width, PLAN.BLOCK_N)
    tiles = experts * m_tiles * n_tiles
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    count = 0
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        _, _, m, n, start, end = place_of_turn(turn, owners, tiles, m_tiles, n_tiles, PLAN.GROUP)
        scales = left_scale + (start * height + m * BLOCK_M) + gl.arange(0, BLOCK_M, flat)
        for block in range(start, end):
            stage = count % PLAN.STAGES
            mbarrier.wait(empty.index(stage), ((count // PLAN.STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (BLOCK_M + PLAN.BLOCK_N) * PLAN.BLOCK)
            bulk_load(left_desc, [block * height + m * BLOCK_M, 0], bar, left_bufs.index(stage))
            bulk_load(right_desc, [block * width + n * PLAN.BLOCK_N, 0], bar, right_bufs.index(stage))
            gather(scale_bufs.index(stage), scales)
            scales += height
            async_copy.mbarrier_arrive(bar, increment_count=False)
            count += 1


@gluon.jit
def _multiply(rows, matrix, zero, HALF: gl.constexpr, BLOCK: gl.constexpr):
    """64 rows by 128 columns of a stage."""
    columns = matrix.slice(HALF * BLOCK, BLOCK, 0).permute((1, 0))
    found = warpgroup_mma(rows, columns, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def _leave(
    sums, right_scale, staging, out, out_desc, expert, row, column, height, width, at: gl.constexpr, PLAN: gl.constexpr
):
    """128 columns of a warpgroup's sums to memory, through its at-th buffer."""
    n = column + gl.arange(0, PLAN.BLOCK, gl.SliceLayout(0, sums.type.layout))
    value = rounded(sums * gl.load(right_scale + n, mask=n < width, other=0.0)[None, :])
    buffer = staging.index(at)
    if PLAN.TRANSPOSED:
        transposed = buffer.permute((1, 0))
        store_piece(value, out, out_desc, buffer, transposed, expert, column, width, row, height, PLAN.BUFFERS - 1)
    else:
        store_piece(value, out, out_desc, buffer, buffer, expert, row, height, column, width, PLAN.BUFFERS - 1)


@gluon.jit
def _consume(
    right_scale, owners, ring, staging, out_desc, out, experts, height, width, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """One warpgroup's 64 rows of each tile."""
    left_bufs, right_bufs, scale_bufs, full, empty = ring
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    m_tiles = gl.cdiv(height, PLAN.BLOCK_M)
    n_tiles = gl.cdiv(width, PLAN.BLOCK_N)
    tiles = experts * m_tiles * n_tiles
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    count = 0
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        tile, expert, m, n, start, end = place_of_turn(turn, owners, tiles, m_tiles, n_tiles, PLAN.GROUP)
        left, right = zero, zero
        for _ in range(start, end):
            stage = count % PLAN.STAGES
            mbarrier.wait(full.index(stage), (count // PLAN.STAGES) & 1)
            scales = scale_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0).load(gl.SliceLayout(1, mma))
            rows = left_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
            left += _multiply(rows, right_bufs.index(stage), zero, 0, BLOCK) * scales[:, None]
            found = _multiply(rows, right_bufs.index(stage), zero, 1, BLOCK)
            mbarrier.arrive(empty.index(stage), count=1)
            right += found * scales[:, None]
            count += 1
        if tile < tiles:
            row = m * PLAN.BLOCK_M + WARPGROUP * HEIGHT
            for half in gl.static_range(2):
                _leave(
                    right if half else left, right_scale, staging, out, out_desc, expert, row,
                    n * PLAN.BLOCK_N + half * BLOCK, height, width, WARPGROUP * PLAN.BUFFERS + half, PLAN,
                )  # fmt: skip
    tma.store_wait(0)


@quick
@gluon.jit(do_not_specialize=["experts"])
def fp8_wgrad_kernel(
    left_desc, right_desc, out_desc, left_scale, right_scale, ends_E, heaviest_E, out, experts, height, width,
    PLAN: gl.constexpr, LEFT_LAYOUT: gl.constexpr, RIGHT_LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = PLAN.STAGES
    left_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLAN.BLOCK_M, PLAN.BLOCK], LEFT_LAYOUT)
    right_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLAN.BLOCK_N, PLAN.BLOCK], RIGHT_LAYOUT)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, PLAN.BLOCK_M], flat)
    staging = gl.allocate_shared_memory(out.dtype.element_ty, PLAN.STAGING, OUT_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33)  # the copy engine, and 32 threads that copy scales
        mbarrier.init(empty.index(i), count=2)
    owners, ring = (ends_E, heaviest_E), (left_bufs, right_bufs, scale_bufs, full, empty)
    gl.warp_specialize(
        [
            (_consume, (
                right_scale, owners, ring, staging, out_desc, out, experts, height, width, gl.constexpr(0), PLAN,
            )),
            (_consume, (
                right_scale, owners, ring, staging, out_desc, out, experts, height, width, gl.constexpr(1), PLAN,
            )),
            (_produce, (left_desc, right_desc, left_scale, owners, ring, experts, height, width, PLAN)),
        ],
        [4, 1],
        PLAN.REGISTERS,
    )  # fmt: skip


@cache
def _bound(plan: Plan, dtype: torch.dtype) -> Any:
    return fp8_wgrad_kernel.bound(
        PLAN=Constants(plan),
        LEFT_LAYOUT=shared_layout((BLOCK_M, BLOCK), E4M3),
        RIGHT_LAYOUT=shared_layout((BLOCK_N, BLOCK), E4M3),
        OUT_LAYOUT=shared_layout(plan.STAGED, dtype),
        num_warps=4,
    )


def weight_gradient(
    left: Transposed, right: Transposed, blocks: RowBlocks, heaviest_E: Tensor, out_EMN: Tensor
) -> None:
    """out: bf16, in one piece as it is or transposed."""
    experts, height, width = out_EMN.shape
    transposed = out_EMN.stride(2) != 1
    stored = out_EMN.transpose(1, 2) if transposed else out_EMN
    fit = stored.is_contiguous() and left.codes_BWR.shape[1] == height and right.codes_BWR.shape[1] == width
    check_arguments(fit, "(E, M, N) in one piece, and copies of M and N columns", out_EMN=out_EMN)
    plan = Plan(transposed)
    _bound(plan, out_EMN.dtype)[(programs(out_EMN.device),)](
        descriptor(left.codes_BWR.view(E4M3).view(-1, BLOCK), (BLOCK_M, BLOCK)),
        descriptor(right.codes_BWR.view(E4M3).view(-1, BLOCK), (BLOCK_N, BLOCK)),
        descriptor(stored.view(experts * stored.shape[1], stored.shape[2]), plan.STAGED),
        left.scales,
        right.scales,
        blocks.end_E,
        heaviest_E,
        out_EMN,
        experts,
        height,
        width,
    )
