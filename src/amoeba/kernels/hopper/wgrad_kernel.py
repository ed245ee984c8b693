"""The tiles of a weight gradient on Hopper: their positions, their sums over a ring of stages, and their store.

    tile, expert, h, w, start, end = place_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP)
    store_gradient(acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP, TRANSPOSED)

    fill_onward(...)          # all tiles' stages, by the gathering warpgroup
    consume_onward(...)       # all tiles' sums, by a multiplying one

For `amoeba.kernels.hopper.wgrad` and the scheduled backward. In the former tiles come one behind the other in the
ring, without a pause between them, and all are whole: where a size is not a multiple of a tile's, the last tile begins
inside the one before it, and both write the same bits there. A tile begins at whichever stage comes next: the stages
up to the ring's end are its head, then come whole turns of the ring, in which each stage has code of its own, then its
tail, and last the rows that do not fill a stage, multiplied sixteen at a time. An expert without rows has sixteen zeros
there. Where the next tile lies, and its first row numbers, are found on the way.
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

from amoeba.kernels.hopper.epilogue import column_parts, wait_for_buffer
from amoeba.kernels.hopper.tma import bulk_load, bulk_store, gather, reinterpret


@gluon.jit
def place_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP: gl.constexpr):
    """Expert, tile along H and along W, and the expert's rows, of a multiprocessor's turn-th tile.

    Experts come by falling number of rows, and every second turn runs backwards: so each multiprocessor gets its share
    of the long and of the short ones. In the last turn there may be no tile for it: no rows then, and `tile` says so.
    """
    tile = _tile_of_turn(turn)
    expert, h, w = expert_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP)
    start, end = rows_of_turn(expert, owners)
    return tile, expert, h, w, start, gl.where(tile < tiles, end, start)


@gluon.jit
def _tile_of_turn(turn):
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + (program if turn % 2 == 0 else programs - 1 - program)


@gluon.jit
def turns_of_program(tiles):
    """How many tiles a multiprocessor has."""
    all_have = tiles // gl.num_programs(0)
    return all_have + (_tile_of_turn(all_have) < tiles).to(gl.int32)


@gluon.jit
def expert_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP: gl.constexpr):
    """Expert, tile along H and along W of a multiprocessor's turn-th tile; of the last tile where it has none."""
    inside = gl.minimum(_tile_of_turn(turn), tiles - 1)
    expert = gl.load(owners[1] + inside // (h_tiles * w_tiles))
    inside = inside % (h_tiles * w_tiles)
    group = inside // (GROUP * w_tiles)
    height = gl.minimum(h_tiles - group * GROUP, GROUP)
    inside = inside % (GROUP * w_tiles)
    return expert, group * GROUP + inside % height, inside // height


@gluon.jit
def whole_tile_of_turn(turn, owners, tiles, h_tiles, w_tiles, hidden, width, PLAN: gl.constexpr):
    """As `expert_of_turn`, with the first element along H and along W in place of the tile's number."""
    expert, h, w = expert_of_turn(turn, owners, tiles, h_tiles, w_tiles, PLAN.GROUP)
    first_h = gl.minimum(h * PLAN.BLOCK_H, hidden - PLAN.BLOCK_H)
    return expert, first_h, gl.minimum(w * PLAN.BLOCK_W, width - PLAN.BLOCK_W)


@gluon.jit
def rows_of_turn(expert, owners):
    """An expert's first row, and behind its last one."""
    offs_E = owners[0]
    return gl.load(offs_E + expert - 1, mask=expert > 0, other=0), gl.load(offs_E + expert)


@gluon.jit
def store_gradient(
    acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP: gl.constexpr, TRANSPOSED: gl.constexpr,
    BUFFERS: gl.constexpr = 1,
):  # fmt: skip
    """One warpgroup's half of a tile along H, in two parts for each of its buffers, which take turns."""
    HALF: gl.constexpr = acc.shape[0]
    BLOCK_W: gl.constexpr = acc.shape[1]
    parts = column_parts(acc, 2 * BUFFERS)
    for part in gl.static_range(2 * BUFFERS):
        first_h = h * (2 * HALF) + WARPGROUP * HALF
        first_w = w * BLOCK_W + part * (BLOCK_W // (2 * BUFFERS))
        buffer = staging.index(WARPGROUP * BUFFERS + part % BUFFERS)
        if TRANSPOSED:
            transposed = buffer.permute((1, 0))
            store_piece(
                parts[part], out, out_desc, buffer, transposed, expert, first_w, width, first_h, hidden, BUFFERS - 1
            )
        else:
            store_piece(
                parts[part], out, out_desc, buffer, buffer, expert, first_h, hidden, first_w, width, BUFFERS - 1
            )


@gluon.jit
def store_piece(value, out, out_desc, buffer, transposed, expert, row, rows, column, columns, PENDING: gl.constexpr):
    """A part of an expert's (rows, columns) to memory: by the copy engine where it is whole, else under a mask.

    transposed: the buffer as `value` lies. PENDING: as for `store_tile`.
    """
    HEIGHT: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    whole = (row + HEIGHT <= rows) & (column + WIDTH <= columns)
    wait_for_buffer(whole, PENDING)
    transposed.store(value.to(out.dtype.element_ty))
    if whole:
        fence_async_shared()
        bulk_store(out_desc, [expert * rows + row, column], buffer)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        pointers = out + (expert.to(gl.int64) * rows + m)[:, None] * columns + n[None, :]
        gl.store(pointers, buffer.load(layout), mask=(m < rows)[:, None] & (n < columns)[None, :])


PIECE = gl.constexpr(8)  # a row begins at 16 bytes: counted in these, all places of 64 GB have a 32-bit number


@gluon.jit
def ring_parts(start, end, count, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Where the head of a tile ends, its whole turns, and its whole stages. count: of the stages before it."""
    filled = start + (end - start) // BLOCK_N * BLOCK_N
    head = gl.minimum(filled, start + (STAGES - count % STAGES) * BLOCK_N)
    return head, head + (filled - head) // (STAGES * BLOCK_N) * (STAGES * BLOCK_N), filled


@gluon.jit
def _fill_stage(right_desc, columns, place, ring, stage, parity, row, w, PLAN: gl.constexpr):
    left_bufs, right_bufs, full, empty = ring
    pointers = columns + (place.to(gl.int64) * PIECE)[:, None]
    mbarrier.wait(empty.index(stage), parity)
    bar = full.index(stage)
    mbarrier.expect(bar, PLAN.BLOCK_W * PLAN.BLOCK_N * 2)
    bulk_load(right_desc, [row, w], bar, right_bufs.index(stage))
    gather(left_bufs.index(stage), pointers)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _fill_last_rows(
    columns, place, right, ring, count, row, end, w, right_stride, LAYOUT: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """An expert's rows that do not fill a stage, or none where it has no rows at all, and zeros behind them."""
    left_bufs, right_bufs, full, empty = ring
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_W: gl.constexpr = PLAN.BLOCK_W
    # The right side in blocks of 64 columns, as they lie one after the other.
    BLOCK: gl.constexpr = 64
    right_blocks = reinterpret(
        right_bufs, right_bufs.dtype, [STAGES * BLOCK_W // BLOCK, PLAN.BLOCK_N, BLOCK], PLAN.BLOCK_LAYOUT
    )
    c = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    n = row + gl.arange(0, PLAN.BLOCK_N, gl.SliceLayout(1, LAYOUT))
    stage = count % STAGES
    owned = (n < end)[:, None]
    pointers = columns + (place.to(gl.int64) * PIECE)[:, None]
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.arrive(bar, count=1)
    own = right + n.to(gl.int64)[:, None] * right_stride + (w + c)[None, :]
    first = stage * (BLOCK_W // BLOCK)
    for block in range(BLOCK_W // BLOCK):
        gather(right_blocks.index(first + block), own + (block * BLOCK), mask=owned)
    # The copy engine writes here again. Said once for each tile: the compiler would say it in each turn of the ring.
    fence_async_shared()
    gather(left_bufs.index(stage), pointers, mask=owned)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def fill_onward(sources, owners, places, ring, sizes, left_stride, right_stride, PLAN: gl.constexpr):
    """Fills the stages, tile after tile, as they come free; all of a tile's columns of the left side are there."""
    right_desc, left, right, order = sources
    experts, hidden, width = sizes
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    TURN: gl.constexpr = STAGES * BLOCK_N
    place_bufs = reinterpret(places, gl.uint32, [STAGES, BLOCK_N], places.type.layout)
    # A thread's rows of a stage are neighbours: it reads their places in one go.
    layout: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])
    of_stage: gl.constexpr = gl.SliceLayout(1, layout)
    turn_n = gl.arange(0, TURN, gl.BlockedLayout([1], [32], [4], [0]))
    pieces = (left_stride // PIECE).to(gl.uint32)
    h_tiles = gl.cdiv(hidden, PLAN.BLOCK_H)
    w_tiles = gl.cdiv(width, PLAN.BLOCK_W)
    tiles = experts * h_tiles * w_tiles
    count = 0
    expert, h, w = whole_tile_of_turn(0, owners, tiles, h_tiles, w_tiles, hidden, width, PLAN)
    start, end = rows_of_turn(expert, owners)
    slot = gl.load(order + (start + turn_n), mask=start + turn_n < end, other=0)
    for turn in range(turns_of_program(tiles)):
        columns = (left + h) + gl.arange(0, PLAN.BLOCK_H, gl.SliceLayout(0, layout))[None, :]
        head, behind, filled = ring_parts(start, end, count, BLOCK_N, STAGES)
        places.store((slot // PLAN.TOP_K).to(gl.uint32) * pieces)
        slot = gl.load(order + (head + turn_n), mask=head + turn_n < end, other=0)
        expert, next_h, next_w = whole_tile_of_turn(turn + 1, owners, tiles, h_tiles, w_tiles, hidden, width, PLAN)
        began = count
        for row in range(start, head, BLOCK_N):
            place = place_bufs.index(count - began).load(of_stage)
            at, parity = count % STAGES, ((count // STAGES) & 1) ^ 1
            _fill_stage(right_desc, columns, place, ring, at, parity, row, w, PLAN)
            count += 1
        next_start, next_end = rows_of_turn(expert, owners)
        for row in range(head, behind, TURN):
            places.store((slot // PLAN.TOP_K).to(gl.uint32) * pieces)
            ahead = row + TURN + turn_n
            slot = gl.load(order + ahead, mask=ahead < end, other=0)
            parity = ((count // STAGES) & 1) ^ 1
            for stage in gl.static_range(STAGES):
                place = place_bufs.index(stage).load(of_stage)
                _fill_stage(right_desc, columns, place, ring, stage, parity, row + stage * BLOCK_N, w, PLAN)
            count += STAGES
        places.store((slot // PLAN.TOP_K).to(gl.uint32) * pieces)
        ahead = next_start + turn_n
        slot = gl.load(order + ahead, mask=ahead < next_end, other=0)
        began = count
        for row in range(behind, filled, BLOCK_N):
            place = place_bufs.index(count - began).load(of_stage)
            at, parity = count % STAGES, ((count // STAGES) & 1) ^ 1
            _fill_stage(right_desc, columns, place, ring, at, parity, row, w, PLAN)
            count += 1
        if (filled < end) | (start == end):
            place = place_bufs.index(count - began).load(of_stage)
            _fill_last_rows(columns, place, right, ring, count, filled, end, w, right_stride, layout, PLAN)
            count += 1
        h, w, start, end = next_h, next_w, next_start, next_end


@gluon.jit
def _sum_stage(acc, ring, stage, parity, more, WARPGROUP: gl.constexpr):
    """A stage's product, begun; the stage before it is given back. more: not the first of a tile."""
    left_bufs, right_bufs, full, empty = ring
    STAGES: gl.constexpr = right_bufs.shape[0]
    HALF: gl.constexpr = left_bufs.shape[2] // 2
    mbarrier.wait(full.index(stage), parity)
    fence_async_shared()  # the left rows were written by threads, the matrix unit reads them as another party
    left = left_bufs.index(stage).slice(WARPGROUP * HALF, HALF, 1).permute((1, 0))
    acc = warpgroup_mma(left, right_bufs.index(stage), acc, use_acc=more, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=more)
    return acc


@gluon.jit
def _sum_last_rows(acc, ring, stage, parity, rows, more, WARPGROUP: gl.constexpr, STEP: gl.constexpr):
    """The product of a stage's first rows, begun, STEP of them at a time."""
    left_bufs, right_bufs, full, _ = ring
    HALF: gl.constexpr = left_bufs.shape[2] // 2
    mbarrier.wait(full.index(stage), parity)
    fence_async_shared()
    left, right = left_bufs.index(stage).slice(WARPGROUP * HALF, HALF, 1), right_bufs.index(stage)
    STEPS: gl.constexpr = right_bufs.shape[1] // STEP
    acc = warpgroup_mma(
        left.slice(0, STEP, 0).permute((1, 0)), right.slice(0, STEP, 0), acc, use_acc=more, is_async=True
    )
    acc = warpgroup_mma_wait(STEPS, deps=(acc,))  # nothing is awaited here
    for step in gl.static_range(1, STEPS):
        if rows > step * STEP:
            left_rows = left.slice(step * STEP, STEP, 0).permute((1, 0))
            acc = warpgroup_mma(left_rows, right.slice(step * STEP, STEP, 0), acc, is_async=True)
            acc = warpgroup_mma_wait(STEPS, deps=(acc,))
    return acc


@gluon.jit
def consume_onward(owners, ring, staging, out_desc, out, sizes, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """One warpgroup's half of each tile along H."""
    experts, hidden, width = sizes
    empty = ring[3]
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_H: gl.constexpr = PLAN.BLOCK_H
    BLOCK_W: gl.constexpr = PLAN.BLOCK_W
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    TRANSPOSED: gl.constexpr = PLAN.TRANSPOSED
    h_tiles = gl.cdiv(hidden, BLOCK_H)
    w_tiles = gl.cdiv(width, BLOCK_W)
    tiles = experts * h_tiles * w_tiles
    dtype: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_W, 16])
    own = staging.index(WARPGROUP)
    acc = gl.zeros((BLOCK_H // 2, BLOCK_W), gl.float32, mma)
    count = 0
    turns = turns_of_program(tiles)
    expert, h, w = whole_tile_of_turn(0, owners, tiles, h_tiles, w_tiles, hidden, width, PLAN)
    start, end = rows_of_turn(expert, owners)
    for turn in range(turns):
        head, behind, filled = ring_parts(start, end, count, BLOCK_N, STAGES)
        for row in range(start, head, BLOCK_N):
            acc = _sum_stage(acc, ring, count % STAGES, (count // STAGES) & 1, row > start, WARPGROUP)
            count += 1
        next_expert, next_h, next_w = whole_tile_of_turn(turn + 1, owners, tiles, h_tiles, w_tiles, hidden, width, PLAN)
        for _ in range(head, behind, STAGES * BLOCK_N):
            parity = (count // STAGES) & 1
            for stage in gl.static_range(STAGES):
                acc = _sum_stage(acc, ring, stage, parity, True, WARPGROUP)
            count += STAGES
        next_start, next_end = rows_of_turn(next_expert, owners)
        for _ in range(behind, filled, BLOCK_N):
            acc = _sum_stage(acc, ring, count % STAGES, (count // STAGES) & 1, True, WARPGROUP)
            count += 1
        partial = (filled < end) | (start == end)
        if partial:
            acc = _sum_last_rows(
                acc, ring, count % STAGES, (count // STAGES) & 1, end - filled, filled > start, WARPGROUP, 16
            )  # fmt: skip
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + 2 * STAGES - 2) % STAGES), count=1, pred=partial & (filled > start))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if TRANSPOSED:
            first, second = expert * width + w, h + WARPGROUP * (BLOCK_H // 2)
        else:
            first, second = expert * hidden + h + WARPGROUP * (BLOCK_H // 2), w
        sums, other_sums = column_parts(acc, 2)
        _store(sums.to(dtype), own, out_desc, first, second, TRANSPOSED)
        if TRANSPOSED:
            first += BLOCK_W // 2
        else:
            second += BLOCK_W // 2
        _store(other_sums.to(dtype), own, out_desc, first, second, TRANSPOSED)
        expert, h, w, start, end = next_expert, next_h, next_w, next_start, next_end
    tma.store_wait(0)


@gluon.jit
def _store(value, buffer, out_desc, first, second, TRANSPOSED: gl.constexpr):
    tma.store_wait(0)
    if TRANSPOSED:
        buffer.permute((1, 0)).store(value)
    else:
        buffer.store(value)
    fence_async_shared()
    bulk_store(out_desc, [first, second], buffer)
