"""After a router: expert ids become slots, and the requested ids reach the host without a synchronisation.

T tokens · K experts per token · N = T·K ids · E experts of the layer · S slots

    export_indices(expert_TK, slot_E, slot_TK, row, serial)     # few tokens: all ids in one program
    to_slots(expert_TK, slot_E, slot_TK)                        # any number of tokens: the first half alone

slot_E says in which slot each expert is, -1 where it is in none; slot_TK gets the slots, -1 for missing experts and for
sentinels. `row` is memory that the host can read while the device writes it (mapped and pinned): int32

    row[0] missing    row[1] asked for    row[2] serial    row[3:] distinct ids, the missing ones first, ascending

so the host reads K or a few more numbers, whatever the batch, and nothing where it need not know. There is one program:
its stores are visible to the host when an event behind the launch is done. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments

HEADER = 3
MOST_IDS = 2048  # that one program looks at; 64 tokens of 32 experts
PAIRS = 8192  # experts times ids that are compared at once; not measured yet
TILE = 1024


def row_length(experts: int, ids: int) -> int:
    return HEADER + min(experts, ids)


def export_indices(expert_TK: Tensor, slot_E: Tensor, slot_TK: Tensor, row: Tensor, serial: int) -> None:
    """serial: tells the host which launch wrote the row."""
    ids, experts = expert_TK.numel(), slot_E.shape[0]
    fit = ids <= MOST_IDS and row.shape[0] >= row_length(experts, ids) and expert_TK.is_contiguous()
    fit = fit and slot_TK.shape == expert_TK.shape and slot_TK.is_contiguous() and slot_E.is_contiguous()
    expected = f"at most {MOST_IDS} contiguous ids, and a row of {row_length(experts, ids)}"
    check_arguments(fit, expected, expert_TK=expert_TK, slot_TK=slot_TK, slot_E=slot_E, row=row)
    _export[(1,)](expert_TK, slot_E, slot_TK, row, serial, ids, EXPERTS=experts, **sizes(experts, ids), num_warps=4)


def sizes(experts: int, ids: int) -> dict[str, int]:
    """Experts and ids that are compared with each other at once."""
    bins = max(2, next_power_of_2(experts))
    return {"BINS": bins, "PIECE": min(next_power_of_2(max(ids, 2)), max(2, PAIRS // bins))}


def to_slots(expert_TK: Tensor, slot_E: Tensor, slot_TK: Tensor) -> None:
    fit = expert_TK.is_contiguous() and slot_TK.is_contiguous() and slot_TK.shape == expert_TK.shape
    check_arguments(fit, "contiguous ids", expert_TK=expert_TK, slot_TK=slot_TK)
    ids = expert_TK.numel()
    if ids:
        _to_slots[(cdiv(ids, TILE),)](expert_TK, slot_E, slot_TK, ids, EXPERTS=slot_E.shape[0], TILE=TILE, num_warps=4)


@triton.jit
def translate(expert_N, slot_E, slot_N, index, N, EXPERTS: tl.constexpr):
    """The ids, which of them are experts, and their slots, which are stored."""
    inside = index < N
    expert = tl.load(expert_N + index, mask=inside, other=-1)
    owned = (expert >= 0) & (expert < EXPERTS)  # before narrowing: an int64 id may be anything
    expert = tl.where(owned, expert, 0).to(tl.int32)
    slot = tl.load(slot_E + expert, mask=owned, other=-1)
    tl.store(slot_N + index, slot.to(slot_N.dtype.element_ty), mask=inside)
    return expert, owned, slot


@quick
@triton.jit(do_not_specialize=["serial", "N"])
def _export(expert_N, slot_E, slot_N, row, serial, N, EXPERTS: tl.constexpr, BINS: tl.constexpr, PIECE: tl.constexpr):
    write_row(expert_N, slot_E, slot_N, row, N, EXPERTS, BINS, PIECE)
    tl.store(row + 2, serial)


@triton.jit
def write_row(expert_N, slot_E, slot_N, row, N, EXPERTS: tl.constexpr, BINS: tl.constexpr, PIECE: tl.constexpr):
    """All but the serial. How many are missing."""
    e = tl.arange(0, BINS)
    asked = tl.zeros((BINS,), tl.int32)
    for first in range(0, N, PIECE):
        expert, owned, _ = translate(expert_N, slot_E, slot_N, first + tl.arange(0, PIECE), N, EXPERTS)
        same = (expert[None, :] == e[:, None]) & owned[None, :]
        asked = tl.maximum(asked, tl.max(same.to(tl.int32), axis=1))
    slot = tl.load(slot_E + e, mask=e < EXPERTS, other=-1)
    missing = tl.where(slot < 0, asked, 0)
    there = asked - missing
    misses = tl.sum(missing, axis=0)
    place = tl.where(missing == 1, tl.cumsum(missing, axis=0), misses + tl.cumsum(there, axis=0)) - 1
    tl.store(row + 3 + place, e, mask=asked == 1)
    tl.store(row, misses)
    tl.store(row + 1, tl.sum(asked, axis=0))
    return misses


@quick
@triton.jit(do_not_specialize=["N"])
def _to_slots(expert_N, slot_E, slot_N, N, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    translate(expert_N, slot_E, slot_N, tl.program_id(0) * TILE + tl.arange(0, TILE), N, EXPERTS)
