"""The scheduled backward as one persistent kernel: tickets, integer counters, and the tile functions of `triton`.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

See `amoeba.tasks.triton.backward`, which launches it. The tasks are those of `Graph` and `ShareGraph`; here a tile of
dA' takes its activation back in its epilogue, and ACTIVATE adds up what the tiles of a row left of ds, in their order.

Arguments travel in groups: inputs (dy, x, h, experts and weights of the routing, gate_up, down), between (what lies in
memory between tasks: dh, s·a, parts of ds, ds, dx of the rows), maps and table of the sorted rows; PLAN has all that is
known when the kernel is compiled (`scheduled_backward` makes it).
peers, biases, router: addresses in memory, made by `context` of `Arrival`, `BiasTasks` and `RouterTasks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.combine import combine_tile, slot_gradient_tile
from amoeba.kernels.down_backward import down_backward_tile
from amoeba.kernels.gemm_tiles import multiply_tile
from amoeba.kernels.launch import quick
from amoeba.kernels.weight_gradient import weight_gradient_tile
from amoeba.tasks.triton.arrivals import (
    COMES,
    FIRST_LOCAL,
    MOST_TOKENS,
    RANK,
    SENDS,
    local_tiles_first,
    number,
    numbers_at,
    room_for_sums,
    send_block,
    wait_for_received,
    wait_for_rows,
)
from amoeba.tasks.triton.bias_tasks import add_bias_dots, sum_bias_columns
from amoeba.tasks.triton.router_tasks import gate_columns, router_block
from amoeba.tasks.triton.tickets import (
    ACTIVATE,
    COMBINE,
    DOWN,
    DOWN_BIAS,
    DOWN_WEIGHTS,
    ROUTER,
    ROUTER_WEIGHTS,
    SEND,
    UP,
    UP_BIAS,
    count_tickets,
    decode_router,
    decode_send,
    decode_ticket,
    note_task,
    now,
    rows_of_row_tile,
    with_biases,
)


@triton.jit
def _wait(counter, at_least):
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < at_least:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _least(counters, owned, complete):
    seen = tl.atomic_add(counters, 0, mask=owned, sem="acquire")
    return tl.min(tl.where(owned, seen, complete), 0)


@triton.jit
def _signal(counter):
    tl.debug_barrier()  # what all threads of the program have written comes before
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _task_of(ticket, sends, end, table, peers, PLAN: tl.constexpr):
    """Kind, item and part. end: of the tickets before the router's."""
    heaviest_E, first_tile, _ = table
    kind, item, part = decode_ticket(
        tl.minimum(tl.maximum(ticket - sends, 0), end - sends - 1), tl.arange(0, PLAN.BLOCK_G), heaviest_E, first_tile,
        PLAN.EXPERTS, PLAN.TN, PLAN.TNX, PLAN.DOWN_PARTS, PLAN.UP_PARTS, PLAN.TOKEN_BLOCKS, PLAN.WAVE, PLAN.WAVES,
        PLAN.LATE, PLAN.BEHIND, PLAN.GROUP,
    )  # fmt: skip
    if PLAN.BIASES.OF_DOWN | PLAN.BIASES.OF_GATE_UP:
        kind, part = with_biases(kind, part, PLAN.DOWN_BIAS_FROM, PLAN.UP_BIAS_FROM)
    if PLAN.ROUTER.PARTS > 0:  # noqa: SIM102 - known when it is compiled, unlike the next
        if ticket >= end:
            kind, item, part = decode_router(ticket - end, PLAN.TOKEN_BLOCKS)
    if PLAN.RANKS > 1:
        if ticket < sends:
            kind, item, part = decode_send(
                ticket, number(peers, MOST_TOKENS), number(peers, RANK), PLAN.SENT, PLAN.RANKS
            )
        elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
            first_local = numbers_at(peers, FIRST_LOCAL, tl.int32)
            item = local_tiles_first(
                item, tl.arange(0, PLAN.BLOCK_E), first_tile, first_local, first_local + PLAN.EXPERTS, PLAN.EXPERTS,
                PLAN.WAVE,
            )  # fmt: skip
    return kind, item, part


@triton.jit
def _pass_gates(kind, item, expert_TK, maps, table, counters, peers, tokens, rows, PLAN: tl.constexpr):
    """Waits until the task may begin. Expert, first row and end of the rows, of tasks that have them."""
    order_N, slot_row_N, offs_E = maps
    heaviest_E, first_tile, place_E = table
    row_counters = counters + 1 + PLAN.EXPERTS
    expert, row, row_end = item, 0 * item, 0 * item
    if kind == COMBINE:
        slot, inside = _slots_of(item, tokens, PLAN)
        slot_row = tl.load(slot_row_N + slot, mask=inside, other=rows)
        owned = slot_row < rows
        expert_of = tl.load(expert_TK + slot, mask=owned, other=0)
        start = tl.load(offs_E + expert_of - 1, mask=owned & (expert_of > 0), other=0)
        place = tl.load(place_E + expert_of, mask=owned, other=0)
        tile = tl.load(first_tile + place, mask=owned, other=0) + (slot_row - start) // PLAN.BLOCK_M
        complete: tl.constexpr = PLAN.TN + 1 + PLAN.TNX
        # a number and no tensor from turn to turn: with that the compiler of Triton 3.6 fails
        least = _least(row_counters + tile, owned, complete)
        while least < complete:
            least = _least(row_counters + tile, owned, complete)
        tl.debug_barrier()
        if PLAN.RANKS > 1:
            token_M = item * PLAN.TOKENS + tl.arange(0, PLAN.TOKENS)
            wait_for_received(
                peers, item, token_M, tokens, PLAN.SENT, PLAN.TOKENS, PLAN.RANKS, PLAN.TAKERS, PLAN.ON_GPU
            )
    elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
        places = tl.arange(0, PLAN.BLOCK_E)
        expert, row, row_end = rows_of_row_tile(
            item, places, offs_E, heaviest_E, first_tile, PLAN.EXPERTS, PLAN.BLOCK_M
        )
        if kind == ACTIVATE:
            _wait(row_counters + item, PLAN.TN)
        elif kind == UP:
            _wait(row_counters + item, PLAN.TN + 1)
        elif PLAN.RANKS > 1:
            row_M = row + tl.arange(0, PLAN.BLOCK_M)
            wanted_M = row_M < row_end
            token_M = tl.load(order_N + row_M, mask=wanted_M, other=0) // PLAN.TOP_K
            wait_for_rows(peers, token_M, wanted_M, PLAN.SENT, PLAN.ON_GPU)
    elif (kind == ROUTER) | (kind == ROUTER_WEIGHTS):
        if PLAN.ROUTER.PARTS > 0:  # of each block of tokens, and behind them how many blocks the router is through with
            place = tl.where(kind == ROUTER, item, PLAN.TOKEN_BLOCKS)
            _wait(counters + PLAN.TOKEN_COUNTERS + place, tl.where(kind == ROUTER, 1, PLAN.TOKEN_BLOCKS))
    elif kind != SEND:
        row_end = tl.load(offs_E + item)
        row = tl.load(offs_E + item - 1, mask=item > 0, other=0)
        _wait(counters + 1 + item, (row_end - row + PLAN.BLOCK_M - 1) // PLAN.BLOCK_M)
    return expert, row, row_end


@triton.jit
def _slots_of(block, tokens, PLAN: tl.constexpr):
    """Of a block of tokens, and which of them there are."""
    slot = block.to(tl.int64) * (PLAN.TOKENS * PLAN.TOP_K) + tl.arange(0, PLAN.SLOTS)
    return slot, (tl.arange(0, PLAN.SLOTS) < PLAN.TOKENS * PLAN.TOP_K) & (slot < tokens * PLAN.TOP_K)


@triton.jit
def _combine(block, ds_N, dx_NH, slot_row_N, d_x, d_weight, peers, tokens, rows, PLAN: tl.constexpr):
    slot, inside = _slots_of(block, tokens, PLAN)
    slot_gradient_tile(slot, inside, ds_N, slot_row_N, None, d_weight, rows)
    COLUMN_BLOCKS: tl.constexpr = (PLAN.H + PLAN.SUMS.BLOCK - 1) // PLAN.SUMS.BLOCK
    sums = d_x
    if PLAN.RANKS > 1:  # straight to the rank whose tokens they are, where they came from
        address = room_for_sums(peers, block, d_x, PLAN.TOKENS, PLAN.H)
        sums = address.to(tl.pointer_type(d_x.dtype.element_ty))
        if PLAN.ALIGNED:
            sums = tl.multiple_of(sums, 16)
        comes_R = numbers_at(peers, COMES, tl.uint8)
    first_token = block.to(tl.int64) * PLAN.TOKENS
    for index in range(0, tl.minimum(tokens - block * PLAN.TOKENS, PLAN.TOKENS) * COLUMN_BLOCKS):
        token = first_token + index // COLUMN_BLOCKS
        if PLAN.RANKS > 1:
            if tl.load(comes_R + token) != 0:
                combine_tile(token, index % COLUMN_BLOCKS, dx_NH, slot_row_N, None, sums, None, rows, PLAN.SUMS)
        else:
            combine_tile(token, index % COLUMN_BLOCKS, dx_NH, slot_row_N, None, sums, None, rows, PLAN.SUMS)


@triton.jit
def _row_tile(kind, part, expert, row, row_end, inputs, between, order_N, biases, rows, PLAN: tl.constexpr):
    """DOWN, ACTIVATE or UP."""
    dy_TH, _, h_NJ, _, weight_TK, gate_up_EJH, down_EHI = inputs
    dh_NJ, scaled_a_NI, part_CN, ds_N, dx_NH = between
    if kind == DOWN:
        down_backward_tile(
            expert, row, row_end, part, dy_TH, down_EHI, h_NJ, weight_TK, dh_NJ, scaled_a_NI, part_CN, order_N, rows,
            PLAN.DOWN_PRODUCT, PLAN.ACTIVATION,
        )  # fmt: skip
    elif kind == ACTIVATE:
        row_M = row + tl.arange(0, PLAN.BLOCK_M)
        valid_M = row_M < row_end
        ds_M = tl.zeros((PLAN.BLOCK_M,), dtype=tl.float32)
        for column in tl.static_range(PLAN.TN):
            ds_M += tl.load(part_CN + column * rows.to(tl.int64) + row_M, mask=valid_M, other=0.0)
        tl.store(ds_N + row_M, ds_M, mask=valid_M)
        if PLAN.BIASES.OF_DOWN:
            tl.debug_barrier()
            add_bias_dots(biases, expert, row, row_end, dy_TH, ds_N, order_N, PLAN)
    else:
        multiply_tile(
            expert, row, row_end, part, dh_NJ, gate_up_EJH, dx_NH, None, None, None, None, 1.0, PLAN.UP_PRODUCT,
        )  # fmt: skip


@triton.jit
def _weight_tile(kind, expert, part, inputs, between, maps, d_gate_up, d_down, PLAN: tl.constexpr):
    """DOWN_WEIGHTS or UP_WEIGHTS."""
    dy_TH, x_TH, _, _, _, _, _ = inputs
    dh_NJ, scaled_a_NI, _, _, _ = between
    order_N, _, offs_E = maps
    if kind == DOWN_WEIGHTS:
        DOWN_WIDTH: tl.constexpr = (PLAN.I + PLAN.OF_DOWN.BLOCK_N - 1) // PLAN.OF_DOWN.BLOCK_N
        weight_gradient_tile(
            expert, part // DOWN_WIDTH, part % DOWN_WIDTH, dy_TH, scaled_a_NI, offs_E, d_down, None, order_N, None,
            PLAN.OF_DOWN,
        )  # fmt: skip
    else:
        UP_WIDTH: tl.constexpr = (PLAN.H + PLAN.OF_UP.BLOCK_N - 1) // PLAN.OF_UP.BLOCK_N
        weight_gradient_tile(
            expert, part // UP_WIDTH, part % UP_WIDTH, dh_NJ, x_TH, offs_E, d_gate_up, None, None, order_N, PLAN.OF_UP
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["tokens", "rows"])
def backward_kernel(
    dy_TH, x_TH, h_NJ, expert_TK, weight_TK, gate_up_EJH, down_EHI, dh_NJ, scaled_a_NI, part_CN, ds_N, dx_NH,
    d_x, d_weight, d_gate_up, d_down, order_N, slot_row_N, offs_E, heaviest_E, counters, trace, peers, biases, router,
    tokens, rows, PLAN: tl.constexpr,
):  # fmt: skip
    inputs = (dy_TH, x_TH, h_NJ, expert_TK, weight_TK, gate_up_EJH, down_EHI)
    between = (dh_NJ, scaled_a_NI, part_CN, ds_N, dx_NH)
    maps = (order_N, slot_row_N, offs_E)
    first_tile = heaviest_E + PLAN.EXPERTS  # see `make_table`
    table = (heaviest_E, first_tile, first_tile + PLAN.EXPERTS + 1)
    total = count_tickets(
        first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, PLAN.DOWN_PARTS, PLAN.UP_PARTS, PLAN.TOKEN_BLOCKS
    )
    sends = 0 * total
    if PLAN.RANKS > 1:
        sends = number(peers, SENDS)
    end = total + sends
    total = end
    if PLAN.ROUTER.PARTS > 0:
        total += PLAN.TOKEN_BLOCKS + PLAN.ROUTER.PARTS
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < total:
        next_ticket = tl.atomic_add(counters, 1, sem="relaxed")  # on its way while this task is computed
        kind, item, part = _task_of(ticket, sends, end, table, peers, PLAN)
        if trace is not None:
            came = now(trace, PLAN.INTERPRETED)
        expert, row, row_end = _pass_gates(kind, item, expert_TK, maps, table, counters, peers, tokens, rows, PLAN)
        if trace is not None:
            started = now(trace, PLAN.INTERPRETED)
        if kind == COMBINE:
            _combine(item, ds_N, dx_NH, slot_row_N, d_x, d_weight, peers, tokens, rows, PLAN)
            if PLAN.ROUTER.PARTS > 0:
                _signal(counters + PLAN.TOKEN_COUNTERS + item)
        elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
            _row_tile(kind, part, expert, row, row_end, inputs, between, order_N, biases, rows, PLAN)
            _signal(counters + 1 + PLAN.EXPERTS + item)
            if kind == ACTIVATE:
                _signal(counters + 1 + expert)
        elif kind == SEND:
            if PLAN.RANKS > 1:
                send_block(peers, item, part, dy_TH, PLAN)
        elif (kind == DOWN_BIAS) | (kind == UP_BIAS):
            if PLAN.BIASES.OF_DOWN | PLAN.BIASES.OF_GATE_UP:
                sum_bias_columns(biases, kind, item, part, row, row_end, dy_TH, dh_NJ, weight_TK, order_N, PLAN)
        elif (kind == ROUTER) | (kind == ROUTER_WEIGHTS):
            if PLAN.ROUTER.PARTS > 0:
                if kind == ROUTER:
                    router_block(router, item, d_x, d_weight, tokens, PLAN.TOKENS, PLAN.H, PLAN.ROUTER)
                    _signal(counters + PLAN.TOKEN_COUNTERS + PLAN.TOKEN_BLOCKS)
                else:
                    gate_columns(router, part, x_TH, tokens, PLAN.H, PLAN.ROUTER)
        else:
            _weight_tile(kind, item, part, inputs, between, maps, d_gate_up, d_down, PLAN)
        if trace is not None:
            note_task(trace, ticket, kind, item, part, came, started, PLAN.INTERPRETED)
        ticket = next_ticket
