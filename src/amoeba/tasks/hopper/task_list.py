"""All tasks of a backward as a list in memory, in the order of tickets: made by one launch ahead of the kernel.

N = T·K routed rows · E experts · H hidden · I intermediate

    records = make_list(table, offs_E, layout, tickets=most, row_counters=129)

A ticket is then a line of eight numbers (`FIELDS`), one load, where `decode_ticket` takes a chain of loads, sums and
divisions; many programs make the list at once. What it says is what `Graph.decode` says; a test compares the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.tiles import grouped_order
from amoeba.tasks.triton.tickets import (
    ACTIVATE,
    COMBINE,
    DOWN,
    DOWN_WEIGHTS,
    UP,
    UP_WEIGHTS,
    Layout,
    Table,
    count_tickets,
    with_biases,
)

# The task; expert, first row and end of the rows; which counter its gate is, and what that has to show: 0 where it
# waits for nothing, or, for sums over tokens, for many counters, which it finds itself.
FIELDS = ("kind", "item", "part", "expert", "row", "end", "gate", "least")
_LINE = tl.constexpr(len(FIELDS))
_SMALL = tl.constexpr(46340)  # squares up to here fit 32 bits
_BLOCK = 128  # tickets of a program


def make_list(table: Table, offs_E: Tensor, layout: Layout, tickets: int, *, row_counters: int) -> Tensor:
    """(tickets, 8); tickets: at most. row_counters: the first row tile's counter."""
    records = torch.empty((tickets, len(FIELDS)), dtype=torch.int32, device=offs_E.device)
    _make_list[(cdiv(tickets, _BLOCK),)](
        table.heaviest_E, table.first_tile, offs_E, records, layout.token_blocks, layout.down_expert_parts,
        layout.up_expert_parts, layout.down_weight_parts, layout.up_weight_parts, layout.wave,
        cdiv(layout.experts, layout.wave), layout.late, layout.behind,
        EXPERTS=layout.experts, TN=layout.down_parts, TNX=layout.up_parts, GROUP=layout.group,
        STEPS=(layout.experts - 1).bit_length(), BLOCK_G=next_power_of_2(cdiv(layout.experts, layout.wave)),
        BLOCK_M=layout.row_block, ROW_COUNTERS=row_counters, BLOCK=_BLOCK,
    )  # fmt: skip
    return records


@triton.jit
def _merged(index, first, second):
    """`amoeba.tasks.triton.tickets._merged`, of many."""
    both = tl.maximum(first + second, 1)
    if tl.max(tl.maximum(index, first), 0) <= _SMALL:
        before = index * first // both
    else:
        before = (index.to(tl.int64) * first // both).to(tl.int32)
    left = index.to(tl.int64) * first - before.to(tl.int64) * both
    return left + first >= both, before, index - before


@triton.jit
def _in_plane(index, inside, tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and column of those that are inside the plane."""
    return grouped_order(tl.where(inside, index, 0), tl.where(inside, tiles, 1), COLUMNS, GROUP)


@triton.jit
def _decode(
    ticket, heaviest_E, first_tile, token_blocks, down_parts, up_parts, wave_size, waves, late, behind,
    EXPERTS: tl.constexpr, TN: tl.constexpr, TNX: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """(kind, item, part) of many tickets: `decode_ticket`, without branches."""
    wave_G = tl.arange(0, BLOCK_G)
    begin_G, end_G = tl.minimum(wave_G * wave_size, EXPERTS), tl.minimum((wave_G + 1) * wave_size, EXPERTS)
    start_G = tl.load(first_tile + end_G) * TN + tl.load(first_tile + begin_G) * (1 + TNX)
    start_G += begin_G * down_parts + tl.minimum(begin_G, late) * up_parts
    begun = (start_G[None, :] <= ticket[:, None]) & (wave_G < waves)[None, :]
    wave = tl.sum(begun.to(tl.int32), 1) - 1
    begin, end = tl.maximum(tl.minimum(wave * wave_size, EXPERTS), 0), tl.minimum((wave + 1) * wave_size, EXPERTS)
    tile_begin, tile_end = tl.load(first_tile + begin), tl.load(first_tile + end)
    next_end = tl.load(first_tile + tl.minimum((wave + 2) * wave_size, EXPERTS))
    start = tile_end * TN + tile_begin * (1 + TNX) + begin * down_parts + tl.minimum(begin, late) * up_parts
    tiles, next_tiles, experts = tile_end - tile_begin, next_end - tile_end, end - begin

    # The next wave's products and this one's row passes.
    index = ticket - tl.where(wave < 0, 0, start)
    merged_size = tiles + next_tiles * TN
    in_first = index < merged_size
    is_pass, pass_index, product_index = _merged(index, tiles, next_tiles * TN)
    down_tile, down_part = _in_plane(product_index, in_first & ~is_pass, next_tiles, TN, GROUP)
    # dx and gradients of down.
    index -= merged_size
    planes, weights = tiles * TNX, experts * down_parts
    in_second = index < planes + weights
    is_up, up_index, weight_index = index < planes, index, index - planes
    up_tile, up_part = _in_plane(up_index, in_second & ~in_first & is_up, tiles, TNX, GROUP)
    weight_index = tl.where(in_second & ~in_first & ~is_up, weight_index, 0)
    down_place, weight_part = begin + weight_index // down_parts, weight_index % down_parts
    # Gradients of gate_up, and the sums over tokens.
    index -= planes + weights
    last = wave == waves - 1
    begin, experts = tl.where(last, late, begin), tl.where(last, EXPERTS - late, experts)
    blocks = tl.where(last, token_blocks, 0)
    merged_size = tl.where(last, tl.maximum(experts * up_parts - behind, 0), experts * up_parts)
    is_late, late_index, block = _merged(tl.maximum(index, 0), merged_size, blocks)
    is_behind = index >= merged_size + blocks
    is_late, late_index = is_late | is_behind, tl.where(is_behind, index - blocks, late_index)
    late_index = tl.where(in_second | ~is_late, 0, late_index)
    up_place, late_part = begin + late_index // up_parts, late_index % up_parts

    place = tl.where(in_second, down_place, up_place)
    weights_of = tl.load(heaviest_E + tl.minimum(place, EXPERTS - 1))
    third, third_item = tl.where(is_late, UP_WEIGHTS, COMBINE), tl.where(is_late, weights_of, block)
    second, second_item = tl.where(is_up, UP, DOWN_WEIGHTS), tl.where(is_up, tile_begin + up_tile, weights_of)
    first, first_item = (
        tl.where(is_pass, ACTIVATE, DOWN),
        tl.where(is_pass, tile_begin + pass_index, tile_end + down_tile),
    )
    kind = tl.where(in_first, first, tl.where(in_second, second, third))
    item = tl.where(in_first, first_item, tl.where(in_second, second_item, third_item))
    part = tl.where(in_first, tl.where(is_pass, 0, down_part), tl.where(is_up, up_part, weight_part))
    part = tl.where(in_second, part, tl.where(is_late, late_part, 0))
    return kind, item, part


@quick
@triton.jit(
    do_not_specialize=[
        "token_blocks", "down_parts", "up_parts", "down_bias_from", "up_bias_from", "wave", "waves", "late", "behind"
    ]
)  # fmt: skip
def _make_list(
    heaviest_E, first_tile, offs_E, records, token_blocks, down_parts, up_parts, down_bias_from, up_bias_from, wave,
    waves, late, behind, EXPERTS: tl.constexpr, TN: tl.constexpr, TNX: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, ROW_COUNTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    ticket = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = count_tickets(first_tile, EXPERTS, TN, TNX, down_parts, up_parts, token_blocks)
    if tl.program_id(0) * BLOCK < total:
        kind, item, part = _decode(
            tl.minimum(ticket, total - 1), heaviest_E, first_tile, token_blocks, down_parts, up_parts, wave, waves,
            late, behind, EXPERTS, TN, TNX, GROUP, BLOCK_G,
        )  # fmt: skip
        of_weights = (kind == DOWN_WEIGHTS) | (kind == UP_WEIGHTS)
        of_tokens = kind == COMBINE
        of_tile = ~of_weights & ~of_tokens
        # Whose rows: of the experts, heaviest first, the last one that begins at or before the tile.
        place = 0 * item
        for step in tl.static_range(STEPS):
            further = place + (1 << (STEPS - 1 - step))
            first = tl.load(first_tile + further, mask=further < EXPERTS, other=2147483647)
            place = tl.where(first <= item, further, place)
        expert = tl.where(of_tile, tl.load(heaviest_E + place, mask=of_tile, other=0), item)
        start = tl.load(offs_E + expert - 1, mask=(expert > 0) & ~of_tokens, other=0)
        end = tl.load(offs_E + expert, mask=~of_tokens, other=0)
        tile = item - tl.load(first_tile + place, mask=of_tile, other=0)
        row = start + tl.where(of_tile, tile, 0) * BLOCK_M
        # Its gate. Each of the two warpgroups adds to a counter.
        gate, least = ROW_COUNTERS + item, 2 * (TN + (kind == UP).to(tl.int32))
        gate = tl.where(of_weights, 1 + item, gate)
        least = tl.where(of_weights, 2 * tl.cdiv(end - start, BLOCK_M), least)
        least = tl.where((kind == DOWN) | of_tokens, 0, least)
        kind, part = with_biases(kind, part, down_bias_from, up_bias_from)
        line, inside = records + ticket * _LINE, ticket < total
        tl.store(line, kind, mask=inside)
        tl.store(line + 1, item, mask=inside)
        tl.store(line + 2, part, mask=inside)
        tl.store(line + 3, expert, mask=inside)
        tl.store(line + 4, row, mask=inside)
        tl.store(line + 5, end, mask=inside)
        tl.store(line + 6, gate, mask=inside)
        tl.store(line + 7, least, mask=inside)
