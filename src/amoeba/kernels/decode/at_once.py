"""Few tokens with all weights of a program in flight at once: many small programs, none with a loop over the weights.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    up_at_once(problem, chosen, ranks)(x_TH, expert_TK, gate_up_EJH, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_at_once(problem, chosen, ranks)(a_NI, expert_TK, weight_TK, down_EHI, bias_EH, low_NR, b_EHR, y_TH)

What a program reads of the weights fits in its registers. The down projection asks for its weights before it looks at
`a`; on Hopper its launch may begin while the one that computes `a` still runs (`chosen.overlap`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.core.problem import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.activation import constants
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, load_b, rounded, times_low
from amoeba.kernels.decode.tiles import load_tile, product_alone
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick


def up_at_once(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    tile, activation = chosen.up, problem.weights.activation
    if tile.depth < hidden:
        raise bad_value("tile", f"a depth of {hidden} or more, whole rows of the weights", tile, "decode by slot")
    return _up_at_once.fixed(
        (problem.rows * cdiv(intermediate, tile.columns),),
        (*problem.weights.gate_up_EJH.stride(), num_experts, hidden, intermediate, problem.expert_TK.shape[1]),
        BLOCK_I=tile.columns,
        BLOCK_H=tile.depth,
        HAS_BIAS=problem.weights.gate_up_bias_EJ is not None,
        EVEN_I=intermediate % tile.columns == 0,
        EVEN_H=hidden == tile.depth,
        INTERLEAVED=activation.interleaved,
        OVERLAP=chosen.overlap,
        **ranks.of_up,
        **constants(activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap and ranks.any_up else {}),
    )


def down_at_once(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    (tokens, top_k), tile = problem.expert_TK.shape, chosen.down
    return _down_at_once.fixed(
        (tokens * cdiv(hidden, tile.columns),),
        (*problem.weights.down_EHI.stride(), num_experts, hidden, intermediate),
        K=top_k,
        SLOTS=next_power_of_2(top_k),
        BLOCK_H=tile.columns,
        BLOCK_I=tile.depth,
        PIECES=cdiv(intermediate, tile.depth),
        HAS_BIAS=problem.weights.down_bias_EH is not None,
        OVERLAP=chosen.overlap,
        RANK=ranks.down,
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


@quick
@triton.jit
def _up_at_once(
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
    blocks = tl.cdiv(I, BLOCK_I)
    slot = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    expert = expert.to(tl.int64)
    column_ok = column < I
    h = tl.arange(0, BLOCK_H)
    weights = gate_up_EJH + expert * stride_e + h.to(tl.int64)[None, :] * stride_h
    # rows of W1 that make a column of a: j, and of a gated layer j + apart
    j = 2 * column if GATED and INTERLEAVED else column
    apart = 1 if INTERLEAVED else I
    gate_rows = weights + j.to(tl.int64)[:, None] * stride_j
    gate_tile = load_tile(gate_rows, column_ok, h < H, EVEN_I, EVEN_H, "evict_first")
    if GATED:
        up_rows = weights + (j + apart).to(tl.int64)[:, None] * stride_j
        up_tile = load_tile(up_rows, column_ok, h < H, EVEN_I, EVEN_H, "evict_first")
    if GATE_RANK > 0:
        gate_b = load_b(gate_b_EIR + expert * I * GATE_RANK, column, column_ok, GATE_RANK)
    if UP_RANK > 0:
        up_b = load_b(up_b_EIR + expert * I * UP_RANK, column, column_ok, UP_RANK)
    x = tl.load(x_TH + (slot // K).to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
    J = 2 * I if GATED else I
    gate = tl.sum(gate_tile.to(tl.float32) * x[None, :], axis=1)
    if HAS_BIAS:
        gate += tl.load(bias_EJ + expert * J + j, mask=column_ok, other=0.0).to(tl.float32)
    if GATE_RANK + UP_RANK > 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        low = low_NR + slot.to(tl.int64) * (UP_AT + UP_RANK)
    if GATE_RANK > 0:
        gate += times_low(gate_b, low, GATE_RANK)
    if GATED:
        up = tl.sum(up_tile.to(tl.float32) * x[None, :], axis=1)
        if HAS_BIAS:
            up += tl.load(bias_EJ + expert * J + j + apart, mask=column_ok, other=0.0).to(tl.float32)
        if UP_RANK > 0:
            up += times_low(up_b, low + UP_AT, UP_RANK)
        a = activations.gated(gate, up, KIND, ALPHA, CLAMP, LIMIT, UP_SHIFT)
    else:
        if UP_RANK > 0:
            gate += times_low(up_b, low, UP_RANK)
        a = activations.plain(gate, KIND, ALPHA, CLAMP, LIMIT)
    tl.store(a_NI + slot.to(tl.int64) * I + column, a.to(a_NI.dtype.element_ty), mask=column_ok)


@quick
@triton.jit
def _down_at_once(
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
    SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RANK: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, SLOTS)
    expert = tl.load(expert_TK + token * K + k, mask=k < K, other=-1)
    owned = (expert >= 0) & (expert < E)
    expert = tl.where(owned, expert, 0).to(tl.int64)
    i = tl.arange(0, BLOCK_I)
    rows = down_EHI + (expert[:, None] * stride_e + h.to(tl.int64)[None, :] * stride_h)[:, :, None]
    inside = owned[:, None] & (h < H)[None, :]
    # in pieces, because I need not be near a power of two
    tiles = ()
    for piece in tl.static_range(PIECES):
        here = piece * BLOCK_I + i
        tile = tl.load(
            rows + (here.to(tl.int64) * stride_i)[None, None, :],
            mask=inside[:, :, None] & (here < I)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    scale = tl.load(weight_TK + token * K + k, mask=owned, other=0.0).to(tl.float32)
    bias = tl.zeros((SLOTS, BLOCK_H), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_EH + expert[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        r = tl.arange(0, triton.next_power_of_2(RANK))
        b_rows = b_EHR + ((expert[:, None] * H + h[None, :]) * RANK)[:, :, None]
        b = tl.load(b_rows + r[None, None, :], mask=inside[:, :, None] & (r < RANK)[None, None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    a = a_NI + (token * K + k).to(tl.int64)[:, None] * I
    total = tl.zeros((SLOTS, BLOCK_H, BLOCK_I), tl.float32)
    for piece in tl.static_range(PIECES):
        here = piece * BLOCK_I + i
        value = tl.load(a + here[None, :], mask=owned[:, None] & (here < I)[None, :], other=0.0).to(tl.float32)
        total += tiles[piece].to(tl.float32) * value[:, None, :]
    y_KH = tl.sum(total, axis=2) + bias
    if RANK > 0:
        low_rows = low_NR + ((token * K + k).to(tl.int64) * RANK)[:, None]
        low = tl.load(low_rows + r[None, :], mask=owned[:, None] & (r < RANK)[None, :], other=0.0)
        y_KH += tl.sum(product_alone(rounded(b, low).to(tl.float32), low.to(tl.float32)[:, None, :]), axis=2)
    y = tl.sum(product_alone(y_KH, scale[:, None]), axis=0)
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=h < H)
