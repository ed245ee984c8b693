"""Few tokens, slot by slot: a slot's product with its expert is a multiply and add, its weights are read once per slot.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    stored = weights, scales, matrix_scale          # see `amoeba.kernels.decode.weights`
    up_by_slot(problem, chosen, ranks)(x_TH, expert_TK, *stored, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_by_token(problem, chosen, ranks)(a_NI, expert_TK, weight_TK, *stored, bias_EH, low_NR, b_EHR, y_TH)

Where a program's weights fit in its registers, all of them are in flight at once (`Tile.at_once`): many small programs,
none with a loop over the weights. The down projection then asks for its weights, and for B, before it looks at `a`; on
Hopper its launch may begin while the one that computes `a` still runs (`chosen.overlap`). Quantised weights are always
read in pieces of a row, all at once or, where that would be many for few rows, in steps that share the values which
they are multiplied with; numbers are added up within 16 bytes of a row before their scale is applied. On Hopper and
newer `one_token` takes most of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.core.problem import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.blocks import columns_of, load_packed, number_of, scales_of
from amoeba.kernels.constants import Group
from amoeba.kernels.decode import one_token
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, halves_of_rows, load_b, rounded, times_low
from amoeba.kernels.decode.weights import (
    PAIR_SCALE,
    activate,
    bias_row,
    is_quantised,
    load_tile,
    number_e4m3,
    numbers_of,
    pair_e2m1,
    places_of_scales,
    product_alone,
    rows_of_gate_up,
    stored_down,
    stored_up,
)
from amoeba.kernels.dequantise import load_scales
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick

# Bytes of quantised weights that all slots of a program of the down projection may have in flight.
MOST_DOWN_BYTES = 32768


def up_by_slot(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile = problem.weights, chosen.up
    if tile.chunks:
        return one_token.up(problem, chosen)
    quantised = is_quantised(weights)
    if tile.at_once and not quantised and tile.depth < weights.hidden:
        whole = f"a depth of {weights.hidden} or more, whole rows of the weights"
        raise bad_value("tile", whole, tile, "decode by slot")
    return _up_by_slot.fixed(
        (problem.rows * cdiv(weights.intermediate, tile.columns),),
        (*numbers_of(problem, weights.gate_up_EJH), problem.expert_TK.shape[1]),
        TILE=Group(
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            AT_ONCE=tile.at_once,
            STAGES=None if tile.at_once or quantised else tile.stages,
            OVERLAP=chosen.overlap,
        ),
        MATRIX=stored_up(problem, tile),
        RANKS=ranks.of_up,
        ACTIVATION=activations.group(weights.activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def down_by_token(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile, (tokens, top_k) = problem.weights, chosen.down, problem.expert_TK.shape
    if tile.chunks:
        return one_token.down(problem, chosen)
    slots, quantised = next_power_of_2(top_k), is_quantised(weights)
    if quantised and tile.at_once:
        row_bytes = cdiv(weights.intermediate, tile.depth) * tile.depth * weights.format.element.bits // 8
        while slots > 1 and slots * tile.columns * row_bytes > MOST_DOWN_BYTES:
            slots //= 2
    pieces = cdiv(weights.intermediate, tile.depth) if tile.at_once or quantised else None
    overlap = chosen.overlap and pieces is not None
    return _down_by_token.fixed(
        (tokens * cdiv(weights.hidden, tile.columns),),
        numbers_of(problem, weights.down_EHI),
        TILE=Group(
            K=top_k,
            SLOTS=slots,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            PIECES=pieces,
            STAGES=None if tile.at_once else tile.stages,
            OVERLAP=overlap,
        ),
        MATRIX=stored_down(problem, tile),
        RANK=ranks.down,
        num_warps=tile.warps,
        **({"launch_pdl": True} if overlap else {}),
    )


@quick
@triton.jit
def _up_by_slot(
    x_TH,
    expert_TK,
    weights,
    scales,
    matrix_scale,
    bias_EJ,
    low_NR,
    gate_b_EIR,
    up_b_EIR,
    a_NI,
    stride_expert,
    stride_row,
    stride_column,
    E,
    H,
    I,
    K,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    RANKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    if MATRIX.QUANTISED:
        E, H, I, K = MATRIX.E, MATRIX.H, MATRIX.I, MATRIX.K
    if TILE.OVERLAP:
        if RANKS.GATE + RANKS.UP == 0:  # for x and ids, which the next launch reads before it waits
            tl.extra.cuda.gdc_wait()
        # programs of the next launch may take the place of those of this one that are done
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = TILE.COLUMNS
    blocks = tl.cdiv(I, COLUMNS)
    slot = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * COLUMNS
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    expert = expert.to(tl.int64)
    if TILE.AT_ONCE and not MATRIX.QUANTISED:
        tensors = (x_TH, weights, bias_EJ, low_NR, gate_b_EIR, up_b_EIR)
        strides = (stride_expert, stride_row, stride_column)
        column = first + tl.arange(0, COLUMNS)
        a = _activated_at_once(tensors, strides, slot, expert, column, H, I, K, TILE, MATRIX, RANKS, ACTIVATION)
    else:
        j, row_ok = rows_of_gate_up(first, I, COLUMNS, ACTIVATION)
        if MATRIX.QUANTISED:
            rows = weights + expert * MATRIX.STRIDE_EXPERT + j.to(tl.int64)[:, None] * MATRIX.STRIDE_ROW
            tiles = _load_pieces(rows, row_ok, TILE, MATRIX)
            part, gate_ok, up_ok = halves_of_rows(j, row_ok, I, ACTIVATION)
            if RANKS.GATE > 0:  # B is asked for at once, too
                gate_b = load_b(gate_b_EIR + expert * I * RANKS.GATE, part, gate_ok, RANKS.GATE)
            if RANKS.UP > 0:
                up_b = load_b(up_b_EIR + expert * I * RANKS.UP, part, up_ok, RANKS.UP)
            x = x_TH + (slot // K).to(tl.int64) * H
            of_expert = scales + expert * MATRIX.STRIDE_SCALE_EXPERT
            h = _quantised_row(tiles, x, of_expert, j, row_ok, TILE, MATRIX, ACTIVATION)
        else:
            x = x_TH + (slot // K).to(tl.int64) * H
            rows = weights + expert * stride_expert + j.to(tl.int64)[:, None] * stride_row
            h = _strided_row(rows, x, row_ok, H, stride_column, TILE, MATRIX, ACTIVATION)
        if matrix_scale is not None:
            h *= tl.load(matrix_scale + expert * MATRIX.STRIDE_MATRIX_SCALE)
        if MATRIX.HAS_BIAS:
            bias = bias_row(bias_EJ, expert, 2 * I if ACTIVATION.GATED else I, MATRIX)
            h += tl.load(bias + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if RANKS.GATE + RANKS.UP > 0:
            if TILE.OVERLAP:
                tl.extra.cuda.gdc_wait()
            low = low_NR + slot.to(tl.int64) * (RANKS.UP_AT + RANKS.UP)
            if not MATRIX.QUANTISED:
                part, gate_ok, up_ok = halves_of_rows(j, row_ok, I, ACTIVATION)
        if RANKS.GATE > 0:
            if not MATRIX.QUANTISED:
                gate_b = load_b(gate_b_EIR + expert * I * RANKS.GATE, part, gate_ok, RANKS.GATE)
            h += times_low(gate_b, low, RANKS.GATE)[:, None]
        if RANKS.UP > 0:
            if not MATRIX.QUANTISED:
                up_b = load_b(up_b_EIR + expert * I * RANKS.UP, part, up_ok, RANKS.UP)
            h += times_low(up_b, low + RANKS.UP_AT, RANKS.UP)[:, None]
        a = activate(h, COLUMNS, 1, ACTIVATION)
        column = first + tl.arange(0, COLUMNS)[:, None]
    tl.store(a_NI + slot.to(tl.int64) * I + column, a.to(a_NI.dtype.element_ty), mask=column < I)


@triton.jit
def _strided_row(rows, x, row_ok, H, stride_column, TILE: tl.constexpr, MATRIX: tl.constexpr, ACTIVATION: tl.constexpr):
    """h of a slot, (rows of W1, 1). rows: pointers to the first of each."""
    DEPTH: tl.constexpr = TILE.DEPTH
    HEIGHT: tl.constexpr = 2 * TILE.COLUMNS if ACTIVATION.GATED else TILE.COLUMNS
    # summed across threads once, after the loop
    total = tl.zeros((HEIGHT, DEPTH), tl.float32)
    for k in tl.range(0, H, DEPTH, num_stages=TILE.STAGES):
        here = k + tl.arange(0, DEPTH)
        pointers = rows + here.to(tl.int64)[None, :] * stride_column
        tile = load_tile(pointers, row_ok, here < H, MATRIX.EVEN_ROWS, MATRIX.EVEN_DEPTH, "evict_first")
        if MATRIX.EVEN_DEPTH:
            value = tl.load(x + here)
        else:
            value = tl.load(x + here, mask=here < H, other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)[None, :]
    return tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def _activated_at_once(
    tensors,
    strides,
    slot,
    expert,
    column,
    H,
    I,
    K,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    RANKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Columns of a slot's a, of strided weights."""
    x_TH, weights, bias_EJ, low_NR, gate_b_EIR, up_b_EIR = tensors
    stride_expert, stride_row, stride_column = strides
    column_ok = column < I
    h = tl.arange(0, TILE.DEPTH)
    weights = weights + expert * stride_expert + h.to(tl.int64)[None, :] * stride_column
    # rows of W1 that make a column of a: j, and of a gated layer j + apart
    j = 2 * column if ACTIVATION.GATED and ACTIVATION.INTERLEAVED else column
    apart = 1 if ACTIVATION.INTERLEAVED else I
    gate_rows = weights + j.to(tl.int64)[:, None] * stride_row
    gate_tile = load_tile(gate_rows, column_ok, h < H, MATRIX.EVEN_ROWS, MATRIX.EVEN_DEPTH, "evict_first")
    if ACTIVATION.GATED:
        up_rows = weights + (j + apart).to(tl.int64)[:, None] * stride_row
        up_tile = load_tile(up_rows, column_ok, h < H, MATRIX.EVEN_ROWS, MATRIX.EVEN_DEPTH, "evict_first")
    if RANKS.GATE > 0:
        gate_b = load_b(gate_b_EIR + expert * I * RANKS.GATE, column, column_ok, RANKS.GATE)
    if RANKS.UP > 0:
        up_b = load_b(up_b_EIR + expert * I * RANKS.UP, column, column_ok, RANKS.UP)
    value = tl.load(x_TH + (slot // K).to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
    bias = bias_EJ + expert * (2 * I if ACTIVATION.GATED else I)
    gate = tl.sum(gate_tile.to(tl.float32) * value[None, :], axis=1)
    if MATRIX.HAS_BIAS:
        gate += tl.load(bias + j, mask=column_ok, other=0.0).to(tl.float32)
    if RANKS.GATE + RANKS.UP > 0:
        if TILE.OVERLAP:
            tl.extra.cuda.gdc_wait()
        low = low_NR + slot.to(tl.int64) * (RANKS.UP_AT + RANKS.UP)
    if RANKS.GATE > 0:
        gate += times_low(gate_b, low, RANKS.GATE)
    if ACTIVATION.GATED:
        up = tl.sum(up_tile.to(tl.float32) * value[None, :], axis=1)
        if MATRIX.HAS_BIAS:
            up += tl.load(bias + j + apart, mask=column_ok, other=0.0).to(tl.float32)
        if RANKS.UP > 0:
            up += times_low(up_b, low + RANKS.UP_AT, RANKS.UP)
        return activations.gated(gate, up, ACTIVATION)
    else:
        if RANKS.UP > 0:
            gate += times_low(up_b, low, RANKS.UP)
        return activations.plain(gate, ACTIVATION)


@triton.jit
def _load_pieces(rows, row_ok, TILE: tl.constexpr, MATRIX: tl.constexpr):
    """Whole rows of bytes, or of numbers in blocks, in pieces of DEPTH numbers. rows: pointers (rows, 1) to the first
    of each."""
    tiles = ()
    for piece in tl.static_range((MATRIX.REDUCTION + TILE.DEPTH - 1) // TILE.DEPTH):
        tile = _load_piece(rows, row_ok, piece, TILE, MATRIX)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    return tiles


@triton.jit
def _load_piece(rows, row_ok, piece, TILE: tl.constexpr, MATRIX: tl.constexpr):
    if MATRIX.SCALE == "inside":
        return load_packed(rows, row_ok[:, None], piece * TILE.DEPTH, TILE.DEPTH, MATRIX)
    else:
        WIDTH: tl.constexpr = TILE.DEPTH * MATRIX.BITS // 8
        ROW_BYTES: tl.constexpr = (MATRIX.REDUCTION * MATRIX.BITS + 7) // 8
        byte = piece * WIDTH + tl.arange(0, WIDTH)
        inside = row_ok[:, None] & (byte < ROW_BYTES)[None, :]
        return tl.load(rows + byte[None, :], mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _quantised_row(tiles, x, scales, j, row_ok, TILE: tl.constexpr, MATRIX: tl.constexpr, ACTIVATION: tl.constexpr):
    """h of a slot, (rows of W1, 1)."""
    DEPTH: tl.constexpr = TILE.DEPTH
    HEIGHT: tl.constexpr = 2 * TILE.COLUMNS if ACTIVATION.GATED else TILE.COLUMNS
    total = 0.0
    for piece in tl.static_range((MATRIX.REDUCTION + DEPTH - 1) // DEPTH):
        total += _sums(
            tiles[piece],
            x + tl.zeros((1, 1), tl.int32),
            tl.full((1, 1), 1, tl.int1),
            scales,
            j,
            row_ok,
            piece,
            HEIGHT,
            HEIGHT,
            DEPTH,
            MATRIX,
        )
    return tl.sum(total, axis=1, keep_dims=True)  # across threads once, after all pieces


@triton.jit
def _sums(
    packed,
    values,
    there,
    scales,
    row_R,
    row_ok,
    piece,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    MATRIX: tl.constexpr,
):
    """(HEIGHT, sums of a row): of the piece-th DEPTH quantised numbers of HEIGHT rows, times values, which GROUP rows
    share, times their scales.

    values: (HEIGHT / GROUP, 1), pointers to the first of each, of which `there` tells which exist.
    """
    if MATRIX.SCALE == "inside":
        return _sums_of_blocks(packed, values, there, piece, HEIGHT, GROUP, DEPTH, MATRIX)
    else:
        BITS: tl.constexpr = MATRIX.BITS
        WIDTH: tl.constexpr = DEPTH * BITS // 8
        LINES: tl.constexpr = DEPTH // MATRIX.BLOCK_COLUMNS if DEPTH > MATRIX.BLOCK_COLUMNS else 1
        VALUES: tl.constexpr = HEIGHT // GROUP
        BLOCK_BYTES: tl.constexpr = MATRIX.BLOCK_COLUMNS * BITS // 8
        CHUNK: tl.constexpr = min(16, BLOCK_BYTES, WIDTH)
        CHUNKS: tl.constexpr = WIDTH // CHUNK  # as in `_quantised_token`
        column = piece * DEPTH + tl.arange(0, DEPTH)
        value = _load_values(values, there, column, MATRIX)
        places, there = places_of_scales(scales, row_R, row_ok, piece, DEPTH, LINES, MATRIX.REDUCTION, MATRIX)
        scale = load_scales(places, there, 1.0, MATRIX.SCALE)
        packed = tl.reshape(packed, (VALUES, GROUP, CHUNKS, CHUNK))
        if BITS == 8:
            value = tl.reshape(value, (VALUES, 1, CHUNKS, CHUNK)).to(tl.float32)
            product = number_e4m3(packed, MATRIX.HARDWARE).to(tl.float32) * value
        else:
            even, odd = tl.split(tl.reshape(value, (VALUES, 1, CHUNKS, CHUNK, 2)))
            low, high = pair_e2m1(packed)
            product = low.to(tl.float32) * even.to(tl.float32) + high.to(tl.float32) * odd.to(tl.float32)
            scale *= PAIR_SCALE
        found = tl.reshape(tl.sum(product, axis=3), (HEIGHT, LINES, CHUNKS // LINES))
        return tl.reshape(product_alone(found, scale[:, :, None]), (HEIGHT, CHUNKS))


@quick
@triton.jit
def _down_by_token(
    a_NI,
    expert_TK,
    weight_TK,
    weights,
    scales,
    matrix_scale,
    bias_EH,
    low_NR,
    b_EHR,
    y_TH,
    stride_expert,
    stride_row,
    stride_column,
    E,
    H,
    I,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    RANK: tl.constexpr,
):
    if MATRIX.QUANTISED:
        H = MATRIX.H
    blocks = tl.cdiv(H, TILE.COLUMNS)
    token = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * TILE.COLUMNS
    h = first + tl.arange(0, TILE.COLUMNS)
    tensors = (a_NI, expert_TK, weight_TK, weights, bias_EH, low_NR, b_EHR)
    if MATRIX.QUANTISED:
        y = _quantised_token(tensors, scales, matrix_scale, token, first, H, TILE, MATRIX, RANK)
    elif TILE.PIECES is not None:
        strides = (stride_expert, stride_row, stride_column)
        y = _token_at_once(tensors, strides, token, h, E, H, I, TILE, MATRIX, RANK)
    else:
        strides = (stride_expert, stride_row, stride_column)
        y = _token_in_steps(tensors, strides, token, h, E, H, I, TILE, MATRIX, RANK)
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=h < H)


@triton.jit
def _token_in_steps(tensors, strides, token, h, E, H, I, TILE: tl.constexpr, MATRIX: tl.constexpr, RANK: tl.constexpr):
    a_NI, expert_TK, weight_TK, weights, bias_EH, low_NR, b_EHR = tensors
    stride_expert, stride_row, stride_column = strides
    DEPTH: tl.constexpr = TILE.DEPTH
    row_ok = h < H
    rows = weights + h.to(tl.int64)[:, None] * stride_row
    steps = tl.cdiv(I, DEPTH)
    total = tl.zeros((TILE.COLUMNS, DEPTH), tl.float32)
    unsummed = tl.zeros((TILE.COLUMNS,), tl.float32)  # what is not summed over I: bias, LoRA
    # one loop over k and the steps of each, so that it can run ahead from one expert into the next
    for step in tl.range(0, TILE.K * steps, num_stages=TILE.STAGES):
        slot = token * TILE.K + step // steps
        i = (step % steps) * DEPTH + tl.arange(0, DEPTH)
        expert = tl.load(expert_TK + slot)
        owned = (expert >= 0) & (expert < E)
        expert = expert.to(tl.int64)
        scale = tl.where(owned, tl.load(weight_TK + slot).to(tl.float32), 0.0)  # a sentinel's weight may be NaN
        depth_ok = i < tl.where(owned, I, 0)
        pointers = rows + expert * stride_expert + i.to(tl.int64)[None, :] * stride_column
        tile = load_tile(pointers, row_ok, depth_ok, MATRIX.EVEN_ROWS, False, "evict_first")
        a = tl.load(a_NI + slot.to(tl.int64) * I + i, mask=depth_ok, other=0.0)
        total += tile.to(tl.float32) * (a.to(tl.float32) * scale)[None, :]
        once_ok = h < tl.where(owned & (step % steps == 0), H, 0)
        if MATRIX.HAS_BIAS:
            unsummed += tl.load(bias_EH + expert * H + h, mask=once_ok, other=0.0).to(tl.float32) * scale
        if RANK > 0:
            b = load_b(b_EHR + expert * H * RANK, h, once_ok, RANK)
            low = low_NR + slot.to(tl.int64) * RANK
            unsummed += times_low(b, low, tl.where(owned, RANK, 0)) * scale
    return tl.sum(total, axis=1) + unsummed


@triton.jit
def _token_at_once(tensors, strides, token, h, E, H, I, TILE: tl.constexpr, MATRIX: tl.constexpr, RANK: tl.constexpr):
    a_NI, expert_TK, weight_TK, weights, bias_EH, low_NR, b_EHR = tensors
    stride_expert, stride_row, stride_column = strides
    SLOTS: tl.constexpr = TILE.SLOTS
    DEPTH: tl.constexpr = TILE.DEPTH
    k = tl.arange(0, SLOTS)
    expert = tl.load(expert_TK + token * TILE.K + k, mask=k < TILE.K, other=-1)
    owned = (expert >= 0) & (expert < E)
    expert = tl.where(owned, expert, 0).to(tl.int64)
    i = tl.arange(0, DEPTH)
    rows = weights + (expert[:, None] * stride_expert + h.to(tl.int64)[None, :] * stride_row)[:, :, None]
    inside = owned[:, None] & (h < H)[None, :]
    # in pieces, because I need not be near a power of two
    tiles = ()
    for piece in tl.static_range(TILE.PIECES):
        here = piece * DEPTH + i
        tile = tl.load(
            rows + (here.to(tl.int64) * stride_column)[None, None, :],
            mask=inside[:, :, None] & (here < I)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    scale = tl.load(weight_TK + token * TILE.K + k, mask=owned, other=0.0).to(tl.float32)
    bias = tl.zeros((SLOTS, TILE.COLUMNS), tl.float32)
    if MATRIX.HAS_BIAS:
        bias = tl.load(bias_EH + expert[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        r = tl.arange(0, triton.next_power_of_2(RANK))
        b_rows = b_EHR + ((expert[:, None] * H + h[None, :]) * RANK)[:, :, None]
        b = tl.load(b_rows + r[None, None, :], mask=inside[:, :, None] & (r < RANK)[None, None, :], other=0.0)
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # all that was ahead of this launch is done
    a = a_NI + (token * TILE.K + k).to(tl.int64)[:, None] * I
    total = tl.zeros((SLOTS, TILE.COLUMNS, DEPTH), tl.float32)
    for piece in tl.static_range(TILE.PIECES):
        here = piece * DEPTH + i
        value = tl.load(a + here[None, :], mask=owned[:, None] & (here < I)[None, :], other=0.0).to(tl.float32)
        total += tiles[piece].to(tl.float32) * value[:, None, :]
    y_KH = tl.sum(total, axis=2) + bias
    if RANK > 0:
        low_rows = low_NR + ((token * TILE.K + k).to(tl.int64) * RANK)[:, None]
        low = tl.load(low_rows + r[None, :], mask=owned[:, None] & (r < RANK)[None, :], other=0.0)
        y_KH += tl.sum(product_alone(rounded(b, low).to(tl.float32), low.to(tl.float32)[:, None, :]), axis=2)
    return tl.sum(product_alone(y_KH, scale[:, None]), axis=0)


@triton.jit
def _quantised_token(
    tensors, scales, matrix_scale, token, first, H, TILE: tl.constexpr, MATRIX: tl.constexpr, RANK: tl.constexpr
):
    a_NI, expert_TK, weight_TK, data, bias_EH, low_NR, b_EHR = tensors
    K: tl.constexpr = TILE.K
    SLOTS: tl.constexpr = TILE.SLOTS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    HEIGHT: tl.constexpr = SLOTS * COLUMNS
    DEPTH: tl.constexpr = TILE.DEPTH
    at = tl.arange(0, HEIGHT)
    h = first + at % COLUMNS
    k = tl.arange(0, SLOTS)
    y = tl.zeros((COLUMNS,), tl.float32)
    for done in range(0, K, SLOTS):
        # of each row of the tile, and of each slot
        slot_R, slot_S = token * K + done + at // COLUMNS, token * K + done + k
        expert = tl.load(expert_TK + slot_R, mask=done + at // COLUMNS < K, other=-1)
        expert_S = tl.load(expert_TK + slot_S, mask=done + k < K, other=-1)
        owned, owned_S = (expert >= 0) & (expert < MATRIX.E), (expert_S >= 0) & (expert_S < MATRIX.E)
        expert = tl.where(owned, expert, 0).to(tl.int64)
        row_ok = owned & (h < H)
        rows = data + expert * MATRIX.STRIDE_EXPERT + h.to(tl.int64) * MATRIX.STRIDE_ROW
        if TILE.STAGES is None:
            tiles = _load_pieces(rows[:, None], row_ok, TILE, MATRIX)
        weight = tl.load(weight_TK + slot_R, mask=owned, other=0.0).to(tl.float32)
        unsummed = tl.zeros((HEIGHT,), tl.float32)
        if MATRIX.HAS_BIAS:
            unsummed = tl.load(bias_EH + expert * MATRIX.STRIDE_BIAS + h, mask=row_ok, other=0.0).to(tl.float32)
        if RANK > 0:
            b = load_b(b_EHR, expert * H + h, row_ok, RANK)
        if TILE.OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()  # all that was ahead of this launch is done
        of_expert = scales + (expert * MATRIX.STRIDE_SCALE_EXPERT)[:, None]
        rows_of_a, there = a_NI + slot_S.to(tl.int64)[:, None] * MATRIX.REDUCTION, owned_S[:, None]
        if TILE.STAGES is None:
            sums = 0.0
            for piece in tl.static_range(TILE.PIECES):
                sums += _sums(
                    tiles[piece], rows_of_a, there, of_expert, h, row_ok, piece, HEIGHT, COLUMNS, DEPTH, MATRIX
                )
        else:
            CHUNK: tl.constexpr = min(16, MATRIX.BLOCK_COLUMNS * MATRIX.BITS // 8, DEPTH * MATRIX.BITS // 8)
            OF_BLOCKS: tl.constexpr = DEPTH // MATRIX.PLANES // min(16, MATRIX.LINE) if MATRIX.SCALE == "inside" else 0
            SUMS: tl.constexpr = OF_BLOCKS if MATRIX.SCALE == "inside" else DEPTH * MATRIX.BITS // 8 // CHUNK
            sums = tl.zeros((HEIGHT, SUMS), tl.float32)
            for piece in tl.range(TILE.PIECES, num_stages=TILE.STAGES):
                tile = _load_piece(rows[:, None], row_ok, piece, TILE, MATRIX)
                sums += _sums(tile, rows_of_a, there, of_expert, h, row_ok, piece, HEIGHT, COLUMNS, DEPTH, MATRIX)
        total = tl.sum(sums, axis=1)  # across threads once
        if matrix_scale is not None:
            total *= tl.load(matrix_scale + expert * MATRIX.STRIDE_MATRIX_SCALE)
        if RANK > 0:
            low = load_b(low_NR, slot_R, owned, RANK)
            unsummed += tl.sum(product_alone(rounded(b, low).to(tl.float32), low.to(tl.float32)), axis=1)
        y += tl.sum(tl.reshape(product_alone(total + unsummed, weight), (SLOTS, COLUMNS)), axis=0)
    return y


@triton.jit
def _load_values(rows, there, column, MATRIX: tl.constexpr):
    known = there & (column < MATRIX.REDUCTION)[None, :]
    return tl.load(rows + column[None, :], mask=known, other=0.0)


@triton.jit
def _sums_of_blocks(
    packed, values, there, piece, HEIGHT: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr, MATRIX: tl.constexpr
):
    """As `_sums`: scales and offsets are applied to what up to 16 numbers of a plane give."""
    total = 0.0
    for plane in tl.static_range(MATRIX.PLANES):
        total += _sums_of_plane(packed, values, there, piece, plane, HEIGHT, GROUP, DEPTH, MATRIX)
    return total


@triton.jit
def _sums_of_plane(
    packed,
    values,
    there,
    piece,
    PLANE: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    MATRIX: tl.constexpr,
):
    VALUES: tl.constexpr = HEIGHT // GROUP
    CHUNK: tl.constexpr = min(16, MATRIX.LINE)
    CHUNKS: tl.constexpr = DEPTH // MATRIX.PLANES // CHUNK
    column = columns_of(piece * DEPTH, PLANE, DEPTH, MATRIX)
    value = tl.reshape(_load_values(values, there, column, MATRIX).to(tl.float32), (VALUES, 1, CHUNKS, CHUNK))
    number = tl.reshape(number_of(packed, PLANE, DEPTH, MATRIX), (VALUES, GROUP, CHUNKS, CHUNK))
    scale, offset = scales_of(packed, PLANE, DEPTH, MATRIX)
    LINES: tl.constexpr = scale.shape[1]
    total = tl.reshape(tl.sum(number * value, axis=3), (HEIGHT, LINES, CHUNKS // LINES))
    total = product_alone(total, scale[:, :, None])
    if MATRIX.HAS_OFFSETS:
        alone = tl.broadcast_to(tl.sum(value, axis=3), (VALUES, GROUP, CHUNKS))
        total += product_alone(tl.reshape(alone, (HEIGHT, LINES, CHUNKS // LINES)), offset[:, :, None])
    return tl.reshape(total, (HEIGHT, CHUNKS))
