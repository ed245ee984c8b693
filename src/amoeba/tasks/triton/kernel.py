"""The scheduled backward as one persistent kernel: tickets, integer counters, and the tile functions of `triton`.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

See `amoeba.tasks.triton.backward`, which launches it. The tasks are those of `Graph` and `ShareGraph`; here a tile of
dA' takes its activation back in its epilogue, and ACTIVATE adds up what the tiles of a row left of ds, in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels.activation_backward_product import down_backward_tile
from amoeba.kernels.combine import combine_tile, slot_gradient_tile
from amoeba.kernels.launch import quick
from amoeba.kernels.product_tiles import multiply_tile
from amoeba.kernels.weight_gradient import weight_gradient_tile
from amoeba.tasks.triton.arrivals import room_for_sums, send_block, wait_for_rows
from amoeba.tasks.triton.clock import note_task, now
from amoeba.tasks.triton.local_first import local_tiles_first
from amoeba.tasks.triton.tickets import (
    ACTIVATE,
    COMBINE,
    DOWN,
    DOWN_WEIGHTS,
    SEND,
    UP,
    count_tickets,
    decode_send,
    decode_ticket,
    rows_of_row_tile,
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


@quick
@triton.jit(do_not_specialize=["tokens", "rows", "sent_tokens", "most_tokens", "rank", "limit", "sends"])
def backward_kernel(
    dy_TH,
    x_TH,
    h_NJ,
    expert_TK,
    weight_TK,
    gate_up_EJH,
    down_EHI,
    dh_NJ,
    scaled_a_NI,
    part_CN,
    ds_N,
    dx_NH,
    d_x,
    d_weight,
    d_gate_up,
    d_down,
    order_N,
    slot_row_N,
    offs_E,
    heaviest_E,
    first_tile,
    place_E,
    counters,
    trace,
    tokens,
    rows,
    first_local,
    local_before,
    sent_dy,
    goes_WT,
    addresses,
    epochs,
    trouble,
    record,
    cell_at,
    cell_size,
    flags_at,
    flags_size,
    comes_R,
    sums_at,
    sums_size,
    sent_tokens,
    most_tokens,
    rank,
    limit,
    sends,
    H: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TN: tl.constexpr,
    TNX: tl.constexpr,
    DOWN_PARTS: tl.constexpr,
    UP_PARTS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr,
    WAVE: tl.constexpr,
    WAVES: tl.constexpr,
    LATE: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DOWN_N: tl.constexpr,
    DOWN_K: tl.constexpr,
    UP_N: tl.constexpr,
    UP_K: tl.constexpr,
    DOWN_WEIGHTS_M: tl.constexpr,
    DOWN_WEIGHTS_N: tl.constexpr,
    DOWN_WEIGHTS_K: tl.constexpr,
    UP_WEIGHTS_M: tl.constexpr,
    UP_WEIGHTS_N: tl.constexpr,
    UP_WEIGHTS_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COMBINE_BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    RANKS: tl.constexpr,
    SENT: tl.constexpr,
    SEND_T: tl.constexpr,
    SEND_H: tl.constexpr,
    ALIGNED: tl.constexpr,
    TAKERS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    expert_counters = counters + 1
    row_counters = expert_counters + EXPERTS
    total = sends + count_tickets(first_tile, EXPERTS, TN, TNX, DOWN_PARTS, UP_PARTS, TOKEN_BLOCKS)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < total:
        next_ticket = tl.atomic_add(counters, 1, sem="relaxed")  # on its way while this task is computed
        kind, item, part = decode_ticket(
            tl.maximum(ticket - sends, 0),
            tl.arange(0, BLOCK_G),
            heaviest_E,
            first_tile,
            EXPERTS,
            TN,
            TNX,
            DOWN_PARTS,
            UP_PARTS,
            TOKEN_BLOCKS,
            WAVE,
            WAVES,
            LATE,
            BEHIND,
            GROUP,
        )
        if RANKS > 1:
            if ticket < sends:
                kind, item, part = decode_send(ticket, most_tokens, rank, SENT, RANKS)
            elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
                item = local_tiles_first(
                    item, tl.arange(0, BLOCK_E), first_tile, first_local, local_before, EXPERTS, WAVE
                )
        if trace is not None:
            came = now(trace, INTERPRETED)
            started = came
        if kind == COMBINE:
            slot = item.to(tl.int64) * (TOKENS * TOP_K) + tl.arange(0, SLOTS)
            inside = (tl.arange(0, SLOTS) < TOKENS * TOP_K) & (slot < tokens * TOP_K)
            row = tl.load(slot_row_N + slot, mask=inside, other=rows)
            owned = row < rows
            expert = tl.load(expert_TK + slot, mask=owned, other=0)
            start = tl.load(offs_E + expert - 1, mask=owned & (expert > 0), other=0)
            place = tl.load(place_E + expert, mask=owned, other=0)
            tile = tl.load(first_tile + place, mask=owned, other=0) + (row - start) // BLOCK_M
            complete: tl.constexpr = TN + 1 + TNX
            # a number and no tensor from turn to turn: with that the compiler of Triton 3.6 fails
            least = _least(row_counters + tile, owned, complete)
            while least < complete:
                least = _least(row_counters + tile, owned, complete)
            tl.debug_barrier()
            if RANKS > 1:  # also rows that no expert here reads: the next pass is sent to the same cell
                token_M = item * TOKENS + tl.arange(0, TOKENS)
                wait_for_rows(
                    token_M, token_M < tokens, addresses, epochs, trouble, record, flags_at, flags_size, most_tokens,
                    rank, limit, SENT, ON_GPU,
                )  # fmt: skip
            if trace is not None:
                started = now(trace, INTERPRETED)
            slot_gradient_tile(slot, inside, ds_N, slot_row_N, None, d_weight, rows, False)
            COLUMN_BLOCKS: tl.constexpr = (H + COMBINE_BLOCK - 1) // COMBINE_BLOCK
            first_token = item.to(tl.int64) * TOKENS
            if RANKS > 1:  # straight to the rank whose tokens they are, where they came from
                sums = room_for_sums(
                    item * TOKENS, d_x, addresses, epochs, trouble, record, sums_at, sums_size, most_tokens, rank,
                    limit, H, RANKS, TAKERS, ALIGNED, ON_GPU,
                )  # fmt: skip
            for index in range(0, tl.minimum(tokens - item * TOKENS, TOKENS) * COLUMN_BLOCKS):
                token = first_token + index // COLUMN_BLOCKS
                if RANKS > 1:
                    if tl.load(comes_R + token) != 0:
                        combine_tile(
                            token, index % COLUMN_BLOCKS, dx_NH, slot_row_N, None, sums, rows, TOP_K, H, H, H,
                            False, AT_ONCE, COMBINE_BLOCK,
                        )  # fmt: skip
                else:
                    combine_tile(
                        token, index % COLUMN_BLOCKS, dx_NH, slot_row_N, None, d_x, rows, TOP_K, H, H, H,
                        False, AT_ONCE, COMBINE_BLOCK,
                    )  # fmt: skip
        elif (kind == DOWN) | (kind == ACTIVATE) | (kind == UP):
            places = tl.arange(0, BLOCK_E)
            expert, row, row_end = rows_of_row_tile(item, places, offs_E, heaviest_E, first_tile, EXPERTS, BLOCK_M)
            if kind == DOWN:
                if RANKS > 1:
                    row_M = row + tl.arange(0, BLOCK_M)
                    wanted_M = row_M < row_end
                    token_M = tl.load(order_N + row_M, mask=wanted_M, other=0) // TOP_K
                    wait_for_rows(
                        token_M, wanted_M, addresses, epochs, trouble, record, flags_at, flags_size, most_tokens, rank,
                        limit, SENT, ON_GPU,
                    )  # fmt: skip
                    if trace is not None:
                        started = now(trace, INTERPRETED)
                down_backward_tile(
                    expert, row, row_end, part, dy_TH, down_EHI, h_NJ, weight_TK, dh_NJ, scaled_a_NI, part_CN,
                    order_N, rows, H, 1, H * I, I, 1, J, J, I, H, I, TOP_K, INTERLEAVED, SLICES, KIND, GATED,
                    ALPHA, CLAMP, LIMIT, UP_SHIFT, BLOCK_M, DOWN_N, DOWN_K,
                )  # fmt: skip
            elif kind == ACTIVATE:
                _wait(row_counters + item, TN)
                if trace is not None:
                    started = now(trace, INTERPRETED)
                row_M = row + tl.arange(0, BLOCK_M)
                valid_M = row_M < row_end
                ds_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
                for column in tl.static_range(TN):
                    ds_M += tl.load(part_CN + column * rows.to(tl.int64) + row_M, mask=valid_M, other=0.0)
                tl.store(ds_N + row_M, ds_M, mask=valid_M)
            else:
                _wait(row_counters + item, TN + 1)
                if trace is not None:
                    started = now(trace, INTERPRETED)
                multiply_tile(
                    expert, row, row_end, part, dh_NJ, gate_up_EJH, dx_NH, None, None, None, None, 1.0, J, 1,
                    J * H, H, 1, H, 0, 0, 0, 0, 0, J, H, 0, False, TOP_K, BLOCK_M, UP_N, UP_K,
                )  # fmt: skip
            _signal(row_counters + item)
            if kind == ACTIVATE:
                _signal(expert_counters + expert)
        elif kind == SEND:
            if RANKS > 1:
                send_block(
                    item, part, sent_dy, goes_WT, addresses, epochs, trouble, record, cell_at, cell_size, flags_at,
                    flags_size, sent_tokens, rank, limit, H, RANKS, SENT, SEND_T, SEND_H, ALIGNED, TAKERS, ON_GPU,
                )  # fmt: skip
        else:
            end = tl.load(offs_E + item)
            start = tl.load(offs_E + item - 1, mask=item > 0, other=0)
            _wait(expert_counters + item, (end - start + BLOCK_M - 1) // BLOCK_M)
            if trace is not None:
                started = now(trace, INTERPRETED)
            if kind == DOWN_WEIGHTS:
                DOWN_WIDTH: tl.constexpr = (I + DOWN_WEIGHTS_N - 1) // DOWN_WEIGHTS_N
                weight_gradient_tile(
                    item, part // DOWN_WIDTH, part % DOWN_WIDTH, dy_TH, scaled_a_NI, offs_E, d_down, None, order_N,
                    None, H, 1, I, 1, H * I, I, 1, 0, 0, 0, H, H, I, TOP_K, DOWN_WEIGHTS_M, DOWN_WEIGHTS_N,
                    DOWN_WEIGHTS_K,
                )  # fmt: skip
            else:
                UP_WIDTH: tl.constexpr = (H + UP_WEIGHTS_N - 1) // UP_WEIGHTS_N
                weight_gradient_tile(
                    item, part // UP_WIDTH, part % UP_WIDTH, dh_NJ, x_TH, offs_E, d_gate_up, None, None, order_N,
                    J, 1, H, 1, J * H, H, 1, 0, 0, 0, J, J, H, TOP_K, UP_WEIGHTS_M, UP_WEIGHTS_N, UP_WEIGHTS_K,
                )  # fmt: skip
        if trace is not None:
            note_task(trace, ticket, kind, item, part, came, started, INTERPRETED)
        ticket = next_ticket
