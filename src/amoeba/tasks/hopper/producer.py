"""The producer of the kernel for Hopper: draws tickets, waits at gates, passes tasks on and fills their stages.

See `amoeba.tasks.hopper.kernel`. On one rank tasks come from a list (`amoeba.tasks.hopper.task_list`). Between two
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from amoeba.kernels.hopper.gemm_kernel import fill_product, row_pointers
from amoeba.tasks.hopper.products import fill_gradients
from amoeba.tasks.hopper.queue import (
    BLOCK_K,
    BLOCK_M,
    HALF,
    STOP,
    draw,
    drawn_ticket,
    pass_on,
    wait,
    wait_for_block,
    wait_for_tile,
    wait_for_tokens,
    wait_per_thread,
)
from amoeba.tasks.hopper.row_passes import fill_lines, fill_tokens
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
    DOWN_WEIGHTS,
    SEND,
    UP,
    UP_WEIGHTS,
    count_tickets,
    decode_send,
    decode_ticket,
    rows_of_row_tile,
)


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
        first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, gl.cdiv(PLAN.DOWN_TILES, bundle), gl.cdiv(PLAN.UP_TILES, bundle),
        token_blocks,
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
    total = count_tickets(first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, PLAN.DOWN_TILES, PLAN.UP_TILES, token_blocks)
    sends = number(peers, SENDS)
    total += sends
    count = 0
    passed = 0
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    while ticket < total:
        kind, item, part = decode_ticket(
            gl.maximum(ticket - sends, 0), wave_G, heaviest_E, first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX,
            PLAN.DOWN_TILES, PLAN.UP_TILES, token_blocks, wave, gl.cdiv(PLAN.EXPERTS, wave), late, behind, PLAN.GROUP,
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
        passed = pass_on(queue, passed, kind, item, part, expert, row, end, ticket)
        count = fill_task(
            descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows,
            intermediate, bundle, PLAN,
        )  # fmt: skip
        ticket = gl.atomic_add(counters, 1, sem="relaxed")
    pass_on(queue, passed, STOP, 0, 0, 0, 0, 0, 0)
