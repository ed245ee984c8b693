"""The scheduled backward on Hopper, in Gluon: one persistent kernel on one ring of stages.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

See `amoeba.tasks.hopper.backward`, which launches it. Three warpgroups: the producer draws tickets, waits at gates,
passes tasks on to the other two and fills the stages; those compute and signal. A stage holds 48 KB for every task:

    DOWN, UP                   128 rows of 64 of the depth, and 64 lines of 256 columns of the matrix
    DOWN_WEIGHTS, UP_WEIGHTS   64 gathered rows, 128 wide in two halves, and the same sorted rows, 256 wide
    ACTIVATE                   dA', gate and up: whole lines of BLOCK columns, 16 KB of each
    COMBINE                    rows of dx, 256 columns of them, of as many tokens as have 64 of them
    DOWN_BIAS, UP_BIAS         nothing: the warpgroups read rows where they lie

The tiles of products and weight gradients call the functions of the separate kernels, and the row passes sum in the
same order as theirs, so the results are bitwise identical.

**Waiting.** The producer and the two other warpgroups process tasks in the order of tickets. Only the producer waits at
gates, before it passes a task on. A warpgroup that has finished a task does not signal immediately: it would have to
wait for its stores and for the release while the tensor cores are idle. It signals while its next product runs, before
it waits for a task that has not been passed on yet, and at the end. So no signal is held back during a wait.

**Visibility of writes.** Threads and the copy engine access memory through different proxies, and neither sees the
other's pending writes. `signal` waits until the engine's writes have arrived (not only been read from shared memory),
orders the two proxies with a fence, synchronises the threads of the warpgroup, then releases. `wait` acquires, then
fences again before the engine is told to load. This covers dA' (stored by the engine or, at an expert's end, by
threads; loaded by the engine), dh and s·a (stored by threads, loaded by the engine or by threads) and dx (stored by
either, copied to shared memory by threads).

**The producer.** On one rank tasks come from a list (`amoeba.tasks.hopper.task_list`). Between two
tasks the ring of stages lasts for two microseconds. To find out what a ticket is, to look at its gate and to ask for
its first rows takes longer than that, one after the other, in the warpgroup that fills the stages. So a task's line of
the list is on its way while the stages of the one before it are filled, and each thread looks at the gate by itself,
without an atomic that is handed around.

Threads that gather rows and the copy engine write the same ring by two ways, and a fence has to join them. One a task
is enough. Without it the compiler has one in each stage, which waits for the rows that are on their way.

Over ranks there is no list: each ticket's task is found out by arithmetic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from amoeba.kernels.hopper.gemm_kernel import fill_product, row_pointers
from amoeba.kernels.hopper.tma import reinterpret
from amoeba.kernels.launch import quick
from amoeba.tasks.hopper.products import (
    activate,
    add_bias_dots,
    combine,
    fill_gradients,
    fill_lines,
    fill_tokens,
    multiply,
    pass_over,
    sum_bias,
    sum_tile,
)
from amoeba.tasks.hopper.queue import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    HALF,
    ONE,
    ROOM,
    STAGES,
    STOP,
    TASKS,
    draw,
    drawn_ticket,
    is_there,
    pass_on,
    receive,
    send_half,
    signal,
    wait,
    wait_for_block,
    wait_for_tile,
    wait_for_tokens,
    wait_per_thread,
)
from amoeba.tasks.triton.arrivals import (
    FIRST_LOCAL,
    MOST_TOKENS,
    RANK,
    ROWS,
    SENDS,
    local_tiles_first,
    number,
    numbers_at,
    wait_until_taken,
)
from amoeba.tasks.triton.tickets import (
    ACTIVATE,
    COMBINE,
    DOWN,
    DOWN_BIAS,
    DOWN_WEIGHTS,
    SEND,
    UP,
    UP_BIAS,
    UP_WEIGHTS,
    count_tickets,
    decode_send,
    decode_ticket,
    note_task,
    now,
    rows_of_row_tile,
    with_biases,
)


@gluon.jit
def _consume(
    descriptors, results, sources, counters, queue, ring, staging, peers, trace, tokens, rows, intermediate,
    bundle, WARPGROUP: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of each task."""
    da_desc, dx_desc, d_down_desc, d_gate_up_desc = descriptors
    da, dh, ds, d_x, d_weight, d_down, d_gate_up = results
    dx = da + rows.to(gl.int64) * PLAN.I
    weight, order, slot_row, dy, biases = sources
    _, _, _, da_bufs, h_bufs, token_bufs, full, empty = ring
    buffers, all_scales = staging
    scales = all_scales.index(WARPGROUP)
    count = 0
    taken = 0
    pending = -1
    next_task = receive(queue, taken)
    ahead = True  # the next task is taken already
    working = True
    while working:
        if trace is not None:
            came = now(trace, False)
        if not ahead:
            if not is_there(queue, taken):
                signal(pending, counters, PLAN)
                pending = -1
            next_task = receive(queue, taken)
        kind, item, part, expert, row, end, ticket = next_task
        ahead = False
        taken += 1
        if trace is not None:
            started = now(trace, False)
        if (kind == DOWN) | (kind == UP):
            depth = gl.where(kind == DOWN, PLAN.H, PLAN.J)
            if PLAN.SMALL * WARPGROUP == 1:  # whose half of the row tile may be empty
                if row + 64 < end:
                    count, ahead, next_task = multiply(
                        next_task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending,
                        depth, rows, WARPGROUP, PLAN,
                    )  # fmt: skip
                else:
                    signal(pending, counters, PLAN)
                    count = pass_over(full, empty, count, depth)
            else:
                count, ahead, next_task = multiply(
                    next_task, da, dx, da_desc, dx_desc, buffers, counters, queue, ring, count, taken, pending, depth,
                    rows, WARPGROUP, PLAN,
                )  # fmt: skip
            pending = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + PLAN.EXPERTS
        elif (kind == DOWN_WEIGHTS) | (kind == UP_WEIGHTS):
            gradients = (d_down, d_gate_up, d_down_desc, d_gate_up_desc)
            if PLAN.BUNDLED:
                tiles = gl.where(kind == DOWN_WEIGHTS, PLAN.DOWN_TILES, PLAN.UP_TILES)
                stop = gl.minimum((part + 1) * bundle, tiles)
                task = next_task
                for tile in range(part * bundle, stop):
                    count, ahead, next_task = sum_tile(
                        task, next_task, tile, tile + 1 == stop, gradients, buffers, counters, queue, ring, count,
                        taken, pending, WARPGROUP, PLAN,
                    )  # fmt: skip
                    pending = -1
            else:
                count, ahead, next_task = sum_tile(
                    next_task, next_task, part, True, gradients, buffers, counters, queue, ring, count, taken, pending,
                    WARPGROUP, PLAN,
                )  # fmt: skip
            pending = -1
        elif kind == ACTIVATE:
            count = activate(
                da, dx, dh, ds, weight, order, counters, pending, da_bufs, h_bufs, scales, full, empty, count, row,
                end, rows, intermediate, WARPGROUP, PLAN,
            )  # fmt: skip
            if PLAN.DOWN_BIAS:
                add_bias_dots(biases, dy, ds, order, expert, row, end, WARPGROUP, PLAN)
            pending = (PLAN.ROW_COUNTERS + item) * (PLAN.EXPERTS + 1) + expert
        elif kind == COMBINE:
            count = combine(
                item, ds, slot_row, d_x, d_weight, peers, counters, pending, token_bufs, full, empty, count,
                tokens, rows, WARPGROUP, PLAN,
            )  # fmt: skip
            pending = -1
        else:
            if PLAN.BIASES:  # noqa: SIM102 - known when it is compiled, unlike the next
                if (kind == DOWN_BIAS) | (kind == UP_BIAS):
                    signal(pending, counters, PLAN)
                    pending = -1
                    sum_bias(biases, kind, item, part, row, end, dy, dh, order, weight, WARPGROUP, PLAN)
            if PLAN.RANKS > 1:  # noqa: SIM102
                if kind == SEND:
                    signal(pending, counters, PLAN)
                    pending = -1
                    send_half(peers, item, part, da, WARPGROUP, PLAN)
        working = kind != STOP
        if trace is not None and WARPGROUP == 0:  # noqa: SIM102 - known when it is compiled, unlike the next
            if working:
                note_task(trace, ticket, kind, item, part, came, started, False)
    signal(pending, counters, PLAN)
    tma.store_wait(0)


@quick
@gluon.jit(do_not_specialize=["tokens", "rows", "wave", "late", "behind", "bundle"])
def backward_kernel(
    down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc, da_desc, dx_desc,
    d_down_desc, d_gate_up_desc, dy, x, expert_TK, weight, da, dh, ds, d_x, d_weight, d_gate_up, d_down, order,
    slot_row, offs_E, heaviest_E, records, counters, biases, peers, trace, tokens, rows, intermediate, wave, late,
    behind, bundle, PLAN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = da.dtype.element_ty
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rowwise: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], PLAN.ROW_LAYOUT)
    left_bufs = reinterpret(row_bufs, dtype, [STAGES * 2, 64, 64], PLAN.LEFT_LAYOUT)
    buffers = gl.allocate_shared_memory(dtype, [4, 64, 64], PLAN.OUT_LAYOUT)  # two of each warpgroup, which take turns
    matrix_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], PLAN.MATRIX_LAYOUT)
    da_bufs = reinterpret(row_bufs, dtype, [STAGES, PLAN.LINES, PLAN.BLOCK], PLAN.LINES_LAYOUT)
    h_bufs = reinterpret(matrix_bufs, dtype, [STAGES * 2, PLAN.LINES, PLAN.BLOCK], PLAN.LINES_LAYOUT)
    token_bufs = reinterpret(matrix_bufs, dtype, [STAGES, BLOCK_K, BLOCK_N], rowwise)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    tasks = gl.allocate_shared_memory(gl.int32, [TASKS, ROOM], plain)
    scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], plain)
    pushed = gl.allocate_shared_memory(gl.int32, [128], plain)
    task_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], barriers)
    task_empty = gl.allocate_shared_memory(gl.int64, [TASKS, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # the copy engine, and 128 threads of the producer
        mbarrier.init(empty.index(i), count=2)  # the two warpgroups
    for i in gl.static_range(TASKS):
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(task_empty.index(i), count=2)
    pushed.store(gl.full([128], 0, gl.int32, ONE))
    ring = (row_bufs, matrix_bufs, left_bufs, da_bufs, h_bufs, token_bufs, full, empty)
    queue = (tasks, pushed, task_full, task_empty)
    staging = (buffers, scales)
    stores = (da_desc, dx_desc, d_down_desc, d_gate_up_desc)
    loads = (down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc)
    results = (da, dh, ds, d_x, d_weight, d_down, d_gate_up)
    sources = (weight, order, slot_row, dy, biases)
    maps = (order, slot_row, offs_E, heaviest_E, records)
    gl.warp_specialize(
        [
            (_consume, (
                stores, results, sources, counters, queue, ring, staging, peers, trace, tokens, rows,
                intermediate, bundle, gl.constexpr(0), PLAN,
            )),
            (_consume, (
                stores, results, sources, counters, queue, ring, staging, peers, trace, tokens, rows,
                intermediate, bundle, gl.constexpr(1), PLAN,
            )),
            (produce, (
                loads, (dy, x, da, dh, expert_TK), maps, counters, queue, ring, peers, tokens, rows, intermediate,
                (wave, late, behind, bundle), PLAN,
            )),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip


@gluon.jit
def fill_task(
    descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows, intermediate,
    bundle, PLAN: gl.constexpr,
):  # fmt: skip
    """count: of stages so far; returned with those of this task."""
    down_desc, gate_up_desc, dh_rows_desc, scaled_a_desc, dh_desc, da_lines_desc, h_lines_desc = descriptors
    dy, x, da, dh, _ = sources
    row_bufs, matrix_bufs, left_bufs, da_bufs, h_bufs, token_bufs, full, empty = ring
    stages, place = (row_bufs, matrix_bufs, full, empty), (expert, row, part)
    gradient_stages = (left_bufs, matrix_bufs, full, empty)
    if kind == DOWN:
        pointers = row_pointers(dy, order, row, end, PLAN.H, PLAN.TOP_K, BLOCK_M, BLOCK_K)
        sizes = (PLAN.H, PLAN.I, PLAN.I)
        count = fill_product((dh_rows_desc, down_desc), pointers, stages, count, place, sizes, True, PLAN)
    elif kind == UP:
        sizes = (PLAN.J, PLAN.H, PLAN.H)
        count = fill_product((dh_rows_desc, gate_up_desc), dy, stages, count, place, sizes, False, PLAN)
    elif kind == DOWN_WEIGHTS:
        count = fill_gradients(
            (scaled_a_desc, dy, da, order), gradient_stages, count, part, row, end, bundle, PLAN.I, PLAN.I,
            PLAN.I_TILES, PLAN.DOWN_TILES, PLAN,
        )  # fmt: skip
    elif kind == UP_WEIGHTS:
        count = fill_gradients(
            (dh_desc, x, dh, order), gradient_stages, count, part, row, end, bundle, PLAN.J, PLAN.J, PLAN.J_TILES,
            PLAN.UP_TILES, PLAN,
        )  # fmt: skip
    elif kind == ACTIVATE:
        count = fill_lines(
            da_lines_desc, h_lines_desc, da_bufs, h_bufs, full, empty, count, row, end, intermediate, PLAN
        )
    elif kind == COMBINE:
        dx = da + rows.to(gl.int64) * PLAN.I  # they lie one behind the other: fewer pointers in registers
        count = fill_tokens(item, dx, slot_row, token_bufs, full, empty, count, tokens, rows, PLAN)
    return count


@gluon.jit
def _line(records, ticket, total):
    """The eight numbers of a task; behind the last one, the last one's again."""
    at = records + gl.minimum(ticket, total - 1).to(gl.int64) * 8
    four: gl.constexpr = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    kind, item, part, expert = gl.inline_asm_elementwise(
        four, "=r,=r,=r,=r,l", [at], (gl.int32, gl.int32, gl.int32, gl.int32), False, 1
    )
    row, end, gate, least = gl.inline_asm_elementwise(
        four, "=r,=r,=r,=r,l", [at + 4], (gl.int32, gl.int32, gl.int32, gl.int32), False, 1
    )
    return kind, item, part, expert, row, end, gate, least


@gluon.jit
def _produce_listed(
    descriptors, sources, maps, counters, queue, ring, tokens, rows, intermediate, bundle, PLAN: gl.constexpr
):
    """Draws tickets, waits at gates, passes tasks on and fills their stages."""
    _, _, _, _, expert_TK = sources
    order, slot_row, offs_E, heaviest_E, records = maps
    first_tile = heaviest_E + PLAN.EXPERTS  # see `make_table`
    place_E = first_tile + PLAN.EXPERTS + 1
    row_counters = counters + PLAN.ROW_COUNTERS
    token_blocks = gl.cdiv(tokens, PLAN.TOKENS)
    total = count_tickets(
        first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, gl.cdiv(PLAN.DOWN_TILES, bundle) + PLAN.DOWN_BIAS_PARTS,
        gl.cdiv(PLAN.UP_TILES, bundle) + PLAN.UP_BIAS_PARTS, token_blocks,
    )  # fmt: skip
    count = 0
    passed = 0
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    line = _line(records, ticket, total)
    while ticket < total:
        drawn = draw(counters, tokens)
        kind, item, part, expert, row, end, gate, least = line
        if kind == COMBINE:
            wait_for_tokens(item, expert_TK, slot_row, offs_E, place_E, first_tile, row_counters, tokens, rows, PLAN)
        elif least > 0:
            wait_per_thread(counters + gate, least)
        passed = pass_on(queue, passed, kind, item, part, expert, row, end, ticket)
        fence_async_shared()  # see above
        ticket = drawn_ticket(drawn)
        line = _line(records, ticket, total)
        count = fill_task(
            descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows,
            intermediate, bundle, PLAN,
        )  # fmt: skip
    pass_on(queue, passed, STOP, 0, 0, 0, 0, 0, 0)


@gluon.jit
def produce(
    descriptors, sources, maps, counters, queue, ring, peers, tokens, rows, intermediate, schedule,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Draws tickets, waits at gates, passes tasks on and fills their stages."""
    if PLAN.LISTED:
        _produce_listed(
            descriptors, sources, maps, counters, queue, ring, tokens, rows, intermediate, schedule[3], PLAN
        )
    else:
        _produce_decoding(
            descriptors, sources, maps, counters, queue, ring, peers, tokens, rows, intermediate, schedule, PLAN
        )


@gluon.jit
def _produce_decoding(
    descriptors, sources, maps, counters, queue, ring, peers, tokens, rows, intermediate, schedule,
    PLAN: gl.constexpr,
):  # fmt: skip
    """... over ranks, where each ticket's task is found out by arithmetic."""
    _, _, _, _, expert_TK = sources
    order, slot_row, offs_E, heaviest_E, _ = maps
    wave, late, behind, bundle = schedule
    first_tile = heaviest_E + PLAN.EXPERTS  # see `make_table`
    place_E = first_tile + PLAN.EXPERTS + 1
    expert_counters = counters + 1
    row_counters = counters + PLAN.ROW_COUNTERS
    wave_G = gl.arange(0, PLAN.BLOCK_G, PLAN.WAVE_LAYOUT)
    places = gl.arange(0, PLAN.BLOCK_E, PLAN.EXPERT_LAYOUT)
    token_blocks = gl.cdiv(tokens, PLAN.TOKENS)
    down_parts = PLAN.DOWN_TILES + PLAN.DOWN_BIAS_PARTS
    up_parts = PLAN.UP_TILES + PLAN.UP_BIAS_PARTS
    total = count_tickets(first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, down_parts, up_parts, token_blocks)
    sends = number(peers, SENDS)
    total += sends
    count = 0
    passed = 0
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    while ticket < total:
        kind, item, part = decode_ticket(
            gl.maximum(ticket - sends, 0), wave_G, heaviest_E, first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX,
            down_parts, up_parts, token_blocks, wave, gl.cdiv(PLAN.EXPERTS, wave), late, behind, PLAN.GROUP,
        )  # fmt: skip
        if ticket < sends:
            kind, item, part = decode_send(
                ticket, number(peers, MOST_TOKENS), number(peers, RANK), 2 * HALF, PLAN.RANKS
            )
        elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
            first_local = numbers_at(peers, FIRST_LOCAL, gl.int32)
            item = local_tiles_first(
                item, places, first_tile, first_local, first_local + PLAN.EXPERTS, PLAN.EXPERTS, wave
            )
        expert = item
        row = 0 * item
        end = 0 * item
        if kind == COMBINE:
            wait_for_tokens(item, expert_TK, slot_row, offs_E, place_E, first_tile, row_counters, tokens, rows, PLAN)
            wait_for_block(peers, item, tokens, PLAN)
        elif kind == SEND:
            wait_until_taken(peers, item, ROWS, PLAN.RANKS, PLAN.TAKERS, True)
        elif (kind == DOWN_WEIGHTS) | (kind == UP_WEIGHTS):
            row = gl.load(offs_E + item - 1, mask=item > 0, other=0)
            end = gl.load(offs_E + item)
            wait(expert_counters + item, 2 * gl.cdiv(end - row, BLOCK_M))
        else:
            expert, row, end = rows_of_row_tile(item, places, offs_E, heaviest_E, first_tile, PLAN.EXPERTS, BLOCK_M)
            if kind == ACTIVATE:
                wait(row_counters + item, PLAN.MULTIPLIED)
            elif kind == UP:
                wait(row_counters + item, PLAN.ACTIVATED)
            else:
                wait_for_tile(peers, order, row, end, PLAN)
        if PLAN.BIASES:
            kind, part = with_biases(kind, part, PLAN.DOWN_TILES, PLAN.UP_TILES)
        passed = pass_on(queue, passed, kind, item, part, expert, row, end, ticket)
        count = fill_task(
            descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows,
            intermediate, bundle, PLAN,
        )  # fmt: skip
        ticket = gl.atomic_add(counters, 1, sem="relaxed")
    pass_on(queue, passed, STOP, 0, 0, 0, 0, 0, 0)
