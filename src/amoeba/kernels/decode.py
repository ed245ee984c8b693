"""The experts for few tokens, without gradients: the time is the reading of the touched experts' weights, once each.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    y_TH = decode(problem)                                              # x's dtype: bf16, fp16 or fp32
    y_TH = decode(problem, configuration=Configuration(up=..., ...))    # for sweeps

Nothing is sorted: every program reads all N expert ids and finds the slots of its expert itself. There are two ways,
and `configuration` chooses:

by slot     up: one program per (slot, columns of a); down: one per (token, columns of y), with the sum over k inside.
            2 launches, products by multiply and add; where a program's share of down fits in registers, all of it is
            on its way before `a` is looked at, while up still runs. Two slots of one expert read its weights twice:
            made for T = 1.
by expert   up and down: one program per (touched expert, columns), the expert's slots in chunks of `rows` on the tensor
            cores, weights as the left operand; then a launch that sums over k. 3 launches, weights read once (the
            second and later chunks of an expert with more than `rows` slots find them in the L2 cache, mostly).

Slots whose id lies outside [0, E) belong to nobody: their rows of the buffers are neither written nor read, and they
add nothing. Sums are in fp32 and in a fixed order: bitwise equal from run to run. No host synchronisation, and grids
follow from shapes alone: all of it can be captured in a CUDA graph. The weights' two inner strides are free; one of
them must be 1 for speed (rows of W1 and W2 contiguous as in transformers is the fastest).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.backends.operator import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.activation import constants
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

# Up to this many tokens the way is by slot. Not measured yet; at T = 2 few slots share an expert if E >> K.
BY_SLOT_TOKENS = 1
# Programs that a launch by slot should have at least: about 4 for each of an H200's 132 SMs.
BY_SLOT_PROGRAMS = 512
# Columns per program by slot: each program reads the whole input row, so few columns mean much reading beside the
# weights (a quarter of their bytes at 4). With 4, 8 and 16 columns up took 32.7 to 33.4 us together with down (H200,
# 2026-11-15, before the cache was filled by reading).
BY_SLOT_LEAST_COLUMNS, BY_SLOT_MOST_COLUMNS = 4, 16
# Elements of the weight tile of a program by slot: 32 in each of 128 threads.
BY_SLOT_TILE = 4096
# A program of the down projection that has all its weights in flight at once: its columns, and the most elements of its
# tile, 128 in each of 128 threads.
AT_ONCE_COLUMNS, AT_ONCE_ELEMENTS = 2, 16384
# Rows of weights in the tile of a program by expert (one wgmma is 64 high), and bytes of each.
# With T = 8 and 64, 64 or 128 rows of 128 or 256 bytes are within 2 %; 512 bytes cost 5 to 25 % (H200, 2026-11-15).
BY_EXPERT_WEIGHT_ROWS = 64
BY_EXPERT_DEPTH_BYTES = 256
# The expected number of an expert's slots times this is the room that a chunk has for them. Room
# for 32 instead of 16 cost 5 % with T = 8 and 18 % with T = 64 (H200, 2026-11-15).
CHUNK_HEADROOM = 3
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 64
# A program by expert finds its chunk's slots by comparing ranks with ids, this many pairs at once. More take registers
# from the products, and with them programs from an SM: by Triton 3.6's compiler for sm_90, 16 ranks x 512 ids need 180
# registers, 16 x 256 need 90, 64 x 256 need 243, 64 x 64 need 168.
RANKS_TIMES_IDS = 4096
# Elements of the K rows that a program of the summing launch reads. Not measured yet.
COMBINE_TILE = 2048


class Tile(NamedTuple):
    """How a product is cut: `columns` of its result per program, `depth` of the summed dimension per step.

    Both are powers of two. A gated up projection reads two rows of weights per column.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


class Configuration(NamedTuple):
    """rows: the slots of an expert that are computed together, a power of two of at least 16; not used by slot.

    at_once: a program of the down projection has all its weights in flight before it needs the first of them.
    overlap: with at_once, the down projection starts while the up projection ends (programmatic dependent launch, from
    Hopper on).
    """

    by_slot: bool
    up: Tile
    down: Tile
    rows: int = SMALLEST_CHUNK
    at_once: bool = False
    overlap: bool = False


def configuration(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool,
    itemsize: int,
    overlap: bool = False,
) -> Configuration:
    """The way and the tiles. overlap: whether the device can start a launch before the one ahead of it ends."""
    slots = tokens * top_k
    if tokens <= BY_SLOT_TOKENS:
        up = _tile_by_slot(slots, intermediate, hidden, rows_per_column=2 if gated else 1)
        if next_power_of_2(top_k) * next_power_of_2(intermediate) * AT_ONCE_COLUMNS <= AT_ONCE_ELEMENTS:
            return Configuration(
                True, up, Tile(AT_ONCE_COLUMNS, next_power_of_2(intermediate)), at_once=True, overlap=overlap
            )
        return Configuration(True, up, _tile_by_slot(tokens, hidden, intermediate, rows_per_column=1))
    expected = CHUNK_HEADROOM * slots // min(num_experts, slots)
    rows = min(max(next_power_of_2(expected), SMALLEST_CHUNK), LARGEST_CHUNK)
    # fp32 has no tensor core in full precision: its operands pass through registers, so its steps are a quarter
    depth = BY_EXPERT_DEPTH_BYTES // itemsize if itemsize == 2 else BY_EXPERT_DEPTH_BYTES // itemsize // 2
    if rows == LARGEST_CHUNK:  # three stages of both operands fit in the 99 KB of shared memory of the smaller GPUs
        depth //= 2
    return Configuration(
        by_slot=False,
        up=_tile_by_expert(intermediate, hidden, rows_per_column=2 if gated else 1, depth=depth),
        down=_tile_by_expert(hidden, intermediate, rows_per_column=1, depth=depth),
        rows=rows,
    )


def _tile_by_slot(lines: int, width: int, depth: int, *, rows_per_column: int) -> Tile:
    columns = BY_SLOT_MOST_COLUMNS
    while columns > BY_SLOT_LEAST_COLUMNS and lines * cdiv(width, columns) < BY_SLOT_PROGRAMS:
        columns //= 2
    room = BY_SLOT_TILE // (columns * rows_per_column)
    return Tile(columns, min(next_power_of_2(depth), room, 1024), warps=4, stages=4)


def _tile_by_expert(width: int, depth_in_all: int, *, rows_per_column: int, depth: int) -> Tile:
    columns = min(BY_EXPERT_WEIGHT_ROWS // rows_per_column, next_power_of_2(width))
    return Tile(max(columns, 16), max(min(depth, next_power_of_2(depth_in_all)), 16), warps=4, stages=3)


def decode(problem: Problem, *, configuration: Configuration | None = None) -> Tensor:
    """y_TH, in the dtype of x. Meant for T <= 64; right for every T whose N ids fit in one program's registers."""
    tokens, top_k = problem.expert_TK.shape
    num_experts, hidden, intermediate = problem.down_EHI.shape
    x_TH = problem.x_TH.contiguous()
    if tokens * top_k == 0:
        return torch.zeros_like(x_TH)
    chosen = configuration or _chosen(problem)
    expert_TK, weight_TK = problem.expert_TK.contiguous(), problem.weight_TK.contiguous()
    a_NI = x_TH.new_empty((tokens * top_k, intermediate))
    y_TH = torch.empty_like(x_TH)
    if chosen.by_slot:
        _launch_up_by_slot(problem, x_TH, expert_TK, a_NI, chosen)
        launch_down = _launch_down_at_once if chosen.at_once else _launch_down_by_token
        launch_down(problem, a_NI, expert_TK, weight_TK, y_TH, chosen)
        return y_TH
    y_NH = x_TH.new_empty((tokens * top_k, hidden), dtype=torch.float32)
    _launch_up_by_expert(problem, x_TH, expert_TK, a_NI, chosen)
    _launch_down_by_expert(problem, a_NI, expert_TK, y_NH, chosen)
    _launch_combine(y_NH, expert_TK, weight_TK, y_TH, num_experts, chosen)
    return y_TH


def _chosen(problem: Problem) -> Configuration:
    tokens, top_k = problem.expert_TK.shape
    return configuration(
        tokens,
        top_k,
        *problem.down_EHI.shape,
        gated=problem.activation.gated,
        itemsize=problem.x_TH.element_size(),
        overlap=_can_overlap(problem.x_TH.device),
    )


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _bias(bias: Tensor | None, stand_in: Tensor) -> tuple[Tensor, bool]:
    return (stand_in, False) if bias is None else (bias.contiguous(), True)


def _launch_up_by_slot(problem: Problem, x_TH: Tensor, expert_TK: Tensor, a_NI: Tensor, chosen: Configuration) -> None:
    (slots, intermediate), hidden, tile = a_NI.shape, x_TH.shape[1], chosen.up
    bias_EJ, has_bias = _bias(problem.gate_up_bias_EJ, x_TH)
    _up_by_slot[(slots * cdiv(intermediate, tile.columns),)](
        x_TH,
        expert_TK,
        problem.gate_up_EJH,
        bias_EJ,
        a_NI,
        *problem.gate_up_EJH.stride(),
        problem.gate_up_EJH.shape[0],
        hidden,
        intermediate,
        expert_TK.shape[1],
        BLOCK_I=tile.columns,
        BLOCK_H=tile.depth,
        STAGES=tile.stages,
        HAS_BIAS=has_bias,
        EVEN_I=intermediate % tile.columns == 0,
        EVEN_H=hidden % tile.depth == 0,
        INTERLEAVED=problem.activation.interleaved,
        OVERLAP=chosen.overlap,
        **constants(problem.activation),
        num_warps=tile.warps,
    )


def _launch_down_at_once(
    problem: Problem, a_NI: Tensor, expert_TK: Tensor, weight_TK: Tensor, y_TH: Tensor, chosen: Configuration
) -> None:
    (tokens, hidden), intermediate, tile = y_TH.shape, a_NI.shape[1], chosen.down
    bias_EH, has_bias = _bias(problem.down_bias_EH, y_TH)
    _down_at_once[(tokens * cdiv(hidden, tile.columns),)](
        a_NI,
        expert_TK,
        weight_TK,
        problem.down_EHI,
        bias_EH,
        y_TH,
        *problem.down_EHI.stride(),
        problem.down_EHI.shape[0],
        hidden,
        intermediate,
        K=expert_TK.shape[1],
        SLOTS=next_power_of_2(expert_TK.shape[1]),
        BLOCK_H=tile.columns,
        BLOCK_I=next_power_of_2(intermediate),
        HAS_BIAS=has_bias,
        OVERLAP=chosen.overlap,
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def _launch_down_by_token(
    problem: Problem, a_NI: Tensor, expert_TK: Tensor, weight_TK: Tensor, y_TH: Tensor, chosen: Configuration
) -> None:
    (tokens, hidden), intermediate, tile = y_TH.shape, a_NI.shape[1], chosen.down
    bias_EH, has_bias = _bias(problem.down_bias_EH, y_TH)
    _down_by_token[(tokens * cdiv(hidden, tile.columns),)](
        a_NI,
        expert_TK,
        weight_TK,
        problem.down_EHI,
        bias_EH,
        y_TH,
        *problem.down_EHI.stride(),
        problem.down_EHI.shape[0],
        hidden,
        intermediate,
        K=expert_TK.shape[1],
        BLOCK_H=tile.columns,
        BLOCK_I=tile.depth,
        STAGES=tile.stages,
        HAS_BIAS=has_bias,
        EVEN_H=hidden % tile.columns == 0,
        num_warps=tile.warps,
    )


def _launch_up_by_expert(
    problem: Problem, x_TH: Tensor, expert_TK: Tensor, a_NI: Tensor, chosen: Configuration
) -> None:
    (slots, intermediate), hidden, tile = a_NI.shape, x_TH.shape[1], chosen.up
    num_experts = problem.gate_up_EJH.shape[0]
    bias_EJ, has_bias = _bias(problem.gate_up_bias_EJ, x_TH)
    _up_by_expert[(min(slots, num_experts) * cdiv(intermediate, tile.columns),)](
        x_TH,
        expert_TK,
        problem.gate_up_EJH,
        bias_EJ,
        a_NI,
        *problem.gate_up_EJH.stride(),
        num_experts,
        hidden,
        intermediate,
        slots,
        expert_TK.shape[1],
        OWNER_IS_EXPERT=num_experts <= slots,
        BLOCK_N=next_power_of_2(slots),
        PIECE=min(RANKS_TIMES_IDS // chosen.rows, next_power_of_2(slots)),
        ROWS=chosen.rows,
        BLOCK_I=tile.columns,
        BLOCK_H=tile.depth,
        HAS_BIAS=has_bias,
        EVEN_I=intermediate % tile.columns == 0,
        EVEN_H=hidden % tile.depth == 0,
        INTERLEAVED=problem.activation.interleaved,
        **constants(problem.activation),
        num_stages=tile.stages,
        num_warps=tile.warps,
    )


def _launch_down_by_expert(
    problem: Problem, a_NI: Tensor, expert_TK: Tensor, y_NH: Tensor, chosen: Configuration
) -> None:
    (slots, hidden), intermediate, tile = y_NH.shape, a_NI.shape[1], chosen.down
    num_experts = problem.down_EHI.shape[0]
    bias_EH, has_bias = _bias(problem.down_bias_EH, a_NI)
    _down_by_expert[(min(slots, num_experts) * cdiv(hidden, tile.columns),)](
        a_NI,
        expert_TK,
        problem.down_EHI,
        bias_EH,
        y_NH,
        *problem.down_EHI.stride(),
        num_experts,
        hidden,
        intermediate,
        slots,
        OWNER_IS_EXPERT=num_experts <= slots,
        BLOCK_N=next_power_of_2(slots),
        PIECE=min(RANKS_TIMES_IDS // chosen.rows, next_power_of_2(slots)),
        ROWS=chosen.rows,
        BLOCK_H=tile.columns,
        BLOCK_I=tile.depth,
        HAS_BIAS=has_bias,
        EVEN_H=hidden % tile.columns == 0,
        EVEN_I=intermediate % tile.depth == 0,
        num_stages=tile.stages,
        num_warps=tile.warps,
    )


def _launch_combine(
    y_NH: Tensor, expert_TK: Tensor, weight_TK: Tensor, y_TH: Tensor, num_experts: int, chosen: Configuration
) -> None:
    (tokens, hidden), top_k = y_TH.shape, expert_TK.shape[1]
    block_k = next_power_of_2(top_k)
    columns = min(max(COMBINE_TILE // block_k, 16), next_power_of_2(hidden))
    _combine[(tokens * cdiv(hidden, columns),)](
        y_NH,
        expert_TK,
        weight_TK,
        y_TH,
        num_experts,
        hidden,
        top_k,
        BLOCK_K=block_k,
        BLOCK_H=columns,
        num_warps=4,
    )


@triton.jit
def _load_tile(pointers, row_ok, depth_ok, EVEN_ROWS: tl.constexpr, EVEN_DEPTH: tl.constexpr, POLICY: tl.constexpr):
    """A tile with zeros where there is nothing; without masks where there is nothing to mask."""
    if EVEN_ROWS and EVEN_DEPTH:
        tile = tl.load(pointers, eviction_policy=POLICY)
    elif EVEN_ROWS:
        tile = tl.load(pointers, mask=depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    elif EVEN_DEPTH:
        tile = tl.load(pointers, mask=row_ok[:, None], other=0.0, eviction_policy=POLICY)
    else:
        tile = tl.load(pointers, mask=row_ok[:, None] & depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def _rows_of_gate_up(first, I, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr):
    """The rows of W1 that make columns first .. first + BLOCK_I of a, and which of them exist."""
    if GATED:
        row = tl.arange(0, 2 * BLOCK_I)
        if INTERLEAVED:
            column = first + row // 2
            j = 2 * first + row
        else:
            column = first + row % BLOCK_I
            j = column + (row // BLOCK_I) * I
    else:
        column = first + tl.arange(0, BLOCK_I)
        j = column
    return j, column < I


@triton.jit
def _activate(
    h,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ROWS: tl.constexpr,
):
    """a (BLOCK_I, ROWS) of h whose rows are in the order of `_rows_of_gate_up`."""
    if GATED:
        if INTERLEAVED:
            pairs = tl.permute(tl.reshape(h, (BLOCK_I, 2, ROWS)), (0, 2, 1))
        else:
            pairs = tl.permute(tl.reshape(h, (2, BLOCK_I, ROWS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        a = activations.gated(gate, up, KIND, ALPHA, CLAMP, LIMIT, UP_SHIFT)
    else:
        a = activations.plain(h, KIND, ALPHA, CLAMP, LIMIT)
    return a


@quick
@triton.jit
def _up_by_slot(
    x_TH,
    expert_TK,
    gate_up_EJH,
    bias_EJ,
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
    j, row_ok = _rows_of_gate_up(first, I, GATED, INTERLEAVED, BLOCK_I)
    depth = tl.arange(0, BLOCK_H)
    x = x_TH + (slot // K).to(tl.int64) * H
    weights = gate_up_EJH + expert * stride_e + j.to(tl.int64)[:, None] * stride_j

    # summed across threads once, after the loop
    total = tl.zeros((WEIGHT_ROWS, BLOCK_H), tl.float32)
    for k in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        here = k + depth
        tile = _load_tile(
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
    a = _activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, BLOCK_I, 1)
    column = first + tl.arange(0, BLOCK_I)[:, None]
    tl.store(a_NI + slot.to(tl.int64) * I + column, a.to(a_NI.dtype.element_ty), mask=column < I)


@quick
@triton.jit
def _down_at_once(
    a_NI,
    expert_TK,
    weight_TK,
    down_EHI,
    bias_EH,
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
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All that a program reads of the weights is on its way before it looks at `a`: with OVERLAP, while the launch that
    computes `a` still runs."""
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, SLOTS)
    expert = tl.load(expert_TK + token * K + k, mask=k < K, other=-1)
    owned = (expert >= 0) & (expert < E)
    expert = tl.where(owned, expert, 0).to(tl.int64)
    i = tl.arange(0, BLOCK_I)
    row = expert[:, None] * stride_e + h.to(tl.int64)[None, :] * stride_h
    inside = owned[:, None] & (h < H)[None, :]
    tile = tl.load(
        down_EHI + row[:, :, None] + (i.to(tl.int64) * stride_i)[None, None, :],
        mask=inside[:, :, None] & (i < I)[None, None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    scale = tl.load(weight_TK + token * K + k, mask=owned, other=0.0).to(tl.float32)
    bias = tl.zeros((SLOTS, BLOCK_H), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_EH + expert[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    slot = (token * K + k).to(tl.int64)
    a = tl.load(a_NI + slot[:, None] * I + i[None, :], mask=owned[:, None] & (i < I)[None, :], other=0.0)
    total = tl.sum(tile.to(tl.float32) * (a.to(tl.float32) * scale[:, None])[:, None, :], axis=0)
    y = tl.sum(total, axis=1) + tl.sum(bias * scale[:, None], axis=0)
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=h < H)


@quick
@triton.jit
def _down_by_token(
    a_NI,
    expert_TK,
    weight_TK,
    down_EHI,
    bias_EH,
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
):
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok = h < H
    depth = tl.arange(0, BLOCK_I)
    rows = down_EHI + h.to(tl.int64)[:, None] * stride_h
    steps = tl.cdiv(I, BLOCK_I)

    total = tl.zeros((BLOCK_H, BLOCK_I), tl.float32)
    bias = tl.zeros((BLOCK_H,), tl.float32)
    # one loop over k and the steps of each, so that it can run ahead from one expert into the next
    for step in tl.range(0, K * steps, num_stages=STAGES):
        slot = token * K + step // steps
        i = (step % steps) * BLOCK_I + depth
        expert = tl.load(expert_TK + slot)
        owned = (expert >= 0) & (expert < E)
        expert = expert.to(tl.int64)
        scale = tl.where(owned, tl.load(weight_TK + slot).to(tl.float32), 0.0)  # nobody's weight may be NaN
        depth_ok = i < tl.where(owned, I, 0)
        pointers = rows + expert * stride_e + i.to(tl.int64)[None, :] * stride_i
        tile = _load_tile(pointers, row_ok, depth_ok, EVEN_H, False, "evict_first")
        a = tl.load(a_NI + slot.to(tl.int64) * I + i, mask=depth_ok, other=0.0)
        total += tile.to(tl.float32) * (a.to(tl.float32) * scale)[None, :]
        if HAS_BIAS:
            bias_ok = h < tl.where(owned & (step % steps == 0), H, 0)
            bias += tl.load(bias_EH + expert * H + h, mask=bias_ok, other=0.0).to(tl.float32) * scale
    y = tl.sum(total, axis=1) + bias
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=row_ok)


@triton.jit
def _my_expert(expert_TK, owner, N, E, OWNER_IS_EXPERT: tl.constexpr, BLOCK_N: tl.constexpr):
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
def _slots_of_chunk(expert_TK, expert, first_rank, N, ROWS: tl.constexpr, PIECE: tl.constexpr):
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
    expert, count = _my_expert(expert_TK, tl.program_id(0) // blocks, N, E, OWNER_IS_EXPERT, BLOCK_N)
    if count == 0:
        return
    j, row_ok = _rows_of_gate_up(first, I, GATED, INTERLEAVED, BLOCK_I)
    column = first + tl.arange(0, BLOCK_I)
    depth = tl.arange(0, BLOCK_H)
    weights = gate_up_EJH + expert * stride_e + j.to(tl.int64)[:, None] * stride_j
    for first_rank in range(0, count, ROWS):
        slot = _slots_of_chunk(expert_TK, expert, first_rank, N, ROWS, PIECE)
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        x = x_TH + (slot // K).to(tl.int64)[:, None] * H
        h = tl.zeros((WEIGHT_ROWS, ROWS), tl.float32)
        for k in range(0, H, BLOCK_H):
            here = k + depth
            tile = _load_tile(weights + here.to(tl.int64)[None, :] * stride_h, row_ok, here < H, EVEN_I, EVEN_H, "")
            value = _load_tile(x + here[None, :], slot_ok, here < H, False, EVEN_H, "")
            h = tl.dot(tile, tl.trans(value), h, input_precision="ieee")
        if HAS_BIAS:
            J = 2 * I if GATED else I
            h += tl.load(bias_EJ + expert * J + j, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        a = _activate(h, KIND, GATED, INTERLEAVED, ALPHA, CLAMP, LIMIT, UP_SHIFT, BLOCK_I, ROWS)
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
):
    blocks = tl.cdiv(H, BLOCK_H)
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    expert, count = _my_expert(expert_TK, tl.program_id(0) // blocks, N, E, OWNER_IS_EXPERT, BLOCK_N)
    row_ok = h < H
    depth = tl.arange(0, BLOCK_I)
    if count == 0:
        return
    weights = down_EHI + expert * stride_e + h.to(tl.int64)[:, None] * stride_h
    for first_rank in range(0, count, ROWS):
        slot = _slots_of_chunk(expert_TK, expert, first_rank, N, ROWS, PIECE).to(tl.int64)
        slot_ok = first_rank + tl.arange(0, ROWS) < count
        a = a_NI + slot[:, None] * I
        y = tl.zeros((BLOCK_H, ROWS), tl.float32)
        for k in range(0, I, BLOCK_I):
            here = k + depth
            tile = _load_tile(weights + here.to(tl.int64)[None, :] * stride_i, row_ok, here < I, EVEN_H, EVEN_I, "")
            value = _load_tile(a + here[None, :], slot_ok, here < I, False, EVEN_I, "")
            y = tl.dot(tile, tl.trans(value), y, input_precision="ieee")
        if HAS_BIAS:
            y += tl.load(bias_EH + expert * H + h, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        tl.store(y_NH + slot[None, :] * H + h[:, None], y, mask=slot_ok[None, :] & row_ok[:, None])


@quick
@triton.jit
def _combine(
    y_NH,
    expert_TK,
    weight_TK,
    y_TH,
    E,
    H,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_K)
    slot = token * K + k
    expert = tl.load(expert_TK + slot, mask=k < K, other=-1)
    owned = (expert >= 0) & (expert < E)
    scale = tl.load(weight_TK + slot, mask=owned, other=0.0).to(tl.float32)
    y = tl.load(y_NH + slot.to(tl.int64)[:, None] * H + h[None, :], mask=owned[:, None] & (h < H)[None, :], other=0.0)
    total = tl.sum(y * scale[:, None], axis=0)
    tl.store(y_TH + token.to(tl.int64) * H + h, total.to(y_TH.dtype.element_ty), mask=h < H)
