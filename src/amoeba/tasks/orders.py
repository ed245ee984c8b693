"""In which order Hopper's kernel hands out its tickets, and how it goes about them: by the layer's size, and by a name.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

    tiling = tiling_of(sizes, tokens=1024, rows=8192, programs=132, order=ORDERS["small"])
    AMOEBA_TASKS_ORDER=small amoeba bench --ours tasks ...         # for one process

The bits are the same in each. Small layers take `small listed`, others `listed`; over ranks, which have no list, all
take `measured`. The rest is there by name alone.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from amoeba.core.errors import bad_value
from amoeba.tasks.sizes import Sizes, Tiling, blocks

# Waves of 32 experts were 1 and 5 % faster than of 8 where a wave of 8 is less than one turn of all programs (sonic_a,
# qwen3_small; H200, 2026-11-16). A gradient of BESIDE_TOKENS columns of gate_up takes about twice as long as the sums
# over tokens, which are bound by memory, so that they can run beside it.
LEAST_WAVE, BESIDE_TOKENS = 8, 360
STAGE_ROWS = 64  # of a weight's gradient
SUMMED_TOKENS = 32  # by one task: to find out whether their rows are there takes as long as to add up ten
# Where an order is `small`: stages of gradients that are one task, and percent of the kept ones that come last.
BUNDLED_STAGES, BEHIND_PERCENT = 4, 30


class Order(NamedTuple):
    """
    small:    for layers with few rows. A program's next ticket is on its way while it finds out what this one is, not
              drawn behind its task; where a row tile has 64 rows or fewer, the warpgroup of the other 64 multiplies
              nothing; so many tiles of a weight's gradient are one task as make BUNDLED_STAGES, a tile at least; of the
              gradients of gate_up that are kept for the end, BEHIND_PERCENT come behind the sums over tokens.
    in_place: as in `Tiling`.
    listed:   tasks come from a list that a launch ahead of the kernel makes (`amoeba.tasks.hopper_listed`), and the
              next ticket is always on its way. Not over ranks.
    """

    small: bool = False
    in_place: bool = False
    listed: bool = False


# N·H·I up to which `small` was faster in CUDA graphs in turns (H200, 2026-11-16; docs/log.md): qwen3_small has 1.03e11,
# sonic_a 0.77e11; qwen3_30b has 4.1e11, and was slower so.
SMALL_WORK = 2 * 10**11
MEASURED = Order()
# Beside the same order without a list (H200, 2026-11-17, CUDA graphs in turns): sonic_a 1.055 times as fast,
# qwen3_small 1.033, sonic_a with 1024 tokens 1.021, qwen3_30b 1.014; qwen3 with 128 tokens 0.995.
_LISTED, _SMALL_LISTED = Order(listed=True), Order(small=True, listed=True)
ORDERS = {
    "measured": MEASURED,
    "small": Order(small=True),
    "listed": _LISTED,
    "small listed": _SMALL_LISTED,
    "lean": Order(in_place=True),
    "small lean": Order(small=True, in_place=True),
}
VARIABLE = "AMOEBA_TASKS_ORDER"


def order_named(name: str, what: str = VARIABLE) -> Order:
    if name not in ORDERS:
        raise bad_value(what, f"one of {', '.join(ORDERS)}", repr(name), "leave it out for the usual one")
    return ORDERS[name]


def chosen_order(rows: int, hidden: int, intermediate: int, over_ranks: bool = False) -> Order:
    """That of the environment, else the one that was faster for a layer of this size."""
    if (name := os.environ.get(VARIABLE)) is not None:
        return order_named(name)
    if over_ranks:
        return MEASURED
    return _SMALL_LISTED if rows * hidden * intermediate <= SMALL_WORK else _LISTED


def bundle_of(rows: int, experts: int, order: Order) -> int:
    """Tiles of a weight's gradient in one task, if all experts have as many rows."""
    return max(1, BUNDLED_STAGES // max(1, blocks(rows, experts * STAGE_ROWS))) if order.small else 1


def tiling_of(sizes: Sizes, tokens: int, rows: int, programs: int, order: Order) -> Tiling:
    """rows: of the experts that are here. tokens: whose sums are made here.

    A wave is at least two turns of all programs in DOWN: so that by the time a row pass or dx is handed out,
    what it waits for is done. It is no larger, so that its rows stay in the second-level cache.
    """
    bundle = bundle_of(rows, sizes.experts, order)
    plain = Tiling(tokens=SUMMED_TOKENS, in_place=order.in_place, bundle=bundle)
    tiles = max(1, blocks(rows, sizes.experts * plain.rows)) * blocks(sizes.intermediate, plain.down_columns)
    wave = max(LEAST_WAVE, 1 << (blocks(2 * programs, tiles) - 1).bit_length())
    waves = blocks(sizes.experts, wave)
    kept = max(1, min(waves, blocks(waves * BESIDE_TOKENS, sizes.width)))
    matrix = blocks(sizes.width, plain.weight_columns) * blocks(sizes.hidden, plain.weight_rows)
    late = sizes.experts - (waves - kept) * wave
    behind = late * blocks(matrix, bundle) * BEHIND_PERCENT // 100 if order.small else 0
    return plain._replace(wave=wave, kept=kept, behind=behind)
