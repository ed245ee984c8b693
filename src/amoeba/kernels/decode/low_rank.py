"""LoRA factors of few tokens: the rank's few numbers of each slot in a launch of their own, B in the epilogues.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · R LoRA rank

    of_up = low_of_up(problem, x_TH, expert_TK, overlap)          # before the up projection: c·A x of each slot
    of_down = low_of_down(problem, a_NI, expert_TK, overlap)      # before the down projection: c·A_d a
    kernel[grid](..., *of_up.tensors, **of_up.constants)          # adds B · low in fp32, before it activates

Only the factors of chosen experts are read, as they are: fp32 ones beside weights of half precision are rounded when
they are loaded, since to copy all experts' for each token would take as long as the projections themselves. Programs of
such a launch may overlap those of the one before it: they ask for A before they look at the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.tiles import load_tile
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.problem import Problem

# Rows of A in a program and how much of them it reads at a time: at T = 1 with K = 8 and R = 16 there are 64 programs.
# Not measured yet.
RANKS, DEPTH, WARPS = 2, 2048, 4


class Low(NamedTuple):
    """What an epilogue is handed, after its other tensors and among its constants."""

    tensors: tuple[Tensor | None, ...]
    constants: dict[str, Any]
    present: bool = True


_NOT_UP = Low((None, None, None), {"GATE_RANK": 0, "UP_RANK": 0, "UP_AT": 0}, False)
_NOT_DOWN = Low((None, None), {"RANK": 0}, False)


def low_of_up(problem: Problem, x_TH: Tensor, expert_TK: Tensor, overlap: bool) -> Low:
    """(low of gate and up side by side, or once where they share their A; gate's B, up's B)."""
    lora = problem.lora
    if lora is None or lora.gate_lora_a is lora.up_lora_a is None:
        return _NOT_UP
    gate_a, up_a = lora.gate_lora_a, None if lora.shares_a else lora.up_lora_a
    gate_rank, up_rank = (0 if a is None else a.shape[1] for a in (gate_a, up_a))
    low_NR = x_TH.new_empty((expert_TK.numel(), gate_rank + up_rank))
    if gate_a is not None:
        _multiply(x_TH, gate_a, expert_TK, low_NR[:, :gate_rank], lora.scaling, overlap and up_a is None)
    if up_a is not None:
        _multiply(x_TH, up_a, expert_TK, low_NR[:, gate_rank:], lora.scaling, overlap)
    if lora.shares_a:
        ranks = {"GATE_RANK": gate_rank, "UP_RANK": gate_rank, "UP_AT": 0}
    else:
        ranks = {"GATE_RANK": gate_rank, "UP_RANK": up_rank, "UP_AT": gate_rank}
    return Low((low_NR, _plain(lora.gate_lora_b), _plain(lora.up_lora_b)), ranks)


def low_of_down(problem: Problem, a_NI: Tensor, expert_TK: Tensor, overlap: bool) -> Low:
    """(low, B)."""
    lora = problem.lora
    if lora is None or lora.down_lora_a is None:
        return _NOT_DOWN
    rank = lora.down_lora_a.shape[1]
    low_NR = a_NI.new_empty((expert_TK.numel(), rank))
    _multiply(a_NI, lora.down_lora_a, expert_TK, low_NR, lora.scaling, overlap, after_rows=overlap)
    return Low((low_NR, _plain(lora.down_lora_b)), {"RANK": rank})


def _plain(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.contiguous()


def _multiply(
    rows: Tensor,
    a_ERW: Tensor,
    expert_TK: Tensor,
    low_NR: Tensor,
    scaling: float,
    overlap: bool,
    *,
    after_rows: bool = False,
) -> None:
    """low[n] = scaling · A of n's expert · its row. rows: of tokens, or of slots.

    after_rows: the launch ahead computes the rows and may still run.
    """
    experts, rank, width = a_ERW.shape
    (slots, _), depth = low_NR.shape, min(next_power_of_2(width), DEPTH)
    _low[(slots * cdiv(rank, RANKS),)](
        rows,
        a_ERW.contiguous(),
        expert_TK,
        low_NR,
        scaling,
        experts,
        low_NR.stride(0),
        WIDTH=width,
        RANK=rank,
        SLOTS_PER_ROW=slots // rows.shape[0],
        RANKS=RANKS,
        DEPTH=depth,
        OVERLAP=overlap,
        AFTER_ROWS=after_rows,
        num_warps=WARPS,
        **({"launch_pdl": True} if after_rows else {}),
    )


@quick
@triton.jit
def _low(
    rows,
    a_ERW,
    expert_TK,
    low_NR,
    scaling,
    E,
    stride_low,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    AFTER_ROWS: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    slot = tl.program_id(0) // BLOCKS
    r = (tl.program_id(0) % BLOCKS) * RANKS + tl.arange(0, RANKS)
    expert = tl.load(expert_TK + slot)
    if (expert < 0) | (expert >= E):
        return
    depth = tl.arange(0, DEPTH)
    factor = a_ERW + expert.to(tl.int64) * (RANK * WIDTH) + r[:, None] * WIDTH
    row = rows + (slot // SLOTS_PER_ROW).to(tl.int64) * WIDTH
    tile = load_tile(factor + depth[None, :], r < RANK, depth < WIDTH, RANK % RANKS == 0, WIDTH == DEPTH, "")
    if AFTER_ROWS:
        tl.extra.cuda.gdc_wait()
    value = tl.load(row + depth, mask=depth < WIDTH, other=0.0)
    total = rounded(tile, value).to(tl.float32) * value.to(tl.float32)[None, :]
    for done in range(DEPTH, WIDTH, DEPTH):
        here = done + depth
        tile = load_tile(factor + here[None, :], r < RANK, here < WIDTH, RANK % RANKS == 0, WIDTH % DEPTH == 0, "")
        value = tl.load(row + here, mask=here < WIDTH, other=0.0)
        total += rounded(tile, value).to(tl.float32) * value.to(tl.float32)[None, :]
    low = tl.sum(total, axis=1) * scaling
    tl.store(low_NR + slot.to(tl.int64) * stride_low + r, low.to(low_NR.dtype.element_ty), mask=r < RANK)


@triton.jit
def rounded(factor, like):
    """A factor in the dtype that the layer computes in."""
    return factor.to(like.dtype)


@triton.jit
def load_b(b_OR, o, o_ok, RANK: tl.constexpr, LEAST: tl.constexpr):
    """The rows o of one expert's B, with zeros up to a power of two of columns, LEAST of them or more."""
    COLUMNS: tl.constexpr = LEAST if RANK <= LEAST else triton.next_power_of_2(RANK)
    r = tl.arange(0, COLUMNS)
    mask = o_ok[:, None] & (r < RANK)[None, :]
    return tl.load(b_OR + o.to(tl.int64)[:, None] * RANK + r[None, :], mask=mask, other=0.0)


@triton.jit
def times_low(b, low, rank):
    """B · low of one slot."""
    r = tl.arange(0, b.shape[1])
    value = tl.load(low + r, mask=r < rank, other=0.0)
    return tl.sum(rounded(b, value).to(tl.float32) * value.to(tl.float32)[None, :], axis=1)


@triton.jit
def add_times_lows(total, b, low_S, slot_ok, RANK: tl.constexpr):
    """total + B · low of many slots, by the tensor cores."""
    r = tl.arange(0, b.shape[1])
    value = tl.load(low_S[:, None] + r[None, :], mask=slot_ok[:, None] & (r < RANK)[None, :], other=0.0)
    return tl.dot(rounded(b, value), tl.trans(value), total, input_precision="ieee")


@triton.jit
def halves_of_rows(j, row_ok, I, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For rows j of W1: the column of a that each makes, which of them are gate's, and which are up's."""
    if GATED:
        if INTERLEAVED:
            column = j // 2
            is_up = j % 2 == 1
        else:
            is_up = j >= I
            column = tl.where(is_up, j - I, j)
        gate_ok = row_ok & (is_up == 0)
        up_ok = row_ok & is_up
    else:
        column = j
        gate_ok = row_ok & (j < 0)
        up_ok = row_ok
    return column, gate_ok, up_ok
