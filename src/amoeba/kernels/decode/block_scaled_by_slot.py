"""Few tokens through block-scaled experts, slot by slot, with all codes of a program in flight at once.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    codes = data, scales, matrix_scale
    up_by_slot(problem, chosen, ranks)(x_TH, expert_TK, *codes, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_by_token(problem, chosen, ranks)(a_NI, expert_TK, weight_TK, *codes, bias_EH, low_NR, b_EHR, y_TH)

As `at_once`: a product is a multiply and add in fp32, a row is read in pieces. Numbers are added up within 16 bytes of
codes before their scale is applied. The down projection asks for its codes, and for B, before it looks at `a`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.problem import Problem
from amoeba.kernels.activation import constants
from amoeba.kernels.block_scaled_product import decode_scales
from amoeba.kernels.decode.codes import (
    PAIR_SCALE,
    constants_of,
    constants_of_bias,
    number_e4m3,
    pair_e2m1,
    places_of_scales,
)
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, halves_of_rows, load_b, rounded, times_low
from amoeba.kernels.decode.tiles import activate, product_alone, rows_of_gate_up
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick

# Bytes of codes that all slots of a program of the down projection may have in flight.
MOST_DOWN_BYTES = 32768


def up_by_slot(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile = problem.weights, chosen.up
    return _up_by_slot.fixed(
        (problem.rows * cdiv(weights.intermediate, tile.columns),),
        (),
        E=weights.num_experts,
        I=weights.intermediate,
        K=problem.expert_TK.shape[1],
        COLUMNS=tile.columns,
        INTERLEAVED=weights.activation.interleaved,
        **constants_of_bias(weights.gate_up_bias_EJ),
        OVERLAP=chosen.overlap,
        DEPTH=tile.depth,
        **ranks.of_up,
        **constants_of(weights.gate_up_EJH.matrix, problem.x_TH.device),
        **constants(weights.activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap and ranks.any_up else {}),
    )


def down_by_token(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile, (tokens, top_k) = problem.weights, chosen.down, problem.expert_TK.shape
    matrix = weights.down_EHI.matrix
    row_bytes = cdiv(weights.intermediate, tile.depth) * tile.depth * matrix.format.element.bits // 8
    slots = next_power_of_2(top_k)
    while slots > 1 and slots * tile.columns * row_bytes > MOST_DOWN_BYTES:
        slots //= 2
    return _down_by_token.fixed(
        (tokens * cdiv(weights.hidden, tile.columns),),
        (),
        E=weights.num_experts,
        H=weights.hidden,
        K=top_k,
        SLOTS=slots,
        COLUMNS=tile.columns,
        **constants_of_bias(weights.down_bias_EH),
        OVERLAP=chosen.overlap,
        DEPTH=tile.depth,
        RANK=ranks.down,
        **constants_of(matrix, problem.x_TH.device),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


@triton.jit
def _sums(
    code,
    value,
    scale,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """(HEIGHT, WIDTH / chunk) sums of codes (HEIGHT, WIDTH) times values, which GROUP rows share, times their scales.

    value: (HEIGHT / GROUP, DEPTH).
    """
    VALUES: tl.constexpr = HEIGHT // GROUP
    BLOCK_BYTES: tl.constexpr = BLOCK_COLUMNS * BITS // 8
    CHUNK: tl.constexpr = min(16, BLOCK_BYTES, WIDTH)
    CHUNKS: tl.constexpr = WIDTH // CHUNK
    codes = tl.reshape(code, (VALUES, GROUP, CHUNKS, CHUNK))
    if BITS == 8:
        value = tl.reshape(value, (VALUES, 1, CHUNKS, CHUNK)).to(tl.float32)
        product = number_e4m3(codes, HARDWARE).to(tl.float32) * value
    else:
        even, odd = tl.split(tl.reshape(value, (VALUES, 1, CHUNKS, CHUNK, 2)))
        low, high = pair_e2m1(codes)
        product = low.to(tl.float32) * even.to(tl.float32) + high.to(tl.float32) * odd.to(tl.float32)
        scale *= PAIR_SCALE
    found = tl.reshape(tl.sum(product, axis=3), (HEIGHT, LINES, CHUNKS // LINES))
    return tl.reshape(product_alone(found, scale[:, :, None]), (HEIGHT, CHUNKS))


@quick
@triton.jit
def _up_by_slot(
    x_TH,
    expert_TK,
    data,
    scales,
    matrix_scale,
    bias_EJ,
    low_NR,
    gate_b_EIR,
    up_b_EIR,
    a_NI,
    E: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DEPTH: tl.constexpr,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    UP_AT: tl.constexpr,
    REDUCTION: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    HAS_MATRIX_SCALE: tl.constexpr,
    STRIDE_MATRIX_SCALE: tl.constexpr,
    HARDWARE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
):
    if OVERLAP:  # programs of the next launch may take the place of those of this one that are done
        tl.extra.cuda.gdc_launch_dependents()
    HEIGHT: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    WIDTH: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (REDUCTION * BITS + 7) // 8
    PIECES: tl.constexpr = (REDUCTION + DEPTH - 1) // DEPTH
    LINES: tl.constexpr = DEPTH // BLOCK_COLUMNS if DEPTH > BLOCK_COLUMNS else 1
    BLOCKS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    slot = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * COLUMNS
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    expert = expert.to(tl.int64)
    j, row_ok = rows_of_gate_up(first, I, GATED, INTERLEAVED, COLUMNS)
    rows = data + expert * STRIDE_EXPERT + j.to(tl.int64)[:, None] * STRIDE_ROW
    scales += expert * STRIDE_SCALE_EXPERT
    tiles = ()
    for piece in tl.static_range(PIECES):
        byte = piece * WIDTH + tl.arange(0, WIDTH)
        inside = row_ok[:, None] & (byte < ROW_BYTES)[None, :]
        tile = tl.load(rows + byte[None, :], mask=inside, other=0, eviction_policy="evict_first")
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    part, gate_ok, up_ok = halves_of_rows(j, row_ok, I, GATED, INTERLEAVED)
    if GATE_RANK > 0:
        gate_b = load_b(gate_b_EIR + expert * I * GATE_RANK, part, gate_ok, GATE_RANK)
    if UP_RANK > 0:
        up_b = load_b(up_b_EIR + expert * I * UP_RANK, part, up_ok, UP_RANK)
    x = x_TH + (slot // K).to(tl.int64) * REDUCTION
    h = tl.zeros((HEIGHT, 1), tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * DEPTH + tl.arange(0, DEPTH)
        value = tl.load(x + column, mask=column < REDUCTION, other=0.0)[None, :]
        places, there = places_of_scales(
            scales, j, row_ok, piece, DEPTH, LINES, REDUCTION, BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS,
            STRIDE_SCALE_ROW,
        )  # fmt: skip
        scale = decode_scales(places, there, 1.0, SCALE)
        found = _sums(tiles[piece], value, scale, HEIGHT, HEIGHT, WIDTH, LINES, BLOCK_COLUMNS, BITS, HARDWARE)
        h += tl.sum(found, axis=1, keep_dims=True)
    if HAS_MATRIX_SCALE:
        h *= tl.load(matrix_scale + expert * STRIDE_MATRIX_SCALE)
    if HAS_BIAS:
        h += tl.load(bias_EJ + expert * STRIDE_BIAS + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    if GATE_RANK + UP_RANK > 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        low = low_NR + slot.to(tl.int64) * (UP_AT + UP_RANK)
    if GATE_RANK > 0:
        h += times_low(gate_b, low, GATE_RANK)[:, None]
    if UP_RANK > 0:
        h += times_low(up_b, low + UP_AT, UP_RANK)[:, None]
    a = activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, COLUMNS, 1)
    column = first + tl.arange(0, COLUMNS)[:, None]
    tl.store(a_NI + slot.to(tl.int64) * I + column, a.to(a_NI.dtype.element_ty), mask=column < I)


@quick
@triton.jit
def _down_by_token(
    a_NI,
    expert_TK,
    weight_TK,
    data,
    scales,
    matrix_scale,
    bias_EH,
    low_NR,
    b_EHR,
    y_TH,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    REDUCTION: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    STRIDE_SCALE_EXPERT: tl.constexpr,
    HAS_MATRIX_SCALE: tl.constexpr,
    STRIDE_MATRIX_SCALE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    HEIGHT: tl.constexpr = SLOTS * COLUMNS
    WIDTH: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (REDUCTION * BITS + 7) // 8
    PIECES: tl.constexpr = (REDUCTION + DEPTH - 1) // DEPTH
    LINES: tl.constexpr = DEPTH // BLOCK_COLUMNS if DEPTH > BLOCK_COLUMNS else 1
    BLOCKS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * COLUMNS
    at = tl.arange(0, HEIGHT)
    h = first + at % COLUMNS
    k = tl.arange(0, SLOTS)
    y = tl.zeros((COLUMNS,), tl.float32)
    for done in range(0, K, SLOTS):
        # of each row of codes, and of each slot
        slot_R, slot_S = token * K + done + at // COLUMNS, token * K + done + k
        expert = tl.load(expert_TK + slot_R, mask=done + at // COLUMNS < K, other=-1)
        expert_S = tl.load(expert_TK + slot_S, mask=done + k < K, other=-1)
        owned, owned_S = (expert >= 0) & (expert < E), (expert_S >= 0) & (expert_S < E)
        expert = tl.where(owned, expert, 0).to(tl.int64)
        row_ok = owned & (h < H)
        rows = data + expert * STRIDE_EXPERT + h.to(tl.int64) * STRIDE_ROW
        tiles = ()
        for piece in tl.static_range(PIECES):
            byte = piece * WIDTH + tl.arange(0, WIDTH)
            inside = row_ok[:, None] & (byte < ROW_BYTES)[None, :]
            tile = tl.load(rows[:, None] + byte[None, :], mask=inside, other=0, eviction_policy="evict_first")
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
        weight = tl.load(weight_TK + slot_R, mask=owned, other=0.0).to(tl.float32)
        beside = tl.zeros((HEIGHT,), tl.float32)
        if HAS_BIAS:
            beside = tl.load(bias_EH + expert * STRIDE_BIAS + h, mask=row_ok, other=0.0).to(tl.float32)
        if RANK > 0:
            b = load_b(b_EHR, expert * H + h, row_ok, RANK)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((HEIGHT,), tl.float32)
        for piece in tl.static_range(PIECES):
            column = piece * DEPTH + tl.arange(0, DEPTH)
            known = owned_S[:, None] & (column < REDUCTION)[None, :]
            value = tl.load(a_NI + slot_S.to(tl.int64)[:, None] * REDUCTION + column[None, :], mask=known, other=0.0)
            places, there = places_of_scales(
                scales + (expert * STRIDE_SCALE_EXPERT)[:, None], h, row_ok, piece, DEPTH, LINES, REDUCTION,
                BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS, STRIDE_SCALE_ROW,
            )  # fmt: skip
            scale = decode_scales(places, there, 1.0, SCALE)
            found = _sums(tiles[piece], value, scale, HEIGHT, COLUMNS, WIDTH, LINES, BLOCK_COLUMNS, BITS, HARDWARE)
            total += tl.sum(found, axis=1)
        if HAS_MATRIX_SCALE:
            total *= tl.load(matrix_scale + expert * STRIDE_MATRIX_SCALE)
        if RANK > 0:
            low = load_b(low_NR, slot_R, owned, RANK)
            beside += tl.sum(product_alone(rounded(b, low).to(tl.float32), low.to(tl.float32)), axis=1)
        y += tl.sum(tl.reshape(product_alone(total + beside, weight), (SLOTS, COLUMNS)), axis=0)
    column = first + tl.arange(0, COLUMNS)
    tl.store(y_TH + token.to(tl.int64) * H + column, y.to(y_TH.dtype.element_ty), mask=column < H)
