"""Tickets on the device: the table of row tiles, and what `Graph.decode` does, for one rank without a router.

N = T·K routed rows · E experts

    heaviest_E, first_tile, place_E = make_table(offs_E, row_block=128)
    kind, item, part = decode_ticket(ticket, wave_G, heaviest_E, first_tile, ...) # in a kernel
    decode(tickets, offs_E, layout)                           # some of them, for a test

`Graph` is the source; a test compares the two. The kinds' numbers are those of `Kind`.

What a kernel writes down of a task is which it was, where it ran, and when:

    came = now(trace, INTERPRETED)                                         # inside a kernel
    note_task(trace, ticket, kind, item, part, came, started, INTERPRETED)

`trace` is int64: the interpreter's clock, which goes by one at each look, then FIELDS numbers for each ticket. A GPU's
clock counts nanoseconds, in steps of its own: 32 ns to 1 µs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.tiles import grouped_order
from amoeba.kernels.weight_gradient import rows_of
from amoeba.tasks.graph import Kind

SEND = tl.constexpr(int(Kind.SEND))
DOWN = tl.constexpr(int(Kind.DOWN))
ACTIVATE = tl.constexpr(int(Kind.ACTIVATE))
UP = tl.constexpr(int(Kind.UP))
DOWN_WEIGHTS = tl.constexpr(int(Kind.DOWN_WEIGHTS))
UP_WEIGHTS = tl.constexpr(int(Kind.UP_WEIGHTS))
COMBINE = tl.constexpr(int(Kind.COMBINE))
DOWN_BIAS = tl.constexpr(int(Kind.DOWN_BIAS))
UP_BIAS = tl.constexpr(int(Kind.UP_BIAS))
ROUTER = tl.constexpr(int(Kind.ROUTER))
ROUTER_WEIGHTS = tl.constexpr(int(Kind.ROUTER_WEIGHTS))


_SMALL = tl.constexpr(46340)  # squares up to here fit 32 bits; a division of 64 bits is a call on a GPU
_ZEROED = 512  # counters at a time, by each program


class Layout(NamedTuple):
    """All that decoding needs besides the table: down_tiles, up_tiles, tasks of an expert's two gradients, blocks of
    tokens. down_bias_parts, up_bias_parts: tasks of an expert's biases, which follow those of its matrices."""

    experts: int
    row_block: int
    down_parts: int
    up_parts: int
    down_weight_parts: int
    up_weight_parts: int
    token_blocks: int
    wave: int
    group: int
    kept: int = 1
    behind: int = 0
    down_bias_parts: int = 0
    up_bias_parts: int = 0

    def with_biases(self, down_parts: int, up_parts: int) -> Layout:
        return self._replace(down_bias_parts=down_parts, up_bias_parts=up_parts)

    @property
    def down_expert_parts(self) -> int:
        return self.down_weight_parts + self.down_bias_parts

    @property
    def up_expert_parts(self) -> int:
        return self.up_weight_parts + self.up_bias_parts

    @property
    def late(self) -> int:
        """Of the experts, heaviest first, the first one whose gradient of gate_up is kept for the end."""
        return max(cdiv(self.experts, self.wave) - max(self.kept, 1), 0) * self.wave

    def most_tickets(self, row_tiles: int) -> int:
        of_weights = self.experts * (self.down_expert_parts + self.up_expert_parts)
        return row_tiles * (self.down_parts + 1 + self.up_parts) + of_weights + self.token_blocks

    def constants(self) -> dict[str, int]:
        waves = cdiv(self.experts, self.wave)
        return {
            "EXPERTS": self.experts,
            "TN": self.down_parts,
            "TNX": self.up_parts,
            "DOWN_PARTS": self.down_expert_parts,
            "UP_PARTS": self.up_expert_parts,
            "TOKEN_BLOCKS": self.token_blocks,
            "WAVE": self.wave,
            "WAVES": waves,
            "LATE": self.late,
            "BEHIND": self.behind,
            "BLOCK_G": next_power_of_2(waves),
            "GROUP": self.group,
        }


class Table(NamedTuple):
    """heaviest_E: experts by falling number of rows. first_tile: the first row tile of each of them, and the end.
    place_E: where an expert is among them. They lie one behind the other."""

    heaviest_E: Tensor
    first_tile: Tensor
    place_E: Tensor


def make_table(offs_E: Tensor, row_block: int, counters: Tensor | None = None) -> Table:
    """counters: zeroed by the same launch."""
    experts = offs_E.shape[0]
    made = torch.empty(3 * experts + 1, dtype=torch.int32, device=offs_E.device)
    heaviest_E, first_tile, place_E = made[:experts], made[experts : 2 * experts + 1], made[2 * experts + 1 :]
    block = next_power_of_2(experts)
    part = min(block, 32)
    _make_table[(block // part,)](
        offs_E, heaviest_E, first_tile, place_E, counters, 0 if counters is None else counters.numel(), EXPERTS=experts,
        BLOCK_E=block, BLOCK_PART=part, BLOCK_M=row_block, ZEROED=_ZEROED,
    )  # fmt: skip
    return Table(heaviest_E, first_tile, place_E)


@quick
@triton.jit(do_not_specialize=["count"])
def _make_table(
    offs_E,
    heaviest_E,
    first_tile,
    place_E,
    counters,
    count,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ZEROED: tl.constexpr,
):
    if counters is not None:
        for first in range(tl.program_id(0) * ZEROED, count, tl.num_programs(0) * ZEROED):
            at = first + tl.arange(0, ZEROED)
            tl.store(counters + at, 0, mask=at < count)
    expert_E = tl.arange(0, BLOCK_E)
    expert_P = tl.program_id(0) * BLOCK_PART + tl.arange(0, BLOCK_PART)
    rows_E, rows_P = rows_of(offs_E, expert_E, EXPERTS), rows_of(offs_E, expert_P, EXPERTS)
    more = rows_E[None, :] > rows_P[:, None]
    earlier = (rows_E[None, :] == rows_P[:, None]) & (expert_E[None, :] < expert_P[:, None])
    before = (more | earlier).to(tl.int32)
    tiles_E = tl.where(expert_E < EXPERTS, (rows_E + BLOCK_M - 1) // BLOCK_M, 0)
    place_P, tile_P = tl.sum(before, 1), tl.sum(before * tiles_E[None, :], 1)
    tl.store(heaviest_E + place_P, expert_P, mask=expert_P < EXPERTS)
    tl.store(first_tile + place_P, tile_P, mask=expert_P < EXPERTS)
    tl.store(place_E + expert_P, place_P, mask=expert_P < EXPERTS)
    if tl.program_id(0) == 0:
        tl.store(first_tile + EXPERTS, tl.sum(tiles_E, 0))


@triton.jit
def count_tickets(
    first_tile,
    EXPERTS: tl.constexpr,
    TN: tl.constexpr,
    TNX: tl.constexpr,
    DOWN_PARTS,
    UP_PARTS,
    TOKEN_BLOCKS,
):
    return tl.load(first_tile + EXPERTS) * (TN + 1 + TNX) + EXPERTS * (DOWN_PARTS + UP_PARTS) + TOKEN_BLOCKS


@triton.jit
def _merged(index, first, second):
    """Whether the index-th ticket of two lanes belongs to the first, and its place there: `graph.merged`."""
    both = tl.maximum(first + second, 1)
    if tl.maximum(index, first) <= _SMALL:
        before = index * first // both
    else:
        before = (index.to(tl.int64) * first // both).to(tl.int32)
    left = index.to(tl.int64) * first - before.to(tl.int64) * both  # the next one is of the first lane if this is full
    return left + first >= both, before, index - before


@triton.jit
def decode_ticket(
    ticket,
    wave_G,
    heaviest_E,
    first_tile,
    EXPERTS: tl.constexpr,
    TN: tl.constexpr,
    TNX: tl.constexpr,
    DOWN_PARTS,
    UP_PARTS,
    TOKEN_BLOCKS,
    WAVE,
    WAVES,
    LATE,
    BEHIND,
    GROUP: tl.constexpr,
):
    """(kind, item, part) of a ticket, as `Task` has them. wave_G: 0 to BLOCK_G, which Gluon wants laid out."""
    # A wave's tickets begin with its row passes, among the next wave's products: behind all products up to that wave,
    # the row passes and dx of those before it, and their weights; those of gate_up from LATE on are at the end.
    begin_G, end_G = tl.minimum(wave_G * WAVE, EXPERTS), tl.minimum((wave_G + 1) * WAVE, EXPERTS)
    start_G = tl.load(first_tile + end_G) * TN + tl.load(first_tile + begin_G) * (1 + TNX)
    start_G += begin_G * DOWN_PARTS + tl.minimum(begin_G, LATE) * UP_PARTS
    wave = tl.sum(((start_G <= ticket) & (wave_G < WAVES)).to(tl.int32), 0) - 1  # -1: before the first
    begin, end = tl.maximum(tl.minimum(wave * WAVE, EXPERTS), 0), tl.minimum((wave + 1) * WAVE, EXPERTS)
    tile_begin, tile_end = tl.load(first_tile + begin), tl.load(first_tile + end)
    next_end = tl.load(first_tile + tl.minimum((wave + 2) * WAVE, EXPERTS))
    start = tile_end * TN + tile_begin * (1 + TNX) + begin * DOWN_PARTS + tl.minimum(begin, LATE) * UP_PARTS
    start = tl.where(wave < 0, 0, start)
    tiles, next_tiles, experts = tile_end - tile_begin, next_end - tile_end, end - begin

    index = ticket - start
    merged_size = tiles + next_tiles * TN
    kind, item, part = 0 * index + ACTIVATE, index, 0 * index
    if index < merged_size:
        is_pass, pass_index, product_index = _merged(index, tiles, next_tiles * TN)
        if is_pass:
            item = tile_begin + pass_index
        else:
            tile, part = grouped_order(product_index, next_tiles, TN, GROUP)
            kind, item = 0 * index + DOWN, tile_end + tile
    elif index < merged_size + tiles * TNX + experts * DOWN_PARTS:
        product_index, weight_index = index - merged_size, index - merged_size - tiles * TNX
        if index < merged_size + tiles * TNX:
            tile, part = grouped_order(product_index, tiles, TNX, GROUP)
            kind, item = 0 * index + UP, tile_begin + tile
        else:
            kind, part = 0 * index + DOWN_WEIGHTS, weight_index % DOWN_PARTS
            item = tl.load(heaviest_E + begin + weight_index // DOWN_PARTS)
    else:
        index -= merged_size + tiles * TNX + experts * DOWN_PARTS
        blocks, merged_size = 0 * index, experts * UP_PARTS
        if wave == WAVES - 1:
            begin, experts = 0 * index + LATE, EXPERTS - LATE + 0 * index
            blocks += TOKEN_BLOCKS
            merged_size = tl.maximum(experts * UP_PARTS - BEHIND, 0)
        is_weight, weight_index, block = _merged(index, merged_size, blocks)
        if index >= merged_size + blocks:
            is_weight, weight_index = index >= 0, index - blocks
        if is_weight:
            kind, part = 0 * index + UP_WEIGHTS, weight_index % UP_PARTS
            item = tl.load(heaviest_E + begin + weight_index // UP_PARTS)
        else:
            kind, item = 0 * index + COMBINE, block
    return kind, item, part


@triton.jit
def with_biases(kind, part, DOWN_BIAS_FROM, UP_BIAS_FROM):
    """Kind and part, where some of an expert's parts are those of its bias: the ones from here on."""
    of_down = (kind == DOWN_WEIGHTS) & (part >= DOWN_BIAS_FROM)
    of_up = (kind == UP_WEIGHTS) & (part >= UP_BIAS_FROM)
    before = tl.where(of_down, DOWN_BIAS_FROM, tl.where(of_up, UP_BIAS_FROM, 0))
    return tl.where(of_down, DOWN_BIAS, tl.where(of_up, UP_BIAS, kind)), part - before


@triton.jit
def decode_send(ticket, tokens, rank, SENT: tl.constexpr, RANKS: tl.constexpr):
    """Of the tickets before all others, where rows go to other ranks: each begins with another one."""
    blocks = (tokens + SENT - 1) // SENT
    return 0 * ticket + SEND, (rank + 1 + ticket // blocks) % RANKS, ticket % blocks


@triton.jit
def decode_router(index, TOKEN_BLOCKS):
    """Of the tickets behind all others, where the router is part of it."""
    of_tokens = index < TOKEN_BLOCKS
    return (
        tl.where(of_tokens, ROUTER, ROUTER_WEIGHTS),
        tl.where(of_tokens, index, 0),
        tl.where(of_tokens, 0, index - TOKEN_BLOCKS),
    )


@triton.jit
def rows_of_row_tile(tile, places, offs_E, heaviest_E, first_tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first sorted row, and end of the expert's rows. places: 0 to a power of two, at least EXPERTS."""
    first_E = tl.load(first_tile + places, mask=places < EXPERTS, other=2147483647)
    place = tl.sum((first_E <= tile).to(tl.int32), 0) - 1
    expert = tl.load(heaviest_E + place)
    start = tl.load(offs_E + expert - 1, mask=expert > 0, other=0)
    return expert, start + (tile - tl.load(first_tile + place)) * BLOCK_M, tl.load(offs_E + expert)


FIELDS = ("kind", "item", "part", "multiprocessor", "came", "started", "ended")
_FIELDS = tl.constexpr(len(FIELDS))


@triton.jit
def now(trace, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.atomic_add(trace, 1)
    else:
        return cuda.globaltimer()


@triton.jit
def note_task(trace, ticket, kind, item, part, came, started, INTERPRETED: tl.constexpr):
    tl.debug_barrier()  # all threads of the program are through
    ended = now(trace, INTERPRETED)
    line = trace + 1 + ticket.to(tl.int64) * _FIELDS
    tl.store(line, kind.to(tl.int64))
    tl.store(line + 1, item.to(tl.int64))
    tl.store(line + 2, part.to(tl.int64))
    if INTERPRETED:
        tl.store(line + 3, 0)
    else:
        tl.store(line + 3, cuda.smid().to(tl.int64))
    tl.store(line + 4, came)
    tl.store(line + 5, started)
    tl.store(line + 6, ended)
