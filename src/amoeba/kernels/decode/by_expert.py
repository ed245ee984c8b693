"""Few tokens, expert by expert: a program computes all slots of its expert, so that a weight is read once.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    stored = weights, scales, matrix_scale          # see `amoeba.kernels.decode.weights`
    up_by_expert(problem, chosen, ranks)(
        x_TH, x_scales, expert_TK, lists, *stored, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI
    )
    down_by_expert(problem, chosen, ranks)(a_NI, a_scales, expert_TK, lists, *stored, bias_EH, low_NR, b_EHR, y_NH)
    sum_of_slots(problem)(y_NH, expert_TK, weight_TK, y_TH)

Which slots are a program's is told in `slot_lists`; it takes them in chunks of `chosen.rows`.

Quantised weights become numbers of x's dtype in registers, on the way from shared memory to the tensor core. e4m3 is
exact in it: where a step lies in one block, its scale is applied to what the step gives. Smaller blocks have theirs
applied to the numbers, which bf16 holds exactly, too.

Rows may be quantised as well (`Configuration.e4m3`), by 128 of their numbers, as is a step then: products are in e4m3,
and both scales are applied to what they give. x_scales and a_scales are None elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.core.problem import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.blocks import columns_of, load_packed, value_of
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.configuration import Configuration, Tile
from amoeba.kernels.decode.low_rank import Ranks, add_low_rank, add_low_rank_of_gate_up
from amoeba.kernels.decode.slot_lists import list_of, lists_are, slots_of, spares, work_of
from amoeba.kernels.decode.weights import (
    RAISED,
    activate,
    bias_row,
    is_lowered,
    is_quantised,
    lanes,
    load_tile,
    number_e4m3,
    numbers_of,
    places_of_scales,
    rows_of_gate_up,
    scaled,
    scaled_lanes_e2m1,
    scaled_pair_e2m1,
    stored_down,
    stored_up,
)
from amoeba.kernels.dequantise import load_scales
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick

# A program by expert finds its chunk's slots by comparing ranks with ids, this many pairs at once. More take registers
# from the products, and with them programs from an SM: by Triton 3.6's compiler for sm_90, 16 ranks x 512 ids need 180
# registers, 16 x 256 need 90, 64 x 256 need 243, 64 x 64 need 168.
RANKS_TIMES_IDS = 4096
# Elements of the K rows that a program of the summing launch reads. Not measured yet.
COMBINE_TILE = 2048


def up_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile = problem.weights, chosen.up
    lists = "ahead" if chosen.lists(problem) else ""
    return _up_by_expert.fixed(
        (_owners(problem, chosen) * cdiv(weights.intermediate, tile.columns),),
        (*numbers_of(problem, weights.gate_up_EJH), problem.rows, problem.expert_TK.shape[1]),
        TILE=_tile(problem, chosen, tile, lists, WRITES=lists_are(problem, chosen) == "by up"),
        MATRIX=stored_up(problem, tile),
        RANKS=ranks.of_up,
        ACTIVATION=activations.group(weights.activation),
        **_options(problem, tile),
        **({"launch_pdl": True} if chosen.overlap and (lists or ranks.any_up) else {}),
    )


def down_by_expert(problem: Problem, chosen: Configuration, ranks: Ranks) -> Launch:
    weights, tile = problem.weights, chosen.down
    return _down_by_expert.fixed(
        (_owners(problem, chosen) * cdiv(weights.hidden, tile.columns),),
        (*numbers_of(problem, weights.down_EHI), problem.rows),
        TILE=_tile(problem, chosen, tile, lists_are(problem, chosen)),
        MATRIX=stored_down(problem, tile),
        RANK=ranks.down,
        **_options(problem, tile),
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def _owners(problem: Problem, chosen: Configuration) -> int:
    return min(problem.rows, problem.weights.num_experts) + spares(problem, chosen)


def _tile(problem: Problem, chosen: Configuration, tile: Tile, lists: str, **others: bool) -> Group:
    warps = max(chosen.up.warps, chosen.down.warps)
    if chosen.by_lanes and warps > 2 and problem.x_TH.dtype == torch.bfloat16:
        remedy = "take fewer, or leave by_lanes out: Triton 3.6 multiplies them wrongly"
        raise bad_value("configuration", "1 or 2 warps for numbers in the order of lanes", warps, remedy)
    ids = 1 if chosen.lists(problem) else next_power_of_2(problem.rows)  # lists are the same for any number
    return Group(
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages if is_quantised(problem.weights) else None,
        ROWS=chosen.rows,
        EXPERTS=problem.weights.num_experts if lists else None,
        OWNER_IS_EXPERT=problem.weights.num_experts <= problem.rows,
        BLOCK_N=ids,
        PIECE=min(RANKS_TIMES_IDS // chosen.rows, ids),
        OVERLAP=chosen.overlap,
        BY_LANES=chosen.by_lanes,
        LISTS=lists,
        **others,
    )


def _options(problem: Problem, tile: Tile) -> dict[str, int]:
    stages = {} if is_quantised(problem.weights) else {"num_stages": tile.stages}
    return {"num_warps": tile.warps, **stages}


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
def _products(
    weights,
    scales,
    expert,
    row_R,
    row_ok,
    values,
    value_scales,
    slot_ok,
    reduction,
    stride_expert,
    stride_row,
    stride_column,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
):
    """(HEIGHT, ROWS) in fp32: these rows of the expert's matrix times the chunk's. values: pointers to the first of
    each row. value_scales: to its first scale, or None."""
    if MATRIX.QUANTISED:
        data = weights + expert * MATRIX.STRIDE_EXPERT
        of_expert = scales + expert * MATRIX.STRIDE_SCALE_EXPERT
        return _quantised_products(data, of_expert, row_R, row_ok, values, value_scales, slot_ok, HEIGHT, TILE, MATRIX)
    else:
        matrix = weights + expert * stride_expert + row_R.to(tl.int64)[:, None] * stride_row
        total = tl.zeros((HEIGHT, TILE.ROWS), tl.float32)
        for k in range(0, reduction, TILE.DEPTH):
            here = k + tl.arange(0, TILE.DEPTH)
            pointers = matrix + here.to(tl.int64)[None, :] * stride_column
            tile = load_tile(pointers, row_ok, here < reduction, MATRIX.EVEN_ROWS, MATRIX.EVEN_DEPTH, "")
            rows = values[:, None] + here[None, :]
            value = load_tile(rows, slot_ok, here < reduction, False, MATRIX.EVEN_DEPTH, "")
            total = tl.dot(tile, tl.trans(value), total, input_precision="ieee")
        return total


@triton.jit
def _quantised_products(
    data,
    scales,
    row_R,
    row_ok,
    values,
    value_scales,
    slot_ok,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
):
    BITS: tl.constexpr = MATRIX.BITS
    ROWS: tl.constexpr = TILE.ROWS
    DEPTH: tl.constexpr = TILE.DEPTH
    REDUCTION: tl.constexpr = MATRIX.REDUCTION
    WIDTH: tl.constexpr = DEPTH * BITS // 8
    ROW_BYTES: tl.constexpr = (REDUCTION * BITS + 7) // 8
    LINES: tl.constexpr = DEPTH // MATRIX.BLOCK_COLUMNS if DEPTH > MATRIX.BLOCK_COLUMNS else 1
    EVEN: tl.constexpr = REDUCTION % DEPTH == 0
    dtype: tl.constexpr = values.dtype.element_ty
    rows = data + row_R.to(tl.int64)[:, None] * MATRIX.STRIDE_ROW
    total = tl.zeros((HEIGHT, ROWS), tl.float32)
    if MATRIX.SCALE == "inside":
        return _products_of_blocks(rows, row_ok, values, slot_ok, total, TILE, MATRIX)
    bytes = rows + tl.arange(0, WIDTH)[None, :]
    values = values[:, None] + tl.arange(0, DEPTH)[None, :]
    for step in tl.range(0, (REDUCTION + DEPTH - 1) // DEPTH, num_stages=TILE.STAGES):
        inside = row_ok[:, None]
        value_ok = slot_ok[:, None]
        if not EVEN:
            inside &= (tl.arange(0, WIDTH) < ROW_BYTES - step * WIDTH)[None, :]
            value_ok &= (tl.arange(0, DEPTH) < REDUCTION - step * DEPTH)[None, :]
        packed = tl.load(bytes + step * WIDTH, mask=inside, other=0)
        places, there = places_of_scales(scales, row_R, row_ok, step, DEPTH, LINES, REDUCTION, MATRIX)
        value = tl.load(values + step * DEPTH, mask=value_ok, other=0.0)
        if BITS == 8:
            scale = load_scales(places, there, 1.0, MATRIX.SCALE)
            if value_scales is not None:
                scale *= tl.load(value_scales + step, mask=slot_ok, other=0.0)[None, :]
                number = packed.to(tl.float8e4nv, bitcast=True)
                codes = tl.trans(value.to(tl.float8e4nv, bitcast=True))
                total += tl.dot(number, codes, input_precision="ieee") * scale
            elif LINES == 1:
                number = number_e4m3(packed, MATRIX.HARDWARE)
                total += tl.dot(number.to(dtype), tl.trans(value), input_precision="ieee") * scale
            else:
                number = number_e4m3(packed, MATRIX.HARDWARE)
                weight = scaled(number, scale, HEIGHT, LINES, WIDTH).to(dtype)
                total = tl.dot(weight, tl.trans(value), total, input_precision="ieee")
        else:
            if TILE.BY_LANES:
                even, odd = lanes(value, ROWS, WIDTH)
                low, high = scaled_lanes_e2m1(packed, places, there, dtype, MATRIX.SCALE, HEIGHT, LINES, WIDTH)
            else:
                even, odd = tl.split(tl.reshape(value, (ROWS, WIDTH, 2)))
                low, high = scaled_pair_e2m1(packed, places, there, dtype, MATRIX.SCALE, HEIGHT, LINES, WIDTH)
            total = tl.dot(low, tl.trans(even), total, input_precision="ieee")
            total = tl.dot(high, tl.trans(odd), total, input_precision="ieee")
    if is_lowered(dtype, BITS):
        total *= RAISED
    return total


@triton.jit
def _products_of_blocks(rows, row_ok, values, slot_ok, total, TILE: tl.constexpr, MATRIX: tl.constexpr):
    """A plane of a block's numbers after the other, each with the columns of the rows that it belongs to."""
    DEPTH: tl.constexpr = TILE.DEPTH
    REDUCTION: tl.constexpr = MATRIX.REDUCTION
    dtype: tl.constexpr = values.dtype.element_ty
    for step in tl.range(0, (REDUCTION + DEPTH - 1) // DEPTH, num_stages=TILE.STAGES):
        packed = load_packed(rows, row_ok[:, None], step * DEPTH, DEPTH, MATRIX)
        for plane in tl.static_range(MATRIX.PLANES):
            column = columns_of(step * DEPTH, plane, DEPTH, MATRIX)
            value_ok = slot_ok[:, None]
            if REDUCTION % DEPTH != 0:
                value_ok &= (column < REDUCTION)[None, :]
            value = tl.load(values[:, None] + column[None, :], mask=value_ok, other=0.0)
            weight = value_of(packed, plane, DEPTH, MATRIX).to(dtype)
            total = tl.dot(weight, tl.trans(value), total, input_precision="ieee")
    return total


@quick
@triton.jit(do_not_specialize=["N"])  # else a batch that grows by a token may compile again
def _up_by_expert(
    x_TH,
    x_scales,
    expert_TK,
    lists,
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
    N,
    K,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    RANKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    if MATRIX.QUANTISED:
        E, H, I, K = MATRIX.E, MATRIX.H, MATRIX.I, MATRIX.K
    if TILE.OVERLAP:  # programs of the next launch may take the place of those of this one that are done
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = TILE.ROWS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    HEIGHT: tl.constexpr = 2 * COLUMNS if ACTIVATION.GATED else COLUMNS
    blocks = tl.cdiv(I, COLUMNS)
    block = tl.program_id(0) % blocks
    owner, expert, count, begin, end = work_of(expert_TK, lists, tl.program_id(0) // blocks, N, E, TILE)
    if TILE.WRITES and block == 0:
        tl.store(lists + owner, count)
    if count == 0:
        return
    first = block * COLUMNS
    j, row_ok = rows_of_gate_up(first, I, COLUMNS, ACTIVATION)
    column = first + tl.arange(0, COLUMNS)
    for at in range(0, end, ROWS):
        first_rank = begin + at
        slot = slots_of(expert_TK, lists, owner, expert, first_rank, count, N, E, TILE)
        rank = first_rank + tl.arange(0, ROWS)
        slot_ok = rank < count
        if TILE.WRITES and block == 0:
            owners = E if TILE.OWNER_IS_EXPERT else N
            tl.store(list_of(lists, owner, owners, N) + rank, slot, mask=slot_ok)
        token = (slot // K).to(tl.int64)
        if x_scales is None:
            of_rows = None
        else:
            of_rows = x_scales + token * ((H + 127) // 128)
        h = _products(
            weights, scales, expert, j, row_ok, x_TH + token * H, of_rows, slot_ok, H, stride_expert, stride_row,
            stride_column, HEIGHT, TILE, MATRIX,
        )  # fmt: skip
        if matrix_scale is not None:
            h *= tl.load(matrix_scale + expert * MATRIX.STRIDE_MATRIX_SCALE)
        if MATRIX.HAS_BIAS:
            bias = bias_row(bias_EJ, expert, 2 * I if ACTIVATION.GATED else I, MATRIX)
            h += tl.load(bias + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if RANKS.GATE + RANKS.UP > 0:
            if TILE.OVERLAP and TILE.LISTS == "":
                tl.extra.cuda.gdc_wait()
            low_S = low_NR + slot.to(tl.int64) * (RANKS.UP_AT + RANKS.UP)
            h = add_low_rank_of_gate_up(
                h, gate_b_EIR, up_b_EIR, expert, j, row_ok, low_S, slot_ok, I, RANKS, ACTIVATION
            )  # fmt: skip
        a = activate(h, COLUMNS, ROWS, ACTIVATION)
        tl.store(
            a_NI + slot.to(tl.int64)[None, :] * I + column[:, None],
            a.to(a_NI.dtype.element_ty),
            mask=slot_ok[None, :] & (column < I)[:, None],
        )


@quick
@triton.jit(do_not_specialize=["N"])  # else a batch that grows by a token may compile again
def _down_by_expert(
    a_NI,
    a_scales,
    expert_TK,
    lists,
    weights,
    scales,
    matrix_scale,
    bias_EH,
    low_NR,
    b_EHR,
    y_NH,
    stride_expert,
    stride_row,
    stride_column,
    E,
    H,
    I,
    N,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    RANK: tl.constexpr,
):
    if MATRIX.QUANTISED:
        E, H, I = MATRIX.E, MATRIX.H, MATRIX.I
    if TILE.OVERLAP:  # for the sum, where its launch overlaps
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = TILE.ROWS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    blocks = tl.cdiv(H, COLUMNS)
    block = tl.program_id(0) % blocks
    owner, expert, count, begin, end = work_of(expert_TK, lists, tl.program_id(0) // blocks, N, E, TILE)
    if count == 0:
        return
    if TILE.OVERLAP and TILE.LISTS == "":
        tl.extra.cuda.gdc_wait()
    for at in range(0, end, ROWS):
        first_rank = begin + at
        slot = slots_of(expert_TK, lists, owner, expert, first_rank, count, N, E, TILE).to(tl.int64)
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        h = block * COLUMNS + tl.arange(0, COLUMNS)
        row_ok = h < H
        if a_scales is None:
            of_rows = None
        else:
            of_rows = a_scales + slot * ((I + 127) // 128)
        y = _products(
            weights, scales, expert, h, row_ok, a_NI + slot * I, of_rows, slot_ok, I, stride_expert, stride_row,
            stride_column, COLUMNS, TILE, MATRIX,
        )  # fmt: skip
        if matrix_scale is not None:
            y *= tl.load(matrix_scale + expert * MATRIX.STRIDE_MATRIX_SCALE)
        if MATRIX.HAS_BIAS:
            bias = bias_row(bias_EH, expert, H, MATRIX)
            y += tl.load(bias + h, mask=row_ok, other=0.0).to(tl.float32)[:, None]
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
