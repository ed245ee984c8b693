"""Row tiles of own tokens before those that wait for rows of other ranks: `Graph._local_first` on the device.

N = T·K routed rows · E experts · K experts per token

    own = make_local_table(order_N, offs_E, table, row_block, top_k, first_row, end_row)
    item = local_tiles_first(item, places, first_tile, *own, EXPERTS, WAVE)          # in a kernel

Rows of an expert are sorted by the rank that they came from: those of own tokens (first_row to end_row) lie together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.tasks.triton.tickets import Table

_MOST = tl.constexpr(2147483647)


class LocalTable(NamedTuple):
    """Of each expert, the heaviest first: its first tile of own rows alone (where there is none, its end), and how many
    such tiles come before it; of the latter also the end."""

    first_local: Tensor
    local_before: Tensor


def make_local_table(
    order_N: Tensor, offs_E: Tensor, table: Table, row_block: int, top_k: int, first_row: int, end_row: int
) -> LocalTable:
    experts = offs_E.shape[0]
    made = torch.empty(2 * experts + 1, dtype=torch.int32, device=offs_E.device)
    first_local, local_before = made[:experts], made[experts:]
    block = next_power_of_2(experts)
    part = min(block, 32)
    _make_local_table[(block // part,)](
        order_N, offs_E, table.first_tile, table.place_E, first_local, local_before, first_row * top_k, end_row * top_k,
        EXPERTS=experts, BLOCK_E=block, BLOCK_PART=part, BLOCK_M=row_block,
        STEPS=max(order_N.shape[0], 1).bit_length(),
    )  # fmt: skip
    return LocalTable(first_local, local_before)


@triton.jit
def _rows_below(order_N, start_E, end_E, bound, STEPS: tl.constexpr):
    """Of each expert, the first sorted row whose slot is not below the bound."""
    low_E, high_E = start_E, end_E
    for _ in range(STEPS):
        open_E = low_E < high_E
        middle_E = (low_E + high_E) // 2
        below_E = open_E & (tl.load(order_N + middle_E, mask=open_E, other=0) < bound)
        low_E = tl.where(below_E, middle_E + 1, low_E)
        high_E = tl.where(open_E & (below_E == 0), middle_E, high_E)
    return low_E


@triton.jit
def _own_tiles(order_N, offs_E, expert_E, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS: tl.constexpr):
    """Of each expert: the first of its tiles that has own rows alone, counted within the expert, and how many."""
    known = expert_E < EXPERTS
    end_E = tl.load(offs_E + expert_E, mask=known, other=0)
    start_E = tl.load(offs_E + expert_E - 1, mask=known & (expert_E > 0), other=0)
    start_E = tl.where(known, start_E, 0)
    own_E = _rows_below(order_N, start_E, end_E, first_slot, STEPS) - start_E
    own_end_E = _rows_below(order_N, start_E, end_E, end_slot, STEPS) - start_E
    rows_E = end_E - start_E
    first_E = (own_E + BLOCK_M - 1) // BLOCK_M
    last_E = tl.where(own_end_E == rows_E, (rows_E + BLOCK_M - 1) // BLOCK_M, own_end_E // BLOCK_M)
    return first_E, tl.maximum(last_E - first_E, 0), (rows_E + BLOCK_M - 1) // BLOCK_M


@quick
@triton.jit(do_not_specialize=["first_slot", "end_slot"])
def _make_local_table(
    order_N, offs_E, first_tile, place_E, first_local, local_before, first_slot, end_slot,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_PART: tl.constexpr, BLOCK_M: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    expert_E = tl.arange(0, BLOCK_E)
    expert_P = tl.program_id(0) * BLOCK_PART + tl.arange(0, BLOCK_PART)
    _, count_E, _ = _own_tiles(order_N, offs_E, expert_E, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS)
    first_P, count_P, tiles_P = _own_tiles(order_N, offs_E, expert_P, first_slot, end_slot, EXPERTS, BLOCK_M, STEPS)
    known_P = expert_P < EXPERTS
    all_places_E = tl.load(place_E + expert_E, mask=expert_E < EXPERTS, other=_MOST)
    place_P = tl.load(place_E + expert_P, mask=known_P, other=0)
    before = (all_places_E[None, :] < place_P[:, None]).to(tl.int32)
    tile_P = tl.load(first_tile + place_P, mask=known_P, other=0)
    tl.store(first_local + place_P, tile_P + tl.where(count_P > 0, first_P, tiles_P), mask=known_P)
    tl.store(local_before + place_P, tl.sum(before * count_E[None, :], 1), mask=known_P)
    if tl.program_id(0) == 0:
        tl.store(local_before + EXPERTS, tl.sum(count_E, 0))


@triton.jit
def local_tiles_first(
    item, places, first_tile, first_local, local_before, EXPERTS: tl.constexpr, WAVE
):  # fmt: skip
    """The row tile in place of this one, which is counted from the beginning of its wave of experts. places: 0 to a
    power of two, at least EXPERTS."""
    known = places < EXPERTS
    first_P = tl.load(first_tile + places, mask=known, other=_MOST)
    before_P = tl.load(local_before + places, mask=known, other=_MOST)
    begin = (tl.sum((first_P <= item).to(tl.int32), 0) - 1) // WAVE * WAVE
    end = tl.minimum(begin + WAVE, EXPERTS)
    before_begin = tl.load(local_before + begin)
    own = tl.load(local_before + end) - before_begin
    index = item - tl.load(first_tile + begin)
    is_own = index < own
    others_P = tl.where(known, first_P - before_P, _MOST)
    wanted_own = before_begin + index
    wanted_other = tl.load(first_tile + begin) - before_begin + index - own
    at_most_P = tl.where(is_own, before_P, others_P)
    place = tl.sum((at_most_P <= tl.where(is_own, wanted_own, wanted_other)).to(tl.int32), 0) - 1
    first, before = tl.load(first_local + place), tl.load(local_before + place)
    other = wanted_other + before
    other = tl.where(other < first, other, other + tl.load(local_before + place + 1) - before)
    return tl.where(is_own, first + wanted_own - before, other)
