"""LoRA factors of few tokens: the rank's few numbers of each slot in a launch of their own, B in the epilogues.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · R LoRA rank

    low = low_launches(problem, ranks_of(lora), overlap)                        # once for a plan
    up(..., *low.before_up(lora, x_TH, expert_TK), a_NI)                        # computes c·A x of each slot
    down(..., *low.before_down(lora, a_NI, expert_TK), y_TH)                    # and c·A_d a

The projections' kernels then add B · low in fp32, the up projection's before it activates.
Only the factors of chosen experts are read, as they are: fp32 ones on weights of half precision are rounded when
they are loaded, since to copy all experts' for each token would take as long as the projections themselves. Programs of
such a launch may overlap those of the one before it: they ask for A before they look at the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.problem import Problem
from amoeba.core.weights import LoraFactors
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.weights import load_tile, product_alone
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick

# Rows of A in a program and how much of them it reads at a time: at T = 1 with K = 8 and R = 16 there are 64 programs.
# Not measured yet.
RANKS, DEPTH, WARPS = 2, 2048, 4
# Ranks that a program by expert multiplies at once; more are multiplied this many at a time. With all 256 of fp32
# factors, which are multiplied in registers, a thread had 14 KB of them in memory; 512 of half precision would take
# more shared memory than an sm86 has (compiled by Triton 3.6).
MOST_RANKS, STEP_RANKS = tl.constexpr(128), tl.constexpr(64)
MOST_WIDE_RANKS = tl.constexpr(32)


class Ranks(NamedTuple):
    """Of the factors of gate, up and down, 0 where there are none; shared: gate and up have one A."""

    gate: int = 0
    up: int = 0
    down: int = 0
    shared: bool = False

    @property
    def any_up(self) -> bool:
        return self.gate + self.up > 0

    @property
    def low_up(self) -> int:
        """How many numbers the up projection has for a slot: gate's, then up's, or those that they share."""
        return self.up if self.shared else self.gate + self.up

    @property
    def of_up(self) -> Group:
        """Constants of a kernel of the up projection. UP_AT: where up's numbers begin in a slot's."""
        return Group(GATE=self.gate, UP=self.up, UP_AT=0 if self.shared else self.gate)


def ranks_of(lora: LoraFactors | None) -> Ranks:
    if lora is None:
        return Ranks()
    gate, up, down = (0 if a is None else a.shape[1] for a in (lora.gate_lora_a, lora.up_lora_a, lora.down_lora_a))
    return Ranks(gate, up, down, lora.shares_a)


def kind_of(lora: LoraFactors) -> tuple:
    """What a plan depends on, of factors."""
    dtypes = (None if factor is None else factor.dtype for factor in lora.six())
    return (ranks_of(lora), lora.scaling, *dtypes)


class LowLaunches(NamedTuple):
    """Of one plan, each None where it has nothing to do."""

    ranks: Ranks
    gate: Launch | None
    up: Launch | None
    down: Launch | None

    def before_up(self, lora: LoraFactors | None, x_TH: Tensor, expert_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the up projection is handed: low, B of gate, B of up; whatever stands in its place where it has none."""
        if lora is None or not self.ranks.any_up:
            return x_TH, x_TH, x_TH
        low_NR = x_TH.new_empty((expert_TK.numel(), self.ranks.low_up))
        if self.gate is not None:
            self.gate(x_TH, _plain(lora.gate_lora_a), expert_TK, low_NR)
        if self.up is not None:
            self.up(x_TH, _plain(lora.up_lora_a), expert_TK, low_NR[:, self.ranks.gate :])
        gate_b, up_b = lora.gate_lora_b, lora.up_lora_b
        return low_NR, x_TH if gate_b is None else _plain(gate_b), x_TH if up_b is None else _plain(up_b)

    def before_down(self, lora: LoraFactors | None, a_NI: Tensor, expert_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the down projection: low, B."""
        if lora is None or self.down is None:
            return a_NI, a_NI
        low_NR = a_NI.new_empty((expert_TK.numel(), self.ranks.down))
        self.down(a_NI, _plain(lora.down_lora_a), expert_TK, low_NR)
        return low_NR, _plain(lora.down_lora_b)


def low_launches(problem: Problem, ranks: Ranks, overlap: bool) -> LowLaunches:
    """overlap: see `configuration.Configuration`."""
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    top_k, scaling = problem.expert_TK.shape[1], 1.0 if problem.lora is None else problem.lora.scaling

    def launch(rank: int, stride: int, width: int, slots_per_row: int, begins_next: bool, after_rows: bool) -> Launch:
        return _low.fixed(
            (problem.rows * cdiv(rank, RANKS),),
            (scaling, num_experts, stride),
            WIDTH=width,
            RANK=rank,
            SLOTS_PER_ROW=slots_per_row,
            RANKS=RANKS,
            DEPTH=min(next_power_of_2(width), DEPTH),
            OVERLAP=begins_next,
            AFTER_ROWS=after_rows,
            num_warps=WARPS,
            **({"launch_pdl": True} if after_rows else {}),
        )

    alone = ranks.up > 0 and not ranks.shared
    of_tokens = ranks.low_up, hidden, top_k
    return LowLaunches(
        ranks,
        launch(ranks.gate, *of_tokens, overlap and not alone, False) if ranks.gate else None,
        launch(ranks.up, *of_tokens, overlap, False) if alone else None,
        launch(ranks.down, ranks.down, intermediate, 1, overlap, overlap) if ranks.down else None,
    )


def _plain(factor: Tensor | None) -> Tensor:
    assert factor is not None
    return factor.contiguous()


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
        if AFTER_ROWS:  # the next launch waits for this one alone, and may read what those ahead of it wrote
            tl.extra.cuda.gdc_wait()
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
def load_b(b_OR, o, o_ok, RANK: tl.constexpr):
    """The rows o of one expert's B, with zeros up to a power of two of columns."""
    r = tl.arange(0, triton.next_power_of_2(RANK))
    mask = o_ok[:, None] & (r < RANK)[None, :]
    return tl.load(b_OR + o.to(tl.int64)[:, None] * RANK + r[None, :], mask=mask, other=0.0)


@triton.jit
def times_low(b, low, rank):
    """B · low of one slot."""
    r = tl.arange(0, b.shape[1])
    value = tl.load(low + r, mask=r < rank, other=0.0)
    return tl.sum(product_alone(rounded(b, value).to(tl.float32), value.to(tl.float32)[None, :]), axis=1)


@triton.jit
def add_low_rank(total, b_OR, o, o_ok, low_S, slot_ok, RANK: tl.constexpr):
    """total + B · low of many slots, by the tensor cores; by the rows o of one expert's B. Of many ranks so many at a
    time as find room: fp32 is multiplied in registers, and a B in fp32 comes through them."""
    WIDE_B: tl.constexpr = b_OR.dtype.element_ty.primitive_bitwidth > 16
    NARROW: tl.constexpr = not WIDE_B and low_S.dtype.element_ty.primitive_bitwidth <= 16
    MOST: tl.constexpr = MOST_RANKS if NARROW else MOST_WIDE_RANKS
    STEP: tl.constexpr = STEP_RANKS if NARROW else MOST_WIDE_RANKS
    if RANK <= MOST:
        COUNT: tl.constexpr = 16 if RANK <= 16 else triton.next_power_of_2(RANK)
        return _add_ranks(total, b_OR, o, o_ok, low_S, slot_ok, 0, RANK, COUNT)
    else:
        for first in range(0, RANK, STEP):
            total = _add_ranks(total, b_OR, o, o_ok, low_S, slot_ok, first, RANK, STEP)
        return total


@triton.jit
def add_low_rank_of_gate_up(
    h, gate_b_EIR, up_b_EIR, expert, j, row_ok, low_S, slot_ok, I, RANKS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """The same for rows j of W1: each gets B of gate or B of up. RANKS is `Ranks.of_up`."""
    part, gate_ok, up_ok = halves_of_rows(j, row_ok, I, ACTIVATION)
    if RANKS.GATE > 0:
        h = add_low_rank(h, gate_b_EIR + expert * I * RANKS.GATE, part, gate_ok, low_S, slot_ok, RANKS.GATE)
    if RANKS.UP > 0:
        h = add_low_rank(h, up_b_EIR + expert * I * RANKS.UP, part, up_ok, low_S + RANKS.UP_AT, slot_ok, RANKS.UP)
    return h


@triton.jit
def _add_ranks(total, b_OR, o, o_ok, low_S, slot_ok, first, RANK: tl.constexpr, COUNT: tl.constexpr):
    r = first + tl.arange(0, COUNT)
    b = tl.load(b_OR + o.to(tl.int64)[:, None] * RANK + r[None, :], mask=o_ok[:, None] & (r < RANK)[None, :], other=0.0)
    value = tl.load(low_S[:, None] + r[None, :], mask=slot_ok[:, None] & (r < RANK)[None, :], other=0.0)
    return tl.dot(rounded(b, value), tl.trans(value), total, input_precision="ieee")


@triton.jit
def halves_of_rows(j, row_ok, I, ACTIVATION: tl.constexpr):
    """For rows j of W1: the column of a that each makes, which of them are gate's, and which are up's."""
    if ACTIVATION.GATED:
        if ACTIVATION.INTERLEAVED:
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
