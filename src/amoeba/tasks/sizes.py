"""Sizes of a layer and of the tiles that its backward is cut into.

H hidden · I intermediate · J = 2I · E experts · K experts per token
"""

from __future__ import annotations

from typing import NamedTuple


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
    tokens:       of a block that is combined.
    sent:         rows of a block that travels.
    wave:         experts that go through the steps together.
    in_place:     dx of a row is written over its s·a: a wave's gradients of down come before its dx, else behind it.
    kept:         so many of the last waves have their gradients of gate_up handed out at the end, beside the sums over
                  tokens; at least one.
    behind:       so many tickets of those kept for the end come behind the sums instead of among them: who takes the
                  last sum is not the last to end then.
    bundle:       tiles of a weight's gradient that are one task: of an expert with few rows, a ticket and its gate take
                  longer than a tile.
    group:        so many row tiles sweep the columns together, so that they meet in the L2 cache.
    """

    rows: int = 128
    down_columns: int = 256
    up_columns: int = 256
    weight_rows: int = 128
    weight_columns: int = 256
    router_columns: int = 32
    tokens: int = 16
    sent: int = 128
    wave: int = 8
    in_place: bool = False
    kept: int = 1
    behind: int = 0
    bundle: int = 1
    group: int = 8


def extra_bytes(sizes: Sizes, rows: int, element: int) -> int:
    """What the scheduled backward has beyond the most that the kernels apart have at once: these are through with dA'
    and s·a when they come to dx of the rows, and with that when they come to the gradient of gate_up. Where dx is in
    the place of s·a, rows · I less. element: bytes of a number."""
    of_gate_up = sizes.experts * sizes.width * sizes.hidden
    return element * (rows * sizes.intermediate + min(rows * sizes.hidden, of_gate_up))


def blocks(count: int, block: int) -> int:
    return -(-count // block)
