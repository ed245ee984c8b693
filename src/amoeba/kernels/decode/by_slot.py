"""Few tokens, slot by slot: a slot's product with its expert is a multiply and add, its weights are read once per slot.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    up_by_slot(problem, chosen, ranks)(x_TH, expert_TK, gate_up_EJH, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_by_token(problem, chosen, ranks)(a_NI, expert_TK, weight_TK, down_EHI, bias_EH, low_NR, b_EHR, y_TH)
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.problem import Problem
from amoeba.kernels.activation import constants
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, halves_of_rows, load_b, times_low
from amoeba.kernels.decode.tiles import activate, load_tile, rows_of_gate_up
from amoeba.kernels.launch import Launch, cdiv, quick


def up_by_slot(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    tile, activation = chosen.up, problem.weights.activation
    return _up_by_slot.fixed(
        (problem.rows * cdiv(intermediate, tile.columns),),
        (*problem.weights.gate_up_EJH.stride(), num_experts, hidden, intermediate, problem.expert_TK.shape[1]),
        BLOCK_I=tile.columns,
        BLOCK_H=tile.depth,
        STAGES=tile.stages,
        HAS_BIAS=problem.weights.gate_up_bias_EJ is not None,
        EVEN_I=intermediate % tile.columns == 0,
        EVEN_H=hidden % tile.depth == 0,
        INTERLEAVED=activation.interleaved,
        OVERLAP=chosen.overlap,
        **ranks.of_up,
        **constants(activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap and ranks.any_up else {}),
    )


def down_by_token(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    (tokens, top_k), tile = problem.expert_TK.shape, chosen.down
    return _down_by_token.fixed(
        (tokens * cdiv(hidden, tile.columns),),
        (*problem.weights.down_EHI.stride(), num_experts, hidden, intermediate),
        K=top_k,
        BLOCK_H=tile.columns,
        BLOCK_I=tile.depth,
        STAGES=tile.stages,
        HAS_BIAS=problem.weights.down_bias_EH is not None,
        EVEN_H=hidden % tile.columns == 0,
        RANK=ranks.down,
        num_warps=tile.warps,
    )


@quick
@triton.jit
def _up_by_slot(
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
    K,
    BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    if OVERLAP:  # programs of the next launch may take the place of those of this one that are done
        tl.extra.cuda.gdc_launch_dependents()
    WEIGHT_ROWS: tl.constexpr = 2 * BLOCK_I if GATED else BLOCK_I
    blocks = tl.cdiv(I, BLOCK_I)
    slot = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK_I
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    expert = expert.to(tl.int64)
    j, row_ok = rows_of_gate_up(first, I, GATED, INTERLEAVED, BLOCK_I)
    depth = tl.arange(0, BLOCK_H)
    x = x_TH + (slot // K).to(tl.int64) * H
    weights = gate_up_EJH + expert * stride_e + j.to(tl.int64)[:, None] * stride_j

    # summed across threads once, after the loop
    total = tl.zeros((WEIGHT_ROWS, BLOCK_H), tl.float32)
    for k in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        here = k + depth
        tile = load_tile(
            weights + here.to(tl.int64)[None, :] * stride_h, row_ok, here < H, EVEN_I, EVEN_H, "evict_first"
        )
        if EVEN_H:
            value = tl.load(x + here)
        else:
            value = tl.load(x + here, mask=here < H, other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)[None, :]
    h = tl.sum(total, axis=1, keep_dims=True)
    if HAS_BIAS:
        J = 2 * I if GATED else I
        h += tl.load(bias_EJ + expert * J + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    if GATE_RANK + UP_RANK > 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        low = low_NR + slot.to(tl.int64) * (UP_AT + UP_RANK)
        part, gate_ok, up_ok = halves_of_rows(j, row_ok, I, GATED, INTERLEAVED)
        if GATE_RANK > 0:
            gate_b = load_b(gate_b_EIR + expert * I * GATE_RANK, part, gate_ok, GATE_RANK)
            h += times_low(gate_b, low, GATE_RANK)[:, None]
        if UP_RANK > 0:
            up_b = load_b(up_b_EIR + expert * I * UP_RANK, part, up_ok, UP_RANK)
            h += times_low(up_b, low + UP_AT, UP_RANK)[:, None]
    a = activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, BLOCK_I, 1)
    column = first + tl.arange(0, BLOCK_I)[:, None]
    tl.store(a_NI + slot.to(tl.int64) * I + column, a.to(a_NI.dtype.element_ty), mask=column < I)


@quick
@triton.jit
def _down_by_token(
    a_NI,
    expert_TK,
    weight_TK,
    down_EHI,
    bias_EH,
    low_NR,
    b_EHR,
    y_TH,
    stride_e,
    stride_h,
    stride_i,
    E,
    H,
    I,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_H: tl.constexpr,
    RANK: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok = h < H
    depth = tl.arange(0, BLOCK_I)
    rows = down_EHI + h.to(tl.int64)[:, None] * stride_h
    steps = tl.cdiv(I, BLOCK_I)

    total = tl.zeros((BLOCK_H, BLOCK_I), tl.float32)
    beside = tl.zeros((BLOCK_H,), tl.float32)  # what is not summed over I: bias, LoRA
    # one loop over k and the steps of each, so that it can run ahead from one expert into the next
    for step in tl.range(0, K * steps, num_stages=STAGES):
        slot = token * K + step // steps
        i = (step % steps) * BLOCK_I + depth
        expert = tl.load(expert_TK + slot)
        owned = (expert >= 0) & (expert < E)
        expert = expert.to(tl.int64)
        scale = tl.where(owned, tl.load(weight_TK + slot).to(tl.float32), 0.0)  # a sentinel's weight may be NaN
        depth_ok = i < tl.where(owned, I, 0)
        pointers = rows + expert * stride_e + i.to(tl.int64)[None, :] * stride_i
        tile = load_tile(pointers, row_ok, depth_ok, EVEN_H, False, "evict_first")
        a = tl.load(a_NI + slot.to(tl.int64) * I + i, mask=depth_ok, other=0.0)
        total += tile.to(tl.float32) * (a.to(tl.float32) * scale)[None, :]
        once_ok = h < tl.where(owned & (step % steps == 0), H, 0)
        if HAS_BIAS:
            beside += tl.load(bias_EH + expert * H + h, mask=once_ok, other=0.0).to(tl.float32) * scale
        if RANK > 0:
            b = load_b(b_EHR + expert * H * RANK, h, once_ok, RANK)
            low = low_NR + slot.to(tl.int64) * RANK
            beside += times_low(b, low, tl.where(owned, RANK, 0)) * scale
    y = tl.sum(total, axis=1) + beside
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=row_ok)
