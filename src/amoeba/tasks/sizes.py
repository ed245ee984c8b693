"""Sizes of a layer and of the tiles that its backward is cut into, by the layer's size on Hopper.

N = T·K routed rows · H hidden · I intermediate · J = 2I · E experts · K experts per token

    tiling = tiling_of(sizes, rows=8192, programs=132, small=is_small(8192, 2048, 768))
"""

from __future__ import annotations

from typing import NamedTuple

# Waves of 32 experts were 1 and 5 % faster than of 8 where a wave of 8 is less than one turn of all programs (sonic_a,
# qwen3_small; H200, 2026-11-16). A gradient of BESIDE_TOKENS columns of gate_up takes about twice as long as the sums
# over tokens, which are bound by memory, so that they can run next to it.
LEAST_WAVE, BESIDE_TOKENS = 8, 360
STAGE_ROWS = 64  # of a weight's gradient
SUMMED_TOKENS = 32  # by one task: to find out whether their rows are there takes as long as to add up ten
# Of small layers: stages of gradients that are one task, and percent of the kept ones that come last.
BUNDLED_STAGES, BEHIND_PERCENT = 4, 30
# N·H·I up to which a layer is small, by what was faster in CUDA graphs, replayed alternately (H200, 2026-11-16):
# qwen3_small has 1.03e11, sonic_a 0.77e11; qwen3_30b has 4.1e11, and was slower so.
SMALL_WORK = 2 * 10**11


class Sizes(NamedTuple):
    hidden: int
    intermediate: int
    experts: int  # of all ranks
    top_k: int

    @property
    def width(self) -> int:
        return 2 * self.intermediate


class Tiling(NamedTuple):
    """
    rows:         of a row tile.
    down_columns, up_columns: of a tile of dA' and of dx.
    weight_rows, weight_columns: of a tile of a weight's gradient.
    router_columns: of a tile of the router's gradient, which sums over all tokens: narrow, or it is done last.
    bias_columns: of a bias's gradient that one task sums up over all rows of its expert.
    tokens:       of a block that is combined.
    sent:         rows of a block that travels.
    wave:         experts that go through the steps together.
    kept:         number of last waves, at least one, whose gradients of gate_up are handed out at the end, next to the
                  sums over tokens.
    behind:       number of those tickets that come after the sums instead of among them, so that the worker with the
                  last sum is not the last to end.
    bundle:       tiles of a weight's gradient that are one task: of an expert with few rows, a ticket and its gate take
                  longer than a tile.
    group:        number of row tiles that sweep the columns together, so that they meet in the L2 cache.
    """

    rows: int = 128
    down_columns: int = 256
    up_columns: int = 256
    weight_rows: int = 128
    weight_columns: int = 256
    router_columns: int = 32
    bias_columns: int = 512
    tokens: int = 16
    sent: int = 128
    wave: int = 8
    kept: int = 1
    behind: int = 0
    bundle: int = 1
    group: int = 8


def extra_bytes(sizes: Sizes, rows: int, element: int) -> int:
    """What the scheduled backward has beyond the most that the kernels apart have at once: these are through with dA'
    and s·a when they come to dx of the rows, and with that when they come to the gradient of gate_up.
    element: bytes of a number."""
    of_gate_up = sizes.experts * sizes.width * sizes.hidden
    return element * (rows * sizes.intermediate + min(rows * sizes.hidden, of_gate_up))


def blocks(count: int, block: int) -> int:
    return -(-count // block)


def is_small(rows: int, hidden: int, intermediate: int, *, over_ranks: bool = False) -> bool:
    """Whether a layer has so little to do that drawing a ticket counts.

    Then one task covers as many tiles of a weight's gradient as make BUNDLED_STAGES; of the gradients of gate_up kept
    for the end, BEHIND_PERCENT come after the sums over tokens; and where a row tile has 64 rows or fewer, the
    warpgroup of the other 64 multiplies nothing. Not over ranks, where tickets are decoded one by one.
    """
    return not over_ranks and rows * hidden * intermediate <= SMALL_WORK


def bundle_of(rows: int, experts: int, small: bool) -> int:
    """Tiles of a weight's gradient in one task, if all experts have as many rows."""
    return max(1, BUNDLED_STAGES // max(1, blocks(rows, experts * STAGE_ROWS))) if small else 1


def tiling_of(sizes: Sizes, rows: int, programs: int, small: bool) -> Tiling:
    """rows: of the experts that are here. programs: how many draw tickets.

    A wave is at least two turns of all programs in DOWN: so that by the time a row pass or dx is handed out,
    what it waits for is done. It is no larger, so that its rows stay in the second-level cache.
    """
    bundle = bundle_of(rows, sizes.experts, small)
    plain = Tiling(tokens=SUMMED_TOKENS, bundle=bundle)
    tiles = max(1, blocks(rows, sizes.experts * plain.rows)) * blocks(sizes.intermediate, plain.down_columns)
    wave = max(LEAST_WAVE, 1 << (blocks(2 * programs, tiles) - 1).bit_length())
    waves = blocks(sizes.experts, wave)
    kept = max(1, min(waves, blocks(waves * BESIDE_TOKENS, sizes.width)))
    matrix = blocks(sizes.width, plain.weight_columns) * blocks(sizes.hidden, plain.weight_rows)
    late = sizes.experts - (waves - kept) * wave
    behind = late * blocks(matrix, bundle) * BEHIND_PERCENT // 100 if small else 0
    return plain._replace(wave=wave, kept=kept, behind=behind)
