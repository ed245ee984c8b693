"""Few tokens, expert by expert: a program computes all slots of its expert, so that a weight is read once.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    up_by_expert(problem, chosen, ranks)(x_TH, expert_TK, gate_up_EJH, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_by_expert(problem, chosen, ranks)(a_NI, expert_TK, down_EHI, bias_EH, low_NR, b_EHR, y_NH)
    sum_of_slots(problem)(y_NH, expert_TK, weight_TK, y_TH)

Every program reads all N expert ids and finds the slots of its expert itself, in chunks of `chosen.rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.problem import Problem
from amoeba.kernels.activation import constants
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, add_low_rank, add_low_rank_of_gate_up
from amoeba.kernels.decode.tiles import activate, load_tile, rows_of_gate_up
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick

# A program by expert finds its chunk's slots by comparing ranks with ids, this many pairs at once. More take registers
# from the products, and with them programs from an SM: by Triton 3.6's compiler for sm_90, 16 ranks x 512 ids need 180
# registers, 16 x 256 need 90, 64 x 256 need 243, 64 x 64 need 168.
RANKS_TIMES_IDS = 4096
# Elements of the K rows that a program of the summing launch reads. Not measured yet.
COMBINE_TILE = 2048


def up_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    slots, tile, activation = problem.rows, chosen.up, problem.weights.activation
    return _up_by_expert.fixed(
        (min(slots, num_experts) * cdiv(intermediate, tile.columns),),
        (
            *problem.weights.gate_up_EJH.stride(),
            num_experts,
            hidden,
            intermediate,
            slots,
            problem.expert_TK.shape[1],
        ),
        OWNER_IS_EXPERT=num_experts <= slots,
        BLOCK_N=next_power_of_2(slots),
        PIECE=min(RANKS_TIMES_IDS // chosen.rows, next_power_of_2(slots)),
        ROWS=chosen.rows,
        BLOCK_I=tile.columns,
        BLOCK_H=tile.depth,
        HAS_BIAS=problem.weights.gate_up_bias_EJ is not None,
        EVEN_I=intermediate % tile.columns == 0,
        EVEN_H=hidden % tile.depth == 0,
        INTERLEAVED=activation.interleaved,
        **ranks.of_up,
        **constants(activation),
        num_stages=tile.stages,
        num_warps=tile.warps,
    )


def down_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    slots, tile = problem.rows, chosen.down
    return _down_by_expert.fixed(
        (min(slots, num_experts) * cdiv(hidden, tile.columns),),
        (*problem.weights.down_EHI.stride(), num_experts, hidden, intermediate, slots),
        OWNER_IS_EXPERT=num_experts <= slots,
        BLOCK_N=next_power_of_2(slots),
        PIECE=min(RANKS_TIMES_IDS // chosen.rows, next_power_of_2(slots)),
        ROWS=chosen.rows,
        BLOCK_H=tile.columns,
        BLOCK_I=tile.depth,
        HAS_BIAS=problem.weights.down_bias_EH is not None,
        EVEN_H=hidden % tile.columns == 0,
        EVEN_I=intermediate % tile.depth == 0,
        RANK=ranks.down,
        num_stages=tile.stages,
        num_warps=tile.warps,
    )


def sum_of_slots(problem: Problem, overlap: bool = False) -> Launch:
    """overlap: its programs begin while those of the down projection end."""
    (tokens, top_k), (num_experts, hidden, _) = problem.expert_TK.shape, problem.weights.down_EHI.shape
    block_k = next_power_of_2(top_k)
    columns = min(max(COMBINE_TILE // block_k, 16), next_power_of_2(hidden))
    return _sum_of_slots.fixed(
        (tokens * cdiv(hidden, columns),),
        (num_experts, hidden, top_k),
        BLOCK_K=block_k,
        BLOCK_H=columns,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def my_expert(expert_TK, owner, N, E, OWNER_IS_EXPERT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The expert that this program computes, and how many slots it has; 0 where there is nothing to do.

    Among the slots that name the same expert it is the first one's programs that compute it.
    """
    index_N = tl.arange(0, BLOCK_N)
    expert_N = tl.load(expert_TK + index_N, mask=index_N < N, other=-1)
    if OWNER_IS_EXPERT:
        mine = owner.to(tl.int64)
        count = tl.sum((expert_N == mine).to(tl.int32), axis=0)
    else:
        mine = tl.load(expert_TK + owner).to(tl.int64)
        match_N = (expert_N == mine).to(tl.int32)
        earlier = tl.sum(tl.where(index_N < owner, match_N, 0), axis=0)
        count = tl.where((mine >= 0) & (mine < E) & (earlier == 0), tl.sum(match_N, axis=0), 0)
    return mine, count


@triton.jit
def slots_of_chunk(expert_TK, expert, first_rank, N, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """The slots of the expert's ranks first_rank .. first_rank + ROWS; 0 for ranks past the last."""
    wanted = first_rank + tl.arange(0, ROWS)
    slot = tl.zeros((ROWS,), tl.int32)
    before = 0
    for start in range(0, N, PIECE):
        index = start + tl.arange(0, PIECE)
        match = (tl.load(expert_TK + index, mask=index < N, other=-1) == expert).to(tl.int32)
        rank = tl.where(match == 1, before + tl.cumsum(match, axis=0) - 1, -1)
        slot += tl.sum(tl.where(rank[None, :] == wanted[:, None], index[None, :], 0), axis=1)
        before += tl.sum(match, axis=0)
    return slot


@quick
@triton.jit(do_not_specialize=["N"])  # else a batch that grows by a token may compile again
def _up_by_expert(
    x_TH,
    expert_TK,
    gate_up_EJH,
    bias_EJ,
    low_NR,
    gate_b_EIR,
    up_b_EIR,
    a_NI,
    stride_e,
    stride_j,
    stride_h,
    E,
    H,
    I,
    N,
    K,
    OWNER_IS_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    UP_AT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
):
    WEIGHT_ROWS: tl.constexpr = 2 * BLOCK_I if GATED else BLOCK_I
    blocks = tl.cdiv(I, BLOCK_I)
    first = (tl.program_id(0) % blocks) * BLOCK_I
    expert, count = my_expert(expert_TK, tl.program_id(0) // blocks, N, E, OWNER_IS_EXPERT, BLOCK_N)
    if count == 0:
        return
    j, row_ok = rows_of_gate_up(first, I, GATED, INTERLEAVED, BLOCK_I)
    column = first + tl.arange(0, BLOCK_I)
    depth = tl.arange(0, BLOCK_H)
    weights = gate_up_EJH + expert * stride_e + j.to(tl.int64)[:, None] * stride_j
    for first_rank in range(0, count, ROWS):
        slot = slots_of_chunk(expert_TK, expert, first_rank, N, ROWS, PIECE)
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        x = x_TH + (slot // K).to(tl.int64)[:, None] * H
        h = tl.zeros((WEIGHT_ROWS, ROWS), tl.float32)
        for k in range(0, H, BLOCK_H):
            here = k + depth
            tile = load_tile(weights + here.to(tl.int64)[None, :] * stride_h, row_ok, here < H, EVEN_I, EVEN_H, "")
            value = load_tile(x + here[None, :], slot_ok, here < H, False, EVEN_H, "")
            h = tl.dot(tile, tl.trans(value), h, input_precision="ieee")
        if HAS_BIAS:
            J = 2 * I if GATED else I
            h += tl.load(bias_EJ + expert * J + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if GATE_RANK + UP_RANK > 0:
            low_S = low_NR + slot.to(tl.int64) * (UP_AT + UP_RANK)
            h = add_low_rank_of_gate_up(
                h, gate_b_EIR, up_b_EIR, expert, j, row_ok, low_S, slot_ok, I, GATED, INTERLEAVED, GATE_RANK, UP_RANK,
                UP_AT,
            )  # fmt: skip
        a = activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, BLOCK_I, ROWS)
        tl.store(
            a_NI + slot.to(tl.int64)[None, :] * I + column[:, None],
            a.to(a_NI.dtype.element_ty),
            mask=slot_ok[None, :] & (column < I)[:, None],
        )


@quick
@triton.jit(do_not_specialize=["N"])  # else a batch that grows by a token may compile again
def _down_by_expert(
    a_NI,
    expert_TK,
    down_EHI,
    bias_EH,
    low_NR,
    b_EHR,
    y_NH,
    stride_e,
    stride_h,
    stride_i,
    E,
    H,
    I,
    N,
    OWNER_IS_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_H: tl.constexpr,
    EVEN_I: tl.constexpr,
    RANK: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK_H)
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    expert, count = my_expert(expert_TK, tl.program_id(0) // blocks, N, E, OWNER_IS_EXPERT, BLOCK_N)
    row_ok = h < H
    depth = tl.arange(0, BLOCK_I)
    if count == 0:
        return
    weights = down_EHI + expert * stride_e + h.to(tl.int64)[:, None] * stride_h
    for first_rank in range(0, count, ROWS):
        slot = slots_of_chunk(expert_TK, expert, first_rank, N, ROWS, PIECE).to(tl.int64)
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        a = a_NI + slot[:, None] * I
        y = tl.zeros((BLOCK_H, ROWS), tl.float32)
        for k in range(0, I, BLOCK_I):
            here = k + depth
            tile = load_tile(weights + here.to(tl.int64)[None, :] * stride_i, row_ok, here < I, EVEN_H, EVEN_I, "")
            value = load_tile(a + here[None, :], slot_ok, here < I, False, EVEN_I, "")
            y = tl.dot(tile, tl.trans(value), y, input_precision="ieee")
        if HAS_BIAS:
            y += tl.load(bias_EH + expert * H + h, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if RANK > 0:
            y = add_low_rank(y, b_EHR + expert * H * RANK, h, row_ok, low_NR + slot * RANK, slot_ok, RANK)
        tl.store(y_NH + slot[None, :] * H + h[:, None], y, mask=slot_ok[None, :] & row_ok[:, None])


@quick
@triton.jit
def _sum_of_slots(
    y_NH,
    expert_TK,
    weight_TK,
    y_TH,
    E,
    H,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_K)
    slot = token * K + k
    expert = tl.load(expert_TK + slot, mask=k < K, other=-1)
    owned = (expert >= 0) & (expert < E)
    scale = tl.load(weight_TK + slot, mask=owned, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    y = tl.load(y_NH + slot.to(tl.int64)[:, None] * H + h[None, :], mask=owned[:, None] & (h < H)[None, :], other=0.0)
    total = tl.sum(y * scale[:, None], axis=0)
    tl.store(y_TH + token.to(tl.int64) * H + h, total.to(y_TH.dtype.element_ty), mask=h < H)
