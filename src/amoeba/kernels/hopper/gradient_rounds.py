"""A weight gradient's tile by whole turns of the ring of stages: which stage it is need not be computed.

    phases = fill_rounds(..., phases, h, w, start, end, ...)      # a tile's stages, by the gathering warpgroup
    consume_rounds(...)                                           # all tiles' sums, by a multiplying one

For `amoeba.kernels.hopper.gradient`. A tile begins at the first stage, whatever the one before it has left: the stages
behind its last rows are passed over, and `phases` has the parity of each stage as a bit. Rows of whole turns come
without masks. Row numbers come a turn at once, each thread fetches two, and go through shared memory as tokens.
"""

from __future__ import annotations

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

from amoeba.kernels.hopper.descriptor import bulk_load, gather, reinterpret
from amoeba.kernels.hopper.gradient_store import place_of_turn, store_gradient


@gluon.jit
def fill_rounds(
    right_desc, left, right, order, places, left_bufs, right_bufs, full, empty, phases, h, w, start, end, width,
    left_stride, right_stride, TOP_K: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_W: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The stages of one tile, as they come free; all of the tile's columns of the left side are there."""
    TURN: gl.constexpr = STAGES * BLOCK_N
    PIECE: gl.constexpr = 8  # a row begins at 16 bytes: counted in these, all places of 64 GB have a 32-bit number
    place_bufs = reinterpret(places, gl.uint32, [STAGES, BLOCK_N], places.type.layout)
    # A thread's rows of a stage are neighbours: it reads their places in one go.
    layout: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])
    of_stage: gl.constexpr = gl.SliceLayout(1, layout)
    # The right side in blocks of 64 columns, as they lie one after the other: an expert's last rows come by these.
    BLOCK: gl.constexpr = 64
    right_blocks = reinterpret(right_bufs, right_bufs.dtype, [STAGES * BLOCK_W // BLOCK, BLOCK_N, BLOCK], BLOCK_LAYOUT)
    c = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    n = gl.arange(0, BLOCK_N, of_stage)
    turn_n = gl.arange(0, TURN, gl.BlockedLayout([1], [32], [4], [0]))
    columns = left + (h * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(0, layout)))[None, :]
    pieces = (left_stride // PIECE).to(gl.uint32)
    behind = whole_turns(start, end, BLOCK_N, STAGES)
    slot = gl.load(order + (start + turn_n), mask=start + turn_n < end, other=0)
    for row in range(start, behind, TURN):
        places.store((slot // TOP_K).to(gl.uint32) * pieces)
        ahead = row + TURN + turn_n
        slot = gl.load(order + ahead, mask=ahead < end, other=0)
        for stage in gl.static_range(STAGES):
            place = place_bufs.index(stage).load(of_stage)
            pointers = columns + (place.to(gl.int64) * PIECE)[:, None]
            mbarrier.wait(empty.index(stage), ((phases >> stage) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BLOCK_W * BLOCK_N * 2)
            bulk_load(right_desc, [row + stage * BLOCK_N, w * BLOCK_W], bar, right_bufs.index(stage))
            gather(left_bufs.index(stage), pointers)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        phases ^= (1 << STAGES) - 1
    places.store((slot // TOP_K).to(gl.uint32) * pieces)
    stage = 0
    for row in range(behind, end, BLOCK_N):
        place = place_bufs.index(stage).load(of_stage)
        pointers = columns + (place.to(gl.int64) * PIECE)[:, None]
        owned = (row + n < end)[:, None]
        mbarrier.wait(empty.index(stage), ((phases >> stage) & 1) ^ 1)
        bar = full.index(stage)
        right_buf = right_bufs.index(stage)
        if row + BLOCK_N <= end:
            mbarrier.expect(bar, BLOCK_W * BLOCK_N * 2)
            bulk_load(right_desc, [row, w * BLOCK_W], bar, right_buf)
        else:
            mbarrier.arrive(bar, count=1)
            own = right + (row + n).to(gl.int64)[:, None] * right_stride + (w * BLOCK_W + c)[None, :]
            first = stage * (BLOCK_W // BLOCK)
            for block in range(gl.minimum(width - w * BLOCK_W, BLOCK_W) // BLOCK):  # nobody reads what is behind them
                gather(right_blocks.index(first + block), own + (block * BLOCK), mask=owned)
        gather(left_bufs.index(stage), pointers, mask=owned)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        stage += 1
    return phases ^ ((1 << stage) - 1)


@gluon.jit
def _sum_stage(acc, left_bufs, right_bufs, full, empty, stage, phases, more, WARPGROUP: gl.constexpr):
    STAGES: gl.constexpr = right_bufs.shape[0]
    HALF: gl.constexpr = left_bufs.shape[2] // 2
    mbarrier.wait(full.index(stage), (phases >> stage) & 1)
    fence_async_shared()  # the left rows were written by threads, the matrix unit reads them as another party
    left = left_bufs.index(stage).slice(WARPGROUP * HALF, HALF, 1).permute((1, 0))
    acc = warpgroup_mma(left, right_bufs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=more)
    return acc


@gluon.jit
def whole_turns(start, end, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Where the rows of whole turns of the ring end."""
    return start + (end - start) // (STAGES * BLOCK_N) * (STAGES * BLOCK_N)


@gluon.jit
def _sum_turns(
    acc, left_bufs, right_bufs, full, empty, phases, start, behind, WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """acc += leftᵀ · right over whole turns of an expert's rows; the last product is begun."""
    for row in range(start, behind, STAGES * BLOCK_N):
        for stage in gl.static_range(STAGES):
            more = True if stage > 0 else row > start
            acc = _sum_stage(acc, left_bufs, right_bufs, full, empty, stage, phases, more, WARPGROUP)
        phases ^= (1 << STAGES) - 1
    return acc, phases


@gluon.jit
def _sum_rest(
    acc, left_bufs, right_bufs, full, empty, phases, start, behind, end, WARPGROUP: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """... and over the rows behind these; all is computed and given back."""
    stage = 0
    for row in range(behind, end, BLOCK_N):
        acc = _sum_stage(acc, left_bufs, right_bufs, full, empty, stage, phases, row > start, WARPGROUP)
        stage += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=end > start)
    return acc, phases ^ ((1 << stage) - 1)


@gluon.jit
def consume_rounds(
    offs_E, heaviest_E, left_bufs, right_bufs, full, empty, staging, out_desc, out, experts, hidden, width,
    WARPGROUP: gl.constexpr, TRANSPOSED: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_W: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each tile along H. Where the next tile lies is found while a product of this one runs."""
    h_tiles = gl.cdiv(hidden, BLOCK_H)
    w_tiles = gl.cdiv(width, BLOCK_W)
    tiles = experts * h_tiles * w_tiles
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_W, 16])
    phases = 0
    tile, expert, h, w, start, end = place_of_turn(0, offs_E, heaviest_E, tiles, h_tiles, w_tiles, GROUP)
    for turn in range(gl.cdiv(tiles, gl.num_programs(0))):
        behind = whole_turns(start, end, BLOCK_N, STAGES)
        acc = gl.zeros((BLOCK_H // 2, BLOCK_W), gl.float32, mma)  # what an expert without rows gets
        acc, phases = _sum_turns(
            acc, left_bufs, right_bufs, full, empty, phases, start, behind, WARPGROUP, BLOCK_N, STAGES
        )
        following = place_of_turn(turn + 1, offs_E, heaviest_E, tiles, h_tiles, w_tiles, GROUP)
        acc, phases = _sum_rest(
            acc, left_bufs, right_bufs, full, empty, phases, start, behind, end, WARPGROUP, BLOCK_N, STAGES
        )
        if tile < tiles:
            store_gradient(
                acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP, TRANSPOSED, BLOCK_H, BLOCK_W
            )
        tile, expert, h, w, start, end = following
    tma.store_wait(0)
