"""Ways of `amoeba.kernels.hopper.product` and `amoeba.kernels.hopper.gradient` to the same bits.

    AMOEBA_PRODUCT_WAYS=rounds amoeba bench --shape qwen3_30b --ours triton --sustained 4      # others, for one process
    AMOEBA_GRADIENT_WAYS= amoeba bench ...                                                     # of weight gradients

Where power limits a GPU, a product's time is its joules, and these spare instructions. On an H200, back to back,
`rounds,brisk` takes 5 % less time and 5 to 8 % fewer joules for the up projection of qwen3_30b, olmoe and sonic_b, and
nothing to 7 % less time for the down projection (docs/log.md, 2026-11-16); `carry` 5 % less time for dx and 10 %
for the down projection of qwen3_30b (2026-11-17); `rounds` of weight gradients 2 to 4 % less time at qwen3_30b, olmoe
and dsv3, and 4 to 5 % where the GPU rests, `onward` 1 to 2 % less once more (2026-11-17); `thrifty,abreast` 1 to 2 % of
a whole step (2026-11-17). The bits are the same in each
(`brisk`: what is below 2^-126 is zero, see `amoeba.kernels.activation`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from amoeba.core.errors import bad_value

VARIABLE = "AMOEBA_PRODUCT_WAYS"
TAKEN = "rounds,brisk,carry,thrifty,abreast"
# Of the weights' gradients.
GRADIENT_VARIABLE = "AMOEBA_GRADIENT_WAYS"
GRADIENT_TAKEN = "rounds,onward"


class Ways(NamedTuple):
    """
    rounds:   where a tile is whole turns of the ring of stages (a depth of 256, 512, ...), each stage has code of its
              own: which stage it is and where its rows lie need not be computed.
    quarters: sums leave through two buffers in turns, and the activation is computed while the first ones leave.
    brisk:    a sigmoid of five instructions.
    carry:    with rounds and without quarters, where rows are not gathered and nothing is activated: half of a tile's
              sums leave while the next tile's products run, and its place is found there.
    thrifty:  where the GPU is ours alone, tiles come in the order in which less is read from memory, see
              `amoeba.kernels.hopper.order`.
    abreast:  with thrifty, where an expert's matrix is large: programs wait for one another at the beginning of a tile,
              so that they read what they share at the same time.
    """

    rounds: bool = False
    quarters: bool = False
    brisk: bool = False
    carry: bool = False
    thrifty: bool = False
    abreast: bool = False


def ways_named(names: str, what: str = VARIABLE) -> Ways:
    """names: parted by commas; none for the plain way."""
    return Ways(**_named(names, Ways._fields, what, TAKEN))


def _named(names: str, possible: tuple[str, ...], what: str, usual: str) -> dict[str, bool]:
    wanted = [name for name in names.split(",") if name]
    if any(name not in possible for name in wanted):
        raise bad_value(what, f"some of {', '.join(possible)}", repr(names), f"leave it out for {usual}")
    return dict.fromkeys(wanted, True)


def chosen_constants(whole_turns: bool) -> dict[str, bool]:
    """Of the kernel's plan. whole_turns: of the ring, a tile's depth."""
    return _constants(os.environ.get(VARIABLE, TAKEN), whole_turns)


@cache
def _constants(names: str, whole_turns: bool) -> dict[str, bool]:
    ways = ways_named(names)
    rounds = ways.rounds and whole_turns
    carry = ways.carry and rounds and not ways.quarters
    taken = ways._replace(rounds=rounds, carry=carry)
    return {name.upper(): value for name, value in taken._asdict().items() if name != "thrifty"}


def is_thrifty() -> bool:
    """Of products."""
    return _is_thrifty(os.environ.get(VARIABLE, TAKEN))


@cache
def _is_thrifty(names: str) -> bool:
    return ways_named(names).thrifty


class GradientWays(NamedTuple):
    """
    rounds: tiles go by whole turns of the ring, see `amoeba.kernels.hopper.gradient_rounds`.
    onward: with rounds, tiles follow one another in the ring, see `amoeba.kernels.hopper.gradient_onward`.
    """

    rounds: bool = False
    onward: bool = False


def gradient_ways(whole_height: bool, whole_width: bool) -> GradientWays:
    """Of the weights' gradients. whole_height: tiles are whole along H; whole_width: along the sorted rows' width."""
    return _gradient_ways(os.environ.get(GRADIENT_VARIABLE, GRADIENT_TAKEN), whole_height, whole_width)


@cache
def _gradient_ways(names: str, whole_height: bool, whole_width: bool) -> GradientWays:
    ways = GradientWays(**_named(names, GradientWays._fields, GRADIENT_VARIABLE, GRADIENT_TAKEN))
    rounds = ways.rounds and whole_height
    return GradientWays(rounds, ways.onward and rounds and whole_width)
