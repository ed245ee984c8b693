"""The device's tickets are Python's, for random layouts."""

import random
from itertools import accumulate

import pytest
import torch

from amoeba.tasks.graph import Graph, Kind, Lane, merged
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling
from selection import quick

pytest.importorskip("triton")
import triton
import triton.language as tl

from amoeba.tasks.triton.tickets import (
    Layout,
    _merged,
    count_tickets,
    decode_router,
    decode_ticket,
    make_table,
    with_biases,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_graph(seed: int) -> tuple[Graph, torch.Tensor]:
    draw = random.Random(seed)
    experts, top_k = draw.randint(1, 6), 1
    tokens = draw.choice((0, 1, 2, 5, 9, 14))
    ids = [[draw.choice((draw.randrange(-1, experts), 0))] for _ in range(tokens)]
    rows = divide_rows([ids], (0,) * experts, 1, row_block := draw.randint(1, 4))
    tiling = Tiling(
        rows=row_block,
        down_columns=draw.randint(2, 6),
        up_columns=draw.randint(3, 6),
        weight_rows=draw.randint(4, 9),
        weight_columns=draw.randint(3, 9),
        tokens=draw.randint(1, 5),
        wave=draw.randint(1, 4),
        group=draw.randint(1, 3),
        kept=draw.randint(1, 4),
        behind=draw.choice((0, 1, 5, 99)),
        bundle=draw.randint(1, 3),
        bias_columns=draw.randint(2, 6),
    )
    sizes = Sizes(draw.randint(1, 9), draw.randint(1, 7), experts, top_k)
    counts = [sum(each == [expert] for each in ids) for expert in range(experts)]
    offs_E = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=DEVICE)
    return Graph(0, rows, sizes, tiling, router=False, biases=draw.random() < 0.5), offs_E


def layout_of(graph: Graph) -> Layout:
    kinds = (Kind.DOWN, Kind.UP, Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS)
    parts = (graph.parts(kind) for kind in kinds)
    tiling = graph.tiling
    return Layout(
        graph.rows.experts,
        tiling.rows,
        *parts,
        graph.token_blocks,
        tiling.wave,
        tiling.group,
        tiling.kept,
        tiling.behind,
        graph.parts(Kind.DOWN_BIAS),
        graph.parts(Kind.UP_BIAS),
    )


def decode(tickets: torch.Tensor, offs_E: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Kind, item and part of each, and how many tickets there are at the end: (n + 1, 3)."""
    out = torch.empty((len(tickets) + 1, 3), dtype=torch.int32, device=offs_E.device)
    biases_from = layout.down_weight_parts, layout.up_weight_parts
    table = make_table(offs_E, layout.row_block)[:2]
    _decode[(1,)](*table, tickets, out, len(tickets), *biases_from, **layout.constants())
    return out


@triton.jit(do_not_specialize=["count", "down_bias_from", "up_bias_from"])
def _decode(
    heaviest_E,
    first_tile,
    tickets,
    out,
    count,
    down_bias_from,
    up_bias_from,
    EXPERTS: tl.constexpr,
    TN: tl.constexpr,
    TNX: tl.constexpr,
    DOWN_PARTS: tl.constexpr,
    UP_PARTS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr,
    WAVE: tl.constexpr,
    WAVES: tl.constexpr,
    LATE: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
):
    total = count_tickets(first_tile, EXPERTS, TN, TNX, DOWN_PARTS, UP_PARTS, TOKEN_BLOCKS)
    column = tl.arange(0, 4)
    tl.store(out + 3 * count + column, total, mask=column < 3)
    for index in range(0, count):
        kind, item, part = decode_ticket(
            tl.load(tickets + index),
            tl.arange(0, BLOCK_G),
            heaviest_E,
            first_tile,
            EXPERTS,
            TN,
            TNX,
            DOWN_PARTS,
            UP_PARTS,
            TOKEN_BLOCKS,
            WAVE,
            WAVES,
            LATE,
            BEHIND,
            GROUP,
        )
        kind, part = with_biases(kind, part, down_bias_from, up_bias_from)
        line = out + 3 * index
        tl.store(line, kind)
        tl.store(line + 1, item)
        tl.store(line + 2, part)


def check(seed: int, most: int) -> None:
    """most: of the tickets, so many at random; the interpreter takes two milliseconds for one."""
    graph, offs_E = random_graph(seed)
    table = make_table(offs_E, graph.tiling.rows)
    assert table.heaviest_E.tolist() == list(graph.rows.heaviest)
    assert table.first_tile.tolist() == list(graph.rows.first_tile)
    tickets = random.Random(seed).sample(range(graph.tickets), min(most, graph.tickets))
    expected = [list(map(int, graph.decode(ticket))) for ticket in tickets] + [[graph.tickets] * 3]
    given = torch.tensor(tickets, dtype=torch.int32, device=DEVICE)
    assert decode(given, offs_E, layout_of(graph)).tolist() == expected, seed


@quick(lambda chunk: chunk == 0)
@pytest.mark.parametrize("chunk", range(4))
def test_50_random_layouts(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        check(seed, most=4)


@pytest.mark.thorough
def test_every_ticket_of_200_random_layouts():
    for seed in range(200):
        check(seed, most=1 << 30)


@triton.jit
def _decode_router(out, TOKEN_BLOCKS, COUNT: tl.constexpr):
    for index in range(COUNT):
        kind, item, part = decode_router(index, TOKEN_BLOCKS)
        tl.store(out + 3 * index, kind)
        tl.store(out + 3 * index + 1, item)
        tl.store(out + 3 * index + 2, part)


def test_the_routers_tickets_are_the_last_ones():
    for seed in range(5):
        plain, _ = random_graph(seed)
        graph = Graph(0, plain.all_rows, plain.sizes, plain.tiling, biases=plain.biases)
        count = graph.tickets - plain.tickets
        out = torch.empty((count, 3), dtype=torch.int32, device=DEVICE)
        _decode_router[(1,)](out, graph.token_blocks, COUNT=count)
        tickets = range(plain.tickets, graph.tickets)
        assert out.tolist() == [list(map(int, graph.decode(ticket))) for ticket in tickets], seed


@triton.jit
def _places(index, out, first, second, COUNT: tl.constexpr):
    for at in range(COUNT):
        is_first, before, after = _merged(tl.load(index + at), first, second)
        tl.store(out + 2 * at, is_first.to(tl.int32))
        tl.store(out + 2 * at + 1, tl.where(is_first, before, after))


@pytest.mark.parametrize("sizes", [(3, 2), (0, 4), (4, 0), (46340, 46340), (46341, 9), (70000, 50000), (2, 90000)])
def test_two_lanes_are_merged_as_in_python_also_where_products_take_64_bits(sizes):
    """Each place within reach of the ends and of where the arithmetic changes."""
    total = sum(sizes)
    indices = sorted({i % total for i in (0, 1, 2, 46339, 46340, 46341, total // 2, total - 2, total - 1)})
    out = torch.empty(len(indices), 2, dtype=torch.int32, device=DEVICE)
    _places[(1,)](torch.tensor(indices, dtype=torch.int32, device=DEVICE), out, *sizes, COUNT=len(indices))
    run = [Lane(kind, 0, size) for kind, size in zip((Kind.UP_WEIGHTS, Kind.COMBINE), sizes, strict=True)]
    expected = [(lane.kind == Kind.UP_WEIGHTS, place) for lane, place in (merged(run, index) for index in indices)]
    assert [(bool(first), place) for first, place in out.tolist()] == expected


def test_the_launch_that_makes_the_table_zeroes_the_counters():
    offs_E = torch.tensor([3, 3, 700], dtype=torch.int32, device=DEVICE)
    counters = torch.full((2000,), -1, dtype=torch.int32, device=DEVICE)
    table = make_table(offs_E, 128, counters[:1999])
    assert not counters[:1999].any() and counters[1999] == -1
    assert table.heaviest_E.tolist() == make_table(offs_E, 128).heaviest_E.tolist() == [2, 0, 1]
