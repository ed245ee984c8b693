"""Weight gradients on Hopper, in Gluon: the sum over each expert's rows of (row of x or dy)ᵀ · (sorted row).

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W width of the sorted rows

    weight_gradient(dy_TH, order_N, K, scaled_a_NI, offs_E, heaviest_E, d_down_EHI)
    weight_gradient(x_TH, order_N, K, dh_NJ, offs_E, heaviest_E, d_gate_up_EJH.transpose(1, 2))

A persistent kernel as in `hopper.gemm`: a warpgroup feeds shared memory, two multiply. The left operand is gathered
by token, 128 wide, by asynchronous copies, its row numbers fetched one step ahead; the right one, 256 wide, comes by
the bulk copy engine. An expert's last rows come under a mask, zeros behind them; an expert without rows gets zeros.

    ring    = left_bufs, right_bufs, full, empty    # stages in shared memory, and their barriers
    sources = right_desc, left, right, order        # what they are filled from
    owners  = offs_E, heaviest_E                    # whose rows are where, and in which order experts come
    sizes   = experts, hidden, width
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
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

from amoeba.kernels.hopper.gemm_kernel import Constants
from amoeba.kernels.hopper.tma import bulk_load, descriptor, gather, shared_layout
from amoeba.kernels.hopper.wgrad_kernel import consume_onward, fill_onward, place_of_turn, store_gradient
from amoeba.kernels.launch import quick
from amoeba.kernels.launch.persistent_grid import programs

# A tile of the gradient, and how many rows one stage holds. 4 stages and the epilogue's buffers take 224 KB of the 227.
BLOCK_H, BLOCK_W, BLOCK_N, STAGES = 128, 256, 64, 4
# Tiles along H that sweep W together.
GROUP = 8


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    BLOCK_H: ClassVar[int] = BLOCK_H
    BLOCK_W: ClassVar[int] = BLOCK_W
    BLOCK_N: ClassVar[int] = BLOCK_N
    STAGES: ClassVar[int] = STAGES
    GROUP: ClassVar[int] = GROUP

    TRANSPOSED: bool  # the gradient is stored (W, H)
    TOP_K: int  # where tiles are whole and follow one another in the ring; else 0, and top_k is read

    @property
    def LEFT(self) -> tuple[int, int, int]:
        """Buffers of the left side: one of a stage, or one for each warpgroup."""
        return (STAGES, BLOCK_N, BLOCK_H) if self.TOP_K else (2 * STAGES, BLOCK_N, BLOCK_H // 2)

    @property
    def STAGED(self) -> tuple[int, int]:
        return (BLOCK_W // 2, BLOCK_H // 2) if self.TRANSPOSED else (BLOCK_H // 2, BLOCK_W // 2)

    @property
    def LEFT_LAYOUT(self) -> Any:
        """In shared memory, as all below for both dtypes of 16 bits."""
        return shared_layout(self.LEFT[1:], torch.bfloat16)

    @property
    def RIGHT_LAYOUT(self) -> Any:
        return shared_layout((BLOCK_N, BLOCK_W), torch.bfloat16)

    @property
    def BLOCK_LAYOUT(self) -> Any:
        """Of 64 columns of the right side."""
        return shared_layout((BLOCK_N, 64), torch.bfloat16)

    @property
    def STAGED_LAYOUT(self) -> Any:
        return shared_layout(self.STAGED, torch.bfloat16)


@gluon.jit
def _produce(sources, owners, ring, sizes, left_stride, right_stride, top_k, places, PLAN: gl.constexpr):
    """Fills the stages, tile after tile, as they come free."""
    if PLAN.TOP_K > 0:
        fill_onward(sources, owners, places, ring, sizes, left_stride, right_stride, PLAN)
    else:
        experts, hidden, width = sizes
        h_tiles = gl.cdiv(hidden, PLAN.BLOCK_H)
        w_tiles = gl.cdiv(width, PLAN.BLOCK_W)
        tiles = experts * h_tiles * w_tiles
        count = 0
        for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
            _, _, h, w, start, end = place_of_turn(turn, owners, tiles, h_tiles, w_tiles, PLAN.GROUP)
            place, strides = (h, w, start, end), (left_stride, right_stride)
            count = fill_gradient(sources, ring, count, place, hidden, width, strides, top_k)


@gluon.jit
def fill_gradient(sources, ring, count, place, hidden, width, strides, top_k):
    """The stages of one tile, as they come free."""
    right_desc, left, right, order = sources
    left_bufs, right_bufs, full, empty = ring
    h, w, start, end = place
    left_stride, right_stride = strides
    STAGES: gl.constexpr = right_bufs.shape[0]
    BLOCK_N: gl.constexpr = right_bufs.shape[1]
    BLOCK_W: gl.constexpr = right_bufs.shape[2]
    HALF: gl.constexpr = left_bufs.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    column = h * (2 * HALF) + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    slot = gl.load(order + start + n, mask=start + n < end, other=0)
    for row in range(start, end, BLOCK_N):
        pointers = left + (slot // top_k).to(gl.int64)[:, None] * left_stride + column[None, :]
        ahead = row + BLOCK_N + n
        slot = gl.load(order + ahead, mask=ahead < end, other=0)
        owned = (row + n < end)[:, None]
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        right_buf = right_bufs.index(stage)
        if row + BLOCK_N <= end:
            mbarrier.expect(bar, BLOCK_W * BLOCK_N * 2)
            bulk_load(right_desc, [row, w * BLOCK_W], bar, right_buf)
        else:
            mbarrier.arrive(bar, count=1)
            _copy_last_rows(right, right_stride, w * BLOCK_W, width, row, end, right_buf)
        gather(left_bufs.index(stage * 2), pointers, mask=owned & (column < hidden)[None, :])
        gather(left_bufs.index(stage * 2 + 1), pointers + HALF, mask=owned & (column + HALF < hidden)[None, :])
        async_copy.mbarrier_arrive(bar, increment_count=False)
        count += 1
    return count


@gluon.jit
def _copy_last_rows(source, stride, column, width, row, end, buffer):
    """Sorted rows up to the expert's end, and zeros behind them."""
    COUNT: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    n = row + gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    pointers = source + n.to(gl.int64)[:, None] * stride + c[None, :]
    gather(buffer, pointers, mask=(n < end)[:, None] & (c < width)[None, :])
    fence_async_shared()  # here, seldom; else the compiler has one in each stage, before the engine writes there


@gluon.jit
def _consume_tiles(owners, ring, staging, out_desc, out, sizes, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """... tile by tile."""
    experts, hidden, width = sizes
    h_tiles = gl.cdiv(hidden, PLAN.BLOCK_H)
    w_tiles = gl.cdiv(width, PLAN.BLOCK_W)
    tiles = experts * h_tiles * w_tiles
    HALF: gl.constexpr = PLAN.BLOCK_H // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.BLOCK_W, 16])
    count = 0
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        tile, expert, h, w, start, end = place_of_turn(turn, owners, tiles, h_tiles, w_tiles, PLAN.GROUP)
        acc = gl.zeros((HALF, PLAN.BLOCK_W), gl.float32, mma)  # what an expert without rows gets
        for row in range(start, end, PLAN.BLOCK_N):
            acc = sum_stage(acc, ring, count, row > start, WARPGROUP)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring[3].index((count + PLAN.STAGES - 1) % PLAN.STAGES), count=1, pred=end > start)
        if tile < tiles:
            store_gradient(acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP, PLAN.TRANSPOSED)
    tma.store_wait(0)


@gluon.jit
def _consume(owners, ring, staging, out_desc, out, sizes, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup's half of each tile along H."""
    if PLAN.TOP_K > 0:
        consume_onward(owners, ring, staging, out_desc, out, sizes, WARPGROUP, PLAN)
    else:
        _consume_tiles(owners, ring, staging, out_desc, out, sizes, WARPGROUP, PLAN)


@gluon.jit
def sum_stage(acc, ring, count, more, WARPGROUP: gl.constexpr):
    """acc += leftᵀ · right of a stage, begun; the stage before it is given back. more: not the first of a tile."""
    left_bufs, right_bufs, full, empty = ring
    STAGES: gl.constexpr = right_bufs.shape[0]
    stage = count % STAGES
    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
    fence_async_shared()  # the left rows were written by threads, the matrix unit reads them as another party
    left = left_bufs.index(stage * 2 + WARPGROUP).permute((1, 0))
    acc = warpgroup_mma(left, right_bufs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=more)
    return acc


@quick
@gluon.jit
def wgrad_kernel(
    right_desc, out_desc, left, right, order, offs_E, heaviest_E, out, experts, hidden, width, left_stride,
    right_stride, top_k, PLAN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out.dtype.element_ty
    STAGES: gl.constexpr = PLAN.STAGES
    left_bufs = gl.allocate_shared_memory(dtype, [PLAN.LEFT[0], PLAN.LEFT[1], PLAN.LEFT[2]], PLAN.LEFT_LAYOUT)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, PLAN.BLOCK_N, PLAN.BLOCK_W], PLAN.RIGHT_LAYOUT)
    staging = gl.allocate_shared_memory(dtype, [2, PLAN.STAGED[0], PLAN.STAGED[1]], PLAN.STAGED_LAYOUT)
    if PLAN.TOP_K > 0:
        places = gl.allocate_shared_memory(gl.uint32, [STAGES * PLAN.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        places = left_bufs
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # the copy engine, and 128 gathering threads
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    sources, owners = (right_desc, left, right, order), (offs_E, heaviest_E)
    ring, sizes = (left_bufs, right_bufs, full, empty), (experts, hidden, width)
    gl.warp_specialize(
        [
            (_consume, (owners, ring, staging, out_desc, out, sizes, gl.constexpr(0), PLAN)),
            (_consume, (owners, ring, staging, out_desc, out, sizes, gl.constexpr(1), PLAN)),
            (_produce, (sources, owners, ring, sizes, left_stride, right_stride, top_k, places, PLAN)),
        ],
        [4, 4],
        [208, 88] if PLAN.TOP_K == 0 else [200, 104],
    )  # fmt: skip


@cache
def _bound(plan: Plan) -> Any:
    return wgrad_kernel.bound(PLAN=Constants(plan), num_warps=4)


def _known_top_k(hidden: int, width: int, top_k: int) -> int:
    """Of the plan."""
    return top_k if hidden >= BLOCK_H and width >= BLOCK_W else 0


def weight_gradient(
    left_TH: Tensor,
    order_N: Tensor,
    top_k: int,
    right_NW: Tensor,
    offs_E: Tensor,
    heaviest_E: Tensor,
    out_EHW: Tensor,
) -> None:
    """out[e] = Σ over e's sorted rows n of left[order[n] // top_k]ᵀ · right[n].

    out may be stored (E, W, H): then it is given transposed. heaviest_E: the experts by falling number of rows.
    """
    experts, hidden, width = out_EHW.shape
    transposed = out_EHW.stride(2) != 1
    stored = out_EHW.transpose(1, 2) if transposed else out_EHW
    plan = Plan(transposed, _known_top_k(hidden, width, top_k))
    _bound(plan)[(programs(out_EHW.device),)](
        descriptor(right_NW, (BLOCK_N, BLOCK_W)),
        descriptor(stored.view(experts * stored.shape[1], stored.shape[2]), plan.STAGED),
        left_TH,
        right_NW,
        order_N,
        offs_E,
        heaviest_E,
        out_EHW,
        experts,
        hidden,
        width,
        left_TH.stride(0),
        right_NW.stride(0),
        top_k,
    )
