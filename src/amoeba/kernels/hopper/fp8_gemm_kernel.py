"""The persistent kernel of Hopper's products in e4m3, for every plan: its loads, its products, what it does with them.

Launched by `amoeba.kernels.hopper.fp8_gemm`, which says what it computes.

Widths are multiples of 64. Where one is no multiple of 128 its last block of scales is half full: the copy engine reads
zeros behind the end of a row, gathered rows are masked, and columns behind the last one count for no scale. Blocks of a
gated matrix are counted through gates and ups, so that with an odd number of 64 gates each 128 columns of up lie in two
blocks, half in each; those of files are counted apart.

What the parts take in common goes in tuples:

    ring    = row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty   # stages and their barriers
    buffers = staging, kept                                                 # through which results leave, and h
    descs   = h_desc, out_desc
    scaled  = order, row_scale, matrix_scale                                # where scales are found
    results = bias, h, h_scale, out, out_scale
    shape   = depth, width, columns, h_stride, out_stride, top_k

Plans that are OVERLAPPED have the ends of tiles under products: the matrix unit works while a half of a tile leaves. A
warpgroup has one transient result of the matrix unit, and its sums are final one half after the other:

    ... | last product of the right half | first product of the next tile's left half | of its right half | ...
        | the left half leaves           | the right half leaves, or a                |

The next tile's place is asked for before the last step, its rows' tokens under the first of these products and its
first scales under the second: nobody waits for them. Sums are added up in the same order as elsewhere. A tile has two
steps or more.
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

from amoeba.kernels.activation import gated
from amoeba.kernels.hopper.epilogue import add_bias, now, store_tile
from amoeba.kernels.hopper.fp8_gemm_parts import (
    begin_turns,
    blocks_of_matrix,
    end_turns,
    first_scales,
    keep,
    load_scales,
    product_in_turn,
    scales_of_columns,
    store_codes,
    store_half,
    token_rows,
)
from amoeba.kernels.hopper.fp8_gemm_scales_in_stage import consume_scales_in_stage, produce_scales_in_stage
from amoeba.kernels.hopper.tile_order import clamped_place, place_of_tile
from amoeba.kernels.hopper.tma import barrier, bulk_load, gather, reinterpret
from amoeba.kernels.launch import quick


@gluon.jit
def _begin_left(ring, zero, count, there, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """A stage's product of the left half, begun when the stage is full; unless it is there, of whatever it holds."""
    row_bufs, matrix_bufs, _, _, full, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    stage = count % PLAN.STAGES
    mbarrier.wait(full.index(stage), (count // PLAN.STAGES) & 1, pred=there)
    if PLAN.GATHER:
        fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(0, PLAN.BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _begin_right(ring, zero, count, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    row_bufs, matrix_bufs, _, _, _, _ = ring
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    stage = count % PLAN.STAGES
    rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
    matrix = matrix_bufs.index(stage).slice(PLAN.BLOCK, PLAN.BLOCK, 0).permute((1, 0))
    return product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)


@gluon.jit
def _finish_right(found, right, of_right, ring, count, there, PLAN: gl.constexpr):
    """The sums with a stage's product of the right half, and the stage after it."""
    done = warpgroup_mma_wait(0, deps=(found,))
    mbarrier.arrive(ring[5].index(count % PLAN.STAGES), count=1, pred=there)
    right += done * of_right[:, None]
    return right, count + 1


@gluon.jit
def consume_overlapped(
    table, ring, buffers, descs, scaled, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, then activate gates and quantise, or store."""
    staging, _ = buffers
    _, out_desc = descs
    order, row_scale, matrix_scale = scaled
    _, _, _, out, out_scale = results
    depth, width, columns, _, out_stride, top_k = shape
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    first_buffer: gl.constexpr = WARPGROUP * PLAN.BUFFERS
    steps = gl.cdiv(depth, BLOCK)
    blocks = gl.cdiv(width, BLOCK)
    count = 0
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    expert, row, end, n = clamped_place(
        gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
    )
    m = token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
    of_row, of_left, of_right, _ = first_scales(row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN)
    some = gl.program_id(0) < tiles * column_tiles
    begin_turns(WARPGROUP, PLAN)
    found = _begin_left(ring, zero, count, some, WARPGROUP, PLAN)
    left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
    found = _begin_right(ring, zero, count, WARPGROUP, PLAN)
    right, count = _finish_right(found, zero, of_row * of_right, ring, count, some, PLAN)
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        row_scales = row_scale + m * steps
        left_scales, right_scales, far_scales = scales_of_columns(
            matrix_scale, m, expert, n, columns, blocks, steps, PLAN
        )
        next_row, next_left, next_right, _ = load_scales(
            row_scales + 1, left_scales + 1, right_scales + 1, far_scales + 1, PLAN
        )
        for step in range(2, steps):
            by_left, by_right = next_row * next_left, next_row * next_right
            next_row, next_left, next_right, _ = load_scales(
                row_scales + step, left_scales + step, right_scales + step, far_scales + step, PLAN
            )
            begun = _begin_left(ring, zero, count, True, WARPGROUP, PLAN)
            left += warpgroup_mma_wait(0, deps=(begun,)) * by_left[:, None]
            begun = _begin_right(ring, zero, count, WARPGROUP, PLAN)
            right, count = _finish_right(begun, right, by_right, ring, count, True, PLAN)
        last = _begin_left(ring, zero, count, True, WARPGROUP, PLAN)
        coming_expert, coming_row, coming_end, coming_n = clamped_place(
            next_tile, table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
        )
        left = now(left + warpgroup_mma_wait(0, deps=(last,)) * (next_row * next_left)[:, None])
        last = _begin_right(ring, zero, count, WARPGROUP, PLAN)
        m = token_rows(order, coming_row, coming_end, top_k, PLAN, HEIGHT, mma)
        gate = left
        if PLAN.PAIRED:
            gate = gate.to(gl.bfloat16)
        else:
            buffer = staging.index(first_buffer)
            store_tile(left, out, out_desc, buffer, out_stride, row, end, 2 * n * BLOCK, width, 0, 1)
        right, count = _finish_right(last, right, next_row * next_right, ring, count, True, PLAN)
        right = now(right)
        some = next_tile < tiles * column_tiles
        found = _begin_left(ring, zero, count, some, WARPGROUP, PLAN)
        of_row, of_left, of_right, _ = first_scales(
            row_scale, matrix_scale, m, coming_expert, coming_n, columns, blocks, steps, PLAN
        )
        if PLAN.PAIRED:
            up = right.to(gl.bfloat16)
            a = gated(gate.to(gl.float32), up.to(gl.float32), PLAN)
            store_codes(
                a, out, out_desc, out_scale, staging.index(first_buffer), out_stride, row, end,
                n * BLOCK, columns, 0, gl.cdiv(columns, BLOCK), 0, PLAN,
            )  # fmt: skip
        else:
            buffer = staging.index(first_buffer + 1)
            store_tile(right, out, out_desc, buffer, out_stride, row, end, (2 * n + 1) * BLOCK, width, 0, 1)
        left = now(zero + warpgroup_mma_wait(0, deps=(found,)) * (of_row * of_left)[:, None])
        found = _begin_right(ring, zero, count, WARPGROUP, PLAN)
        right, count = _finish_right(found, zero, of_row * of_right, ring, count, some, PLAN)
        expert, row, end, n = coming_expert, coming_row, coming_end, coming_n
    end_turns(WARPGROUP, PLAN)
    tma.store_wait(0)


@gluon.jit
def _produce_in_order(
    row_desc, matrix_desc, rows, order, table, ring, depth, width, columns, row_stride, top_k, PLAN: gl.constexpr
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free."""
    row_bufs, matrix_bufs, _, _, full, empty = ring
    BLOCK: gl.constexpr = PLAN.BLOCK
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    STAGES: gl.constexpr = PLAN.STAGES
    BYTES: gl.constexpr = PLAN.BLOCK_N * BLOCK if PLAN.GATHER else (PLAN.BLOCK_N + BLOCK_M) * BLOCK
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    count = 0
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
        pointers = rows
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        if PLAN.GATHER:
            sorted_row = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
            token = gl.load(order + sorted_row) // top_k
            k_offset = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            pointers = rows + (token.to(gl.int64) * row_stride)[:, None] + k_offset[None, :]
        at = expert * width + n * PLAN.COLUMNS
        for k in range(0, depth, BLOCK):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            matrix_buf = matrix_bufs.index(stage)
            mbarrier.expect(bar, BYTES)
            if PLAN.PAIRED:
                bulk_load(matrix_desc, [at, k], bar, matrix_buf.slice(0, BLOCK, 0))
                bulk_load(matrix_desc, [at + columns, k], bar, matrix_buf.slice(BLOCK, BLOCK, 0))
            else:
                bulk_load(matrix_desc, [at, k], bar, matrix_buf)
            if PLAN.GATHER:
                if PLAN.CUT:
                    there = (k + gl.arange(0, BLOCK, gl.SliceLayout(0, layout)) < depth)[None, :]
                    gather(row_bufs.index(stage), pointers, mask=there)
                else:
                    gather(row_bufs.index(stage), pointers)
                pointers += BLOCK
                if PLAN.PREFETCHED:
                    async_copy.commit_group()
                    if count >= 1:
                        async_copy.wait_group(1)
                        fence_async_shared()
                        barrier()  # all have done so
                        mbarrier.arrive(full.index((count - 1) % STAGES), count=1)
                else:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                bulk_load(row_desc, [row, k], bar, row_bufs.index(stage))
            count += 1
    if PLAN.PREFETCHED:
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        for stage in range(gl.maximum(count - 1, 0), count):
            mbarrier.arrive(full.index(stage % STAGES), count=1)


@gluon.jit
def _produce(
    row_desc, matrix_desc, rows, row_scale, matrix_scale, order, table, ring, depth, width, columns, row_stride,
    top_k, PLAN: gl.constexpr,
):  # fmt: skip
    if PLAN.SCALES_IN_STAGE:
        produce_scales_in_stage(
            matrix_desc, rows, row_scale, matrix_scale, order, table, ring, depth, width, columns, row_stride, top_k,
            PLAN,
        )  # fmt: skip
    else:
        _produce_in_order(
            row_desc, matrix_desc, rows, order, table, ring, depth, width, columns, row_stride, top_k, PLAN
        )  # fmt: skip


@gluon.jit
def _multiply_tile(ring, count, steps, there, scales, first, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The two halves of a tile, in fp32, of the first `there` of its steps.

    scales: of rows, of the left half, of the right half and of that one's last 64 columns, where these have others,
    along the depth. first: the first of each."""
    row_bufs, matrix_bufs, _, _, full, empty = ring
    row_scales, left_scales, right_scales, far_scales = scales
    next_row, next_left, next_right, next_far = first
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    STAGES: gl.constexpr = PLAN.STAGES
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    left = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    right = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    zero = gl.zeros((HEIGHT, BLOCK), gl.float32, mma)
    near = (gl.arange(0, BLOCK, gl.SliceLayout(0, mma)) < BLOCK // 2)[None, :]
    for step in range(0, there):
        stage = count % STAGES
        of_left = next_row * next_left
        of_right = next_row * next_right
        of_far = next_row * next_far
        ahead = gl.minimum(step + 1, steps - 1)
        next_row, next_left, next_right, next_far = load_scales(
            row_scales + ahead, left_scales + ahead, right_scales + ahead, far_scales + ahead, PLAN
        )
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if PLAN.GATHER and not PLAN.PREFETCHED:
            fence_async_shared()  # the rows were written by threads, the matrix unit reads them as another party
        rows = row_bufs.index(stage).slice(WARPGROUP * HEIGHT, HEIGHT, 0)
        matrix = matrix_bufs.index(stage)
        found = warpgroup_mma(rows, matrix.slice(0, BLOCK, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        left += found * of_left[:, None]
        found = warpgroup_mma(rows, matrix.slice(BLOCK, BLOCK, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.arrive(empty.index(stage), count=1)
        if PLAN.SHIFTED:
            right += found * gl.where(near, of_right[:, None], of_far[:, None])
        else:
            right += found * of_right[:, None]
        count += 1
    if PLAN.PREFETCHED:
        for _ in range(there, steps):
            mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
            mbarrier.arrive(empty.index(count % STAGES), count=1)
            count += 1
    return left, right, count


@gluon.jit
def _consume_in_order(
    table, ring, buffers, descs, scaled, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """One warpgroup's half of each tile's rows: multiply, add the bias, activate, quantise, store."""
    staging, kept = buffers
    h_desc, out_desc = descs
    order, row_scale, matrix_scale = scaled
    bias, h, h_scale, out, out_scale = results
    depth, width, columns, h_stride, out_stride, top_k = shape
    tiles = gl.load(table)
    column_tiles = gl.cdiv(columns, PLAN.COLUMNS)
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    buffer = staging.index(WARPGROUP * PLAN.BUFFERS)
    steps = gl.cdiv(depth, BLOCK)
    blocks = blocks_of_matrix(width, columns, PLAN)
    count = 0
    if PLAN.PREFETCHED:
        expert, row, end, n = clamped_place(
            gl.program_id(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
        )
        m = token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
        first = first_scales(row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN)
    for tile in range(gl.program_id(0), tiles * column_tiles, gl.num_programs(0)):
        if PLAN.PREFETCHED:
            next_expert, next_row, next_end, next_n = clamped_place(
                tile + gl.num_programs(0), table, tiles, column_tiles, WARPGROUP * HEIGHT, PLAN.GROUP_M, PLAN.ORDER
            )
        else:
            expert, row, end, n = place_of_tile(tile, table, tiles, column_tiles, PLAN.GROUP_M, PLAN.ORDER)
            row += WARPGROUP * HEIGHT
            m = token_rows(order, row, end, top_k, PLAN, HEIGHT, mma)
            first = first_scales(row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN)
        left_scales, right_scales, far_scales = scales_of_columns(
            matrix_scale, m, expert, n, columns, blocks, steps, PLAN
        )
        there = steps
        if PLAN.PREFETCHED:
            there = gl.where(row < end, steps, 0)
        scales = (row_scale + m * steps, left_scales, right_scales, far_scales)
        left, right, count = _multiply_tile(ring, count, steps, there, scales, first, WARPGROUP, PLAN)
        if PLAN.PREFETCHED:
            m = token_rows(order, next_row, next_end, top_k, PLAN, HEIGHT, mma)
        bias_row = bias + expert.to(gl.int64) * width
        if PLAN.PAIRED:
            column = n * BLOCK
            if PLAN.BIAS:
                left = add_bias(left, bias_row, column, columns, BLOCK)
                right = add_bias(right, bias_row + columns, column, columns, BLOCK)
            left, right = left.to(gl.bfloat16), right.to(gl.bfloat16)
            if PLAN.KEEP:
                keep(left, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, 0, blocks, WARPGROUP, PLAN)
                keep(
                    right, h, h_desc, h_scale, kept, h_stride, row, end, column, columns, columns, blocks, WARPGROUP,
                    PLAN,
                )  # fmt: skip
            left, right = left.to(gl.float32), right.to(gl.float32)
            a = gated(left, right, PLAN)
            if PLAN.PREFETCHED:
                first = first_scales(row_scale, matrix_scale, m, next_expert, next_n, columns, blocks, steps, PLAN)
            store_codes(
                a, out, out_desc, out_scale, buffer, out_stride, row, end, column, columns, 0, gl.cdiv(columns, BLOCK),
                0, PLAN,
            )  # fmt: skip
        else:
            for half in gl.static_range(2):
                if PLAN.PREFETCHED and half == 1:
                    first = first_scales(row_scale, matrix_scale, m, next_expert, next_n, columns, blocks, steps, PLAN)
                store_half(
                    right if half else left, bias_row, buffers, descs, results, (h_stride, out_stride), row, end,
                    (2 * n + half) * BLOCK, width, blocks, WARPGROUP, half, PLAN,
                )  # fmt: skip
        if PLAN.PREFETCHED:
            expert, row, end, n = next_expert, next_row, next_end, next_n
    tma.store_wait(0)


@gluon.jit
def _consume(table, ring, buffers, descs, scaled, results, shape, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.SCALES_IN_STAGE:
        consume_scales_in_stage(table, ring, buffers, descs, results, shape, WARPGROUP, PLAN)
    elif PLAN.OVERLAPPED:
        consume_overlapped(table, ring, buffers, descs, scaled, results, shape, WARPGROUP, PLAN)
    else:
        _consume_in_order(table, ring, buffers, descs, scaled, results, shape, WARPGROUP, PLAN)


@quick
@gluon.jit
def fp8_gemm_kernel(
    row_desc, matrix_desc, h_desc, out_desc, rows, row_scale, matrix_scale, order, table, bias, h, h_scale, out,
    out_scale, depth, width, columns, row_stride, h_stride, out_stride, top_k, PLAN: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK: gl.constexpr = PLAN.BLOCK
    HEIGHT: gl.constexpr = PLAN.BLOCK_M // 2
    row_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLAN.BLOCK_M, BLOCK], PLAN.ROW_LAYOUT)
    matrix_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PLAN.BLOCK_N, BLOCK], PLAN.MATRIX_LAYOUT)
    dtype: gl.constexpr = out.dtype.element_ty
    if PLAN.TWO_BUFFERS:  # codes leave through the first buffer of h
        kept = gl.allocate_shared_memory(h.dtype.element_ty, [4, HEIGHT, BLOCK // 2], PLAN.KEPT_LAYOUT)
        staging = reinterpret(kept, dtype, [4, HEIGHT, BLOCK], PLAN.STAGED_LAYOUT)
    else:
        staging = gl.allocate_shared_memory(dtype, [2 * PLAN.BUFFERS, HEIGHT, PLAN.STAGED[1]], PLAN.STAGED_LAYOUT)
        kept = staging
        if PLAN.KEEP:
            kept = gl.allocate_shared_memory(h.dtype.element_ty, [2, HEIGHT, PLAN.KEPT[1]], PLAN.KEPT_LAYOUT)
    scale_bufs, column_bufs = matrix_bufs, matrix_bufs  # stand for what this plan does not have
    if PLAN.SCALES_IN_STAGE:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, PLAN.BLOCK_M], flat)
        column_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 4], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # the copy engine, and 128 gathering threads or one for them all
        mbarrier.init(full.index(i), count=(2 if PLAN.PREFETCHED else 129) if PLAN.GATHER else 1)
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    ring = (row_bufs, matrix_bufs, scale_bufs, column_bufs, full, empty)
    buffers, descs, scaled = (staging, kept), (h_desc, out_desc), (order, row_scale, matrix_scale)
    results, shape = (bias, h, h_scale, out, out_scale), (depth, width, columns, h_stride, out_stride, top_k)
    gl.warp_specialize(
        [
            (_consume, (table, ring, buffers, descs, scaled, results, shape, gl.constexpr(0), PLAN)),
            (_consume, (table, ring, buffers, descs, scaled, results, shape, gl.constexpr(1), PLAN)),
            (_produce, (
                row_desc, matrix_desc, rows, row_scale, matrix_scale, order, table, ring, depth, width, columns,
                row_stride, top_k, PLAN,
            )),
        ],
        [4, 4 if PLAN.GATHER else 1],
        PLAN.REGISTERS,
    )  # fmt: skip
