"""Few tokens through block-scaled experts, expert by expert: codes are read once, and multiplied by the tensor cores.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    codes = data, scales, matrix_scale
    up_by_expert(problem, chosen, ranks)(x_TH, expert_TK, lists, *codes, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down_by_expert(problem, chosen, ranks)(a_NI, expert_TK, lists, *codes, bias_EH, low_NR, b_EHR, y_NH)

As `by_expert`, with another product inside. Codes become numbers of x's dtype in registers, on the way from shared
memory to the tensor core. e4m3 is exact in it: where a step lies in one block, its scale is applied to what the step
gives. Smaller blocks have theirs applied to the numbers, which bf16 holds exactly, too.

Which slots are a program's is told in `slot_lists`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.core.problem import Problem
from amoeba.kernels.activation import constants
from amoeba.kernels.block_scaled_product import decode_scales
from amoeba.kernels.decode.by_expert import RANKS_TIMES_IDS
from amoeba.kernels.decode.codes import (
    RAISED,
    constants_of,
    constants_of_bias,
    is_lowered,
    lanes,
    number_e4m3,
    places_of_scales,
    scaled,
    scaled_lanes_e2m1,
    scaled_pair_e2m1,
)
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import Ranks, add_low_rank, add_low_rank_of_gate_up
from amoeba.kernels.decode.slot_lists import list_of, lists_are, slots_of, spares, work_of
from amoeba.kernels.decode.tiles import activate, rows_of_gate_up
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick


def up_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, slots, tile = problem.weights, problem.rows, chosen.up
    return _up_by_expert.fixed(
        ((min(slots, weights.num_experts) + spares(problem, chosen)) * cdiv(weights.intermediate, tile.columns),),
        (slots,),
        E=weights.num_experts,
        I=weights.intermediate,
        K=problem.expert_TK.shape[1],
        COLUMNS=tile.columns,
        INTERLEAVED=weights.activation.interleaved,
        **constants_of_bias(weights.gate_up_bias_EJ),
        **_options(problem, chosen),
        LISTS="ahead" if chosen.lists(problem) else "",
        WRITES=lists_are(problem, chosen) == "by up",
        DEPTH=tile.depth,
        STAGES=tile.stages,
        **ranks.of_up,
        **constants_of(weights.gate_up_EJH.matrix, problem.x_TH.device),
        **constants(weights.activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap and (chosen.lists(problem) or ranks.any_up) else {}),
    )


def down_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, slots, tile = problem.weights, problem.rows, chosen.down
    return _down_by_expert.fixed(
        ((min(slots, weights.num_experts) + spares(problem, chosen)) * cdiv(weights.hidden, tile.columns),),
        (slots,),
        E=weights.num_experts,
        H=weights.hidden,
        COLUMNS=tile.columns,
        **constants_of_bias(weights.down_bias_EH),
        **_options(problem, chosen),
        LISTS=lists_are(problem, chosen),
        DEPTH=tile.depth,
        STAGES=tile.stages,
        RANK=ranks.down,
        **constants_of(weights.down_EHI.matrix, problem.x_TH.device),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def _options(problem: Problem, chosen: Configuration) -> dict[str, int | bool]:
    warps = max(chosen.up.warps, chosen.down.warps)
    if chosen.by_lanes and warps > 2 and problem.x_TH.dtype == torch.bfloat16:
        remedy = "take fewer, or leave by_lanes out: Triton 3.6 multiplies them wrongly"
        raise bad_value("configuration", "1 or 2 warps for numbers in the order of lanes", warps, remedy)
    ids = 1 if chosen.lists(problem) else next_power_of_2(problem.rows)  # lists are the same for any number
    return {
        "OWNER_IS_EXPERT": problem.weights.num_experts <= problem.rows,
        "BLOCK_N": ids,
        "PIECE": min(RANKS_TIMES_IDS // chosen.rows, ids),
        "ROWS": chosen.rows,
        "OVERLAP": chosen.overlap,
        "BY_LANES": chosen.by_lanes,
    }


@triton.jit
def _products(
    data,
    scales,
    row_R,
    row_ok,
    values,
    slot_ok,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    REDUCTION: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALE_ROW: tl.constexpr,
    HARDWARE: tl.constexpr,
    BY_LANES: tl.constexpr,
):
    """(HEIGHT, ROWS) in fp32: these rows of the matrix times the chunk's. values: pointers to the first of each row."""
    WIDTH: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (REDUCTION * BITS + 7) // 8
    LINES: tl.constexpr = DEPTH // BLOCK_COLUMNS if DEPTH > BLOCK_COLUMNS else 1
    EVEN: tl.constexpr = REDUCTION % DEPTH == 0
    dtype: tl.constexpr = values.dtype.element_ty
    codes = data + row_R.to(tl.int64)[:, None] * STRIDE_ROW + tl.arange(0, WIDTH)[None, :]
    values = values[:, None] + tl.arange(0, DEPTH)[None, :]
    total = tl.zeros((HEIGHT, ROWS), tl.float32)
    for step in tl.range(0, (REDUCTION + DEPTH - 1) // DEPTH, num_stages=STAGES):
        inside = row_ok[:, None]
        value_ok = slot_ok[:, None]
        if not EVEN:
            inside &= (tl.arange(0, WIDTH) < ROW_BYTES - step * WIDTH)[None, :]
            value_ok &= (tl.arange(0, DEPTH) < REDUCTION - step * DEPTH)[None, :]
        code = tl.load(codes + step * WIDTH, mask=inside, other=0)
        value = tl.load(values + step * DEPTH, mask=value_ok, other=0.0)
        places, there = places_of_scales(
            scales, row_R, row_ok, step, DEPTH, LINES, REDUCTION, BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS,
            STRIDE_SCALE_ROW,
        )  # fmt: skip
        if BITS == 8:
            scale = decode_scales(places, there, 1.0, SCALE)
            number = number_e4m3(code, HARDWARE)
            if LINES == 1:
                total += tl.dot(number.to(dtype), tl.trans(value), input_precision="ieee") * scale
            else:
                weight = scaled(number, scale, HEIGHT, LINES, WIDTH).to(dtype)
                total = tl.dot(weight, tl.trans(value), total, input_precision="ieee")
        else:
            if BY_LANES:
                even, odd = lanes(value, ROWS, WIDTH)
                low, high = scaled_lanes_e2m1(code, places, there, dtype, SCALE, HEIGHT, LINES, WIDTH)
            else:
                even, odd = tl.split(tl.reshape(value, (ROWS, WIDTH, 2)))
                low, high = scaled_pair_e2m1(code, places, there, dtype, SCALE, HEIGHT, LINES, WIDTH)
            total = tl.dot(low, tl.trans(even), total, input_precision="ieee")
            total = tl.dot(high, tl.trans(odd), total, input_precision="ieee")
    if is_lowered(dtype, BITS):
        total *= RAISED
    return total


@quick
@triton.jit(do_not_specialize=["N"])  # else a batch that grows by a token may compile again
def _up_by_expert(
    x_TH,
    expert_TK,
    lists,
    data,
    scales,
    matrix_scale,
    bias_EJ,
    low_NR,
    gate_b_EIR,
    up_b_EIR,
    a_NI,
    N,
    E: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    OWNER_IS_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
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
    BY_LANES: tl.constexpr,
    LISTS: tl.constexpr,
    WRITES: tl.constexpr,
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
    BLOCKS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % BLOCKS
    owner, expert, count, begin, end = work_of(
        expert_TK, lists, tl.program_id(0) // BLOCKS, N, E, OWNER_IS_EXPERT, BLOCK_N, OVERLAP, LISTS, ROWS
    )  # fmt: skip
    if WRITES and block == 0:
        tl.store(lists + owner, count)
    if count == 0:
        return
    data += expert * STRIDE_EXPERT
    scales += expert * STRIDE_SCALE_EXPERT
    for at in range(0, end, ROWS):
        first_rank = begin + at
        slot = slots_of(
            expert_TK, lists, owner, expert, first_rank, count, N, E, OWNER_IS_EXPERT, ROWS, PIECE, LISTS
        )  # fmt: skip
        rank = first_rank + tl.arange(0, ROWS)
        slot_ok = rank < count
        if WRITES and block == 0:
            owners = E if OWNER_IS_EXPERT else N
            tl.store(list_of(lists, owner, owners, N) + rank, slot, mask=slot_ok)
        first = block * COLUMNS
        j, row_ok = rows_of_gate_up(first, I, GATED, INTERLEAVED, COLUMNS)
        column = first + tl.arange(0, COLUMNS)
        h = _products(
            data, scales, j, row_ok, x_TH + (slot // K).to(tl.int64) * REDUCTION, slot_ok, HEIGHT, ROWS, DEPTH,
            STAGES, REDUCTION, BITS, SCALE, BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS, STRIDE_ROW,
            STRIDE_SCALE_ROW, HARDWARE, BY_LANES,
        )  # fmt: skip
        if HAS_MATRIX_SCALE:
            h *= tl.load(matrix_scale + expert * STRIDE_MATRIX_SCALE)
        if HAS_BIAS:
            h += tl.load(bias_EJ + expert * STRIDE_BIAS + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if GATE_RANK + UP_RANK > 0:
            if OVERLAP and LISTS == "":
                tl.extra.cuda.gdc_wait()
            low_S = low_NR + slot.to(tl.int64) * (UP_AT + UP_RANK)
            h = add_low_rank_of_gate_up(
                h, gate_b_EIR, up_b_EIR, expert, j, row_ok, low_S, slot_ok, I, GATED, INTERLEAVED, GATE_RANK, UP_RANK,
                UP_AT,
            )  # fmt: skip
        a = activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, COLUMNS, ROWS)
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
    lists,
    data,
    scales,
    matrix_scale,
    bias_EH,
    low_NR,
    b_EHR,
    y_NH,
    N,
    E: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STRIDE_BIAS: tl.constexpr,
    OWNER_IS_EXPERT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
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
    BY_LANES: tl.constexpr,
    LISTS: tl.constexpr,
):
    if OVERLAP:  # for the sum, where its launch overlaps
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % BLOCKS
    owner, expert, count, begin, end = work_of(
        expert_TK, lists, tl.program_id(0) // BLOCKS, N, E, OWNER_IS_EXPERT, BLOCK_N, OVERLAP, LISTS, ROWS
    )  # fmt: skip
    if count == 0:
        return
    if OVERLAP and LISTS == "":
        tl.extra.cuda.gdc_wait()
    data += expert * STRIDE_EXPERT
    scales += expert * STRIDE_SCALE_EXPERT
    for at in range(0, end, ROWS):
        first_rank = begin + at
        slot = slots_of(
            expert_TK, lists, owner, expert, first_rank, count, N, E, OWNER_IS_EXPERT, ROWS, PIECE, LISTS
        ).to(tl.int64)  # fmt: skip
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        h = block * COLUMNS + tl.arange(0, COLUMNS)
        row_ok = h < H
        y = _products(
            data, scales, h, row_ok, a_NI + slot * REDUCTION, slot_ok, COLUMNS, ROWS, DEPTH, STAGES, REDUCTION,
            BITS, SCALE, BLOCK_ROWS, BLOCK_COLUMNS, PART_ROWS, PART_BLOCKS, STRIDE_ROW, STRIDE_SCALE_ROW,
            HARDWARE, BY_LANES,
        )  # fmt: skip
        if HAS_MATRIX_SCALE:
            y *= tl.load(matrix_scale + expert * STRIDE_MATRIX_SCALE)
        if HAS_BIAS:
            y += tl.load(bias_EH + expert * STRIDE_BIAS + h, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if RANK > 0:
            y = add_low_rank(y, b_EHR + expert * H * RANK, h, row_ok, low_NR + slot * RANK, slot_ok, RANK)
        tl.store(y_NH + slot[None, :] * H + h[:, None], y, mask=slot_ok[None, :] & row_ok[:, None])
